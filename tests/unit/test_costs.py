"""Costs: from every kind of file into a column, checked, shown, summed by episodes, and computed by a function."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium as gym
import h5py
import numpy as np
import pytest
import torch

from offrl import registry, rng
from offrl.collect.environment import look
from offrl.collect.episodes import columns_of, statistics
from offrl.collect.recorder import Stage
from offrl.data import Dataset, DatasetConfig, load_dataset
from offrl.data.arrays import from_arrays
from offrl.data.samplers.sequences import SequenceSampler
from offrl.data.samplers.transitions import TransitionSampler
from offrl.data.tools.convert import convert
from offrl.errors import UserError
from offrl.evaluation.evaluator import Evaluator
from offrl.evaluation.result import normalized_cost
from offrl.figures.curves import read_curves
from offrl.report.dataset import doctor
from offrl.runs.log import RunLog
from offrl.settings.compose import compose, parse, rehearse
from offrl.settings.evaluation import EvalConfig
from offrl.settings.replicas import Replica
from offrl.tasks.task import Task

ROWS = 12  # three episodes of four steps
COSTS = np.array([0, 1, 0, 1, 0, 0, 0, 0, 5, 0, 7, 0], np.float32)


def dsrl(path: Path, **changed: np.ndarray) -> Path:
    """A file in DSRL's layout: D4RL's, with costs, single numbers as columns [R, 1]."""
    row = np.arange(ROWS)
    columns = {
        "observations": np.stack([row, row % 4], 1).astype(np.float32),
        "next_observations": np.stack([row + 1, row % 4 + 1], 1).astype(np.float32),
        "actions": (np.linspace(-1, 1, ROWS)[:, None]).astype(np.float32),
        "rewards": np.repeat([1.0, 2.0, 3.0], 4)[:, None].astype(np.float32),
        "costs": COSTS[:, None],
        "terminals": np.zeros((ROWS, 1), bool),
        "timeouts": (row % 4 == 3)[:, None],
        **changed,
    }
    with h5py.File(path, "w") as file:
        for name, values in columns.items():
            file[name] = values
    return path


def loaded(path: Path, **settings: object) -> Dataset:
    return load_dataset(DatasetConfig(name=str(path), cache="never", **settings))  # type: ignore[arg-type]


def test_dsrl_files_are_read_and_shown(tmp_path: Path) -> None:
    path = dsrl(tmp_path / "SafetyToy-v1-12-3.hdf5")
    data = loaded(path)
    assert data.spec.costs and data.columns["costs"].tolist() == COSTS.tolist()
    assert data.episode_costs().tolist() == [2.0, 0.0, 12.0]
    findings = doctor(DatasetConfig(name=str(path)), tmp_path / "page")
    assert "cost <= 10: 66.7% of the episodes, best return 8" in findings.render()
    assert "episode costs: mean 4.66667" in findings.render()
    assert (tmp_path / "page" / "costs.png").is_file()


@pytest.mark.parametrize("form", ["d4rl", "minari"])
def test_written_costs_come_back(tmp_path: Path, form: str) -> None:
    data = loaded(dsrl(tmp_path / "x.hdf5"))
    target = tmp_path / ("y.hdf5" if form == "d4rl" else "made-v0")
    convert(DatasetConfig(name=str(tmp_path / "x.hdf5")), str(target), form)
    assert torch.equal(loaded(target).columns["costs"], data.columns["costs"])


def test_minari_puts_the_costs_of_a_step_in_the_row_after_it(tmp_path: Path) -> None:
    """Its collector records what `reset` says as row 0, so that an episode of four steps has five rows."""
    convert(DatasetConfig(name=str(dsrl(tmp_path / "x.hdf5"))), tmp_path / "made-v0", "minari")
    with h5py.File(tmp_path / "made-v0" / "data" / "main_data.hdf5") as file:
        assert file["episode_2/infos/costs"][()].tolist() == [0, 5, 0, 7, 0]


def test_negative_costs_and_nan_are_refused_and_zeros_are_pointed_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    negative, gap = COSTS.copy(), COSTS.copy()
    negative[6], gap[9] = -0.5, np.nan
    with pytest.raises(UserError, match=r"'costs' holds -0.5, .*\(first at episode 1, row 6\)"):
        loaded(dsrl(tmp_path / "x.hdf5", costs=negative))
    with pytest.raises(UserError, match=r"'costs' has NaN in 1 row \(first at episode 2, row 9\)"):
        loaded(dsrl(tmp_path / "x.hdf5", costs=gap))
    with pytest.raises(UserError, match="'costs' has 3 rows"):
        loaded(dsrl(tmp_path / "x.hdf5", costs=COSTS[:3]))
    capsys.readouterr()
    loaded(dsrl(tmp_path / "x.hdf5", costs=0 * COSTS))
    assert "'costs' are all 0" in capsys.readouterr().err
    ended = np.arange(ROWS) == 3
    loaded(dsrl(tmp_path / "x.hdf5", terminals=ended, timeouts=~ended & (np.arange(ROWS) % 4 == 3)))
    assert "1 episode(s) terminate in a step with a cost" in capsys.readouterr().err


def test_a_function_gives_costs(tmp_path: Path) -> None:
    (tmp_path / "rules.py").write_text(
        "def far(columns):\n    return columns['observations'][:, 1] > 2\n\n\n"
        "def wrong(columns):\n    return columns['observations'][:, 1] - 1\n"
    )
    path = dsrl(tmp_path / "x.hdf5")
    data = loaded(path, cost_labels=f"{tmp_path / 'rules.py'}:far")
    assert data.columns["costs"].tolist() == [0, 0, 0, 1] * 3 and data.fingerprint != loaded(path).fingerprint
    with pytest.raises(UserError, match=r"dataset.cost_labels=.*episode 0: the cost of its step 0 \(row 0\) is -1"):
        loaded(path, cost_labels=f"{tmp_path / 'rules.py'}:wrong")


def test_episodes_are_kept_by_their_costs(tmp_path: Path) -> None:
    path = dsrl(tmp_path / "x.hdf5")
    assert loaded(path, keep="cost <= 2").episode_costs().tolist() == [2.0, 0.0]
    assert loaded(path, keep="cost > 0 and cost < 12").episode_returns().tolist() == [4.0]
    assert loaded(path, keep="return>4", top_fraction=0.5).episode_costs().tolist() == [12.0]
    for condition, reason in {
        "cost < 0": "leaves no episode of x: the costs of its episodes lie between 0 and 12",
        "costs <= 2": "Did you mean 'cost'",
        "cost = 2": '"cost = 2" is no condition',
        "cost <= nan": '"cost <= nan" is no condition',
    }.items():
        with pytest.raises(UserError, match=reason):
            loaded(path, keep=condition)
    with pytest.raises(UserError, match=r"dataset.keep=cost <= 2 needs costs, and .* has none"):
        load_dataset(DatasetConfig(keep="cost <= 2"))


def test_samplers_hand_costs_on(tmp_path: Path) -> None:
    data = loaded(dsrl(tmp_path / "x.hdf5"))
    key = rng.make_key(0)
    batch = TransitionSampler(extra=("costs",))
    rows = batch(batch.prepare(data), key, 64)
    assert torch.equal(rows["costs"], data.columns["costs"][rows["observations"][:, 0].long()])
    window = TransitionSampler(extra=("costs",), n_step=3)
    rows = window(window.prepare(data), key, 64)
    first = rows["observations"][:, 0].long()
    after = torch.tensor([[*COSTS[r : r // 4 * 4 + 4], 0, 0, 0][:3] for r in range(ROWS)])
    assert torch.equal(rows["step_costs"], after[first])
    sequence = SequenceSampler(4, extra=("costs_to_go",))
    rows = sequence(sequence.prepare(data), key, 64)
    to_go = torch.tensor([2, 2, 1, 1, 0, 0, 0, 0, 12, 7, 7, 0.0])
    assert torch.equal(rows["costs_to_go"][:, 0], to_go[rows["observations"][:, 0, 0].long()])


class Bumpy(gym.Env):
    """A point that moves by its action; each step costs how far it is from 0. `step` gives five values or six."""

    observation_space = gym.spaces.Box(-9.0, 9.0, (1,), np.float32)
    action_space = gym.spaces.Box(-1.0, 1.0, (1,), np.float32)

    def __init__(self, six: bool = False, sign: float = 1.0) -> None:
        self.six, self.sign = six, sign

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self.x, self.t = np.zeros(1, np.float32), 0
        return self.x.copy(), {}

    def step(self, action: np.ndarray) -> Any:
        self.x, self.t = self.x + action, self.t + 1
        cost, over = self.sign * abs(float(self.x[0])), self.t == 4
        ends = (cost, False, over, {}) if self.six else (False, over, {"cost": cost})
        return self.x.copy(), 1.0, *ends


class Steady:
    """Moves by a half each step, and remembers what steps cost."""

    def __init__(self, limit: float | None) -> None:
        self.cost_limit = limit
        self.paid: list[float] = []

    def start(self, episodes: int) -> None:
        return None

    def step(self, carry: Any, observations: np.ndarray, t: int, explore: bool = False) -> tuple[np.ndarray, Any]:
        return np.full((len(observations), 1), 0.5, np.float32), carry

    def observe_cost(self, carry: Any, costs: np.ndarray) -> Any:
        self.paid.append(float(costs[0]))
        return carry


@pytest.mark.parametrize("six", [False, True])
def test_evaluation_counts_costs_and_hands_them_on(six: bool) -> None:
    policies = [Steady(5.0), Steady(4.0), Steady(None)]
    with Evaluator(Task("bumpy", env_factory=lambda: Bumpy(six)), EvalConfig(episodes=2)) as evaluator:
        result = evaluator(policies, [0, 1, 2])
    assert result.costs is not None and result.costs.tolist() == [[5.0, 5.0]] * 3
    assert policies[0].paid == [0.5, 1.0, 1.5, 2.0]
    rows = [[row[k] for k in ("cost", "cost_normalized", "safe")] for row in result.rows()]
    assert rows == [[5.0, 1.0, 1.0], [5.0, 1.25, 0.0], [5.0, None, None]]
    with Evaluator(Task("bumpy", env_factory=Bumpy), EvalConfig(episodes=2, cost_limit=0.0)) as evaluator:
        assert evaluator(policies[:1], [0]).rows()[0]["cost_normalized"] == 6.0
    task, reason = Task("bumpy", env_factory=lambda: Bumpy(six, -1.0)), r"step 0\): ValueError: info\['cost'\] is -0.5"
    with Evaluator(task, EvalConfig(episodes=2)) as evaluator, pytest.raises(UserError, match=reason):
        evaluator(policies[:1], [0])


def test_normalized_costs() -> None:
    """DSRL's: (C + e) / (limit + e), e = 1 for the limit 0."""
    assert [normalized_cost(*x) for x in ((30.0, 20.0), (0.0, 0.0), (3.0, 0.0))] == [1.5, 1.0, 4.0]


