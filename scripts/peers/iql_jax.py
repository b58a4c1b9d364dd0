"""IQL in JAX: optax, `lax.scan`, jit. Written for this comparison."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax
from peers import common, jax_loop
from peers.common import ACTION, HIDDEN, OBSERVATION
from peers.jax_loop import Layers, Tree, descend, mlp, polyak, twin

DISCOUNT, TAU, EXPECTILE, TEMPERATURE = 0.99, 0.005, 0.7, 3.0
ADAM = optax.adam(3e-4)
ACTOR_ADAM = optax.adam(optax.cosine_decay_schedule(3e-4, 1_000_000))


def state_of(value: Layers, actor: Layers, critic: Layers) -> Tree:
    policy = {"net": actor, "log_std": jnp.zeros(ACTION)}
    opt = {"value": ADAM.init(value), "actor": ACTOR_ADAM.init(policy), "critic": ADAM.init(critic)}
    target = jax.tree.map(jnp.copy, critic)  # donated buffers must not be shared
    return {"value": value, "actor": policy, "critic": critic, "target": target, "opt": opt}


def init(key: jax.Array) -> Tree:
    kv, ka, kc = jax.random.split(key, 3)
    q = jax_loop.random_twin(kc, OBSERVATION + ACTION, *HIDDEN, 1)
    return state_of(
        jax_loop.random_layers(kv, OBSERVATION, *HIDDEN, 1), jax_loop.random_layers(ka, OBSERVATION, *HIDDEN, ACTION), q
    )


def update(state: Tree, batch: Tree, key: jax.Array, phase: int) -> tuple[Tree, Tree]:
    obs, actions = batch["observations"], batch["actions"]
    pair = jnp.concatenate([obs, actions], -1)
    target_q = twin(state["target"], pair).min(0)

    def value_loss(value: Layers) -> jax.Array:
        u = target_q - mlp(value, obs).squeeze(-1)
        return (jnp.where(u < 0, 1 - EXPECTILE, EXPECTILE) * u**2).mean()

    value, value_opt, v_loss = descend(ADAM, value_loss, state["value"], state["opt"]["value"])
    advantage = target_q - mlp(value, obs).squeeze(-1)
    weight = jnp.minimum(jnp.exp(TEMPERATURE * advantage), 100.0)

    def actor_loss(policy: Tree) -> jax.Array:
        mean, log_std = jnp.tanh(mlp(policy["net"], obs)), policy["log_std"].clip(-5.0, 2.0)
        z = (actions - mean) / jnp.exp(log_std)
        log_prob = (-0.5 * z**2 - log_std - 0.5 * jnp.log(2 * jnp.pi)).sum(-1)
        return -(weight * log_prob).mean()

    actor, actor_opt, pi_loss = descend(ACTOR_ADAM, actor_loss, state["actor"], state["opt"]["actor"])
    y = batch["rewards"] + DISCOUNT * batch["masks"] * mlp(value, batch["next_observations"]).squeeze(-1)

    def critic_loss(critic: Layers) -> jax.Array:
        return ((twin(critic, pair) - y) ** 2).mean(-1).sum()

    critic, critic_opt, q_loss = descend(ADAM, critic_loss, state["critic"], state["opt"]["critic"])
    opt = {"value": value_opt, "actor": actor_opt, "critic": critic_opt}
    new = {"value": value, "actor": actor, "critic": critic, "target": polyak(state["target"], critic, TAU), "opt": opt}
    return new, {"value/loss": v_loss, "actor/loss": pi_loss, "critic/loss": q_loss}


def main() -> None:
    options = common.options()
    if options.check:
        weights, batches = common.load_check(options.check)
        value, actor = jax_loop.given_layers(weights, "value"), jax_loop.given_layers(weights, "actor")
        jax_loop.check(update, state_of(value, actor, jax_loop.given_twin(weights)), batches)
        return
    loop = jax_loop.Loop(init, update, common.transitions(options.rows), options.replicas)
    common.serve(loop.updates, chunk=loop.scan, note=f"jax {jax.__version__}")


if __name__ == "__main__":
    main()
