"""The parts of a JAX loop: `lax.scan` over many updates with sampling inside, one compiled call for each scan, donated
state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from peers import common
from peers.common import BATCH, Arrays

SCAN = 100  # updates in one compiled call

Layers = list[tuple[jax.Array, jax.Array]]
Tree = dict[str, Any]


def mlp(layers: Layers, x: jax.Array) -> jax.Array:
    for w, b in layers[:-1]:
        x = jax.nn.relu(x @ w + b)
    w, b = layers[-1]
    return x @ w + b


def twin(layers: Layers, x: jax.Array) -> jax.Array:
    """Two networks with stacked weights: [2, B]."""
    return jax.vmap(mlp, in_axes=(0, None))(layers, x).squeeze(-1)


def uniform(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return jax.random.uniform(key, shape, minval=-1.0, maxval=1.0)


def random_layers(key: jax.Array, *sizes: int) -> Layers:
    """Uniform in +-1/sqrt(in), as torch's linear layers."""
    layers = []
    for i, o in zip(sizes[:-1], sizes[1:], strict=True):
        key, kw, kb = jax.random.split(key, 3)
        layers.append((uniform(kw, (i, o)) * i**-0.5, uniform(kb, (o,)) * i**-0.5))
    return layers


def random_twin(key: jax.Array, *sizes: int) -> Layers:
    return jax.vmap(lambda k: random_layers(k, *sizes))(jax.random.split(key))


def given_layers(weights: Arrays, name: str) -> Layers:
    """The weights of a check."""
    count = sum(k.startswith(f"{name}/w") for k in weights)
    return [(jnp.asarray(weights[f"{name}/w{i}"]), jnp.asarray(weights[f"{name}/b{i}"])) for i in range(count)]


def given_twin(weights: Arrays) -> Layers:
    return jax.tree.map(
        lambda a, b: jnp.stack([a, b]), given_layers(weights, "critic0"), given_layers(weights, "critic1")
    )


def descend(
    optimizer: optax.GradientTransformation, loss: Callable[..., jax.Array], params: Tree, opt: Tree
) -> tuple[Tree, Tree, jax.Array]:
    value, grads = jax.value_and_grad(loss)(params)
    steps, opt = optimizer.update(grads, opt, params)
    return optax.apply_updates(params, steps), opt, value


def polyak(target: Tree, online: Tree, tau: float) -> Tree:
    return jax.tree.map(lambda t, o: (1 - tau) * t + tau * o, target, online)


def actor_critic(adam: optax.GradientTransformation, actor: Tree, critic: Tree) -> Tree:
    """The state of an actor and critics with their targets and optimisers."""
    opt = {"actor": adam.init(actor), "critic": adam.init(critic)}
    target = jax.tree.map(jnp.copy, {"actor": actor, "critic": critic})  # donated buffers must not be shared
    return {"actor": actor, "critic": critic, "target": target, "opt": opt}


def random_actor_twin(key: jax.Array, hidden: Sequence[int]) -> tuple[Layers, Layers]:
    """The initial layers of a policy and of two critics."""
    ka, kc = jax.random.split(key)
    actor = random_layers(ka, common.OBSERVATION, *hidden, common.ACTION)
    return actor, random_twin(kc, common.OBSERVATION + common.ACTION, *hidden, 1)


class Loop:
    """Runs `update(state, batch, key, phase) -> (state, losses)` for one seed, or with `vmap` for several; `phase`
    counts to `period`.
    """

    def __init__(
        self,
        init: Callable[[jax.Array], Tree],
        update: Callable[..., tuple[Tree, Tree]],
        data: Arrays,
        replicas: int,
        period: int = 1,
        batch: int = BATCH,
        scan: int = SCAN,
    ) -> None:
        self.data, self.scan = {k: jnp.asarray(v) for k, v in data.items()}, scan
        rows = len(data["rewards"])

        def one(state: Tree, data: Tree) -> tuple[Tree, Tree]:
            def body(carry: Tree, _: None) -> tuple[Tree, Tree]:
                key, train, losses = carry["key"], carry["train"], {}
                for phase in range(period):
                    key, pick, noise = jax.random.split(key, 3)
                    drawn = jax.random.randint(pick, (batch,), 0, rows)
                    train, seen = update(train, jax.tree.map(lambda c, i=drawn: c[i], data), noise, phase)
                    losses |= seen
                return {"key": key, "train": train}, losses

            return jax.lax.scan(body, state, None, length=scan // period)

        function = one if replicas == 1 else jax.vmap(one, in_axes=(0, None))
        self.function = jax.jit(function, donate_argnums=0)
        keys = jax.random.split(jax.random.key(0), replicas)
        if replicas == 1:
            self.state: Tree = {"key": keys[0], "train": init(keys[0])}
        else:
            self.state = {"key": keys, "train": jax.vmap(init)(keys)}

    def updates(self, count: int) -> dict[str, float]:
        for _ in range(count // self.scan):
            self.state, losses = self.function(self.state, self.data)
        return {k: float(np.mean(v)) for k, v in jax.block_until_ready(losses).items()}


def check(update: Callable[..., tuple[Tree, Tree]], state: Tree, batches: list[Arrays], period: int = 1) -> None:
    """Print the losses of each update in a check's file."""
    step = jax.jit(update, static_argnums=3)
    seen = []
    for i, batch in enumerate(batches):
        state, losses = step(state, {k: jnp.asarray(v) for k, v in batch.items()}, jax.random.key(0), i % period)
        seen.append({k: float(v) for k, v in losses.items()})
    common.report(losses=seen)
