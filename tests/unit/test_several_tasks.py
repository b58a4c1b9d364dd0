"""Multi-task data of tasks of other sizes: their form, their environment, training, scores, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import offrl
from offrl.data import Dataset, DatasetConfig, load_dataset
from offrl.data.arrays import from_arrays
from offrl.data.dataset import DataSpec
from offrl.data.transforms.multitask import as_tasks
from offrl.errors import UserError
from offrl.evaluation.studies import study_of
from offrl.export.dimensions import range_of, tasks_of, units_of
from offrl.finetuning.outcome import play_regrets
from offrl.runs.record import directory
from offrl.settings.compose import compose
from offrl.settings.evaluation import EvalConfig
from offrl.tasks.environments import episode_limit, make_env, resolve_task
from offrl.tasks.multitask import MultiTaskEnv
from offrl.tasks.task import Task, TaskPart, task_from_json

PENDULUM = Task("swing", env_id="Pendulum-v1", ref_min=-1000.0, ref_max=0.0)
CAR = Task("car", env_id="MountainCarContinuous-v0", ref_min=0.0, ref_max=100.0)
BOTH = Task(
    "swing + car",
    starts=({"task": 0}, {"task": 1}),
    parts=(TaskPart(PENDULUM, 3, (-2.0,), (2.0,)), TaskPart(CAR, 2, (-1.0,), (1.0,))),
)
OWN: dict[str, dict[str, Any]] = {
    "tdmpc2": {"algo.latent": 8, "algo.encoder_hidden": [8], "algo.planning": False},
    "brc": {"algo.critic_hidden": [8]},
}
SMALL: dict[str, Any] = {
    "algo.hidden": [8],
    "algo.batch_size": 8,
    "compile": "eager",
    "workers": 1,
    "eval.workers": 0,
    "eval.episodes": 2,
    "eval.max_steps": 5,
    "quiet": True,
}


def some(columns: int = 2, actions: int = 1, rows: int = 20, high: float = 1.0, **more: Any) -> Dataset:
    g, flags = np.random.default_rng(0), np.arange(rows) % 10 == 9
    return from_arrays(g.normal(size=(rows, columns)), high * g.uniform(-1, 1, (rows, actions)), np.ones(rows),
                       np.zeros(rows, bool), flags, action_low=[-high] * actions, action_high=[high] * actions,
                       **more)  # fmt: skip


def test_one_form_of_two_sizes() -> None:
    first, second = as_tasks([some(2, 1, high=2.0), some(3, 2)])
    assert first.spec.observation_shape == second.spec.observation_shape == (4,)
    assert first.spec.action_low == (-1.0, -1.0) and first.spec.task == second.spec.task is not None
    for name in ("observations", "next_observations"):
        own = some(2, 1, high=2.0).columns[name]
        assert torch.equal(first.columns[name], torch.cat([own, torch.zeros(20, 2)], 1))
        assert torch.equal(second.columns[name][:, 3], torch.ones(20))
    assert torch.equal(first.columns["actions"][:, :1], some(2, 1, high=2.0).columns["actions"])
    assert torch.equal(first.columns["actions"][:, 1], torch.zeros(20))
    parts = first.spec.task.parts
    assert [(p.observation_dim, p.action_high) for p in parts] == [(2, (2.0,)), (3, (1.0, 1.0))]
    assert DataSpec.from_json(json.loads(json.dumps(first.spec.to_json()))) == first.spec


def test_the_folder_of_long_names(tmp_path: Path) -> None:
    long = [some(name=letter * 80) for letter in "abcd"]
    folder = directory(compose({"algo": "brc", "runs_dir": str(tmp_path)}), as_tasks(long)[0])
    folder.mkdir()
    assert folder.name.startswith("brc-aaa") and len(folder.name) < 170


def test_the_column_tasks_of_one_dataset() -> None:
    data = load_dataset(DatasetConfig(name="point-robot", multitask=True))
    assert data.spec.observation_shape == (3,) and data.spec.task is not None
    assert data.spec.name == "point-robot (45 tasks)"  # whose scores are none of its single task's
    assert len(data.spec.task.parts) == 45 and data.spec.task.parts[7].task.env_kwargs == {"task": 7}
    plain = load_dataset("point-robot")
    assert torch.equal(data.columns["observations"][:, 2].long(), plain.columns["tasks"].long())


def test_the_environment_plays_the_task_that_is_asked_for() -> None:
    env = make_env(BOTH)
    assert isinstance(env, MultiTaskEnv) and env.observation_space.shape == (4,)
    for number, task, action in ((0, PENDULUM, 2.0), (1, CAR, 1.0)):
        alone = make_env(task)
        first, _ = alone.reset(seed=3)
        row, _ = env.reset(seed=3, options={"task": number})
        assert row.dtype == np.float32 and row.tolist() == [*first.tolist(), *[0.0] * number, float(number)]
        after, reward, *_ = alone.step(np.array([action], np.float32))
        row, gain, *_ = env.step(np.array([1.0], np.float32))
        assert (row[: len(after)].tolist(), gain) == (after.tolist(), reward)
        alone.close()
    assert episode_limit(env, BOTH, None) == 999  # the car's; the pendulum's is 200
    drawn = {env.reset(seed=seed)[0][-1] for seed in range(8)}
    assert drawn == {0.0, 1.0}
    with pytest.raises(UserError, match="robust=rrls is not for policies of several tasks"):
        study_of("rrls", env, BOTH.name)
    with pytest.raises(UserError, match="there is no task 2: 0 is swing, 1 is car"):
        env.reset(options={"task": 2})
    env.close()


def test_a_part_that_does_not_fit_its_environment() -> None:
    wrong = Task("a", starts=({"task": 0},), parts=(TaskPart(CAR, 3, (-1.0,), (1.0,)),))
    with pytest.raises(UserError, match="task 0, car, has observations of 3 numbers and 1 actions"):
        make_env(wrong).reset()


def test_scores_by_the_references_of_each_task() -> None:
    returns = np.array([[-500.0, 50.0, 0.0, 100.0]])
    assert BOTH.score(returns, None).tolist() == [[50.0, 50.0, 100.0, 100.0]]
    without = Task("a", starts=BOTH.starts, parts=(*BOTH.parts[:1], TaskPart(Task("b"), 2, (-1.0,), (1.0,))))
    assert without.score(returns, None) is None


def test_play_of_several_tasks_has_no_regret() -> None:
    """Episodes do not say of which task they are, by whose references they would be scored."""
    assert play_regrets(PENDULUM, [{"start": "task", "length": 9, "return": -500.0, "success": None}]) == (0.5, 0.5)
    assert play_regrets(BOTH, [{"start": "task", "length": 9, "return": -500.0, "success": None}]) is None


def test_the_tasks_of_one_environment_alone() -> None:
    played = resolve_task(BOTH, EvalConfig(env="MountainCarContinuous-v0"))
    assert played is not None and played.starts == ({"task": 1},) and played.parts == BOTH.parts
    assert resolve_task(BOTH, EvalConfig(env="none")) is None
    with pytest.raises(UserError, match="CartPole-v1 is of no task that the policy learnt: Pendulum-v1, Mountain"):
        resolve_task(BOTH, EvalConfig(env="CartPole-v1"))


@pytest.mark.parametrize("damage", [3, [3], [{}], [{"task": {"name": "a"}, "observation_dim": 0, "action_low": [0.0],
                                                     "action_high": [1.0]}]])  # fmt: skip
def test_a_damaged_list_of_tasks(damage: Any) -> None:
    with pytest.raises(UserError, match="the file is damaged: its task is none that offrl writes"):
        task_from_json({"name": "a", "parts": damage})


@pytest.mark.parametrize(
    ("datasets", "message"),
    [
        ([some()], "nothing says of which task a row of"),
        ([some(tasks=np.arange(20))], "episode 0 belongs to two tasks"),
        (
            [from_arrays(np.zeros((4, 2)), np.zeros(4, int), np.zeros(4), np.arange(4) == 3, num_actions=2)] * 2,
            "is for vectors and continuous actions, and .* has discrete actions",
        ),
    ],
)
def test_data_that_are_refused(datasets: list[Dataset], message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        as_tasks(datasets)
    assert "\n" not in str(error.value)


def test_what_an_exported_file_says() -> None:
    spec = as_tasks([some(2, 1, high=2.0, name="a"), some(3, 2, name="b")])[0].spec
    assert "numbers as its environment gives them, zeros up to 3, and last its number" in units_of(spec, False)
    assert "in [-1, 1]" in range_of(spec)
    assert tasks_of(spec) == [
        {"number": 0, "name": "a", "environment": None, "observations": 2, "low": [-2.0], "high": [2.0]},
        {"number": 1, "name": "b", "environment": None, "observations": 3, "low": [-1.0] * 2, "high": [1.0] * 2},
    ]


def test_settings_that_are_refused() -> None:
    with pytest.raises(UserError, match="multitask=true: normalize_observations is of a single task's"):
        DatasetConfig(multitask=True, normalize_observations=True).validate()
    with pytest.raises(
        UserError,
        match=r"iql learns one task, and point-robot \(45 tasks\) is of several \(dataset.multitask\): take brc, td",
    ):
        offrl.train("iql", "point-robot", steps=1, **{"dataset.multitask": True})


@pytest.mark.slow
@pytest.mark.parametrize("name", OWN)
def test_a_run_of_two_tasks(name: str, tmp_path: Path) -> None:
    """Scores of each, resumed runs on data and in the environments with the same bits, and a file that acts alike."""
    settings = {
        **SMALL,
        **OWN[name],
        "dataset.multitask": True,
        "dataset.concatenate": ["drawn-pendulum-state"],
        "runs_dir": str(tmp_path),
    }
    whole = offrl.train(name, "point-robot", steps=4, name="whole", seeds=2, **settings)
    row = whole.final_scores[0]
    assert [part.partition(":")[0] for part in row["score_by_task"].split()] == ["0", "1"]
    offrl.train(name, "point-robot", steps=2, name="part", seeds=2, **settings)
    part = offrl.train(resume=str(tmp_path / "part"), steps=4, quiet=True)
    same_policies(whole, part)
    evaluation = whole.evaluate(episodes=2, max_steps=5)
    assert evaluation.rows()[0]["score_by_task"] == row["score_by_task"]
    assert evaluation.rows()[0]["q_overestimation"] is None
    policy = whole.policy(seed=1)
    width = policy.spec.observation_dim
    actions = policy.act(np.array([[0.0] * width, [0.0] * (width - 1) + [1.0]], np.float32))
    assert actions.shape == (2, 2) and actions[1, 1] == 0.0 != actions[0, 1]
    with pytest.raises(UserError, match="last number is its task's, and there is no task 2: 0 is point-robot"):
        policy.act(np.full(width, 2.0, np.float32))

    play: dict[str, Any] = {"warmup": 8, "max_steps": 5, "eval.workers": 0, "eval.episodes": 2, "eval.max_steps": 5}
    play |= {"mixing": 0.5, "quiet": True, "compile": "eager", "runs_dir": str(tmp_path)}
    online = offrl.finetune(str(tmp_path / "whole"), steps=16, name="online", **play)
    offrl.finetune(str(tmp_path / "whole"), steps=12, name="half", **play)
    same_policies(online, offrl.finetune(resume=str(tmp_path / "half"), steps=16, quiet=True))


def same_policies(one: Any, other: Any) -> None:
    params = [run.policy(seed=1).state.params for run in (one, other)]
    for module, tensors in params[0].items():
        assert all(torch.equal(x, params[1][module][name]) for name, x in tensors.items())
