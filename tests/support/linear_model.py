"""World models that are linear and all but free of noise, written by hand, so that what is made of them can be worked
out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from offrl.data.arrays import from_arrays
from offrl.data.dataset import Dataset, DataSpec
from offrl.world_models import starts
from offrl.world_models.dynamics import DynamicsSettings, data_range
from offrl.world_models.model import WorldModel, save

# s' = s + [s, a] W, r = [s, a] w + 1, of two members; the action is the model's, in [-1, 1]
MEMBERS = (
    (np.array([[-0.1, 0.0], [0.1, -0.2], [0.0, 0.1]]), np.array([0.5, 0.0, -0.25])),
    (np.array([[-0.1, 0.0], [0.1, -0.1], [0.05, 0.2]]), np.array([0.5, 0.25, 0.0])),
)
LOW, HIGH = -2.0, 4.0  # of the environment's action


def rows(episodes: int = 3, length: int = 7, **spec: Any) -> Dataset:
    """Episodes whose first observations differ, of two numbers each; with the action's range."""
    draw = np.random.default_rng(0)
    observations = draw.uniform(-1.0, 1.0, (episodes * length, 2)).astype(np.float32)
    observations[0] = 0.5
    observations[3], observations[4] = -20.0, 20.0  # so wide is the data's range
    rewards = draw.uniform(-50.0, 50.0, episodes * length).astype(np.float32)
    actions = draw.uniform(LOW, HIGH, (episodes * length, 1)).astype(np.float32)
    ends = np.arange(1, episodes * length + 1) % length == 0
    following = np.where(ends[:, None], observations, np.roll(observations, -1, 0))
    made = from_arrays(
        observations, actions, rewards, truncations=ends, next_observations=following, action_low=LOW, action_high=HIGH
    )
    return dataclasses.replace(made, spec=dataclasses.replace(made.spec, **spec))


def write(
    path: Path,
    dataset: Dataset | None = None,
    members: Sequence[tuple[np.ndarray, np.ndarray]] = MEMBERS,
    *,
    spec: DataSpec | None = None,
    log_var: float = -60.0,
    with_starts: bool = True,
    settings: dict[str, Any] | None = None,
) -> Path:
    """The file of a model of the linear dynamics `members`; `log_var` is the logarithm of the variance of its noise."""
    dataset = rows() if dataset is None else dataset
    spec = spec or dataset.spec
    config = DynamicsSettings(
        members=len(members), elites=len(members), hidden=[], termination="never", reward="learned"
    )
    config = dataclasses.replace(config, **(settings or {}))
    model = WorldModel(config, spec)
    width, out = model.in_dim, model.out_dim
    weight = torch.zeros(len(members), width, model.network.net.head.weight.shape[-1])
    bias = torch.zeros(len(members), 1, weight.shape[-1])
    for e, (dynamics, reward) in enumerate(members):
        last = width - len(reward)  # where a model looks back, only the present counts
        weight[e, last:, : out - 1], weight[e, last:, out - 1] = (
            torch.from_numpy(dynamics).float(),
            torch.from_numpy(reward).float(),
        )
        bias[e, 0, out - 1], bias[e, 0, out : 2 * out] = 1.0, log_var
    bounds = {"max_log_var": torch.full((out,), log_var + 20.0), "min_log_var": torch.full((out,), log_var - 20.0)}
    tree = {
        "params": {"net.head.weight": weight, "net.head.bias": bias, **bounds},
        "mean": torch.zeros(width),
        "std": torch.ones(width),
        "elites": torch.arange(len(members)),
        "scale": torch.ones(out),
        **data_range(dataset),
    }
    kept = starts.sample(model, dataset) if with_starts else {}
    longest = {"longest": int(dataset.episode_lengths().max())} if with_starts else {}
    meta = {"data": {"name": "rows"}, "held_out": [0.1] * len(members), "seed": 0, "updates": 1}
    save(path, model, {**tree, **kept}, {**meta, **longest})
    return path


def step(member: int, s: np.ndarray, raw_action: float) -> tuple[np.ndarray, float]:
    """(s', r) of one member in float64, for an action in the environment's range."""
    dynamics, reward = MEMBERS[member]
    x = np.append(s, 2.0 * (np.clip(raw_action, LOW, HIGH) - LOW) / (HIGH - LOW) - 1.0)
    return s + x @ dynamics, float(x @ reward) + 1.0
