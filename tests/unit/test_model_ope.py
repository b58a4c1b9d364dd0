"""Off-policy evaluation in a model: values of a linear policy in linear models, worked out in float64."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from offrl import ope
from offrl.cli import select as command
from offrl.data.dataset import Dataset
from offrl.errors import UserError
from offrl.pretrained import Requirement
from offrl.statistics.intervals import student_t
from tests.support import linear_model

DISCOUNT = 0.9


class Linear:
    """a = k . s + c in the environment's range."""

    def __init__(self, k: tuple[float, float], c: float = 1.0) -> None:
        self.k, self.c = np.array(k), c

    def start(self, episodes: int) -> None:
        return None

    def step(self, carry: None, observations: np.ndarray, t: int) -> tuple[np.ndarray, None]:
        return (observations @ self.k + self.c)[:, None], None


class Counting(Linear):
    """Remembers how often it has acted, and leaves the range as it pleases."""

    def start(self, episodes: int) -> Any:
        return np.zeros(episodes)

    def step(self, carry: Any, observations: np.ndarray, t: int) -> tuple[np.ndarray, Any]:
        return (3.0 * np.sin(carry) + 1.0)[:, None], carry + 1.0


CANDIDATES = {"a": Linear((0.5, 0.5)), "b": Linear((-1.0, 0.3)), "c": Counting((0.0, 0.0))}


def by_hand(member: int, policy: Any, s: np.ndarray, horizon: int, falls: bool = False) -> float:
    """The discounted return; with `falls` until entry 1 is beyond 0.2."""
    s, carry, total = s.astype(float), policy.start(1), 0.0
    for t in range(horizon):
        action, carry = policy.step(carry, s[None], t)
        s, reward = linear_model.step(member, s, float(action[0, 0]))
        total += DISCOUNT**t * reward
        if falls and abs(s[1]) > 0.2:
            break
    return total


def small() -> Dataset:
    return linear_model.rows(episodes=4)


def found(path: Path, data: Dataset, **more: Any) -> ope.Estimates:
    settings = ope.OPEConfig(discount=DISCOUNT, world_model=str(path), **{"rollouts": 4, "horizon": 12, **more})
    return ope.evaluate_policies(data, CANDIDATES, "model", settings).estimates["model"]


def test_values_of_linear_policies_by_hand(tmp_path: Path) -> None:
    data = small()
    estimates = found(linear_model.write(tmp_path / "m.safetensors", data), data)
    first = data.columns["observations"][data.episode_start].numpy()
    # [E, M, K]
    values = np.array([[[by_hand(m, p, s, 12) for p in CANDIDATES.values()] for s in first] for m in (0, 1)])
    np.testing.assert_allclose(estimates.value, values.mean((0, 1)), rtol=1e-4)
    np.testing.assert_allclose(estimates.details["members"], values.mean(1), rtol=1e-4)
    # the interval: variance of the mean over 4 states, and that between 2 members; Welch and Satterthwaite's degrees of
    # freedom
    over_states, between = values.mean(0).var(0, ddof=1) / 4, values.mean(1).var(0, ddof=1)
    freedom = ((over_states + between) ** 2 / (over_states**2 / 3 + between**2)).astype(int).clip(1)
    half = np.array([student_t(0.95, int(f)) for f in freedom]) * np.sqrt(over_states + between)
    np.testing.assert_allclose(estimates.high - estimates.value, half, rtol=1e-3)
    np.testing.assert_allclose(estimates.value - estimates.low, half, rtol=1e-3)
    assert estimates.details["steps"] == [12.0] * 3 and estimates.details["clipped"] == [0.0] * 3


def test_fewer_starts_are_spread_and_more_are_repeated(tmp_path: Path) -> None:
    data = small()
    path = linear_model.write(tmp_path / "m.safetensors", data, linear_model.MEMBERS[:1])
    first = data.columns["observations"][data.episode_start].numpy()
    for rollouts, rows in ((2, [0, 3]), (9, [0, 1, 2, 3])):
        values = np.array([[by_hand(0, p, first[i], 12) for p in CANDIDATES.values()] for i in rows])
        estimates = found(path, data, rollouts=rollouts)
        np.testing.assert_allclose(estimates.value, values.mean(0), rtol=1e-4)
        half = student_t(0.95, len(rows) - 1) * values.std(0, ddof=1) / np.sqrt(len(rows))
        np.testing.assert_allclose(estimates.high - estimates.value, half, rtol=1e-3)


