"""The picture of a goal-conditioned run: what it is drawn for, which subgoals it shows, walls in their places, and
never an error.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from offrl import registry
from offrl.data.arrays import from_arrays
from offrl.data.dataset import Dataset, DataSpec
from offrl.envs import ogbench
from offrl.errors import UserError
from offrl.figures import goal_map
from offrl.settings.replicas import Replica
from offrl.tasks.environments import make_env
from offrl.tasks.task import Task
from offrl.training.engine import policies_of
from offrl.training.run.artifacts import FinishedRun, make_artifacts


def walks(normal: bool = False, name: str = "my-maze", **columns: Any) -> Dataset:
    """12 episodes of 9 rows in the plane; number 4 goes farthest."""
    rng = np.random.default_rng(0)
    steps = rng.uniform(-0.2, 0.2, (12, 9, 2))
    steps[4] = [0.7, 0.5]
    data = from_arrays(
        np.concatenate([np.cumsum(steps, 1), steps], -1).reshape(-1, 4), steps.reshape(-1, 2), np.zeros(108),
        truncations=np.arange(108) % 9 == 8, action_low=-1.0, action_high=1.0, name=name, task=Task(name), **columns,
    )  # fmt: skip
    if not normal:
        return data
    mean, std = (1.0, -1.0, 0.0, 0.0), (2.0, 0.5, 1.0, 1.0)
    shown = {
        k: (v - torch.tensor(mean)) / torch.tensor(std) if "observations" in k else v for k, v in data.columns.items()
    }
    return dataclasses.replace(
        data, columns=shown, spec=dataclasses.replace(data.spec, observation_mean=mean, observation_std=std)
    )


def trained(name: str, data: Dataset) -> tuple[Any, Any]:
    kind = registry.get("algo", name)
    algorithm = kind(kind.Config(hidden=[8], batch_size=4), data.spec)
    return algorithm, algorithm.init(0)


def test_which_data_are_of_a_maze() -> None:
    spec = DataSpec((4,), 2, name="x", task=Task("D4RL/pointmaze/umaze-v2"))
    assert goal_map.is_maze(spec) and goal_map.is_maze(
        dataclasses.replace(spec, task=Task("x", env_id="AntMaze_UMaze-v4"))
    )
    assert goal_map.is_maze(dataclasses.replace(spec, task=ogbench.lookup("humanoidmaze-giant-stitch-v0")))
    for other in (ogbench.lookup("antsoccer-arena-navigate-v0"), ogbench.lookup("cube-single-play-v0"), None):
        assert not goal_map.is_maze(dataclasses.replace(spec, task=other))
    assert not goal_map.is_maze(dataclasses.replace(spec, observation_shape=(64, 64, 3)))


class OneStep(registry.get("algo", "hiql")):  # type: ignore[misc]
    """Latents are goals; its high level asks for a place 1 to the right of where it is, but not beyond the goal."""

    def __init__(self) -> None:  # no networks
        self.config = SimpleNamespace(subgoal_steps=1)

    def represent(self, value: Any, observations: Tensor, goals: Tensor) -> Tensor:
        return goals

    def subgoals(self, state: Any, observations: Tensor, goals: Tensor) -> Tensor:
        return torch.minimum(observations + torch.tensor([1.0, 0.0]), goals)


class Params:
    params: dict[str, Any] = {"value": None}  # noqa: RUF012


def test_subgoals_lead_from_one_to_the_next_until_the_goal() -> None:
    places = torch.tensor([[3.0, 0.0], [0.0, 0.0], [1.1, 0.1], [2.1, 0.0], [7.0, 7.0]])
    start, goal = torch.tensor([0.0, 0.0]), torch.tensor([3.3, 0.0])
    found = goal_map.subgoals(OneStep(), Params(), start, goal, places, places)  # type: ignore[arg-type]
    assert found == [2, 3, 0]  # then 3.3, which is the goal itself
    assert goal_map.subgoals(OneStep(), Params(), start, torch.tensor([0.2, 0.0]), places, places) == []  # type: ignore[arg-type]
    stuck = places[[1, 4]]  # the nearest to what is asked for is where it is: it would ask for that again
    assert goal_map.subgoals(OneStep(), Params(), start, torch.tensor([30.0, 0.0]), stuck, stuck) == [0]  # type: ignore[arg-type]


@pytest.mark.rendered
@pytest.mark.parametrize("normal", [False, True])
def test_without_an_environment_long_episodes_are_shown(tmp_path: Path, normal: bool) -> None:
    data = walks(normal)
    scene = goal_map._scene_of_data(data)
    assert len(scene.panels) == 5 and scene.panels[0].title == "goal 1: the end of episode 4" and not len(scene.walls)
    first, plain = scene.panels[0], walks()
    np.testing.assert_allclose(first.goal, plain.columns["observations"][44].numpy(), atol=1e-5)  # as the data had it
    np.testing.assert_allclose(first.way, plain.columns["observations"][36:45, :2].numpy(), atol=1e-5)
    algorithm, state = trained("hiql" if normal else "gcbc", data)  # with distances and subgoals, and without
    goal_map.draw(
        tmp_path / "a.png", algorithm, state, policies_of(algorithm, stacked(state), [Replica(0)])[0], data, "seed 0"
    )
    header = (tmp_path / "a.png").read_bytes()[:24]
    assert header[1:4] == b"PNG" and int.from_bytes(header[16:20], "big") > 1000
    assert not list(tmp_path.glob("*.part"))


def stacked(state: Any) -> Any:
    return pytree.tree_map(lambda x: x.unsqueeze(0), state)


def test_a_picture_that_fails_is_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    data = walks()
    algorithm, state = trained("gcbc", data)
    run = FinishedRun(tmp_path, algorithm, data, [Replica(0)], stacked(state), "auto", True)
    for error, words in (
        (UserError("disk\nfull"), "no goal_map.png: disk full"),
        (ValueError("odd"), "ValueError: odd"),
    ):

        def fail(*x: Any, error: Exception = error) -> None:
            raise error

        monkeypatch.setattr(goal_map, "draw", fail)
        make_artifacts(algorithm, data.spec, lambda: run)
        printed = capsys.readouterr().err
        assert words in printed and printed.count("\n") == 1
    make_artifacts(algorithm, data.spec, lambda: dataclasses.replace(run, replicas=[]))  # all diverged
    other = dataclasses.replace(data, spec=dataclasses.replace(data.spec, name="hopper", task=None))
    make_artifacts(algorithm, other.spec, lambda: dataclasses.replace(run, dataset=other))
    assert not capsys.readouterr().err


@pytest.mark.skipif(importlib.util.find_spec("ogbench") is None, reason="needs the extra `ogbench`")
def test_walls_stand_where_the_maze_has_them() -> None:
    task = ogbench.lookup("pointmaze-medium-navigate-v0")
    assert task is not None
    env: Any = make_env(task)
    first, _ = env.reset(seed=0, options={"task_id": 1})
    walls = goal_map._walls(env, first[:2])
    maze = env.unwrapped.maze_map
    centres = {(round(x + w / 2, 4), round(y + h / 2, 4)) for x, y, w, h in walls}
    assert (
        centres == {(4.0 * j - 4, 4.0 * i - 4) for i, j in np.argwhere(maze == 1).tolist()}
        and (walls[:, 2:] == 4.0).all()
    )
    shifted = goal_map._walls(env, first[:2] + 3.0)  # an observation that counts from elsewhere
    np.testing.assert_allclose(shifted[:, :2], walls[:, :2] + 3.0, atol=1e-6)
