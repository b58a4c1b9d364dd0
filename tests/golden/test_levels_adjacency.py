"""HRAC's adjacency constraint on two levels: the sampler's pairs and labels, the contrast and the penalty in float64
NumPy, and that nothing changes without it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from offrl import registry, rng
from offrl.algorithm import TrainState
from offrl.data.arrays import from_arrays
from offrl.data.dataset import Dataset, DataSpec
from offrl.data.samplers.adjacency import ADJACENT, ANY_STATES, NEAR_STATES, AdjacentSampler
from offrl.data.samplers.goals import GoalSampler, Mix
from tests.support.reference import goals
from tests.support.reference import mlp as ref

B, OBS, Z, K = 7, 3, 4, 2
G = np.random.default_rng(1)
KEY = rng.make_key(0)
SPEC = DataSpec((OBS,), 2, action_low=(-1.0,) * 2, action_high=(1.0,) * 2)
NAMES = (
    "observations",
    "near_states",
    "any_states",
    "near_goals",
    "any_goals",
    "high_goals",
    "high_targets",
    "high_target_states",
)
X = {name: G.normal(size=(B, OBS)) for name in NAMES} | {ADJACENT: np.array([0, 1, 0, 0, 1, 0, 0.0])}
BATCH = {name: torch.tensor(x, dtype=torch.float32) for name, x in X.items()}


def make(**settings: Any) -> tuple[Any, TrainState]:
    kind = registry.get("algo", "hiql")
    algorithm = kind(kind.Config(hidden=[6, 5], representation=Z, subgoal_steps=K, **settings), SPEC)
    return algorithm, algorithm.init(3)


def moved(state: TrainState) -> TrainState:
    """With other parameters: the first ones of psi have nothing beyond the margins."""
    g = torch.Generator().manual_seed(5)
    for params in state.params.values():
        params.update({k: v + 0.3 * torch.randn(v.shape, generator=g) for k, v in params.items()})
    return state


def psi(p: Any, states: np.ndarray) -> np.ndarray:
    """The embedding of the first two entries."""
    hidden = ref.forward(ref.net(p, "psi."), states[:, :2])[0]
    return np.asarray(np.maximum(hidden, 0.0) @ goals.f64(p, "head").T)


def far(p: Any, latents: np.ndarray) -> np.ndarray:
    """Distances from psi(s) to what is read out of (s, z)."""
    here = psi(p, X["observations"])
    return np.linalg.norm(
        here - ref.forward(ref.net(p, "reads."), np.concatenate([X["observations"], latents], 1))[0], axis=1
    )


def sphere(x: np.ndarray) -> np.ndarray:
    return np.asarray(x * np.sqrt(x.shape[1]) / np.linalg.norm(x, axis=1, keepdims=True))


def latent(p: Any, name: str) -> np.ndarray:
    return sphere(goals.mlp(p, np.concatenate([X["observations"], X[name]], 1), "represent."))


def test_contrast_and_reading() -> None:
    algorithm, state = make(adjacency_weight=2.0, adjacency_dims=2)
    p, value = moved(state).params["adjacency"], state.params["value"]
    at = {n: psi(p, X[n]) for n in NAMES[:3]}
    near, other = (np.linalg.norm(at["observations"] - at[n], axis=1) for n in ("near_states", "any_states"))
    label = X[ADJACENT]
    hinge = np.maximum(near - 1.0, 0), label * np.maximum(other - 1.0, 0) + (1 - label) * np.maximum(1.2 - other, 0)
    assert (hinge[0] > 0).any() and (hinge[1] > 0).any()
    missed = 0.0
    for n in ("near", "any"):
        inputs = np.concatenate([X["observations"], latent(value, f"{n}_goals")], 1)
        missed += 0.5 * ((ref.forward(ref.net(p, "reads."), inputs)[0] - at[f"{n}_states"]) ** 2).sum(1).mean()
    loss, metrics = algorithm.adjacency_loss(p, state, BATCH)
    assert float(metrics["adjacency/contrast"]) == pytest.approx((hinge[0].mean() + hinge[1].mean()) / 2, rel=1e-4)
    assert float(loss) == pytest.approx((hinge[0].mean() + hinge[1].mean()) / 2 + missed, rel=1e-4)
    assert float(metrics["adjacency/near_accuracy"]) == pytest.approx((near < 1.1).mean())
    assert float(metrics["adjacency/far_right"]) == pytest.approx(
        ((other > 1.1) & (label == 0)).sum() / (label == 0).sum()
    )


def test_the_high_level_pays_for_what_is_far() -> None:
    algorithm, state = make(adjacency_weight=2.0, adjacency_dims=2)
    plain, _ = make()
    high = moved(state).params["high"]
    mean = goals.mlp(high, np.concatenate([X["observations"], X["high_goals"]], 1), "net.")
    paid = np.maximum(far(state.params["adjacency"], sphere(mean)) - 1.1, 0)
    assert (paid > 0).any()
    loss, _ = algorithm.high_loss(high, state, BATCH)
    without, _ = plain.high_loss(high, state, BATCH)
    assert float(loss) == pytest.approx(float(without) + 2.0 * paid.mean(), rel=1e-4)


def test_without_it_everything_is_as_it_was() -> None:
    _, plain = make()
    _, state = make(adjacency_weight=1.0)
    assert sorted(plain.params) == ["actor", "high", "value"] and sorted(state.params) == [
        "actor",
        "adjacency",
        "high",
        "value",
    ]
    for name, params in plain.params.items():
        assert all(torch.equal(p, state.params[name][k]) for k, p in params.items())


def walk() -> Dataset:
    """Two trajectories of 8 steps along a line, from 0 to 7 and from 7.3 to 0.3."""
    places = np.concatenate([np.arange(8.0), np.arange(8.0)[::-1] + 0.3])
    observations = np.stack([places, G.normal(size=16), np.zeros(16)], 1).astype(np.float32)
    ends = np.isin(np.arange(16), (7, 15))
    following = np.where(ends[:, None], observations, np.roll(observations, -1, 0))
    options: dict[str, Any] = {"action_low": -1.0, "action_high": 1.0, "next_observations": following}
    return from_arrays(observations, G.uniform(-1, 1, (16, 2)), np.zeros(16), np.zeros(16, bool), ends, **options)


@pytest.mark.parametrize("cell", [0.0, 1.0])
def test_pairs(cell: float) -> None:
    mix, data = Mix(0.2, 0.5, 0.3), walk()
    sampler, count = AdjacentSampler(mix, mix, subgoal_steps=K, near_steps=K, dims=1, cell=cell), 512
    batch = sampler(sampler.prepare(data), KEY, count)
    plain = GoalSampler(mix, mix, subgoal_steps=K)
    for name, column in plain(plain.prepare(data), KEY, count).items():
        assert torch.equal(batch[name], column), "the rest of a batch is what it was"
    rows = {tuple(o.tolist()): i for i, o in enumerate(data.columns["observations"])}
    here, near, other = ([rows[tuple(o.tolist())] for o in batch[n]] for n in ("observations", NEAR_STATES, ANY_STATES))
    ahead = [n - h for h, n in zip(here, near, strict=True)]
    assert all(1 <= d <= K or (d == 0 and h % 8 == 7) for d, h in zip(ahead, here, strict=True))
    assert {1, 2} <= set(ahead) and len({o - h for h, o in zip(here, other, strict=True)}) > 20
    line = np.round(data.columns["observations"][:, 0].numpy())
    for h, o, label in zip(here, other, batch[ADJACENT].tolist(), strict=True):
        same = h // 8 == o // 8 and abs(h - o) <= K
        assert label == float(same or (cell > 0 and abs(line[h] - line[o]) <= K))
    assert 0.1 < float(batch[ADJACENT].mean()) < 0.7
