"""The setting of the golden tests of critics: a batch of noise, its float64 twin, the data's description, and critics
in float64.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from offrl import rng
from offrl.data.dataset import DataSpec
from tests.support.reference import mlp

B, OBS, A, K = 8, 3, 2, 4  # rows; dimensions of an observation and an action; discrete actions
KEY = rng.make_key(0)


def single(columns: dict[str, Any]) -> dict[str, Tensor]:
    """A float32 batch of these columns."""
    return {k: torch.tensor(v, dtype=torch.float32) for k, v in columns.items()}


def double(batch: dict[str, Tensor]) -> dict[str, np.ndarray]:
    """The same numbers in float64 NumPy."""
    return {k: v.numpy().astype(np.float64) for k, v in batch.items()}


def transitions(g: np.random.Generator, next_scale: float = 1.0) -> dict[str, Tensor]:
    """A batch of B transitions, of which three end their episode."""
    return single(
        {
            "observations": g.normal(size=(B, OBS)),
            "actions": g.uniform(-1, 1, (B, A)),
            "rewards": g.normal(size=B),
            "masks": np.array([1, 0, 1, 1, 0, 1, 0, 1]),
            "next_observations": next_scale * g.normal(size=(B, OBS)),
        }
    )


def spec(discrete: int = 0) -> DataSpec:
    """Actions in [-1, 1]^A, or one of so many."""
    return (
        DataSpec((OBS,), 1, True, discrete)
        if discrete
        else DataSpec((OBS,), A, action_low=(-1.0,) * A, action_high=(1.0,) * A)
    )


def redraw(params: dict[str, Tensor], g: torch.Generator, scale: float = 0.7) -> None:
    """Replace a module's parameters, in place, by larger ones than it starts with, so that its outputs lie on both
    sides of every bound.
    """
    params.update({k: scale * torch.randn(v.shape, generator=g) for k, v in params.items()})


def critics(params: dict[str, Any], kind: ModuleType = mlp) -> list[Any]:
    """Each member of an ensemble; `kind` is the module of `tests.support.reference` that knows its layers."""
    return [kind.net(params, member=e) for e in range(len(params["head.weight"]))]


def q_values(nets: list[Any], observations: np.ndarray, actions: np.ndarray, kind: ModuleType = mlp) -> np.ndarray:
    """[E, B] at actions [B, A], or [E, M, B] at actions [M, B, A]."""
    inputs = np.concatenate([np.broadcast_to(observations, (*actions.shape[:-1], OBS)), actions], -1).reshape(
        -1, OBS + A
    )
    return np.stack([kind.forward(net, inputs)[0][:, 0].reshape(actions.shape[:-1]) for net in nets])
