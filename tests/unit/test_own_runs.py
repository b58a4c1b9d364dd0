"""Runs on own data: environments of one's own by file and class, the length of a first run, and what is said where nothing scores."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

import offrl
from offrl.data.given import is_own
from offrl.errors import UserError
from offrl.ope.afterwards import judge
from offrl.ope.linear import values
from offrl.ope.problem import make_problem
from offrl.runs.settings import run_settings
from offrl.settings.advice import first_run
from offrl.tasks.environments import make_env
from offrl.tasks.own import place_of
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
    return offrl.from_arrays(rng.normal(size=(rows, 1)), actions, actions[:, 0], truncations=ends, action_low=-1.0, action_high=1.0)


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
    from offrl.tasks.own import own_environment

    assert own_environment("gymnasium.envs.registration:load_env_creator") is None


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
    assert again.final_scores[0]["step"] == 3 and offrl.load(run.dir).evaluate(episodes=1, env="house.py:House").returns.shape == (1, 1)
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
    ("rows", "cpu", "steps"), [(100, True, 10_000), (23_456, True, 24_000), (10**6, True, 50_000), (10**7, False, 10**6)]
)
def test_length_of_a_first_run(rows: int, cpu: bool, steps: int) -> None:
    assert first_run.steps_for(rows, cpu) == steps


def test_only_runs_on_own_data_without_a_length_get_one() -> None:
    from offrl.settings.compose import compose

    assert first_run.is_open(compose({"dataset": "mine.csv"}))
    assert not first_run.is_open(compose({"dataset": "mine.csv", "steps": 1_000_000}))
    assert not first_run.is_open(compose({})) and not first_run.is_open(compose({"dataset": "hopper-medium-v2"}))
    assert is_own("mine.csv", data()) and not is_own("hopper-medium-v2", data())


class Constant:
    """A policy that always does the same."""

    def __init__(self, action: float) -> None:
        self.action = action

    def start(self, episodes: int) -> None:
        return None

    def step(self, carry: None, observations: np.ndarray, t: int) -> tuple[np.ndarray, None]:
        return np.full((len(observations), 1), self.action, np.float32), None


def test_linear_values_are_those_of_rewards_that_are_the_actions() -> None:
    """Reward a, for ever: a / (1 - 0.9), and the data's own about 0."""
    problem = make_problem(data(40), {"up": Constant(0.5), "down": Constant(-0.5)})
    result = values(problem, 0.9, 10)
    assert result.policies[0] == pytest.approx([5.0, -5.0], abs=1.5) and abs(result.data[0]) < 1.5
    low, high = np.percentile(result.policies[1:, 0] - result.data[1:], [2.5, 97.5])
    assert 0.0 < low < 5.0 < high + 1.5


def test_a_run_without_scores_is_judged_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"runs_dir": str(tmp_path), "algo.batch_size": 8, "algo.hidden": [8]}
    run = offrl.train("bc", data(), seeds=2, steps=3, quiet=True, settings=settings)
    config = run_settings(run.dir)
    assert judge(run, config, data()) == []  # a trial
    monkeypatch.setattr("offrl.ope.afterwards.TRIAL", 1)
    lines = judge(run, config, data())
    numbers = json.loads((run.dir / "estimate.json").read_text())
    assert "mean of 2 policies" in lines[1] and "offrl select" in lines[-1] and numbers["sound"]
    monkeypatch.setattr("offrl.ope.afterwards._estimate", None)
    assert judge(run, config, data()) == lines
    config.eval.estimate = False
    assert judge(run, config, data()) == []
