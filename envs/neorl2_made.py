"""Four tasks of NeoRL-2 (arXiv 2503.19267), made again from their definition: a pipeline whose outlet answers 19 steps
late, two masses between springs, a hopper on a floor of unknown friction, a cheetah with a speed limit.

They need no neorl2 package. Data are ours as well, of controllers of several qualities, so scores are not those that
NeoRL-2 publishes; of the pipeline there is a version without the past in its observations.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from offrl.envs.generated import BaseEnvironment, Info, Step, raw_data, side_by_side
from offrl.envs.neorl2 import TASKS
from offrl.registry import register
from offrl.tasks.task import Task

if TYPE_CHECKING:
    from offrl.data.raw import RawData

Array = np.ndarray
ROWS = 100_000  # of the data
NOISE = 0.2  # deviation of what is added to the controllers' actions
PAST = 25  # steps of the pipeline's past in its observations
FASTEST = 3.2096  # of the cheetah


class Plant(ABC):
    """n copies of a process, side by side. draw: its random numbers, from when episodes begin."""

    size: int  # A
    skills: tuple[float, ...]  # of the controllers of the data: 0 leaves out what a good one looks at, 1 does not

    @abstractmethod
    def __init__(self, draw: np.random.Generator, n: int) -> None: ...

    @abstractmethod
    def step(self, actions: Array) -> Array:
        """Rewards [n] of actions [n, A] in [-1, 1]."""

    @abstractmethod
    def observe(self) -> Array:
        """[n, O] float32."""

    def visible(self) -> Array:
        """What the controllers of the data look at."""
        return self.observe()

    @staticmethod
    @abstractmethod
    def control(observations: Array, skill: Any) -> Array:
        """Actions [n, A] for observations [n, O]; skill: a number, or [n, 1]."""


class Pipeline(Plant):
    """A pipe of 20 cells: a step sets the flow at the gate, clip(gate + a, 0, 200), and moves all flows on by a cell.
    The target is one of 50, 80, 110, 140, another one with probability 0.003 a step. Observed are the outlet, the
    target, and the last 25 outlets and actions, newest first. Reward ((200 - |outlet - target|) / 100)² - 3.

    The target is drawn when an episode begins; the neorl2 package keeps it over episodes.
    """

    size, skills, cells = 1, (0.0, 0.1, 0.2), 20

    def __init__(self, draw: np.random.Generator, n: int) -> None:
        self.draw = draw
        self.flows = np.repeat(draw.uniform(80.0, 120.0, (n, 1)), self.cells, 1)
        self.outlets, self.actions = np.repeat(self.flows[:, :1], PAST, 1), np.zeros((n, PAST))
        self.target = self._targets(n)

    def _targets(self, n: int) -> Array:
        return self.draw.choice([50.0, 80.0, 110.0, 140.0], n)

    def step(self, actions: Array) -> Array:
        n = len(actions)
        self.target = np.where(self.draw.random(n) < 0.003, self._targets(n), self.target)
        self.outlets = np.concatenate([self.flows[:, -1:], self.outlets[:, :-1]], 1)
        self.actions = np.concatenate([actions, self.actions[:, :-1]], 1)
        self.flows = np.concatenate([np.clip(self.flows[:, :1] + actions, 0.0, 200.0), self.flows[:, :-1]], 1)
        return ((200.0 - np.abs(self.flows[:, -1] - self.target)) * 0.01) ** 2 - 3.0

    def observe(self) -> Array:
        parts = [self.flows[:, -1:], self.target[:, None], self.outlets, self.actions]
        return np.concatenate(parts, 1).astype(np.float32)

    @staticmethod
    def control(observations: Array, skill: Any) -> Array:
        """Steer to the target what will be at the outlet; without skill what is there now."""
        outlet, target, actions = observations[:, :1], observations[:, 1:2], observations[:, 2 + PAST :]
        ahead = outlet + skill * actions[:, : Pipeline.cells - 1].sum(1, keepdims=True)
        return np.clip(0.2 * (target - ahead), -1.0, 1.0)


class BarePipeline(Pipeline):
    """The pipeline without its past: observed are the outlet and the target."""

    def observe(self) -> Array:
        return super().observe()[:, :2]

    def visible(self) -> Array:
        return super().observe()


class Masses(Plant):
    """Two masses of 20 between walls and each other, with springs of 2 and dampers of 4; Euler steps of 0.2, forces up
    to 30. Each has a target for the whole episode, or one for each half. Observed are positions, velocities and the
    targets of now. Reward -sum ln(|x - target| + 0.01).
    """

    size, skills, steps = 2, (0.3, 0.6, 1.0), 100
    springs, dampers = np.array([[4.0, -2.0], [-2.0, 4.0]]), np.array([[8.0, -4.0], [-4.0, 8.0]])

    def __init__(self, draw: np.random.Generator, n: int) -> None:
        self.positions, self.velocities = draw.uniform(-0.25, 0.25, (n, 2)), draw.uniform(-0.1, 0.1, (n, 2))
        pieces = draw.uniform(-1.5, 1.5, (n, 2, 2))  # of mass and half
        single = draw.random((n, 2)) < 0.5
        self.targets = np.where(single[..., None], pieces[..., :1], pieces)
        self.t = 0

    def _target(self) -> Array:
        return self.targets[:, :, int(self.t >= self.steps // 2)]

    def step(self, actions: Array) -> Array:
        forces = 30.0 * actions - self.positions @ self.springs - self.velocities @ self.dampers
        self.positions, self.velocities = self.positions + 0.2 * self.velocities, self.velocities + 0.01 * forces
        self.t += 1
        return -np.log(np.abs(self.positions - self._target()) + 0.01).sum(1)

    def observe(self) -> Array:
        return np.concatenate([self.positions, self.velocities, self._target()], 1).astype(np.float32)

    @staticmethod
    def control(observations: Array, skill: Any) -> Array:
        """Proportional and derivative, and with skill the force that holds the masses at their targets."""
        x, v, target = observations[:, :2], observations[:, 2:4], observations[:, 4:]
        return np.clip((15.0 * (target - x) - 25.0 * v + skill * (target @ Masses.springs)) / 30.0, -1.0, 1.0)


PLANTS: dict[str, type[Plant]] = {"Pipeline": Pipeline, "BarePipeline": BarePipeline, "DMSD": Masses}


class MadeEnvironment(BaseEnvironment):
    """One of `PLANTS`."""

    def __init__(self, plant: str) -> None:
        self.kind = PLANTS[plant]
        self.plant = self.kind(np.random.default_rng(0), 1)
        size = self.plant.observe().shape[1]
        self.observation_space = spaces.Box(-np.inf, np.inf, (size,), np.float32)
        self.action_space = spaces.Box(-1.0, 1.0, (self.kind.size,), np.float32)

    def begin(self, options: Info) -> tuple[Array, Info]:
        self.plant = self.kind(self.np_random, 1)
        return self.plant.observe()[0], {}

    def step(self, action: Array) -> Step:
        reward = self.plant.step(np.clip(np.asarray(action, np.float64), -1.0, 1.0)[None])
        return self.plant.observe()[0], float(reward[0]), False, False, {}


class RandomFrictionHopper(gym.Wrapper):
    """Gymnasium's Hopper-v5 with x and the friction observed, no reward for being upright, and in each episode another
    friction of the foot, uniform in 1.5 to 2.5, in the model to two digits."""

    def __init__(self, render_mode: str | None = None) -> None:
        options: dict[str, Any] = {"exclude_current_positions_from_observation": False, "render_mode": render_mode}
        super().__init__(gym.make("Hopper-v5", **options).unwrapped)
        self.friction, robot = 2.0, self.env.unwrapped
        self.foot = robot.model.geom("foot_geom").id  # type: ignore[attr-defined]
        self.observation_space = spaces.Box(-np.inf, np.inf, (13,), np.float64)

    def reset(self, *, seed: int | None = None, options: Info | None = None) -> tuple[Array, Info]:
        observation, info = self.env.reset(seed=seed, options=options)
        self.friction = self.env.unwrapped.np_random.uniform(1.5, 2.5)
        self.env.unwrapped.model.geom_friction[self.foot, 0] = round(self.friction, 2)  # type: ignore[attr-defined]
        return np.append(observation, self.friction), info

    def step(self, action: Array) -> Any:
        observation, _, terminated, truncated, info = self.env.step(action)
        reward = info["reward_forward"] + info["reward_ctrl"]
        return np.append(observation, self.friction), reward, terminated, truncated, info


class SafetyHalfCheetah(gym.Wrapper):
    """Gymnasium's HalfCheetah-v5 with x observed; a step faster than 3.2096 earns -100, and nothing else."""

    def __init__(self, render_mode: str | None = None) -> None:
        options: dict[str, Any] = {"exclude_current_positions_from_observation": False, "render_mode": render_mode}
        super().__init__(gym.make("HalfCheetah-v5", **options).unwrapped)

    def step(self, action: Array) -> Any:
        observation, reward, terminated, truncated, info = self.env.step(action)
        reward = -100.0 if info["x_velocity"] > FASTEST else reward
        return observation, reward, terminated, truncated, info


