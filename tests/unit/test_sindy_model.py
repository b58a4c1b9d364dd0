"""SINDy as a world model: units, members, rollouts that stay in the data, and the run that leaves it."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch

from offrl import rng
from offrl.data.dataset import DataSpec
from offrl.world_models.model import load, save
from offrl.world_models.rollout import branched
from offrl.world_models.sindy import regression as sindy
from offrl.world_models.sindy.model import SindyModel, SindySettings

SETTINGS = SindySettings(members=4, degree=1, control_degree=0, termination="never")
SPEC = DataSpec(
    (2,),
    1,
    action_low=(-2.0,),
    action_high=(4.0,),
    reward_scale=10.0,
    reward_shift=1.0,
    observation_mean=(1.0, 2.0),
    observation_std=(3.0, 0.5),
)


def made(spec: DataSpec = SPEC, growth: float = 1.0) -> tuple[SindyModel, dict]:  # type: ignore[type-arg]
    g = np.random.default_rng(0)
    s, a = g.normal(size=(500, 2)), g.uniform(-2, 4, (500, 1))
    nexts = growth * s + np.concatenate([0.1 * s[:, 1:], 0.5 * a], 1) + 1e-4 * g.normal(size=s.shape)
    tree, _ = sindy.fit(s, a, s[:, 0], nexts, SETTINGS)
    for part in ("dynamics", "reward"):
        tree[part]["coefficients"] = torch.cat([tree[part]["coefficients"], tree[part]["median"][None]])
    tree |= {
        "low": torch.full((2,), -3.0),
        "high": torch.full((2,), 3.0),
        "elites": torch.tensor([4]),
        "scale": torch.ones(3),
    }
    return SindyModel(SETTINGS, spec), tree


def test_equations_hold_in_the_environments_units() -> None:
    model, tree = made()
    raw, action = torch.tensor([[0.4, -1.0]]), torch.tensor([[1.6]])
    told = model.predict(
        tree,
        (raw - torch.tensor([1.0, 2.0])) / torch.tensor([3.0, 0.5]),
        (action + 2.0) / 3.0 - 1.0,
        torch.zeros(1, 0, 3),
    )
    later = (torch.tensor([0.4 - 0.1, -1.0 + 0.8]) - torch.tensor([1.0, 2.0])) / torch.tensor([3.0, 0.5])
    torch.testing.assert_close(told.mean[4, 0], later, atol=1e-3, rtol=0)
    assert float(told.reward[4, 0]) == pytest.approx(10.0 * 0.4 + 1.0, abs=1e-3)
    assert told.std[0, 0].tolist() == pytest.approx([1e-4 / 3.0, 1e-4 / 0.5], rel=0.2)


def test_members_by_themselves() -> None:
    model, tree = made()
    s, a = torch.randn(6, 2), torch.rand(6, 1)
    together, past = model.predict(tree, s, a, torch.zeros(6, 0, 3)), torch.zeros(5, 6, 0, 3)
    alone = model.predict_each(tree, s.expand(5, 6, 2), a.expand(5, 6, 1), past)
    for x, y in zip(together[:4], alone[:4], strict=True):
        torch.testing.assert_close(x, y)


def test_roll_outs_follow_the_median_and_stay_in_the_data() -> None:
    model, tree = made(dataclasses.replace(SPEC, observation_mean=None, observation_std=None), growth=1.5)
    s = torch.randn(8, 2)
    found = branched(model, tree, lambda o, p, k: torch.zeros(len(o), 1), s, torch.zeros(8, 0, 3), 30, rng.make_key(0))
    assert found.clipped.any() and found.next_observations.abs().max() <= 3.0 and torch.isfinite(found.rewards).all()
    expected = model.predict(tree, s, torch.zeros(8, 1), torch.zeros(8, 0, 3)).mean[4].clamp(-3.0, 3.0)
    torch.testing.assert_close(found.next_observations[0], expected)


def test_a_file_holds_it(tmp_path: Path) -> None:
    model, tree = made()
    save(tmp_path / "m.safetensors", model, tree, {"data": {}, "held_out": [0.0] * 5})
    back = load(tmp_path / "m.safetensors")
    assert isinstance(back.model, SindyModel) and back.model.config == SETTINGS
    s, a, past = torch.randn(3, 2), torch.rand(3, 1), torch.zeros(3, 0, 3)
    assert torch.equal(back.model.predict(back.tree, s, a, past).mean, model.predict(tree, s, a, past).mean)
    assert sindy.equations(back.tree) == sindy.equations(tree)
