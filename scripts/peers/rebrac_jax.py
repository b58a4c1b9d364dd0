"""ReBRAC in JAX: optax, `lax.scan`, jit. Written for this comparison."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from peers import common, jax_loop
from peers.flops import BATCHES, DEEP_HIDDEN
from peers.jax_loop import Layers, Tree, actor_critic, descend, mlp, polyak

DISCOUNT, TAU, PENALTY, CLIP = 0.99, 0.005, 0.01, 0.5
ADAM = optax.adam(1e-3)


def normed(net: Tree, x: jax.Array) -> jax.Array:
    """An MLP with LayerNorm after each activation: Q [B]."""
    for (w, b), (scale, shift) in zip(net["layers"][:-1], net["norms"], strict=True):
        x = jax.nn.relu(x @ w + b)
        mean = x.mean(-1, keepdims=True)
        variance = jnp.square(x - mean).mean(-1, keepdims=True)
        x = (x - mean) * jax.lax.rsqrt(variance + 1e-6) * scale + shift
    w, b = net["layers"][-1]
    return (x @ w + b).squeeze(-1)


def twin(nets: Tree, x: jax.Array) -> jax.Array:
    """Two such critics with stacked weights: [2, B]."""
    return jax.vmap(normed, in_axes=(0, None))(nets, x)


def state_of(actor: Layers, layers: Layers) -> Tree:
    critic = {"layers": layers, "norms": [(jnp.ones((2, width)), jnp.zeros((2, width))) for width in DEEP_HIDDEN]}
    return actor_critic(ADAM, actor, critic)


def init(key: jax.Array) -> Tree:
    return state_of(*jax_loop.random_actor_twin(key, DEEP_HIDDEN))


def make_update(noise: float) -> Callable[..., tuple[Tree, Tree]]:
    def update(state: Tree, batch: Tree, key: jax.Array, phase: int) -> tuple[Tree, Tree]:
        obs, actions, after = batch["observations"], batch["actions"], batch["next_observations"]
        target = state["target"]
        draw = (jax.random.normal(key, actions.shape) * noise).clip(-CLIP, CLIP)
        next_action = (jnp.tanh(mlp(target["actor"], after)) + draw).clip(-1.0, 1.0)
        distance = ((next_action - batch["next_actions"]) ** 2).sum(-1)
        next_q = twin(target["critic"], jnp.concatenate([after, next_action], -1)).min(0) - PENALTY * distance
        y = batch["rewards"] + DISCOUNT * batch["masks"] * next_q

        def critic_loss(critic: Tree) -> jax.Array:
            return ((twin(critic, jnp.concatenate([obs, actions], -1)) - y) ** 2).mean(-1).sum()

        critic, critic_opt, q_loss = descend(ADAM, critic_loss, state["critic"], state["opt"]["critic"])
        actor, actor_opt, losses = state["actor"], state["opt"]["actor"], {"critic/loss": q_loss}
        if phase == 1:

            def actor_loss(actor: Layers) -> jax.Array:
                pi = jnp.tanh(mlp(actor, obs))
                q = twin(critic, jnp.concatenate([obs, pi], -1)).min(0)
                scale = 1.0 / jax.lax.stop_gradient(jnp.abs(q).mean())
                return PENALTY * ((pi - actions) ** 2).sum(-1).mean() - scale * q.mean()

            actor, actor_opt, losses["actor/loss"] = descend(ADAM, actor_loss, actor, actor_opt)
            target = polyak(target, {"actor": actor, "critic": critic}, TAU)
        return {
            "actor": actor,
            "critic": critic,
            "target": target,
            "opt": {"actor": actor_opt, "critic": critic_opt},
        }, losses

    return update


def main() -> None:
    options = common.options()
    if options.check:
        weights, batches = common.load_check(options.check)
        state = state_of(jax_loop.given_layers(weights, "actor"), jax_loop.given_twin(weights))
        jax_loop.check(make_update(0.0), state, batches, period=2)
        return
    data = common.with_next_actions(options.rows)
    loop = jax_loop.Loop(
        init, make_update(0.2), data, options.replicas, period=2, batch=BATCHES["rebrac"], scan=common.CHUNKS["rebrac"]
    )
    common.serve(loop.updates, chunk=loop.scan, note=f"jax {jax.__version__}")


if __name__ == "__main__":
    main()
