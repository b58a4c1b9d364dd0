"""OGSRL: what the guardian excludes, the costs of both kinds, and a policy that weighs both."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from offrl import registry, rng
from offrl.data.arrays import from_arrays
from offrl.data.dataset import Dataset
from offrl.errors import UserError
from tests.support.reference import mlp as ref
from tests.support.reference import world_model as small
from tests.support.reference.world_model import OBS, ROWS, A

COSTS = np.arange(ROWS) % 4.0
DATA = small.dataset(costs=COSTS)
KEY = rng.make_key(1)
KAPPA = 6.0 * 0.75  # of the limit 6 over two steps with the discount 0.5


def make(path: Path, data: Dataset = DATA, **settings: Any) -> tuple[Any, Any, Any]:
    limits = {"cost_limit": 6.0, "cost_horizon": 2, "cost_discount": 0.5, "guardian_limit": 0.05}
    return small.make(path, "ogsrl", data, **{**limits, **settings})


def constant(params: dict[str, torch.Tensor], *outputs: float) -> None:
    """Critics that give these numbers everywhere."""
    params.update({k: torch.zeros_like(v) for k, v in params.items()})
    params["head.bias"] = torch.tensor(outputs).view(-1, 1, 1)


def test_the_guardian_excludes_a_twentieth_of_fresh_rows(tmp_path: Path) -> None:
    """Normal numbers: 39,200 rows to fit it to, 9,800 for the threshold (without the last of each episode), 10,000
    fresh ones; what is 6 standard deviations off is outside.
    """

    def drawn(seed: int, rows: int) -> tuple[np.ndarray, np.ndarray]:
        g = np.random.default_rng(seed)
        return g.normal(size=(rows, OBS)), g.normal(size=(rows, A))

    states, actions = drawn(0, 50_000)
    ends = np.arange(50_000) % 50 == 49
    spaces: dict[str, Any] = {"action_low": [-10.0] * A, "action_high": [10.0] * A}
    data = from_arrays(states, actions, np.zeros(50_000), truncations=ends, **spaces)
    algorithm, _, source = make(tmp_path, data, cost_limit=None)
    states, actions = (torch.tensor(x, dtype=torch.float32) for x in drawn(1, 10_000))
    assert len(source.extra["values"]) == 9_800
    assert float(algorithm.outside(source, states, actions / 10.0).mean()) == pytest.approx(0.05, abs=0.01)
    far = 6.0 * torch.eye(OBS + A)
    assert algorithm.outside(source, far[:, :OBS], far[:, OBS:] / 10.0).tolist() == [1.0] * (OBS + A)


def test_a_larger_share_is_a_lower_threshold(tmp_path: Path) -> None:
    """Of 14 held-out rows, one episode of four, the two strangest; and half of them."""
    for excluded, count in ((2 / 14, 2), (0.5, 7)):
        algorithm, _, source = make(tmp_path, guardian_excluded=excluded)
        rows = small.wide(source.extra["values"])
        threshold = np.quantile(rows, 1 - excluded)
        inputs = DATA.columns["observations"], DATA.columns["actions"]
        np.testing.assert_allclose(
            algorithm.outside(source, *inputs), small.wide(algorithm.strangeness(source, *inputs)) > threshold + 1e-6
        )
        assert (rows > threshold + 1e-6).sum() == count


def test_costs_of_the_data_and_of_imagined_rows(tmp_path: Path) -> None:
    """The first two rows of eight are the data's: their costs are those recorded; the others' are modelled, at least
    0.
    """
    algorithm, state, source = make(tmp_path)
    state.params["cost_model"].update({k: 3.0 * v for k, v in state.params["cost_model"].items()})
    state, _ = algorithm.refresh(state, source, KEY, step=0)
    batch = algorithm.sampler()(source, KEY, 8)
    rows = algorithm.mixed(state, batch, KEY)
    pairs = np.concatenate([small.wide(rows["observations"]), small.wide(rows["actions"])], 1)
    model = ref.forward(ref.net(state.params["cost_model"]), pairs)[0][:, 0]
    assert (model[2:] < 0).any() and (model[2:] > 0).any()
    np.testing.assert_allclose(rows["costs"][2:], np.maximum(model[2:], 0), rtol=1e-4, atol=1e-5)
    recorded = small.wide(batch["costs"])
    matches = (small.wide(DATA.columns["observations"]) == small.wide(batch["observations"])[:, None]).all(-1)
    assert recorded.tolist() == rows["costs"][:2].tolist() == [float(COSTS[row.argmax()]) for row in matches]
    loss, _ = algorithm.cost_model_loss(state.params["cost_model"], state, batch)
    assert float(loss) == pytest.approx(((model[:2] - recorded) ** 2).mean(), rel=1e-4)
    assert torch.equal(rows["outside"], algorithm.outside(source, rows["observations"], rows["actions"]))


def test_an_actor_weighs_both_costs(tmp_path: Path) -> None:
    """(2 + 6 (3 (0.3 - 0.1) / 0.1 + 1 (9 - 4.5) / 4.5)) / (1 + 3 + 1): the guardian's threshold is 0.05 / (1 - 0.5)."""
    algorithm, state, _ = make(tmp_path)
    constant(state.params["guardian_critic"], 0.3, 0.2)
    constant(state.params["cost_critic"], 8.0, 9.0)
    for name, value in (("guardian_multiplier", 3.0), ("multiplier", 1.0)):
        state = state.with_extra(**{name: {**state.extra[name], "value": torch.tensor(value)}})
    batch = small.batch()
    loss, metrics = algorithm.limited(
        torch.tensor(2.0), {}, state, batch["observations"], batch["actions"], torch.tensor(6.0)
    )
    assert float(loss) == pytest.approx((2 + 6 * (3 * 2 + 1)) / 5)
    assert float(metrics["guardian/excess"]) == pytest.approx(2.0)
    assert float(metrics["cost/excess"]) == pytest.approx((9 - KAPPA) / KAPPA)
    assert float(metrics["actor/loss"]) == float(loss)