def test_tables_get_columns_of_costs_where_there_are_any(tmp_path: Path) -> None:
    """The first scores may be without: earlier lines are then filled up. A resumed run goes on with the columns."""
    row = {"seed": 0, "episodes": 2, "return_mean": 1.0}
    more = {**row, "cost": 5.0, "cost_normalized": 1.25, "safe": 0.5}
    options: dict[str, Any] = {"quiet": True, "total_steps": 9, "replicas": [Replica(0, ())], "title": "x"}
    with RunLog(tmp_path, resume_step=None, loggers=(), **options) as log:
        log.scores(1, [row], [[1.0, 1.0]])
        assert "cost" not in (tmp_path / "scores.csv").read_text()
        log.scores(2, [more], [[1.0, 1.0]], [[4, 4]], [[3.0, 7.0]])
    with RunLog(tmp_path, resume_step=2, loggers=(), **options) as log:
        log.scores(3, [more], [[1.0, 1.0]], [[4, 4]], [[3.0, 7.0]])
    header, *lines = (tmp_path / "scores.csv").read_text().splitlines()
    assert header.endswith(",success_by_task,cost,cost_normalized,safe") and len(lines) == 3
    assert [line.split(",")[-3:] for line in lines] == [["", "", ""], *2 * [["5.0", "1.25", "0.5"]]]
    assert {line.count(",") for line in (header, *lines)} == {header.count(",")}
    # no settings of a grid, though some are empty
    assert read_curves(tmp_path / "scores.csv", "return_mean") == {(): {0: {1: 1.0, 2: 1.0, 3: 1.0}}}
    assert '"costs": [[3.0, 7.0]]' in (tmp_path / "episodes.jsonl").read_text()