def test_units_of_the_models_data_are_undone(tmp_path: Path) -> None:
    """A model of normalised observations and scaled rewards values the same as one of plain ones."""
    data = small()
    plain = found(linear_model.write(tmp_path / "plain.safetensors", data), data)
    mean, std, scale, shift = np.array([0.5, -1.0]), np.array([2.0, 0.5]), 0.1, -3.0
    members = []
    # s = mean + std z; what the mean adds is put into the action's weight, which is then 1
    for dynamics, reward in linear_model.MEMBERS:
        into = np.diag([*std, 1.0])
        members.append((into @ dynamics / std, scale * into @ reward))
    spec = dataclasses.replace(
        data.spec, observation_mean=tuple(mean), observation_std=tuple(std), reward_scale=scale, reward_shift=shift
    )
    path = linear_model.write(tmp_path / "other.safetensors", data, members, spec=spec)
    # the constants: s' gains mean @ W, r' becomes scale (mean . w + 1) + shift
    from offrl.world_models.model import load, save

    trained = load(path)
    bias = trained.tree["params"]["net.head.bias"]
    for e, (dynamics, reward) in enumerate(linear_model.MEMBERS):
        bias[e, 0, :2] = bias.new_tensor(mean @ dynamics[:2] / std)
        bias[e, 0, 2] = scale * (mean @ reward[:2] + 1.0) + shift
    trained.tree["low"], trained.tree["high"] = trained.tree["low"] * 0 - 100.0, trained.tree["high"] * 0 + 100.0
    save(path, trained.model, trained.tree, {"data": trained.meta["data"]})
    np.testing.assert_allclose(found(path, data).value, plain.value, rtol=1e-3)


def test_rewards_and_states_are_cut_off_at_the_datas_range(tmp_path: Path) -> None:
    data = small()
    path = linear_model.write(tmp_path / "m.safetensors", data)
    rewards = data.columns["rewards"].clamp(-0.1, 0.2)
    narrow = dataclasses.replace(data, columns={**data.columns, "rewards": rewards})
    estimates = found(path, narrow, horizon=200)
    bound = (1.0 - DISCOUNT**200) / (1.0 - DISCOUNT)
    assert (estimates.value <= 0.2 * bound + 1e-9).all() and (estimates.value >= -0.1 * bound - 1e-9).all()
    # doubles: 0.5 reaches 20 after 5.3 steps
    runaway = [(np.array([[1.0, 0.0], [0.0, 0.0], [0.0, 0.0]]), np.array([0.0, 0.0, 0.0]))]
    estimates = found(linear_model.write(tmp_path / "r.safetensors", data, runaway), data, rollouts=1)
    assert estimates.details["clipped"] == [pytest.approx(7 / 12)] * 3


def test_terminations_end_the_sum(tmp_path: Path) -> None:
    data = linear_model.rows(episodes=30)
    path = linear_model.write(
        tmp_path / "m.safetensors", data, linear_model.MEMBERS[:1], settings={"termination": "inverted_pendulum"}
    )
    estimates = found(path, data, rollouts=30)
    first = data.columns["observations"][data.episode_start].numpy()
    values = np.array([[by_hand(0, p, s, 12, falls=True) for s in first] for p in CANDIDATES.values()])
    np.testing.assert_allclose(estimates.value, values.mean(1), rtol=1e-4)
    assert all(1.0 < steps < 12.0 for steps in estimates.details["steps"])


def test_noise_and_propagation(tmp_path: Path) -> None:
    data = small()
    path = linear_model.write(tmp_path / "m.safetensors", data, log_var=-4.0)
    quiet, again = found(path, data, noise=False), found(path, data, noise=False)
    np.testing.assert_array_equal(quiet.value, again.value)
    exact = found(linear_model.write(tmp_path / "exact.safetensors", data), data)
    np.testing.assert_allclose(quiet.value, exact.value, rtol=1e-4)
    noisy = found(path, data)
    assert (noisy.value != quiet.value).all()
    mixed = found(path, data, noise=False, propagation="ts1", rollouts=400)
    assert len(mixed.details["members"]) == 1
    members = np.array(exact.details["members"])
    # members mixed along the way: in between, here
    assert ((mixed.value > members.min(0)) & (mixed.value < members.max(0))).all()