def test_each_kind_of_cost_has_critics_and_a_multiplier(tmp_path: Path) -> None:
    """Critics that say 0 are wrong by what steps cost: once for each of two. The controllers see excesses of 1 and -1:
    0.1 + 0.003 + 0.001, and 0."""
    algorithm, state, _ = make(tmp_path)
    for params in (state.params, state.target):
        constant(params["guardian_critic"], 0.0, 0.0)
        constant(params["cost_critic"], 0.0, 0.0)
    batch = small.batch() | {"outside": (torch.arange(8) < 3).float(), "costs": torch.arange(8.0)}
    actor = {"guardian/excess": torch.tensor(1.0), "cost/excess": torch.tensor(-1.0)}
    state, metrics = algorithm.learn_costs(state, batch, lambda rows: rows["actions"], actor)
    assert float(metrics["guardian/loss"]) == pytest.approx(2 * 3 / 8)
    assert float(metrics["cost/loss"]) == pytest.approx(2 * 140 / 8)
    assert float(state.extra["guardian_multiplier"]["value"]) == pytest.approx(0.104)
    assert float(state.extra["multiplier"]["value"]) == 0.0


def test_rollouts_say_how_many_of_their_steps_are_outside(tmp_path: Path) -> None:
    algorithm, state, source = make(tmp_path, guardian_excluded=0.5, rollouts=40)
    imagined = algorithm.roll(state, source, KEY)
    outside = algorithm.outside(source, imagined.observations.reshape(-1, OBS), imagined.actions.reshape(-1, A))
    valid = imagined.valid.flatten()
    share = float(algorithm.describe(source, imagined)["rollout/outside"])
    assert 0 < share < 1 and share == pytest.approx(float(outside[valid].mean()))


def test_without_a_limit_there_is_the_guardian_alone(tmp_path: Path) -> None:
    algorithm, state, source = make(tmp_path, small.dataset(), cost_limit=None)
    assert sorted(state.params) == ["actor", "critic", "entropy", "guardian_critic"]
    assert "costs" not in algorithm.sampler()(source, KEY, 8)


def test_what_it_refuses(tmp_path: Path) -> None:
    spaces: dict[str, Any] = {"action_low": [-1.0] * A, "action_high": [1.0] * A}
    one = from_arrays(np.zeros((9, OBS)), np.zeros((9, A)), np.zeros(9), **spaces)
    with pytest.raises(UserError, match=r"has one episode, and algo=ogsrl finds its threshold on others"):
        make(tmp_path, one, cost_limit=None)
    with pytest.raises(UserError, match=r"algo\.real_share=0 of algo\.batch_size=8 is no row: OGSRL learns costs"):
        make(tmp_path, real_share=0.0)
    free = registry.get("algo", "ogsrl")
    with pytest.raises(UserError, match=r"algo\.cost_limit needs costs"):
        free.fit_config(free.Config(), small.dataset())
