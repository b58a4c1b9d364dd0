"""Runs on own data: environments of one's own by file and class, the length of a first run, and what is said where
nothing scores.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import offrl
from offrl.data.loading.load import is_user_data
from offrl.errors import UserError
from offrl.ope.linear import LinearValues, gap, interval, values
from offrl.ope.problem import make_problem
from offrl.ope.unscored import ENDS, _sentences, judge, summary
from offrl.runs.settings import run_settings
from offrl.settings import advice
from offrl.statistics.intervals import student_t
from offrl.tasks.custom import place_of
from offrl.tasks.environments import make_env
from offrl.tasks.task import Task

ENVIRONMENT = """
import gymnasium as gym
import numpy as np


class House(gym.Env):
    observation_space = gym.spaces.Box(-9, 9, (1,), np.float32)
    action_space = gym.spaces.Box(-1, 1, (1,), np.float32)

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.steps += 1
        return np.zeros(1, np.float32), float(action[0]), False, self.steps >= 3, {}
"""


def data(episodes: int = 12, steps: int = 20) -> offrl.Dataset:
    """Random actions a, reward a, in one state and a half."""
    rng = np.random.default_rng(0)
    rows = episodes * steps
    actions = rng.uniform(-1, 1, (rows, 1)).astype(np.float32)
    ends = np.arange(rows) % steps == steps - 1
    return offrl.from_arrays(
        rng.normal(size=(rows, 1)), actions, actions[:, 0], truncations=ends, action_low=-1.0, action_high=1.0
    )


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "house.py").write_text(ENVIRONMENT)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OFFRL_TRUST", "")
    return tmp_path


def test_an_environment_of_a_file_is_made_where_a_person_names_it_only(home: Path) -> None:
    task = Task(name="x", env_id="house.py:House")
    env = make_env(task)  # a Task that is made here counts as typed
    assert env.reset()[0].shape == (1,)
    from offrl.system import trust

    with pytest.raises(UserError, match="named by a file"):
        trust.check_environment("other.py:House")
    trust.typed("my houses.py:House")
    assert trust.importable("my houses.py:House") and not trust.importable("my%20houses.py:House")
    with pytest.raises(UserError, match="Did you mean 'House'"):
        make_env(Task(name="x", env_id="house.py:Hose"))


def test_a_module_that_files_may_name_gives_only_what_is_registered(home: Path) -> None:
    """Otherwise a file could have any function of Gymnasium's called, with arguments of its choice."""
    from offrl.tasks.custom import custom_environment

    assert custom_environment("gymnasium.envs.registration:load_env_creator") is None


def test_a_run_scored_in_a_class_is_evaluated_and_resumed(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(home))
    from house import House  # type: ignore[import-not-found]

    settings = {"algo.batch_size": 8, "eval.episodes": 1, "name": "own", "algo.hidden": [8]}
    run = offrl.train("bc", data(), seeds=1, steps=2, env=House, quiet=True, settings=settings)
    assert run.record["env"] == "house.py:House" and run.evaluate(episodes=1).returns.shape == (1, 1)
    monkeypatch.setenv("OFFRL_TRUST", "")
    with pytest.raises(UserError, match=r"named by a file.*env=house\.py:House"):
        offrl.load(run.dir).evaluate(episodes=1)
    with pytest.raises(UserError, match=r"say it again, eval\.env=house\.py:House"):
        offrl.train(resume=run.dir, dataset=data(), steps=3, quiet=True)
    again = offrl.train(resume=run.dir, dataset=data(), steps=3, quiet=True, env="house.py:House")
    assert again.final_scores[0]["step"] == 3 and offrl.load(run.dir).evaluate(
        episodes=1, env="house.py:House"
    ).returns.shape == (1, 1)
    sys.modules.pop("house")