def test_what_collect_records(tmp_path: Path) -> None:
    gym.register("offrl-test/Bumpy-v0", Bumpy, max_episode_steps=4)
    world = look("offrl-test/Bumpy-v0")
    with Stage(world, 2) as stage:
        episodes = stage.wave(Steady(None), 0, False)
    assert [e.columns["costs"].tolist() for e in episodes] == [[0.5, 1.0, 1.5, 2.0]] * 2
    assert columns_of(episodes)["costs"].dtype == np.float32 and statistics(episodes)["cost_mean"] == 5.0
    del episodes[1].columns["costs"]
    with pytest.raises(UserError, match="in some episodes alone"):
        columns_of(episodes)


def test_first_observations_count_each_episode_alike() -> None:
    """Of episodes of one and three rows: their mean number, 2, over their own."""
    rows = np.arange(4.0)[:, None]
    data = from_arrays(rows, rows, rows[:, 0], rows[:, 0] % 3 == 0, next_observations=rows + 1, check=False)
    batch = TransitionSampler(extra=("first_observations",)).prepare(data).take(torch.arange(4))
    assert batch["first_observations"].flatten().tolist() == [0.0, 1.0, 1.0, 1.0]
    assert torch.equal(batch["first_weights"], torch.tensor([2.0, 2 / 3, 2 / 3, 2 / 3]))


