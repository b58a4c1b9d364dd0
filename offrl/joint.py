"""Descent of several modules on one loss, as world models need it: one gradient, one clip, an optimiser for each."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from offrl.optim import Params, clipped, gradient

if TYPE_CHECKING:
    from offrl.algorithm import Algorithm, TrainState


def descend_jointly(
    algorithm: Algorithm,
    state: TrainState,
    names: tuple[str, ...],
    loss_fn: Callable[..., Any],
    *x: Any,
    clip: float = math.inf,
    aux: bool = False,
) -> tuple[Any, ...]:
    """`Algorithm.descend` on the modules `names`."""

    def loss(params: Params, *x: Any) -> tuple[Tensor, Any]:
        value, *more = loss_fn(separate(params, names), *x)
        return value, more

    runtime = algorithm.runtime
    grads, more = gradient(loss, joined(state.params, names), state, *x, alone=runtime.alone)
    if runtime.reduce_gradients is not None:  # the norm is that of the whole batch
        grads = runtime.reduce_gradients(grads)
    for name, module in separate(clipped(grads, clip), names).items():
        state = algorithm._stepped(state, name, module, reduced=True)
    return (state, *more) if aux else (state, more[0])


def joined(params: Mapping[str, Params], names: tuple[str, ...]) -> Params:
    """The parameters of several modules as those of one, by MODULE/PARAMETER."""
    return {f"{name}/{k}": v for name in names for k, v in params[name].items()}


def separate(params: Params, names: tuple[str, ...]) -> dict[str, Params]:
    """The inverse of `joined`."""
    return {n: {k.removeprefix(f"{n}/"): v for k, v in params.items() if k.startswith(f"{n}/")} for n in names}
