"""Judges that need data only: losses against numbers worked by hand, critics against exact ones, and what cannot be
judged.
"""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from offrl import ope
from offrl.data.arrays import from_arrays
from offrl.data.dataset import Dataset
from offrl.data.transforms.episodes import keep_episodes
from offrl.errors import UserError
from offrl.ope.config import LSTD_LOSSES, OPEConfig
from offrl.ope.fqe import fit
from offrl.ope.judges import critics
from offrl.ope.judges.fits import lstd, variants
from offrl.ope.judges.tournament import bvft_losses, lstd_losses
from offrl.ope.problem import make_problem

# ------------------------------------------------------------------------------------------------------------
# tournaments

GOLDEN_Q = np.array([[1.0, 2.0, 3.0], [1.5, 2.0, 2.0], [0.0, 0.0, 0.0]])
GOLDEN_V = np.array([[2.0, 3.0, 0.0], [2.0, 2.0, 0.0], [0.0, 0.0, 0.0]])
GOLDEN_R, GOLDEN_DISCOUNT = np.array([-0.8, -0.7, 3.0]), 0.9


def test_lstd_by_hand() -> None:
    """d_2 = (.5, .9, -1), d_3 = (.8, .7, -3); std q_1 = .81650, std q_2 = .23570, std (q_2 - q_1) = .62361, std q_3 =
    0.
    """
    losses = lstd_losses(GOLDEN_Q, GOLDEN_V, GOLDEN_R, GOLDEN_DISCOUNT)
    assert set(losses) == set(LSTD_LOSSES)
    expected = {
        "minus": [0.0, 1.25 / 3, 6.8 / 3],
        "plain": [0.0, 0.7 / 3, 6.8 / 3],
        "td_square": [0.0, 2.06 / 3, 10.13 / 3],
        "avg_bellman": [0.0, 0.4, 1.5],
        # candidate 2: .41667 / .62361 against 1, .18333 / .23570 against 3; candidate 3: 2.26667 / .81650 and 1.13333 /
        # .23570
        "minus_std": [0.0, 0.777817, 4.808326],
        # candidate 2: .23333 / .81650 and .18333 / .23570
        "plain_std": [0.0, 0.777817, 4.808326],
        "hybrid": [0.0, 0.777817, 4.808326],
    }
    for name, numbers in expected.items():
        np.testing.assert_allclose(losses[name], numbers, atol=1e-6, err_msg=name)
    assert np.argmin(losses["minus_std"]) == 0


# A -> G or B by chance, G earns 10 and ends, B earns -10 and ends. The halved function has the smaller squared error:
# where A leads is chance, and it varies less. d of the right one: -9, 9, 0, 0; of the halved one: -4.5, 4.5, -5, 5
CHANCE_R = np.array([0.0, 0.0, 10.0, -10.0])
RIGHT, HALVED = np.array([0.0, 0.0, 10.0, -10.0]), np.array([0.0, 0.0, 5.0, -5.0])


def test_td_square_prefers_the_flatter_and_tournaments_do_not() -> None:
    q = np.stack([HALVED, RIGHT])
    v = np.stack([[5.0, -5.0, 0.0, 0.0], [10.0, -10.0, 0.0, 0.0]])
    losses = lstd_losses(q, v, CHANCE_R, 0.9)
    np.testing.assert_allclose(losses["td_square"], [90.5 / 4, 162 / 4])
    np.testing.assert_allclose(losses["minus"], [50 / 4, 0.0], atol=1e-12)
    np.testing.assert_allclose(losses["minus_std"], [12.5 / math.sqrt(12.5), 0.0], atol=1e-12)
    result = bvft_losses(q, v, CHANCE_R, 0.9)  # the two rows of A are one group: its mean target is 0
    np.testing.assert_allclose(result.losses, [math.sqrt(50 / 4), 0.0], atol=1e-12)
    assert 10 / 64 <= result.resolution <= 10 / 8
    assert np.argmin(losses["td_square"]) == 0 and np.argmin(losses["minus_std"]) == 1 and np.argmin(result.losses) == 1


