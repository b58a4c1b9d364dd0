"""MOReL: the threshold of each row, halting and its share, against float64 NumPy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from offrl import registry, rng
from offrl.data.arrays import from_arrays
from offrl.errors import UserError
from offrl.world_models.model import Outcome
from offrl.world_models.rollout import Imagined
from tests.support.reference import world_model as small
from tests.support.reference.world_model import OBS, A

DATA = small.dataset()
X = {k: small.wide(DATA.columns[k]) for k in ("observations", "actions", "rewards")}


def make(path: Path, **settings: Any) -> tuple[Any, Any, Any]:
    return small.make(path, "morel", DATA, **{"critics": 2, **settings})


def disagreements(source: Any, observations: np.ndarray, actions: np.ndarray) -> np.ndarray:
    """max over pairs of members of the distance of their means, for each row by itself."""
    mean = small.predict(source.tree, observations, actions)[0][..., :OBS]
    return np.sqrt(((mean[:, None] - mean[None]) ** 2).sum(-1)).max((0, 1))


@pytest.mark.parametrize(
    ("settings", "limit"),
    [
        ({}, lambda u: u.mean() + 3 * u.std()),
        ({"threshold_scale": 0.5}, lambda u: u.mean() + 0.5 * u.std()),
        ({"threshold": "maximum"}, lambda u: u.max()),
        ({"threshold": "maximum", "threshold_scale": 0.8}, lambda u: 0.8 * u.max()),
        ({"threshold": "quantile"}, lambda u: np.quantile(u, 0.95)),
        ({"threshold": "quantile", "threshold_scale": 1.0}, lambda u: u.max()),
    ],
    ids=lambda x: "" if callable(x) else str(x),
)
def test_limits(settings: dict[str, Any], limit: Any, tmp_path: Path) -> None:
    algorithm, _, source = make(tmp_path, **settings)
    rows = DATA.transition_rows().numpy()
    each = disagreements(source, X["observations"][rows], X["actions"][rows])
    np.testing.assert_allclose(source.extra["uncertainties"], np.sort(each), rtol=1e-4)
    assert float(algorithm.limit(source)) == pytest.approx(limit(each), rel=1e-4)
    # not the largest distance of one member's prediction of a row from another's of another row
    means = small.predict(source.tree, X["observations"], X["actions"])[0][..., :OBS].reshape(-1, OBS)
    assert np.sqrt(((means[:, None] - means[None]) ** 2).sum(-1)).max() > 1.2 * each.max()


def test_halting(tmp_path: Path) -> None:
    """Rollouts of the algorithm beside those without a judge: the same until HALT, and nothing after it."""
    algorithm, state, source = make(tmp_path, threshold_scale=0.5, rollouts=40, horizon=4)
    limit, lowest = float(algorithm.limit(source)), X["rewards"][DATA.transition_rows().numpy()].min()
    told = algorithm.roll(state, source, rng.make_key(1))
    algorithm.judged = lambda source, outcome, uncertainty: (outcome.rewards, outcome.terminations)
    plain = algorithm.roll(state, source, rng.make_key(1))
    u = disagreements(
        source, small.wide(plain.observations).reshape(-1, OBS), small.wide(plain.actions).reshape(-1, A)
    ).reshape(4, 40)
    np.testing.assert_allclose(plain.uncertainty, u, rtol=1e-3, atol=1e-4)
    assert torch.equal(told.observations, plain.observations)
    unknown = u > limit
    first = np.where(unknown.any(0), unknown.argmax(0), 4)
    assert 0 < (first < 4).mean() < 1 and len(set(first.tolist())) > 2
    steps = np.arange(4)[:, None]
    np.testing.assert_array_equal(told.valid, steps <= first)  # HALT's own step is there, later ones are not
    np.testing.assert_array_equal(told.terminations, unknown)
    np.testing.assert_allclose(told.rewards, np.where(unknown, lowest - 200.0, small.wide(plain.rewards)), rtol=1e-5)
    metrics = algorithm.describe(source, told)
    assert float(metrics["rollout/halted"]) == pytest.approx((first < 4).mean())
    assert float(metrics["rollout/limit"]) == pytest.approx(limit, rel=1e-5)


@pytest.mark.parametrize(
    ("settings", "reward"),
    [({"halt_reward": -7.0}, -7.0), ({"halt_offset": 10.0}, float(X["rewards"].min()) - 10.0)],
    ids=str,
)
def test_what_halting_costs(settings: dict[str, Any], reward: float, tmp_path: Path) -> None:
    """The end of a rollout: its value is that one reward, whatever the next state; the model's own terminations
    stay.
    """
    algorithm, _, source = make(tmp_path, **settings)
    flags = torch.tensor([False, False, True])
    outcome = Outcome(torch.zeros(3, OBS), torch.tensor([1.0, 2.0, 3.0]), flags, ~flags)
    limit = algorithm.limit(source)
    rewards, ended = algorithm.judged(source, outcome, torch.stack([limit * 0.99, limit * 1.01, limit]))
    assert rewards.tolist() == [1.0, pytest.approx(reward), 3.0] and ended.tolist() == [False, True, True]


def test_a_penalty_is_of_known_steps_alone(tmp_path: Path) -> None:
    algorithm, _, source = make(tmp_path, penalty=2.0, halt_reward=-50.0)
    outcome = Outcome(
        torch.zeros(2, OBS), torch.ones(2), torch.zeros(2, dtype=torch.bool), torch.zeros(2, dtype=torch.bool)
    )
    limit = algorithm.limit(source)
    rewards, _ = algorithm.judged(source, outcome, torch.stack([0.5 * limit, 2 * limit]))
    assert rewards.tolist() == [pytest.approx(1.0 - float(limit)), -50.0]


def test_halted_rows_end_in_the_ring(tmp_path: Path) -> None:
    algorithm, state, source = make(tmp_path, threshold_scale=0.5, rollouts=40, halt_reward=-77.0)
    state, metrics = algorithm.refresh(state, source, rng.make_key(2), step=0)
    rows = algorithm.rollouts.draw(state, rng.make_key(3), 300)
    halted = rows["rewards"] == -77.0
    assert halted.any() and not rows["masks"][halted].any() and rows["masks"][~halted].all()
    assert 0 < float(metrics["rollout/halted"]) < 1


def test_one_that_did_not_begin_is_not_counted(tmp_path: Path) -> None:
    """`sample_dropout` leaves rollouts out: the share is of the others."""
    algorithm, _, source = make(tmp_path)
    limit = algorithm.limit(source)
    u = torch.tensor([[2.0, 0.0, 2.0, 0.0], [0.0, 2.0, 0.0, 0.0]]) * limit
    valid = torch.tensor([[True, True, False, True], [False, True, False, True]])
    none = torch.zeros(2, 4)
    imagined = Imagined(none, none, none, none, none, none.bool(), u, none.bool(), valid)
    assert float(algorithm.describe(source, imagined)["rollout/halted"]) == pytest.approx(2 / 3)


def test_the_bins_of_a_value_head_hold_halt(tmp_path: Path) -> None:
    kind, lowest = registry.get("algo", "morel"), float(X["rewards"].min())
    config = kind.Config(value_head="hl_gauss")
    plain = (
        registry.get("algo", "mopo")
        .fit_config(registry.get("algo", "mopo").Config(value_head="hl_gauss"), DATA)
        .value_range
    )
    assert kind.fit_config(config, DATA).value_range == [pytest.approx(lowest - 200.0), plain[1]]
    assert kind.fit_config(config, DATA, {"halt_offset": [1.0, 500.0]}).value_range[0] == pytest.approx(lowest - 500.0)
    own = kind.Config(value_head="hl_gauss", halt_reward=-1000.0)
    assert (
        kind.fit_config(own, DATA).value_range == [-1000.0, plain[1]]
        and kind.fit_config(kind.Config(), DATA).value_range == []
    )
    assert kind.fit_config(kind.Config(value_head="hl_gauss", value_range=[-1.0, 1.0]), DATA).value_range == [-1.0, 1.0]


def test_a_halt_that_would_pay_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    """Rewards of -16 to 0, -6 on average, for ever are worth -600: an end at -216 is better than to go on."""
    kind, rewards = registry.get("algo", "morel"), np.linspace(-16.0, 4.0, 40)
    data = from_arrays(np.zeros((40, OBS)), np.zeros((40, A)), rewards, np.zeros(40, bool), np.arange(40) % 20 == 19)
    kind.fit_config(kind.Config(), data)
    assert "HALT costs less (-216) than to go on as the data do for ever (-600" in capsys.readouterr().err
    kind.fit_config(kind.Config(halt_reward=-700.0), data)
    assert not capsys.readouterr().err


def test_what_it_refuses(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"algo=morel halts .*: choose algo\.uncertainty=aleatoric"):
        make(tmp_path, uncertainty="none")
    with pytest.raises(UserError, match=r"algo\.threshold_scale=1\.5: a quantile is at most 1"):
        make(tmp_path, threshold="quantile", threshold_scale=1.5)
    with pytest.raises(UserError, match="compares the members of an ensemble"):
        make(tmp_path, model={"members": 1, "elites": [0]})


def test_published_defaults() -> None:
    c = registry.get("algo", "morel").Config()
    assert (c.critics, c.hidden, c.learning_rate, c.actor_learning_rate, c.init) == (
        10,
        [256, 256, 256],
        1e-4,
        1e-4,
        "fixed_bias",
    )
    assert (c.horizon, c.real_share, c.halt_offset, c.uncertainty, c.penalty) == (5, 0.01, 200.0, "disagreement", 0.0)