@pytest.mark.parametrize("name", ["algo.cost_limit", "grid.cost_limit"])
def test_a_limit_for_an_algorithm_without_costs(name: str) -> None:
    cure = r"It is a setting of awac, .*, cdt, .*: choose one of them or keep cheap episodes, dataset.keep="
    for check in (compose, rehearse):
        with pytest.raises(UserError, match=rf"unknown setting '{name}'. {cure}"):
            check({"dataset": "-", "algo": "bc", name: [10, 20] if name.startswith("grid") else 10})


def test_limits_that_the_data_cannot_teach(tmp_path: Path) -> None:
    data = loaded(dsrl(tmp_path / "x.hdf5", costs=COSTS + 1))
    free = from_arrays(np.zeros((4, 1)), np.zeros((4, 1)), np.zeros(4), name="free")
    for algo in ("td3_bc", "iql", "coptidice", "cpq"):
        kind = registry.get("algo", algo)
        fitted = kind.fit_config(kind.Config(cost_limit=6.0), data)
        assert fitted.cost_horizon == 4 and fitted.cost_limit == 6.0
        with pytest.raises(UserError, match=r"algo.cost_limit=3 is below what any episode of x costs: the cheapest"):
            kind.fit_config(kind.Config(), data, {"cost_limit": [6.0, 3.0]})
        with pytest.raises(UserError, match=r"algo.cost_limit needs costs, and free has none: name their column"):
            kind.fit_config(kind.Config(cost_limit=6.0), free)


def test_conditions_stand_as_they_are_typed() -> None:
    assert parse(["dataset.keep=cost > 5 and cost <= 15"]) == {"dataset.keep": "cost > 5 and cost <= 15"}
    assert parse(["dataset.keep=null"]) == {"dataset.keep": None}
