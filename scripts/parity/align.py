"""Named differences from references, made equal on our side while two implementations are compared."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from offrl import rng
from offrl.nn.policies import TanhGaussian, gaussian_log_prob
from parity.common import ACTION, BATCH, draws

# for `shared_noise`: the reference draws its critics' actions first, ours the actor's
CRITICS_FIRST = {BATCH * ACTION: (1, 0)}


@contextlib.contextmanager
def tanh_epsilon(epsilon: float = 1e-6) -> Iterator[None]:
    """Our tanh policies' log density with log(1 - tanh(u)^2 + epsilon) in place of its exact form."""

    def density(dist: tuple[Tensor, ...], u: Tensor) -> Tensor:
        return gaussian_log_prob(*dist, u) - (1 - u.tanh().square() + epsilon).log().sum(-1)

    with mock.patch.object(TanhGaussian, "_density", staticmethod(density)):
        yield


@contextlib.contextmanager
def rows_first(rows: int, count: int, width: int) -> Iterator[None]:
    """Within `shared_noise`: torch's draws for `count` actions of each of `rows` states, [rows, count, width] or [rows
    * count, width], are ours of the shape [count, rows, width]."""

    def arranged(shape: Any, kind: str = "normal") -> Tensor:
        noise = torch.as_tensor(draws.theirs((count, rows, width), kind))
        return noise.transpose(0, 1).reshape(shape)

    def several(shape: Any) -> bool:
        return tuple(shape) in ((rows, count, width), (rows * count, width))

    normal, uniform = torch.distributions.normal._standard_normal, Tensor.uniform_  # type: ignore[attr-defined]

    def standard_normal(shape: Any, **options: Any) -> Tensor:
        return arranged(shape) if several(shape) else normal(shape, **options)

    def uniform_(x: Tensor, low: float = 0.0, high: float = 1.0) -> Tensor:
        return x.copy_(low + (high - low) * arranged(x.shape, "uniform")) if several(x.shape) else uniform(x, low, high)

    with (
        mock.patch.object(torch.distributions.normal, "_standard_normal", standard_normal),
        mock.patch.object(Tensor, "uniform_", uniform_),
    ):
        yield


def steps_in_order(algorithm: Any, order: str) -> Callable[..., Any]:
    """The update of a soft actor-critic of ours with its steps in another order: letters of c (critics), a (actor), e
    (entropy's weight).

    The weight's step takes the log densities of the actor before its own step, as all references' do.
    """

    def update(state: Any, batch: Any, key: Tensor, *, phase: int) -> Any:
        actor_key, critic_key = rng.split(key)
        negative_entropy = algorithm.negative_entropy(state.params["actor"], batch["observations"], actor_key)
        metrics: dict[str, Tensor] = {}
        for step in order:
            if step == "c":
                state, new = algorithm.descend(state, "critic", algorithm.critic_loss, batch, critic_key)
            elif step == "a":
                state, new = algorithm.descend(state, "actor", algorithm.actor_loss, batch, actor_key)
            else:
                state, new = algorithm.descend(state, "entropy", algorithm.entropy_loss, negative_entropy)
            metrics |= new
        return algorithm.polyak(state, "critic", algorithm.config.polyak), metrics

    return update
