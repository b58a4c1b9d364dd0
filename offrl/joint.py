"""Descent of several modules: on one loss, as world models need it (one gradient, one clip, an optimiser for each), or
on losses that all read the state before.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from offrl.optim import Params, clipped

if TYPE_CHECKING:
    from offrl.algorithm import Algorithm, TrainState


def joint_loss(loss_fn: Callable[..., Any], names: tuple[str, ...]) -> Callable[..., tuple[Tensor, Any]]:
    """A loss of several modules' parameters by name as one of `joined` parameters, with what else it returns as a
    list.
    """

    def loss(params: Params, *x: Any) -> tuple[Tensor, Any]:
        value, *more = loss_fn(separate(params, names), *x)
        return value, more

    return loss


def step_jointly(
    algorithm: Algorithm,
    state: TrainState,
    names: tuple[str, ...],
    grads: Params,
    more: list[Any],
    clip: float = math.inf,
    aux: bool = False,
) -> tuple[Any, ...]:
    """`Algorithm.descend` on the modules `names`, once there are gradients of their `joined` parameters."""
    if algorithm.runtime.reduce_gradients is not None:  # the norm is that of the whole batch
        grads = algorithm.runtime.reduce_gradients(grads)
    for name, module in separate(clipped(grads, clip), names).items():
        state = algorithm._stepped(state, name, module, reduced=True)
    return (state, *more) if aux else (state, more[0])


def joined(params: Mapping[str, Params], names: tuple[str, ...]) -> Params:
    """The parameters of several modules as those of one, by MODULE/PARAMETER."""
    return {f"{name}/{k}": v for name in names for k, v in params[name].items()}


def separate(params: Params, names: tuple[str, ...]) -> dict[str, Params]:
    """The inverse of `joined`."""
    return {n: {k.removeprefix(f"{n}/"): v for k, v in params.items() if k.startswith(f"{n}/")} for n in names}


def merged(before: TrainState, *after: TrainState) -> TrainState:
    """One state of several that each descended from `before` on other modules: all of their losses read what was before
    all of them.
    """
    params, opt = dict(before.params), dict(before.opt)
    for state in after:
        for name, value in state.params.items():
            if value is not before.params[name]:
                params[name], opt[name] = value, state.opt[name]
    return before._replace(params=params, opt=opt)
