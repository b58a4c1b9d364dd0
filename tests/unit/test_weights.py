"""Trajectory weighting: weights against NumPy, what carries them along, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from offrl.data import Dataset, DatasetConfig, load_dataset, weight_episodes
from offrl.data.arrays import from_arrays
from offrl.data.dataset import effective_episodes
from offrl.data.transforms.episodes import concatenate, keep_episodes
from offrl.data.transforms.weights import advantages
from offrl.errors import UserError

LENGTHS = [2, 5, 3, 4, 1, 6]
ENDS = np.cumsum(LENGTHS) - 1
REWARDS = np.random.default_rng(0).normal(size=sum(LENGTHS))
RETURNS = np.add.reduceat(REWARDS.astype(np.float32), np.r_[0, ENDS[:-1] + 1], dtype=np.float64)
STATES = np.random.default_rng(1).normal(size=(sum(LENGTHS), 2)).astype(np.float32)


def data(rewards: np.ndarray = REWARDS, name: str = "six") -> Dataset:
    truncations = np.isin(np.arange(len(rewards)), ENDS)
    return from_arrays(STATES, np.zeros((len(rewards), 1)), rewards, truncations=truncations, name=name)


def softmax_over_rows(scores: np.ndarray, temperature: float) -> np.ndarray:
    """Weights of the episodes with mean 1 over the rows, by a softmax over all rows."""
    rows = np.repeat((scores - scores.min()) / (scores.max() - scores.min()), LENGTHS) / temperature
    p = np.exp(rows - rows.max()) / np.exp(rows - rows.max()).sum()
    return (p * len(rows))[ENDS]


def test_return_weights_are_a_softmax_over_rows() -> None:
    found = weight_episodes(data(), "return", 0.3)
    assert found.weights is not None and found.weights.dtype == torch.float64
    np.testing.assert_allclose(found.weights, softmax_over_rows(RETURNS, 0.3), rtol=1e-12)
    np.testing.assert_allclose(found.row_weights(), np.repeat(softmax_over_rows(RETURNS, 0.3), LENGTHS), rtol=1e-12)
    shares = softmax_over_rows(RETURNS, 0.3) * LENGTHS / sum(LENGTHS)
    np.testing.assert_allclose(found.episode_shares(), shares, rtol=1e-12)
    assert found.describe()["effective_episodes"] == pytest.approx(np.exp(-(shares * np.log(shares)).sum()))
    assert "effective_episodes" not in data().describe() and torch.equal(
        data().row_weights(), torch.ones(21, dtype=torch.float64)
    )
    assert "weighting return temperature 0.3" in found.transforms and "of 6 episodes" in found.notes[-1]
    scaled = weight_episodes(data(REWARDS * 7.0), "return", 0.3)  # the scale of rewards does not matter
    np.testing.assert_allclose(scaled.weights, found.weights, rtol=1e-5)
    cold = weight_episodes(data(), "return", 1e-6)
    assert int((cold.weights > 0.0).sum()) == 1 and int(cold.weights.argmax()) == int(RETURNS.argmax())


def test_advantages_are_returns_less_a_ridge_regression() -> None:
    rng = np.random.default_rng(3)
    x, y = rng.normal(size=(50, 4)) * [1, 10, 0.1, 0] + 5.0, rng.normal(size=50)
    x[:, 1] += 8 * y
    z = (x - x.mean(0)) / np.where(x.std(0) > 0, x.std(0), np.inf)
    design = np.c_[np.ones(50), z]
    penalty = np.diag([0.0, 4.0, 4.0, 4.0, 4.0])
    expected = y - design @ np.linalg.solve(design.T @ design + penalty, design.T @ y)
    np.testing.assert_allclose(advantages(x, y), expected, atol=1e-10)
    assert advantages(x, y).std() < 0.8 * y.std()  # the second dimension says much about the return
    many = rng.normal(size=(5_000, 3))
    line = many @ [1.0, -2.0, 0.5] + 3.0 + rng.normal(size=5_000)
    plain = np.linalg.lstsq(np.c_[np.ones(5_000), many], line, rcond=None)[0]
    np.testing.assert_allclose(advantages(many, line), line - np.c_[np.ones(5_000), many] @ plain, atol=0.01)
    wide = rng.normal(size=(10, 40))  # more dimensions than episodes: least squares would leave nothing
    assert advantages(wide, y[:10]).std() > 0.2 * y[:10].std()
    both = rng.normal(size=(12, 12))  # the two forms of the same system
    np.testing.assert_allclose(advantages(np.c_[both, np.zeros((12, 0))], y[:12]), advantages(both, y[:12]))
    z = (wide - wide.mean(0)) / wide.std(0)
    direct = y[:10] - y[:10].mean()
    np.testing.assert_allclose(
        advantages(wide, y[:10]), direct - z @ np.linalg.solve(z.T @ z + 40 * np.eye(40), z.T @ direct), atol=1e-10
    )


def test_advantage_weights_and_top() -> None:
    scores = advantages(STATES[np.r_[0, ENDS[:-1] + 1]].astype(np.float64), RETURNS)
    np.testing.assert_allclose(
        weight_episodes(data(), "advantage", 0.1).weights, softmax_over_rows(scores, 0.1), rtol=1e-6
    )
    top = weight_episodes(data(), "top", fraction=0.5)
    assert set(np.flatnonzero(top.weights)) == set(np.argsort(RETURNS)[-3:]) and len(top.columns["rewards"]) == 21
    assert (
        float(top.row_weights().mean()) == pytest.approx(1.0) and len(set(top.weights[top.weights > 0].tolist())) == 1
    )
    assert int((weight_episodes(data(), "top", fraction=0.01).weights > 0).sum()) == 1


def test_what_has_nothing_to_prefer_is_refused() -> None:
    equal = np.where(np.isin(np.arange(21), ENDS), 1.0, 0.0)
    with pytest.raises(UserError, match=r"six: all 6 episodes have the same return, so that dataset\.weighting=return"):
        weight_episodes(data(equal), "return")
    with pytest.raises(UserError, match="same advantage"):
        weight_episodes(data(equal), "advantage")
    one = from_arrays(STATES, np.zeros((21, 1)), REWARDS, name="one")
    with pytest.raises(UserError, match="one has one episode"):
        weight_episodes(one, "return")
    with pytest.raises(UserError, match="must be above 0"):
        weight_episodes(data(), "return", 0.0)
    for bad in (
        {"weighting_temperature": 0.0},
        {"weighting": "retrun"},
        {"weighting_fraction": 0.0},
        {"weighting_fraction": 1.5},
    ):
        with pytest.raises(UserError, match=f"dataset.{next(iter(bad))}"):
            DatasetConfig(**bad).validate()  # type: ignore[arg-type]


def test_weights_go_along() -> None:
    found = weight_episodes(data(), "return", 0.3)
    some = keep_episodes(found, torch.tensor([1, 5]), "two")
    assert some.weights is not None
    assert float(some.weights[0] / some.weights[1]) == pytest.approx(float(found.weights[1] / found.weights[5]))  # type: ignore[index]
    assert float(some.row_weights().mean()) == pytest.approx(1.0)
    joined = concatenate([found, data(name="plain")])
    shares = joined.episode_shares()
    assert float(shares[:6].sum()) == pytest.approx(0.5) and torch.allclose(shares[:6], found.episode_shares() / 2)
    assert concatenate([data(), data()]).weights is None
    top = weight_episodes(data(), "top", fraction=0.2)
    with pytest.raises(UserError, match="draws none"):
        keep_episodes(top, torch.nonzero(top.weights == 0.0).squeeze(-1), "rest")
    assert replace(found).to("cpu").weights is found.weights
    assert effective_episodes(np.array([0.0, 2.0, 2.0])) == pytest.approx(2.0)


def test_from_a_setting_in_memory_and_on_disk(tmp_path: Path) -> None:
    truncations = np.isin(np.arange(21), ENDS)
    np.savez(
        tmp_path / "six.npz", observations=STATES, actions=np.zeros((21, 1)), rewards=REWARDS, truncations=truncations
    )
    settings = {
        "name": str(tmp_path / "six.npz"),
        "cache_dir": str(tmp_path),
        "weighting": "return",
        "reward_scale": 3.0,
        "reward_shift": -9.0,
    }
    memory, disk, again = (load_dataset(DatasetConfig(**settings, memory=m)) for m in ("device", "mmap", "mmap"))  # type: ignore[arg-type]
    for found in (memory, disk, again):
        # of the rewards before scale and shift
        np.testing.assert_allclose(found.weights, softmax_over_rows(RETURNS, 0.1), rtol=1e-12)
    plain = load_dataset(DatasetConfig(name=settings["name"], cache_dir=str(tmp_path), memory="mmap"))
    assert plain.mapped and plain.weights is None and plain.fingerprint == disk.fingerprint