def test_bvft_by_hand() -> None:
    """Width 1 puts q = (0, .4, 2, 3) on the grid 1, 2: cells {0, .4}, {2, 3}, beside an opponent with cells {0, 2},
    {.4, 3}.
    """
    q = np.array([[0.0, 0.4, 2.0, 3.0], [0.0, 3.0, 0.0, 3.0]])
    alone = bvft_losses(q[:1], np.zeros((1, 4)), np.array([1.0, 3.0, 2.0, 4.0]), 0.9, [1.0])
    # means of the targets 2 and 3: errors -2, -1.6, -1, 0
    assert alone.losses[0] == pytest.approx(math.sqrt((4 + 2.56 + 1) / 4)) and alone.resolution == 1.0
    both = bvft_losses(q, np.zeros((2, 4)), np.array([1.0, 3.0, 2.0, 4.0]), 0.9, [1.0])
    # against the other each row is a group: errors -1, -2.6, 0, -1, whose mean square 8.76 / 4 is larger than 7.56 / 4
    assert both.losses[0] == pytest.approx(math.sqrt(8.76 / 4))
    # the opponent's own cells have the means 1.5 and 3.5; with the first's: -1, 0, -2, -1
    other = np.array([-1.5, -0.5, -1.5, -0.5])
    assert both.losses[1] == pytest.approx(math.sqrt(max((other**2).mean(), 6 / 4)))


def test_the_right_function_wins_on_a_random_walk() -> None:
    """Five states in a row, ends at both sides, 1 at the right one; the right Q is worked out by linear algebra."""
    rng, states, discount = np.random.default_rng(0), 5, 0.95
    s = rng.integers(0, states, 4_000)
    after = s + rng.choice([-1, 1], len(s))
    ended, rewards = (after < 0) | (after >= states), (after >= states).astype(float)
    walk = np.zeros((states, states))
    for i in range(states):
        walk[i, [j for j in (i - 1, i + 1) if 0 <= j < states]] = 0.5
    right = np.linalg.solve(np.eye(states) - discount * walk, 0.5 * np.eye(states)[-1])
    wrong = [
        0.8 * right + 0.2 * right.mean(),
        right + 0.2,
        np.full(states, right.mean()) + 0.05 * np.arange(states),
        right[::-1],
        1.5 * right,
    ]
    tables = np.stack([*wrong[:2], right, *wrong[2:]])
    q, v = tables[:, s], np.where(ended, 0.0, tables[:, np.clip(after, 0, states - 1)])
    losses = lstd_losses(q, v, rewards, discount)
    for name in ("minus", "minus_std", "plain_std", "hybrid"):
        assert np.argmin(losses[name]) == 2, name
    assert np.argmin(bvft_losses(q, v, rewards, discount).losses) == 2
    assert losses["td_square"][0] < losses["td_square"][2]  # the flatter one


def test_equal_and_lost_candidates() -> None:
    twice = lambda x: np.concatenate([x, x[:1]])  # noqa: E731
    losses = lstd_losses(twice(GOLDEN_Q), twice(GOLDEN_V), GOLDEN_R, GOLDEN_DISCOUNT)
    np.testing.assert_allclose(losses["minus_std"], [0.0, 0.777817, 4.808326, 0.0], atol=1e-6)
    shifted = lstd_losses(
        np.stack([GOLDEN_Q[0], GOLDEN_Q[0] + 0.1]), np.stack([GOLDEN_V[0]] * 2), GOLDEN_R, GOLDEN_DISCOUNT
    )
    assert (shifted["minus_std"] == 0.0).all() and shifted["minus"][1] == pytest.approx(0.01)
    lost = GOLDEN_Q.copy()
    lost[0, 1] = np.nan
    losses = lstd_losses(lost, GOLDEN_V, GOLDEN_R, GOLDEN_DISCOUNT)
    assert losses["minus_std"][0] == np.inf and np.argmin(losses["minus_std"]) == 1
    np.testing.assert_allclose(losses["minus"], [np.inf, 0.55 / 3, 3.4 / 3])  # without an opponent that is lost
    with_it = bvft_losses(lost[:2], GOLDEN_V[:2], GOLDEN_R, GOLDEN_DISCOUNT)
    assert with_it.losses[0] == np.inf and np.argmin(with_it.losses) == 1


