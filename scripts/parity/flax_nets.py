"""References in JAX: float64, the shared noise, and weights by the paths that flax gives them. Imports jax where it is
used.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import numpy as np

from parity.common import ACTION, BATCH, draws

NEEDS = ("jax", "flax", "optax", "tensorflow_probability")
Layers = Sequence[tuple[np.ndarray, np.ndarray]]


@contextlib.contextmanager
def jax_float64() -> Iterator[None]:
    """Inside, jax computes in float64 and has the draws of `parity.common`, and names that newer versions dropped are
    there.
    """
    import flax
    import jax

    def normal(key: Any, shape: Sequence[int] = (), dtype: Any = float) -> Any:
        return jax.numpy.asarray(draws.theirs(shape))

    def uniform(
        key: Any, shape: Sequence[int] = (), dtype: Any = float, minval: float = 0.0, maxval: float = 1.0
    ) -> Any:
        return minval + (maxval - minval) * jax.numpy.asarray(draws.theirs(shape, "uniform"))

    original = jax.jit

    def jit(
        function: Any, **options: Any
    ) -> Any:  # newer versions refuse names of static arguments that a function does not have
        if isinstance(names := options.get("static_argnames"), tuple | list):
            options["static_argnames"] = [name for name in names if name in inspect.signature(function).parameters]
        return original(function, **options)

    wide, frozen = jax.config.jax_enable_x64, flax.config.flax_return_frozendict
    jax.config.update("jax_enable_x64", True)
    flax.config.update("flax_return_frozendict", True)
    try:
        with (
            mock.patch.object(jax.random, "normal", normal),
            mock.patch.object(jax.random, "uniform", uniform),
            mock.patch.object(jax, "jit", jit),
            mock.patch.object(jax, "tree_map", jax.tree_util.tree_map, create=True),
            mock.patch.object(jax, "tree_multimap", jax.tree_util.tree_map, create=True),
        ):
            yield
    finally:
        jax.config.update("jax_enable_x64", wide)
        flax.config.update("flax_return_frozendict", frozen)


def of_dimensions(key: Any, shape: Any = (), dtype: Any = float) -> Any:
    """Noise of a policy's actions for distributions that ask for it by dimensions."""
    import jax

    transposed = shape == (ACTION, BATCH)
    return jax.numpy.asarray(draws.theirs((BATCH, ACTION)).T if transposed else draws.theirs(shape))


def flat(params: Any) -> dict[str, Any]:
    """Parameters by path, such as "MLP_0/Dense_0/kernel"."""
    import flax

    return dict(flax.traverse_util.flatten_dict(flax.core.unfreeze(params), sep="/"))


def replaced(params: Any, values: Mapping[str, np.ndarray]) -> Any:
    """`params` in float64 with some of them replaced, as a FrozenDict. Paths that it lacks are an error."""
    import flax
    import jax.numpy as jnp

    leaves = {k: jnp.asarray(v, dtype=jnp.float64) for k, v in flat(params).items()}
    for path, value in values.items():
        leaves[path] = jnp.asarray(value, dtype=jnp.float64).reshape(leaves[path].shape)
    return flax.core.freeze(flax.traverse_util.unflatten_dict(leaves, sep="/"))


def dense(layers: Layers, paths: Sequence[str]) -> dict[str, np.ndarray]:
    """Our layers as kernels and biases under flax's paths."""
    assert len(layers) == len(paths), (len(layers), paths)
    pairs = zip(layers, paths, strict=True)
    return {f"{p}/{name}": x for (weight, bias), p in pairs for name, x in (("kernel", weight), ("bias", bias))}


def compared(name: str, ours: Mapping[str, np.ndarray], reference: Any) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Pairs for `Outcome.parameters` of what `ours` holds by flax's paths."""
    leaves = flat(reference)
    return {
        f"{name}/{path}": (np.asarray(x).reshape(-1), np.asarray(leaves[path]).reshape(-1)) for path, x in ours.items()
    }