def test_all_has_it_where_a_model_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from offrl.ope import selection

    asked: list[str] = []
    real = selection.METHODS["model"]
    for name in ("fqe", "wis", "dr"):
        monkeypatch.setitem(selection.METHODS, name, lambda work, name=name: asked.append(name) or real(work))
    data = small()
    settings = ope.OPEConfig(
        world_model=str(linear_model.write(tmp_path / "m.safetensors", data)), rollouts=2, horizon=3
    )
    assert list(ope.evaluate_policies(data, CANDIDATES, "all", settings).estimates) == ["fqe", "wis", "dr", "model"]
    result = ope.evaluate_policies(data, CANDIDATES, "model", settings)
    result.write(tmp_path / "select.csv")
    header, first, *_ = (tmp_path / "select.csv").read_text().splitlines()
    assert header.startswith("rank,candidate,model,model_low,model_high,model_clipped,model_steps")
    assert first.split(",")[:2] == ["1", result.best]
    assert asked == ["fqe", "wis", "dr"]


def test_models_that_do_not_fit(tmp_path: Path) -> None:
    data = small()
    path = linear_model.write(tmp_path / "m.safetensors", data)
    other = dataclasses.replace(data, spec=dataclasses.replace(data.spec, action_low=(-1.0,)))
    with pytest.raises(UserError, match="another action range"):
        found(path, other)
    with pytest.raises(UserError, match="does not exist"):
        found(tmp_path / "none.safetensors", data)
    lost = linear_model.write(
        tmp_path / "lost.safetensors", data, spec=dataclasses.replace(data.spec, reward_scale=0.0)
    )
    with pytest.raises(UserError, match="rewards multiplied by 0"):
        found(lost, data)


def test_report_says_what_roll_outs_were_like(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = small()
    path = linear_model.write(tmp_path / "m.safetensors", data)
    settings = ope.OPEConfig(world_model=str(path), rollouts=2, horizon=3)
    command.report(ope.evaluate_policies(data, CANDIDATES, "model", settings))
    out = capsys.readouterr().out
    assert "model: rollouts of 3 steps, 0.0% of which leave the data's range" in out and "ranked by model" in out


def test_without_a_model_one_is_trained_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data, asked = small(), []

    def train_first(config: Any, dataset: Dataset, name: str, requirement: Requirement) -> Path:
        asked.append(
            (requirement.algo, config.runs_dir, config.device, config.compile, config.quiet, dataset.fingerprint)
        )
        return linear_model.write(tmp_path / "m.safetensors", data)

    monkeypatch.setattr("offrl.ope.model_based.train_first", train_first)
    settings = ope.OPEConfig(models_dir=str(tmp_path), rollouts=2, horizon=3, compile="eager")
    result = ope.evaluate_policies(data, CANDIDATES, "model", settings)
    assert asked == [("dynamics", str(tmp_path), "cpu", "eager", True, data.fingerprint)]
    assert result.estimates["model"].details["world_model"] == str(tmp_path / "m.safetensors")


@pytest.mark.parametrize("count", [1, 2, 4])
def test_each_elite_is_asked_for_its_own_rows(tmp_path: Path, count: int) -> None:
    from offrl.ope.model_based import per_elite
    from offrl.world_models.model import load

    trained = load(linear_model.write(tmp_path / "m.safetensors"))
    tree = {**trained.tree, "elites": torch.tensor([1, 0])}
    s, a = torch.rand(2 * count, 2), 2 * torch.rand(2 * count, 1) - 1
    order = torch.randperm(2 * count)
    found = per_elite(trained.model, tree, s, a, trained.model.first_past(s), order)
    everybody = trained.model.predict(tree, s, a, trained.model.first_past(s))
    for place, row in enumerate(order.tolist()):
        torch.testing.assert_close(found.mean[0, row], everybody.mean[1 if place < count else 0, row])
        torch.testing.assert_close(found.reward[0, row], everybody.reward[1 if place < count else 0, row])