def test_what_is_no_tournament() -> None:
    with pytest.raises(UserError, match="none of 1 value functions is finite"):
        lstd_losses(np.full((1, 2), np.nan), np.zeros((1, 2)), np.zeros(2), 0.9)
    with pytest.raises(UserError, match="rewards hold NaN"):
        lstd_losses(np.zeros((1, 2)), np.zeros((1, 2)), np.array([0.0, np.nan]), 0.9)
    with pytest.raises(UserError, match=r"bvft: flat has the same value in all of 3 rows"):
        bvft_losses(GOLDEN_Q, GOLDEN_V, GOLDEN_R, GOLDEN_DISCOUNT, names=["a", "b", "flat"])
    for q, v in (
        (np.zeros(3), np.zeros(3)),
        (np.zeros((2, 3)), np.zeros((1, 3))),
        (np.zeros((0, 3)), np.zeros((0, 3))),
    ):
        with pytest.raises(ValueError, match="q and v are"):
            lstd_losses(q, v, np.zeros(3), 0.9)
    for widths in ([], [0.0], [-1.0], [np.nan]):
        with pytest.raises(ValueError, match="resolutions must be positive"):
            bvft_losses(GOLDEN_Q[:1], GOLDEN_V[:1], GOLDEN_R, 0.9, widths)


def test_fine_grids_are_sorted_rather_than_counted() -> None:
    rng = np.random.default_rng(1)
    q, v, rewards = rng.normal(size=(2, 50)), rng.normal(size=(2, 50)), rng.normal(size=50)
    fine = bvft_losses(q, v, rewards, 0.9, [1e-7])  # each row but the ends a cell of its own: the TD error
    np.testing.assert_allclose(fine.losses, np.sqrt(((q - rewards - 0.9 * v) ** 2).mean(1)))


# ------------------------------------------------------------------------------------------------------------ own
# critics