def test_a_run_scored_in_a_lambda_says_what_to_do(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make = lambda: make_env(Task(name="x", env_id="house.py:House"))  # noqa: E731
    assert place_of(make) is None
    settings = {"algo.batch_size": 8, "eval.episodes": 1, "name": "own", "algo.hidden": [8]}
    run = offrl.train("bc", data(), seeds=1, steps=2, env=make, quiet=True, settings=settings)
    with pytest.raises(UserError, match="which no file names: give it again"):
        offrl.load(run.dir).evaluate(episodes=1)
    offrl.train(resume=run.dir, dataset=data(), steps=3, quiet=True)
    assert "goes on without scores. It was scored in what" in capsys.readouterr().err


def test_a_script_that_trains_when_it_is_imported_is_told_so(home: Path) -> None:
    (home / "careless.py").write_text(ENVIRONMENT + "import offrl\noffrl.train('bc', steps=1)\n")
    with pytest.raises(UserError, match="trains when it is imported"):
        make_env(Task(name="x", env_id="careless.py:House"))


@pytest.mark.parametrize(
    ("rows", "cpu", "steps"),
    [(100, True, 10_000), (23_456, True, 24_000), (10**6, True, 50_000), (10**7, False, 10**6)],
)
def test_length_of_a_first_run(rows: int, cpu: bool, steps: int) -> None:
    assert advice.steps_for(rows, cpu) == steps


def test_only_runs_on_own_data_without_a_length_get_one() -> None:
    from offrl.settings.compose import compose

    assert advice.is_open(compose({"dataset": "mine.csv"}))
    assert not advice.is_open(compose({"dataset": "mine.csv", "steps": 1_000_000}))
    assert not advice.is_open(compose({})) and not advice.is_open(compose({"dataset": "hopper-medium-v2"}))
    assert is_user_data("mine.csv", data()) and not is_user_data("hopper-medium-v2", data())


class Constant:
    """A policy that always does the same."""

    def __init__(self, action: float) -> None:
        self.action = action

    def start(self, episodes: int) -> None:
        return None

    def step(self, carry: None, observations: np.ndarray, t: int) -> tuple[np.ndarray, None]:
        return np.full((len(observations), 1), self.action, np.float32), None


class Pull(Constant):
    """One that acts in proportion to what it sees."""

    def step(self, carry: None, observations: np.ndarray, t: int) -> tuple[np.ndarray, None]:
        return np.clip(self.action * observations, -1, 1), None


def test_linear_values_are_those_of_rewards_that_are_the_actions() -> None:
    """Reward a, for ever: a / (1 - 0.9), and the data's own about 0."""
    problem = make_problem(data(40), {"up": Constant(0.5), "down": Constant(-0.5)})
    result = values(problem, 0.9, 10)
    (up, low, high), (down, *_), own = (interval(x) for x in (*np.moveaxis(result.policies, 2, 0), result.data))
    assert up == pytest.approx(5.0, abs=1.5) and down == pytest.approx(-5.0, abs=1.5) and abs(own[0]) < 1.5
    assert low - 0.05 < 5.0 < high + 0.05 and (result.rows > 50).all()
    assert interval(result.policies[..., 0] - result.data)[1] > 0.0


def test_the_interval_holds_the_spread_between_fits_and_within_them() -> None:
    fits = np.array([[1.0, 1.0, 1.0], [2.0, 2.0, 2.0], [3.0, 3.0, 3.0]])
    assert interval(fits) == pytest.approx((2.0, 2.0 - 4.302653, 2.0 + 4.302653))  # t of 2 degrees of freedom, sd 1
    within = np.array([[2.0, 1.0, 3.0], [2.0, 0.0, 2.0], [2.0, 3.0, 3.0]])  # variances 2, 2 and 0
    assert interval(within)[2] == pytest.approx(2.0 + 4.302653 * np.sqrt(4.0 / 3.0))


def test_the_gap_is_to_the_nearest_row_of_another_episode() -> None:
    known = torch.tensor([[0.0, 0.0], [0.1, 0.0], [3.0, 4.0]]).double()
    wanted, episode = torch.tensor([[0.0, 0.0]] * 3).double(), torch.tensor([0, 0, 1])
    # two of three rows are drawn from the first episode
    assert gap(wanted, known, episode) == pytest.approx(5.0 / np.sqrt(2.0))
    assert gap(wanted, known, torch.zeros(3)) == 0.0


def test_actions_and_states_that_the_data_do_not_have_rest_on_few_rows() -> None:
    """Random actions of a walk that stays near 0: one that goes on in one direction leaves it, though each action is in
    the data.
    """
    rng, position, rows = np.random.default_rng(0), 0.0, []
    for _ in range(2000):
        action = float(np.clip(rng.normal() - position, -1, 1))
        rows.append((position, action))
        position += 0.3 * action
    x, a = np.array(rows).T[:, :, None]
    ends = np.arange(2000) % 100 == 99
    walk = offrl.from_arrays(x, a, -np.abs(x[:, 0]), truncations=ends, action_low=-1.0, action_high=1.0)
    near = make_problem(walk, {"back": Pull(-1.0), "away": Constant(0.9), "stay": Constant(0.0)})
    back, away, _ = np.median(values(near, 0.95, 10).rows, 0) * 0.05
    assert back > 10.0 > away


def test_fits_count_where_they_rest_on_enough_rows_and_are_possible() -> None:
    """Of ten fits of five policies: all count; five rest on few rows; two do, and have no say; five are impossible; the
    data are far.
    """
    fits = np.repeat(np.arange(10.0)[:, None, None], 5, 2).repeat(3, 1)
    rows = np.full((10, 5), 1_000.0)
    rows[:5, 1], rows[8:, 2], fits[5:, :, 3] = 999.0, 999.0, 200.0
    fitted = LinearValues(fits, np.zeros((10, 3)), rows, np.array([0.1, 0.3, 0.1, 0.1, 0.1, 0.31]), 0.0, 100.0)
    whole, few, without, beyond, far = ([*summary(fitted, k, 0.99, 10)] for k in range(5))
    assert (
        whole[:3] == pytest.approx([4.5, 0.0, 4.5 + student_t(0.95, 9) * np.std(np.arange(10), ddof=1)])
        and whole[6] == 10
    )
    assert whole[3:6] == pytest.approx([4.5, 4.5 - whole[2] + 4.5, whole[2]]), (
        "the difference to the data's 0, without bounds"
    )
    assert without[0] == pytest.approx(3.5) and without[6] == 8 and without[1] is not None
    assert few[1:6] == beyond[1:6] == far[1:6] == [None] * 5 and few[6] == beyond[6] == 5
    assert summary(fitted, 0, 0.99, 9)[1] is None and summary(fitted, 0, 0.9901, 10)[1] is None, (
        "a longer horizon needs more rows"
    )


def words(policies: dict[str, dict[str, Any]], count: int = 0, **more: Any) -> list[str]:
    """What is said of policies with a value, and an interval of 1 about it unless `value_low` is None."""
    known = {"difference": 1.0, "fits": 10, "rows": 900.0, "gap": 0.1, "distance": 0.3}
    for p in policies.values():
        ends = (
            dict.fromkeys(ENDS)
            if "value_low" in p
            else dict(zip(ENDS, (p["value"] - 1, p["value"] + 1, 3.0, 2.0, 4.0), strict=True))
        )
        p |= {**known, **ends, **{k: v for k, v in p.items() if k != "value_low"}}
    common = {
        "steps": 9,
        "discount": 0.99,
        "episodes": 40,
        "rows": 8000,
        "inputs": 4,
        "gap": 0.1,
        "spread": 0.3,
        "discrete": False,
        "low": -900.0,
        "high": 0.0,
    }
    return _sentences(
        Path("RUN"), {**common, "data": [-9.0, -10.0, -8.0], "policies": policies, **more}, count or len(policies)
    )


def test_estimates_are_said_policy_by_policy_with_the_worst_first() -> None:
    lines = words({"seed_0": {"value": -5.0}, "seed_1": {"value": -53.6}, "seed_2": {"value": -7.0}})
    assert [line.split(":")[0].strip() for line in lines[1:4]] == ["seed_1", "seed_2", "seed_0"]
    assert "-53.6 [-54.6, -52.6]; difference to what made the data +3 [+2, +4]" in lines[
        1
    ] and "mean of" not in " ".join(lines)
    assert "probably better" in lines[-2] and "offrl select RUN" in lines[-1]
    many = words({f"seed_{k}": {"value": -float(k)} for k in range(8)}, 24)
    assert (
        len(many) == len(lines) + 2
        and "seed_7" in many[1]
        and "5 others: -4 to -0" in many[4]
        and "16 further policies" in many[5]
    )


def test_a_guess_has_no_interval_comes_first_and_says_why() -> None:
    few = {"value_low": None, "fits": 2, "rows": 44.0}
    lines = words({"seed_0": {"value": -90.0}, "seed_1": {"value": -4.0, **few}})
    assert (
        "seed_1: -4, a guess without an interval (it rests on some 44 of 8,000 rows" in lines[1] and "[" not in lines[1]
    )
    assert "seed_1 are guesses" in lines[-2] and "algo=td3_bc" in lines[-2]
    assert "the estimate is a guess" in words({"seed_0": {"value": -4.0, **few}})[-2]
    assert "most fits are beyond what the rewards allow" in words({"seed_0": {"value": 4.0, **few, "rows": 4000.0}})[1]
    far = words({"seed_0": {"value": -4.0, "value_low": None, "gap": 0.34}}, gap=0.33)
    assert (
        "(the nearest data of other episodes are 0.34 standard deviations away" in far[1]
        and "8,000 rows are too few for 4" in far[-2]
    )
    alone = words({"seed_0": {"value": -4.0, "value_low": None}}, episodes=1)
    assert "(1 episode only)" in alone[1] and "divide the log" in alone[-2]


def test_a_run_without_scores_is_judged_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"runs_dir": str(tmp_path), "algo.batch_size": 8, "algo.hidden": [8]}
    run = offrl.train("bc", data(), seeds=2, steps=3, quiet=True, settings=settings)
    config = run_settings(run.dir)
    assert judge(run, config, data()) == []  # a trial
    monkeypatch.setattr("offrl.ope.unscored.TRIAL", 1)
    monkeypatch.setattr("offrl.ope.linear.FEATURES", 12)
    lines = judge(run, config, data())
    numbers = json.loads((run.dir / "estimate.json").read_text())
    assert sorted(line.split(":")[0].strip() for line in lines[1:3]) == ["seed_0", "seed_1"] and set(
        numbers["policies"]
    ) == {
        "seed_0",
        "seed_1",
    }
    with monkeypatch.context() as patch:
        patch.setattr("offrl.ope.unscored.estimate", None)
        assert judge(run, config, data()) == lines
    for damage in ({"data": 1}, {"policies": []}, {"policies": {"seed_0": {}}}, {"low": None}):
        (run.dir / "estimate.json").write_text(json.dumps(numbers | damage))
        with pytest.raises(TypeError, match="not callable"), monkeypatch.context() as patch:
            patch.setattr("offrl.ope.unscored.estimate", None)
            judge(run, config, data())
    config.eval.estimate = False
    assert judge(run, config, data()) == []