def generate(kind: type[Plant], task: Task, steps: int, rows: int = ROWS, seed: int = 0) -> RawData:
    """Whole episodes of at least `rows` rows: each of one of the controllers, with noise."""
    draw, parts = np.random.Generator(np.random.PCG64(seed)), []
    plant = kind(draw, -(-rows // steps))
    skill = draw.choice(kind.skills, (-(-rows // steps), 1))
    for _ in range(steps):
        observations, noise = plant.observe(), NOISE * draw.standard_normal((len(skill), kind.size))
        actions = np.clip(kind.control(plant.visible(), skill) + noise, -1.0, 1.0).astype(np.float32)
        rewards = plant.step(actions.astype(np.float64))
        after = plant.observe()
        parts.append({"observations": observations, "actions": actions, "rewards": rewards, "next_observations": after})
    return raw_data(side_by_side(parts), task, seed, action_low=np.float32(-1.0), action_high=np.float32(1.0))


def _act(kind: type[Plant], skill: float, observations: Array, rng: np.random.Generator) -> Array:
    actions = kind.control(np.asarray(observations, np.float64), skill)
    return np.clip(actions + NOISE * rng.standard_normal(actions.shape), -1.0, 1.0)


def controllers(kind: type[Plant]) -> dict[str, Callable[[Array, np.random.Generator], Array]]:
    """What recorded the data, as policies: {name: act(observations, rng)}."""
    return {f"skill-{skill:g}": partial(_act, kind, skill) for skill in kind.skills}


PIPELINE, MASSES = controllers(Pipeline), controllers(Masses)
MADE = {  # by the task's name: NeoRL-2's, the environment's id, what it is made with
    "made-pipeline": ("Pipeline", "offrl/MadePipeline-v0", {"plant": "Pipeline"}),
    "made-pipeline-bare": ("Pipeline", "offrl/MadeBarePipeline-v0", {"plant": "BarePipeline"}),
    "made-dmsd": ("DMSD", "offrl/MadeDMSD-v0", {"plant": "DMSD"}),
    "made-random-friction-hopper": ("RandomFrictionHopper", "offrl/MadeRandomFrictionHopper-v0", {}),
    "made-safety-halfcheetah": ("SafetyHalfCheetah", "offrl/MadeSafetyHalfCheetah-v0", {}),
}
for _name, (_published, _id, _kwargs) in MADE.items():
    _, _actions, _steps, _low, _high = TASKS[_published]
    _entry = "MadeEnvironment" if _kwargs else _published
    gym.register(_id, f"offrl.envs.neorl2_made:{_entry}", kwargs=_kwargs, max_episode_steps=_steps)
    _task = Task(
        name=_name,
        env_id=f"offrl.envs.neorl2_made:{_id}",
        max_episode_steps=_steps,
        ref_min=_low,
        ref_max=_high,
        ref_label="NeoRL-2",
        action_dim=_actions,
        note=f"NeoRL-2's {_published} made again, with data of ours: no score that NeoRL-2 publishes compares",
    )
    register("task", _name)(lambda name, task=_task: task if name == task.name else None)
    if _kwargs:
        _make = partial(generate, PLANTS[_kwargs["plant"]], _task, _steps)
        register("dataset", _name)(lambda config, make=_make: make())
