"""TD3+BC in JAX: optax, `lax.scan`, jit. Written for this comparison."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from peers import common, jax_loop
from peers.common import HIDDEN
from peers.jax_loop import Layers, Tree, actor_critic, descend, mlp, polyak, twin

DISCOUNT, TAU, ALPHA, CLIP = 0.99, 0.005, 2.5, 0.5
ADAM = optax.adam(3e-4)


def init(key: jax.Array) -> Tree:
    return actor_critic(ADAM, *jax_loop.random_actor_twin(key, HIDDEN))


def make_update(noise: float) -> Callable[..., tuple[Tree, Tree]]:
    def update(state: Tree, batch: Tree, key: jax.Array, phase: int) -> tuple[Tree, Tree]:
        obs, actions, after = batch["observations"], batch["actions"], batch["next_observations"]
        target = state["target"]
        draw = (jax.random.normal(key, actions.shape) * noise).clip(-CLIP, CLIP)
        next_action = (jnp.tanh(mlp(target["actor"], after)) + draw).clip(-1.0, 1.0)
        next_q = twin(target["critic"], jnp.concatenate([after, next_action], -1)).min(0)
        y = batch["rewards"] + DISCOUNT * batch["masks"] * next_q

        def critic_loss(critic: Layers) -> jax.Array:
            return ((twin(critic, jnp.concatenate([obs, actions], -1)) - y) ** 2).mean(-1).sum()

        critic, critic_opt, q_loss = descend(ADAM, critic_loss, state["critic"], state["opt"]["critic"])
        actor, actor_opt, losses = state["actor"], state["opt"]["actor"], {"critic/loss": q_loss}
        if phase == 1:
            first = jax.tree.map(lambda x: x[0], critic)

            def actor_loss(actor: Layers) -> jax.Array:
                pi = jnp.tanh(mlp(actor, obs))
                q = mlp(first, jnp.concatenate([obs, pi], -1))
                scale = ALPHA / jax.lax.stop_gradient(jnp.abs(q).mean())
                return ((pi - actions) ** 2).mean() - scale * q.mean()

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
        state = actor_critic(ADAM, jax_loop.given_layers(weights, "actor"), jax_loop.given_twin(weights))
        jax_loop.check(make_update(0.0), state, batches, period=2)
        return
    loop = jax_loop.Loop(init, make_update(0.2), common.transitions(options.rows), options.replicas, period=2)
    common.serve(loop.updates, chunk=loop.scan, note=f"jax {jax.__version__}")


if __name__ == "__main__":
    main()
