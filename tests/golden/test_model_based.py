"""What model-based algorithms share: penalised rewards, the ring of imagined transitions, dropout, look-ahead."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from offrl import rng
from offrl.algorithm import select, stack
from offrl.data.arrays import from_arrays
from offrl.errors import UserError
from offrl.training.step import Step
from offrl.world_models.model import Outcome, load_for
from offrl.world_models.rollout import Imagined, branched, careful, describe
from tests.support.reference import world_model as small
from tests.support.reference.world_model import OBS, A

# ---- MOPO's rewards


@pytest.mark.parametrize("penalty", [0.0, 1.5])
def test_mopo_s_penalised_reward(penalty: float, tmp_path: Path) -> None:
    """r - lambda max over all members of the norm of their standard deviations, the reward's among them; what is drawn
    stays the same.
    """
    algorithm, state, source = small.make(tmp_path, "mopo", penalty=penalty, rollouts=20)
    assert algorithm.config.uncertainty == "aleatoric"
    told = algorithm.roll(state, source, rng.make_key(1))
    algorithm.judged = lambda source, outcome, uncertainty: (outcome.rewards, outcome.terminations)
    plain = algorithm.roll(state, source, rng.make_key(1))
    assert torch.equal(told.next_observations, plain.next_observations)
    _, std = small.predict(
        source.tree, small.wide(plain.observations).reshape(-1, OBS), small.wide(plain.actions).reshape(-1, A)
    )
    u = np.sqrt((std**2).sum(-1)).max(0).reshape(3, 20)
    assert (std.argmax(0) == 1).any()  # a member that is no elite counts
    np.testing.assert_allclose(told.rewards, small.wide(plain.rewards) - penalty * u, rtol=1e-4, atol=1e-4)


def test_an_outcome_is_drawn_from_an_elite(tmp_path: Path) -> None:
    """Of members that are sure, each row's outcome is one elite's mean; all elites come, no other member does."""
    algorithm, state, source = small.make(tmp_path, "mopo", rollouts=60, horizon=1, range_margin=50.0)
    source.tree["params"] |= {k: torch.full((OBS + 1,), -30.0) for k in ("max_log_var", "min_log_var")}
    found = algorithm.roll(state, source, rng.make_key(1))
    mean, _ = small.predict(source.tree, small.wide(found.observations[0]), small.wide(found.actions[0]))
    distance = np.abs(mean[..., :OBS] - small.wide(found.next_observations[0])).max(-1)  # [E, B]
    assert distance.min(0).max() < 1e-3
    assert sorted(set(distance.argmin(0).tolist())) == sorted(small.ELITES)


def test_imagined_observations_stay_near_the_data(tmp_path: Path) -> None:
    for margin in (0.0, 0.5):
        algorithm, state, source = small.make(tmp_path, "mopo", rollouts=60, range_margin=margin, model={"scale": 3.0})
        found = algorithm.roll(state, source, rng.make_key(1))
        low, high = source.tree["low"], source.tree["high"]
        room = margin * (high - low)
        assert (found.next_observations >= low - room - 1e-5).all() and (
            found.next_observations <= high + room + 1e-5
        ).all()
        outside = (found.next_observations == high + room) | (found.next_observations == low - room)
        assert outside.any() and torch.equal(outside.any(-1), found.clipped)
        assert 0 < float(describe(found)["rollout/clipped"]) <= 1


# ---- the ring


def steps(first: int, valid: list[list[bool]]) -> Imagined:
    """Transitions numbered from `first`, in their rewards and observations."""
    mask = torch.tensor(valid)
    number = first + torch.arange(mask.numel(), dtype=torch.float32).reshape(mask.shape)
    wide = number.unsqueeze(-1)
    return Imagined(
        wide.expand(*mask.shape, OBS),
        wide.expand(*mask.shape, A),
        torch.zeros(*mask.shape, 0, OBS + A),
        wide.expand(*mask.shape, OBS) + 0.5,
        number,
        number % 2 == 1,
        torch.zeros(mask.shape),
        torch.zeros(mask.shape).bool(),
        mask,
    )


def rewards(algorithm: Any, ring: dict[str, Tensor]) -> list[float]:
    first, _, _, _ = algorithm.rollouts.layout["rewards"]
    return ring["rows"][: algorithm.rollouts.capacity, first].tolist()


def test_the_ring_against_a_list(tmp_path: Path) -> None:
    """Rows of ended rollouts are dropped, the oldest ones overwritten, in the order of their steps."""
    algorithm, state, _ = small.make(tmp_path, "mopo", rollouts=3, horizon=2, rollout_retain=1)
    ring, kept, number, g = state.buffers["ring"], [0.0] * 6, 1, np.random.default_rng(0)
    assert algorithm.rollouts.capacity == 6
    at = count = 0
    for _ in range(8):
        valid = g.random((2, 3)) < 0.6
        ring = algorithm.rollouts.push(ring, steps(number, valid.tolist()))
        for row in (number + np.flatnonzero(valid.reshape(-1))).tolist():
            kept[at], at, count = float(row), (at + 1) % 6, min(count + 1, 6)
        number += 6
        assert rewards(algorithm, ring) == kept
        assert (int(ring["at"]), int(ring["count"])) == (at, count)
        assert not ring["rows"][6].any()  # what was thrown away leaves nothing
    assert count == 6 and number > 20
    columns = algorithm.rollouts.draw(state._replace(buffers={"ring": ring}), rng.make_key(0), 50)
    n = columns["rewards"]
    torch.testing.assert_close(columns["observations"], n.unsqueeze(-1).expand(-1, OBS))
    torch.testing.assert_close(columns["next_observations"], n.unsqueeze(-1).expand(-1, OBS) + 0.5)
    torch.testing.assert_close(columns["masks"], (n % 2 == 0).float())


def test_draws_are_uniform_over_what_is_there(tmp_path: Path) -> None:
    algorithm, state, _ = small.make(tmp_path, "mopo", rollouts=4, horizon=2, rollout_retain=3)
    ring = algorithm.rollouts.push(
        state.buffers["ring"], steps(1, [[True, True, False, True], [True, False, False, True]])
    )
    drawn = algorithm.rollouts.draw(state._replace(buffers={"ring": ring}), rng.make_key(5), 10_000)["rewards"]
    values, counts = drawn.unique(return_counts=True)
    assert values.tolist() == [1.0, 2.0, 4.0, 5.0, 8.0]  # 5 of 24 places hold something
    assert float((counts / 10_000 - 0.2).abs().max()) < 0.02


def test_the_data_s_rows_come_first_in_a_batch(tmp_path: Path) -> None:
    data = small.dataset(rewards=np.full(small.ROWS, 9.0))
    algorithm, state, source = small.make(tmp_path, "mopo", data, real_share=0.25)
    state, _ = algorithm.refresh(state, source, rng.make_key(0), step=0)
    batch = algorithm.rollouts.mixed(state, algorithm.sampler()(source, rng.make_key(1), 8), rng.make_key(2))
    assert (batch["rewards"] == 9.0).tolist() == [True] * 2 + [False] * 6
    assert all(v.shape[0] == 8 for v in batch.values())


# ---- dropout (MBDP)


def test_the_best_roll_outs_of_each_state_are_left_out(tmp_path: Path) -> None:
    """Half of 4 from each of 3 states, by their own returns until they end: not the best of all."""
    algorithm, _, _ = small.make(tmp_path, "mopo", rollouts=12, horizon=2, sample_dropout=0.5, repeats=4)
    imagined = steps(0, [[True] * 12, [True] * 11 + [False]])
    first = torch.tensor([1.0, 3.0, 2.0, 4.0, 100.0, 101.0, 103.0, 102.0, -1.0, -2.0, -3.0, -4.0])
    later = torch.tensor([10.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 99.0])  # the last is not reached
    kept = algorithm.rollouts.without_best(imagined._replace(rewards=torch.stack([first, later])), 4).valid
    assert kept[0].tolist() == [False, True, True, False, True, True, False, False, False, False, True, True]
    assert kept[1].tolist() == [*kept[0].tolist()[:11], False]


def test_roll_outs_from_one_state_share_it(tmp_path: Path) -> None:
    algorithm, state, source = small.make(tmp_path, "mopo", rollouts=12, sample_dropout=0.25, repeats=4)
    found = algorithm.roll(state, source, rng.make_key(0))
    begun = found.observations[0].reshape(3, 4, OBS)
    assert torch.equal(begun, begun[:, :1].expand_as(begun)) and not torch.equal(begun[0], begun[1])
    assert found.valid[0].reshape(3, 4).sum(1).tolist() == [3, 3, 3]
    whole, _, _ = small.make(tmp_path, "mopo", rollouts=12)
    assert whole.roll(state, source, rng.make_key(0)).valid[0].all()


@pytest.mark.parametrize(
    ("share", "members"), [(0.0, small.ELITES), (0.25, [2, 0, 3]), (0.5, [2, 0]), (0.75, [2]), (0.9, [2])]
)
def test_members_with_the_largest_errors_are_not_asked(share: float, members: list[int], tmp_path: Path) -> None:
    _, _, source = small.make(tmp_path, "mopo", model_dropout=share)
    assert small.HELD_OUT == [0.2, 0.9, 0.1, 0.3] and source.tree["elites"].tolist() == members


# ---- look-ahead (COPlanner)


class Line:
    """s' = s + a on a line, with reward -(s' - 1)^2 and an end beyond 2: what is imagined can be worked out by hand."""

    history = 1

    def predict(self, tree: Any, observations: Tensor, actions: Tensor, past: Tensor) -> Any:
        return observations + actions

    def outcome(self, tree: Any, prediction: Tensor, observations: Tensor, actions: Tensor, key: Tensor) -> Outcome:
        reward = -(prediction - 1.0).square().squeeze(-1)
        return Outcome(prediction, reward, prediction.squeeze(-1) > 2.0, torch.zeros_like(reward, dtype=torch.bool))

    def later_past(self, past: Tensor, observations: Tensor, actions: Tensor) -> Tensor:
        return past


def effort(model: Any, tree: Any, prediction: Tensor, observations: Tensor, actions: Tensor) -> Tensor:
    return actions.abs().squeeze(-1)


@pytest.mark.parametrize(("penalty", "discount"), [(0.0, 1.0), (2.0, 0.97), (2.0, 0.5), (20.0, 0.97)])
def test_the_first_action_of_the_best_future(penalty: float, discount: float) -> None:
    rows, many, horizon = 50, 4, 3
    start = torch.linspace(-2.0, 1.9, rows).unsqueeze(-1)
    drawn: list[np.ndarray] = []

    def act(observations: Tensor, past: Tensor, key: Tensor) -> Tensor:
        actions = rng.normal(key, (observations.shape[0], 1))
        drawn.append(small.wide(actions).reshape(many, rows))
        return actions

    found = careful(
        Line(),
        {},
        act,
        start,
        torch.zeros(rows, 0, 2),
        rng.make_key(0),
        horizon=horizon,
        candidates=many,
        measure=effort,
        penalty=penalty,
        discount=discount,
    )
    s, going, worth = (
        np.tile(small.wide(start)[:, 0], (many, 1)),
        np.ones((many, rows), dtype=bool),
        np.zeros((many, rows)),
    )
    assert len(drawn) == horizon
    for t, a in enumerate(drawn):
        s = s + a
        worth += going * discount**t * (-((s - 1) ** 2) - penalty * np.abs(a))
        going &= s <= 2.0
    assert not going.all()
    best = worth.argmax(0)
    np.testing.assert_allclose(found[:, 0], drawn[0][best, np.arange(rows)], rtol=1e-6)
    assert len(set(best.tolist())) == many


def test_roll_outs_choose_among_candidates(tmp_path: Path) -> None:
    """One candidate is the policy's sample itself. With several and a large penalty the policy goes where the members
    agree more.
    """
    found = {}
    for candidates, penalty in ((1, 2.0), (8, 1000.0)):
        algorithm, state, source = small.make(
            tmp_path,
            "mopo",
            rollouts=300,
            horizon=1,
            candidates=candidates,
            lookahead=1,
            lookahead_penalty=penalty,
            uncertainty="ensemble_std",
        )
        found[candidates] = algorithm.roll(state, source, rng.make_key(0))
    assert torch.equal(found[1].observations, found[8].observations)
    assert float(found[8].uncertainty.mean()) < 0.9 * float(found[1].uncertainty.mean())
    plain = branched(
        source.model,
        source.tree,
        lambda o, p, k: algorithm.sample(state.params["actor"], o, k)[0],
        found[1].observations[0],
        source.model.first_past(found[1].observations[0]),
        1,
        rng.split(rng.make_key(0))[1],
    )
    assert torch.equal(plain.actions, found[1].actions)


# ---- replicas with settings of their own


@pytest.mark.parametrize(
    ("name", "field", "values"),
    [
        ("mopo", "penalty", [0.0, 3.0]),
        ("mopo", "range_margin", [0.0, 1.0]),
        ("mopo", "lookahead_penalty", [0.0, 50.0]),
        ("morel", "threshold_scale", [0.2, 1.0]),
        ("morel", "halt_offset", [1.0, 50.0]),
        ("combo", "conservative_weight", [0.0, 5.0]),
        ("mobile", "inconsistency_weight", [0.0, 5.0]),
    ],
)
def test_a_grid_s_replicas_are_those_of_single_runs(name: str, field: str, values: list[float], tmp_path: Path) -> None:
    more = {"candidates": 3, "lookahead": 2} if field.startswith("lookahead") else {}
    more |= {"threshold": "quantile"} if field == "threshold_scale" else {}
    settings = {"rollout_every": 2, "real_share": 0.5, "model": {"scale": 1.5}, **more}

    def run(hyper: dict[str, Tensor], replicas: int, **own: float) -> Any:
        algorithm, _, source = small.make(tmp_path, name, **settings, **own)
        state = stack([algorithm.init(0)] * replicas)
        return Step(algorithm, source, batch_size=8, replicas=replicas, hyper=hyper).run(state, {}, 0, 3)[0]

    together = run({field: torch.tensor(values)}, 2)
    for i, value in enumerate(values):
        alone = select(run({}, 1, **{field: value}), 0)
        for module, params in alone.params.items():
            for k, v in params.items():
                torch.testing.assert_close(together.params[module][k][i], v, rtol=1e-4, atol=1e-5)
    critic = together.params["critic"]
    assert any(not torch.allclose(v[0], v[1], atol=1e-6) for v in critic.values())


# ---- what is refused


def test_what_it_refuses(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="uncertainty=aleatoric needs learnt variances"):
        small.make(tmp_path, "mopo", model={"loss": "squared"})
    algorithm, _, _ = small.make(tmp_path, "mopo")
    quiet = dataclasses.replace(algorithm.config, penalty=0.0, uncertainty="none")
    fit = type(algorithm).fit_config
    with pytest.raises(UserError, match=r"algo\.penalty=1 is times an uncertainty, and algo.uncertainty=none"):
        fit(dataclasses.replace(quiet, penalty=1.0), small.dataset())
    with pytest.raises(UserError, match=r"algo\.penalty=5 is times an uncertainty"):
        fit(quiet, small.dataset(), {"penalty": [0.0, 5.0]})
    with pytest.raises(UserError, match=r"algo\.sample_dropout=0\.05 of algo\.repeats=10 rollouts is none"):
        fit(dataclasses.replace(quiet, sample_dropout=0.05, repeats=10), small.dataset())
    wrong = from_arrays(np.zeros((9, 2)), np.zeros((9, A)), np.zeros(9), np.ones(9, bool))
    with pytest.raises(UserError, match=r"trained on .* with observations"):
        load_for(algorithm.config.world_model, wrong.spec)


def test_look_back(tmp_path: Path) -> None:
    """A model that looks back is given what came before the data's states."""
    data = small.dataset()
    algorithm, state, source = small.make(
        tmp_path, "mopo", data, model={"history": 3}, rollouts=40, candidates=2, lookahead=2
    )
    found = algorithm.roll(state, source, rng.make_key(0))
    assert found.past.shape == (3, 40, 2, OBS + A)
    rows = (found.observations[0].unsqueeze(1) == data.columns["observations"]).all(-1).float().argmax(1)
    inside = rows % 15 >= 2
    before = torch.cat([data.columns["observations"], data.columns["actions"]], -1)
    for back in (1, 2):
        torch.testing.assert_close(found.past[0, inside, -back], before[rows[inside] - back])
    torch.testing.assert_close(found.past[1, :, -1], torch.cat([found.observations[0], found.actions[0]], -1))