class Critic:
    """A policy of zeros on one observation, with a value for each observation, of rewards * scale + shift."""

    discount = 0.5

    def __init__(self, values: dict[int, float], scale: float = 1.0, shift: float = 0.0, action: float = 0.0) -> None:
        self.values, self.scale, self.shift, self.action = values, scale, shift, action

    def start(self, episodes: int) -> None:
        return None

    def step(self, carry: Any, observations: np.ndarray, t: int) -> tuple[np.ndarray, Any]:
        return np.full((len(observations), 1), self.action, np.float32), carry

    def own_value(self, observations: np.ndarray, actions: np.ndarray) -> np.ndarray:
        return np.array([self.values[int(o)] for o in observations[:, 0]]) + 0.01 * actions[:, 0]

    def in_recorded_units(self, values: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        return (values - self.shift * (1 - 0.5**lengths) / 0.5) / self.scale


class Plain:
    """Without a critic."""

    def start(self, episodes: int) -> None:
        return None

    def step(self, carry: Any, observations: np.ndarray, t: int) -> tuple[np.ndarray, Any]:
        return np.zeros((len(observations), 1), np.float32), carry


def data(rewards: tuple[float, ...] = (1.0, 2.0, 3.0), ended: bool = True) -> Dataset:
    """Observations 0, 1 with rewards 1, 2 and an end; observation 2 with reward 3, an end, or a time-out before
    observation 3.
    """
    return from_arrays(
        np.arange(3, dtype=np.float32)[:, None],
        np.zeros((3, 1), np.float32),
        np.array(rewards),
        terminations=np.array([False, True, ended]) if rewards != (7.0,) * 3 else np.zeros(3, bool),
        truncations=np.array([False, rewards == (7.0,) * 3, not ended or rewards == (7.0,) * 3]),
        next_observations=np.arange(1, 4, dtype=np.float32)[:, None],
        action_low=-1.0,
        action_high=1.0,
    )


EXACT = {0: 1 + 0.5 * 2, 1: 2.0, 2: 3 + 0.5 * 4, 3: 4.0}
# of rewards * 2 + 1: 3, 5 and an end; 7 and on with 9 (recorded 4) for one step
SCALED = {0: 3 + 0.5 * 5, 1: 5.0, 2: 7 + 0.5 * 9, 3: 9.0}


def test_td_error_by_hand() -> None:
    candidates = {
        "exact": Critic(EXACT),
        "scaled": Critic(SCALED, 2.0, 1.0),
        "off": Critic({**EXACT, 1: 4.0}),  # errs by -1 in row 0 and by 2 in row 1
        "none": Plain(),
    }
    result = ope.evaluate_policies(data(ended=False), candidates, ["td", "q"], OPEConfig(discount=0.9))
    estimates = result.estimates["td"]
    np.testing.assert_allclose(estimates.value, [0.0, 0.0, -(1 + 4 + 0) / 3, np.nan], atol=1e-12)
    assert result.best == "exact" and result.order[-1] == 3
    # one episode errs, the other does not
    assert estimates.low[2] == pytest.approx(-2.5) and estimates.high[2] == pytest.approx(0.0)
    np.testing.assert_allclose(result.estimates["q"].value, result.own_q)
    np.testing.assert_allclose(result.own_q[[0, 2]], [(2 + 5) / 2, (2 + 5) / 2])


def test_gates_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    candidates = {
        "exact": Critic(EXACT),
        "scaled": Critic(SCALED, 2.0, 1.0),
        "huge": Critic({**EXACT, 1: 9.5}),
        "nan": Critic({**EXACT, 1: math.nan}),
        "lost": Critic(EXACT, action=math.nan),
        "none": Plain(),
    }
    found = ope.gates(data(ended=False), candidates)
    np.testing.assert_allclose(found.q_largest, [5.0, 5.75, 9.5, np.nan, np.nan, np.nan])
    np.testing.assert_allclose(found.q_bound, [6.0, 7.0, 6.0, 6.0, np.nan, np.nan])  # 3 / .5; (3 * 2 + 1) / 2 / .5
    np.testing.assert_allclose(found.td_error[:3], [0.0, 0.0, (3.75**2 + 7.5**2) / 3], atol=1e-12)
    assert found.q_start[0] == pytest.approx(3.5)
    assert found.finite.tolist() == [True, True, True, False, False, True]
    assert found.passed.tolist() == [True, True, False, False, False, True]
    assert found.reasons()[2] == "max |Q| is 1.58 times what the rewards allow" and "not finite" in found.reasons()[4]
    monkeypatch.setattr(critics, "ROWS", 2)  # a part of the episodes, and of their rows
    assert ope.gates(data(ended=False), {"exact": Critic(EXACT)}).td_error[0] == pytest.approx(0.0)


def test_what_cannot_be_judged() -> None:
    quick = OPEConfig(updates=1, hidden=[4], compile="eager", seeds=1)
    for method in ("td", "lstd", "bvft"):
        with pytest.raises(UserError, match=r"every reward is 0, so that .* dataset.reward_labels="):
            ope.evaluate_policies(data((0.0,) * 3), {"a": Critic(EXACT)}, method, quick)
        with pytest.raises(UserError, match="every reward is 7 and no episode ends"):
            ope.evaluate_policies(data((7.0,) * 3), {"a": Critic(EXACT)}, method, quick)
    with pytest.raises(UserError, match="every reward is 0"):
        ope.gates(data((0.0,) * 3), {"a": Critic(EXACT)})
    # how long an episode lasts is something
    survival = ope.evaluate_policies(data((1.0, 1.0, 1.0)), {"a": Critic(EXACT)}, "td")
    assert np.isfinite(survival.estimates["td"].value).all()
    for method in ("td", "q"):
        with pytest.raises(UserError, match=f"method={method} asks each candidate's own critic, and none of 1 has one"):
            ope.evaluate_policies(data(), {"a": Plain()}, method)
    with pytest.raises(UserError, match="there is no candidate"):
        ope.gates(data(), {})
    with pytest.raises(UserError, match=r"gave actions of shape \(3, 2\)"):
        wide = Plain()
        wide.step = lambda carry, observations, t: (np.zeros((len(observations), 2)), carry)  # type: ignore[method-assign]
        ope.gates(data(), {"a": wide})
    for fits in (["base"], ["base", "base"], []):
        with pytest.raises(UserError, match="a tournament needs two different ones of base, narrow"):
            ope.evaluate_policies(data(), {"a": Plain()}, "lstd", OPEConfig(fits=fits))
    with pytest.raises(UserError, match="fits=bas is not allowed"):
        ope.evaluate_policies(data(), {"a": Plain()}, "lstd", OPEConfig(fits=["bas", "wide"]))
    with pytest.raises(UserError, match="no method is named"):
        ope.evaluate_policies(data(), {"a": Plain()}, [])


# ------------------------------------------------------------------------------------------------------------
# tournaments of fits


class Left(Plain):
    """Discrete: always the same choice."""

    def __init__(self, choice: int) -> None:
        self.choice = choice

    def step(self, carry: Any, observations: np.ndarray, t: int) -> tuple[np.ndarray, Any]:
        return np.full(len(observations), self.choice), carry


def corridor(episodes: int = 60) -> Dataset:
    """Choice 1 earns 1 and goes on with probability .8; choice 0 earns 0, likewise."""
    rng = np.random.default_rng(0)
    rows: list[tuple[float, int, float, bool, bool]] = []
    for _ in range(episodes):
        for t in range(8):
            choice = int(rng.integers(2))
            over = bool(rng.random() > 0.8)
            rows.append((t % 3, choice, float(choice), over, t == 7 and not over))
            if over:
                break
    o, a, r, end, cut = map(np.array, zip(*rows, strict=True))
    return from_arrays(
        np.eye(3, dtype=np.float32)[o.astype(int)],
        a,
        r.astype(np.float32),
        terminations=end,
        truncations=cut,
        num_actions=2,
    )


QUICK = OPEConfig(
    discount=0.8,
    updates=300,
    hidden=[16],
    learning_rate=3e-3,
    polyak=0.1,
    compile="eager",
    seeds=2,
    fits=["base", "narrow", "short"],
)


def test_the_fit_that_is_trained_wins() -> None:
    problem = make_problem(corridor(), {"left": Left(0), "right": Left(1)})
    good, poor = fit(problem, QUICK), fit(problem, dataclasses.replace(QUICK, updates=3))
    result = lstd({"poor": poor, "good": good}, QUICK)
    assert result.details["chosen"] == ["good", "good"] and result.order().tolist() == [1, 0]
    np.testing.assert_array_equal(result.value, result.details["values"]["good"])
    np.testing.assert_allclose(np.mean(result.details["seeds"], 0), result.value)
    assert result.details["losses"]["good"][1] < result.details["losses"]["poor"][1]
    with torch.no_grad():
        for critic in good.critics:
            critic["0.weight" if "0.weight" in critic else next(iter(critic))].fill_(math.nan)
    assert lstd({"poor": poor, "lost": good}, QUICK).details["chosen"] == ["poor", "poor"]
    lost = lstd({"lost": good, "gone": good}, QUICK)
    assert np.isnan(lost.value).all() and lost.details["chosen"] == ["", ""]


@pytest.mark.nightly
def test_methods_share_their_fits(tmp_path: Path) -> None:
    titles: list[str] = []

    def stage(title: str, total: int) -> Any:
        titles.append(f"{title} {total}")
        return lambda step, rate: None

    part = keep_episodes(corridor(), torch.arange(0, 60, 2), "half")
    methods = ["lstd", "bvft", "fqe"]
    result = ope.evaluate_policies(part, {"left": Left(0), "right": Left(1)}, methods, QUICK, stage=stage)
    assert list(result.estimates) == methods and result.best == "right" and len(titles) == 3  # base, narrow, short
    assert "narrow" in titles[1] and titles[2].endswith(" 150")
    assert result.episodes == 30
    for method in ("lstd", "bvft"):
        chosen = result.estimates[method].details["chosen"]
        for k, fitted in enumerate(chosen):
            assert result.estimates[method].value[k] == result.estimates[method].details["values"][fitted][k]
    result.write(tmp_path / "select.csv")
    header, first, *_ = (tmp_path / "select.csv").read_text().splitlines()
    assert (
        "lstd_chosen,bvft_chosen" in header and first.split(",")[header.split(",").index("lstd_chosen")] in QUICK.fits
    )
    own = variants(OPEConfig(hidden=[64, 1], updates=9, fits=["narrow", "wide", "norm", "short"]))
    assert (
        [own[n].hidden for n in ("narrow", "wide")] == [[32, 1], [128, 2]]
        and not own["norm"].layer_norm
        and own["short"].updates == 4
    )
