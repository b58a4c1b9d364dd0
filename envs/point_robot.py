"""A point in the plane and a goal that it is not shown, which makes a task: the point robot of offline meta-RL (arXiv
1903.08254; as in Meta-DT, arXiv 2410.11448)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from offrl.envs.generated import BaseEnvironment, Info, Step, raw_data, register_generated, side_by_side, task_number
from offrl.tasks.task import Task

if TYPE_CHECKING:
    from offrl.data.raw import RawData

NAME = "point-robot"
ENV = "offrl/PointRobot-v0"
LIMIT, REACH = 20, 0.1  # steps; the longest move along each axis
TASKS, EPISODES = 45, 40  # in the data
QUALITY = (0.0, 0.2, 0.5, 1.0)  # standard deviations of where the data's episodes go instead of the goal
NOISE = 0.03  # of their actions


def goal_of(task: int) -> np.ndarray:
    """The goal [2] of the task of that number, uniform in [-1, 1]**2."""
    return np.random.default_rng([2, task]).uniform(-1.0, 1.0, 2)


def best(position: np.ndarray, goal: np.ndarray) -> np.ndarray:
    """The optimal action [..., 2] at positions [..., 2]."""
    return np.clip(goal - position, -REACH, REACH)


class PointRobot(BaseEnvironment):
    """Observation: x and y. Action: how far to move along each, in [-0.1, 0.1]. Reward: minus the distance from the
    goal. It begins at 0 and never ends by itself.

    task: the number of the goal; None: another one in each episode, of those that are `held_out`.
    """

    held_out = range(1_000_000, 2_000_000)

    def __init__(self, task: int | None = None, render_mode: str | None = None) -> None:
        self.task, self.render_mode = task, render_mode
        self.observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float32)
        self.action_space = spaces.Box(-REACH, REACH, (2,), np.float32)
        self.goal, self.position = goal_of(task or 0), np.zeros(2)

    def begin(self, options: Info) -> tuple[np.ndarray, Info]:
        number = task_number(self)
        self.goal, self.position = goal_of(number), np.zeros(2)
        return self.position.astype(np.float32), {"task": number}

    def step(self, action: np.ndarray) -> Step:
        self.position = self.position + np.clip(np.asarray(action, np.float64), -REACH, REACH)
        return self.position.astype(np.float32), -float(np.linalg.norm(self.position - self.goal)), False, False, {}


gym.register(ENV, entry_point="offrl.envs.point_robot:PointRobot", max_episode_steps=LIMIT)


TASK = Task(name=NAME, env_id=f"offrl.envs.point_robot:{ENV}", max_episode_steps=LIMIT, observation_dim=2, action_dim=2)
register_generated(TASK, lambda: generate(0, TASKS, EPISODES))


def generate(seed: int, tasks: int, episodes: int, quality: tuple[float, ...] = QUALITY, first: int = 0) -> RawData:
    """`episodes` in each of the tasks `first`, ..., `first` + `tasks` - 1 of a point that goes, with noise, somewhere
    near the goal: how near on average is drawn for each episode from `quality`. Columns tasks and optimal_actions as
    well."""
    draw = np.random.Generator(np.random.PCG64(seed))
    number = np.repeat(np.arange(first, first + tasks), episodes)
    goal = np.stack([goal_of(int(n)) for n in number])
    aim = goal + draw.choice(quality, (len(number), 1)) * draw.standard_normal(goal.shape)
    position, parts = np.zeros_like(goal), []
    for _ in range(LIMIT):
        action = np.clip(best(position, aim) + NOISE * draw.standard_normal(goal.shape), -REACH, REACH)
        after = position + action
        parts.append(
            {
                "observations": position,
                "next_observations": after,
                "actions": action,
                "rewards": -np.linalg.norm(after - goal, axis=-1),
                "tasks": number,
                "optimal_actions": best(position, goal),
            }
        )
        position = after
    return raw_data(side_by_side(parts), TASK, seed, action_low=np.float32(-REACH), action_high=np.float32(REACH))
