"""A small world model, its predictions in float64 NumPy, and model-based algorithms that use it. Shared by the golden
tests of those.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from offrl import registry, rng
from offrl.algorithm import TrainState
from offrl.data.arrays import from_arrays
from offrl.data.dataset import Dataset
from offrl.world_models.dynamics import DynamicsSettings, data_range
from offrl.world_models.model import WorldModel, load, save
from tests.support.reference import mlp as ref

OBS, A, ROWS, MEMBERS, ELITES = 3, 2, 60, 4, [2, 0, 3]
HELD_OUT = [0.2, 0.9, 0.1, 0.3]  # of each member


def dataset(**columns: Any) -> Dataset:
    """60 rows of noise in episodes of 15; the second one ends in a terminal."""
    g = np.random.default_rng(7)
    ends, cuts = np.arange(ROWS) == 29, np.arange(ROWS) % 15 == 14
    options: dict[str, Any] = {
        "rewards": g.normal(size=ROWS),
        "action_low": [-1.0] * A,
        "action_high": [1.0] * A,
        **columns,
    }
    rewards = options.pop("rewards")
    return from_arrays(g.normal(size=(ROWS, OBS)), g.uniform(-1, 1, (ROWS, A)), rewards, ends, cuts & ~ends, **options)


def world_model(
    path: Path, data: Dataset, *, history: int = 1, elites: list[int] | None = None, scale: float = 0.5, **settings: Any
) -> str:
    """The file of a model with random weights."""
    defaults = {
        "members": MEMBERS,
        "elites": 3,
        "hidden": [6, 5],
        "history": history,
        "termination": "never",
        "reward": "learned",
        "epoch": 1,
    }
    config = DynamicsSettings(**{**defaults, **settings})
    model = WorldModel(config, data.spec)
    g = torch.Generator().manual_seed(11)
    params = {k: scale * torch.randn(v.shape, generator=g) for k, v in model.build().named_parameters()}
    params |= {"max_log_var": torch.linspace(-1.0, 0.0, OBS + 1), "min_log_var": torch.linspace(-4.0, -3.0, OBS + 1)}
    chosen = ELITES if elites is None else elites
    tree = {
        "params": params,
        "mean": 0.3 * torch.randn(model.in_dim, generator=g),
        "std": 0.5 + torch.rand(model.in_dim, generator=g),
        "elites": torch.tensor(chosen),
        **data_range(data),
        "scale": torch.ones(OBS + 1),
    }
    save(path, model, tree, {"held_out": HELD_OUT})
    return str(path)


def make(
    path: Path, name: str, data: Dataset | None = None, model: dict[str, Any] | None = None, **settings: Any
) -> tuple[Any, TrainState, Any]:
    """(algorithm, state, source): `name` with a small model, networks whose weights are larger than initial ones, and
    the data prepared.
    """
    data = dataset() if data is None else data
    kind = registry.get("algo", name)
    small = {
        "hidden": [6, 5],
        "batch_size": 8,
        "rollouts": 6,
        "horizon": 3,
        "rollout_retain": 2,
        "real_share": 0.25,
        "discount": 0.9,
    }
    at = world_model(path / "model.safetensors", data, **(model or {}))
    algorithm = kind(kind.Config(**{**small, "world_model": at, **settings}), data.spec, {"world_model": load(at)})
    source = algorithm.runtime.source = algorithm.sampler().prepare(data)
    state = algorithm.init(3)
    g = torch.Generator().manual_seed(5)
    for params in (state.params["critic"], state.target["critic"], state.params["actor"]):
        params.update({k: 0.7 * torch.randn(v.shape, generator=g) for k, v in params.items()})
    state.params["entropy"]["log"] = torch.tensor(0.4)
    return algorithm, state, source


def silu(layers: ref.Net, x: np.ndarray) -> np.ndarray:
    for i, (w, b) in enumerate(layers):
        x = x @ w + b
        if i < len(layers) - 1:
            x = x / (1.0 + np.exp(-x))
    return x


def softplus(x: np.ndarray) -> np.ndarray:
    return np.logaddexp(x, 0.0)


def predict(tree: dict[str, Any], observations: np.ndarray, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Means and standard deviations [E, B, O + 1] of the next observation and the reward, of every member."""
    offset, unit, high, low = (
        np.asarray(x, dtype=np.float64) for x in (tree["mean"], tree["std"], *(tree["params"][k] for k in BOUNDS))
    )
    inputs = (np.concatenate([observations, actions], -1) - offset) / unit
    means, stds = [], []
    for e in range(tree["params"]["net.head.weight"].shape[0]):
        mean, log_var = np.split(silu(ref.net(tree["params"], "net.", member=e), inputs)[:, : 2 * (OBS + 1)], 2, 1)
        log_var = high - softplus(high - log_var)
        log_var = low + softplus(log_var - low)
        means.append(mean + np.concatenate([observations, np.zeros((len(observations), 1))], 1))
        stds.append(np.exp(0.5 * log_var))
    return np.stack(means), np.stack(stds)


BOUNDS = ("max_log_var", "min_log_var")


def wide(x: torch.Tensor) -> np.ndarray:
    return x.detach().numpy().astype(np.float64)


def normal(key: torch.Tensor, *shape: int) -> np.ndarray:
    return wide(rng.normal(key, shape))


def sample(params: dict[str, Any], observations: np.ndarray, noise: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Actions of a tanh-Gaussian policy and their log densities; noise [..., B, A]."""
    mean, raw = np.split(ref.forward(ref.net(params, "net."), observations)[0], 2, 1)
    log_std = np.clip(raw, -5, 2)
    u = mean + np.exp(log_std) * noise
    slope = -2 * (np.logaddexp(u, -u) - np.log(2))  # log(1 - tanh(u)**2)
    return np.tanh(u), (-0.5 * noise**2 - log_std - 0.5 * np.log(2 * np.pi) - slope).sum(-1)


def q_values(params: dict[str, Any], observations: np.ndarray, actions: np.ndarray) -> np.ndarray:
    """[critics, ...] at observations [B, O] and actions [..., B, A]."""
    inputs = np.concatenate([np.broadcast_to(observations, (*actions.shape[:-1], OBS)), actions], -1)
    many = params["head.weight"].shape[0]
    return np.stack(
        [
            ref.forward(ref.net(params, member=e), inputs.reshape(-1, OBS + A))[0].reshape(actions.shape[:-1])
            for e in range(many)
        ]
    )


def batch(size: int = 8) -> dict[str, torch.Tensor]:
    """A batch as `ModelRollouts.mixed` gives it."""
    g = np.random.default_rng(4)
    columns = {
        "observations": g.normal(size=(size, OBS)),
        "actions": g.uniform(-1, 1, (size, A)),
        "rewards": g.normal(size=size),
        "next_observations": g.normal(size=(size, OBS)),
        "masks": (np.arange(size) % 3 > 0).astype(float),
    }
    return {k: torch.tensor(v, dtype=torch.float32) for k, v in columns.items()}
