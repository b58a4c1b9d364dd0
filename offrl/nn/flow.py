"""Flow matching (Lipman et al., 2022, arXiv 2210.02747): velocity fields from noise to data along straight lines, and
their integration.

Time t runs from 0, noise, to 1, data. Everything is a product of matrices unrolled over a fixed number of steps, so
that it passes through `vmap`, compilation and export.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from offrl import rng
from offrl.nn.mlp import MLP

Velocity = Callable[[Tensor, Tensor], Tensor]  # (x [B, D], t [B, 1]) -> velocity [B, D]


class Field(nn.Module):
    """v(s, x, t): observations [B, O], points [B, D], times [B, 1] in [0, 1] -> velocities [B, D], by an MLP of the
    three side by side.

    timed=False: without t, a map from noise to actions in one step (FQL's mu, arXiv 2502.02538).
    """

    def __init__(
        self,
        obs_dim: int,
        dim: int,
        hidden: Sequence[int],
        *,
        timed: bool = True,
        activation: str = "gelu_tanh",
        layer_norm: bool = False,
        layer_norm_epsilon: float = 1e-6,
        init: str = "xavier",
    ) -> None:
        super().__init__()
        norm = {"layer_norm": layer_norm, "layer_norm_epsilon": layer_norm_epsilon}
        self.net = MLP(obs_dim + dim + int(timed), hidden, dim, activation=activation, init=init, **norm)  # type: ignore[arg-type]

    def forward(self, observations: Tensor, x: Tensor, t: Tensor | None = None) -> Tensor:
        return self.net(torch.cat([observations, x] if t is None else [observations, x, t], -1))


def interpolate(noise: Tensor, data: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
    """(x_t, velocity) [B, D]: (1 - t) noise + t data on the line from noise to data [B, D], at times t [B, 1]; and data
    - noise.
    """
    return (1.0 - t) * noise + t * data, data - noise


def matching(velocity: Velocity, data: Tensor, key: Tensor) -> Tensor:
    """(v(x_t, t) - (data - noise))^2 [B, D] at uniform times between standard normal noise and data [B, D]: flow
    matching, row by row.
    """
    noise_key, time_key = rng.split(key)
    t = rng.uniform(time_key, (data.shape[0], 1))
    x, expected = interpolate(rng.normal(noise_key, tuple(data.shape)), data, t)
    return (velocity(x, t) - expected).square()


def integrate(
    velocity: Velocity,
    noise: Tensor,
    steps: int,
    low: float | None = -1.0,
    high: float | None = 1.0,
) -> Tensor:
    """Points [B, D] at t = 1 from `noise` [B, D] at t = 0, by `steps` Euler steps: x + v(x, i / steps) / steps.

    low, high: where the result is cut off, at the end alone; None: nowhere.
    """
    x = noise
    for i in range(steps):
        x = x + velocity(x, torch.full_like(x[..., :1], i / steps)) / steps
    return x if low is None and high is None else x.clamp(low, high)


def repeated(x: Tensor, count: int) -> Tensor:
    """[B, ...] -> [count * B, ...]: the batch `count` times, one after another, for as many candidates at each row."""
    return x.expand(count, *x.shape).flatten(0, 1)


def best_of(scores: Tensor, candidates: Tensor) -> Tensor:
    """The candidate with the largest score at each row: scores [N, B], candidates [N, B, ...] -> [B, ...]; the first of
    equal ones.
    """
    return chosen(scores.argmax(0), candidates)


def chosen(index: Tensor, candidates: Tensor) -> Tensor:
    """The candidates of those numbers: index [B] int64, candidates [N, B, ...] -> [B, ...]."""
    index = index.reshape(1, -1, *[1] * (candidates.ndim - 2)).expand(1, *candidates.shape[1:])
    return candidates.gather(0, index).squeeze(0)  # `take_along_dim` fixes the batch size where it is traced
