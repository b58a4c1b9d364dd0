"""Today's Gymnasium environments seen through D4RL's eyes: its observations, rewards and endings, so that its data and
scores apply.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import gymnasium as gym
import mujoco
import numpy as np
from gymnasium import spaces

from offrl.envs.generated import Info, Step
from offrl.errors import UserError
from offrl.system import trust
from offrl.tasks.environments import register_robotics


def make_ant(**kwargs: Any) -> gym.Env:
    """Ant-v4 whose 27 numbers are followed by the 84 contact forces of gym's Ant-v2, which MuJoCo 2 left at zero (D4RL
    issue 143).
    """
    return PadObservation(_inner("Ant-v4", **kwargs), 111)


def make_kitchen(tasks: Sequence[str], **kwargs: Any) -> gym.Env:
    """FrankaKitchen-v1 with D4RL's flat observation of 60: 9 robot and 21 object positions, 30 goal positions; and
    D4RL's sensor noise.
    """
    names = [str(t) for t in tasks]
    inner = _robotics(
        "FrankaKitchen-v1", tasks_to_complete=names, robot_noise_ratio=0.1, object_noise_ratio=0.1, **kwargs
    )
    return Kitchen(inner, names)


def make_adroit(hand: str, **kwargs: Any) -> gym.Env:
    """A hand of gymnasium-robotics with D4RL's rewards. `hand` is pen, door, hammer or relocate."""
    return Adroit(_robotics(f"AdroitHand{hand.capitalize()}-v1", **kwargs), hand)


def _inner(env_id: str, **kwargs: Any) -> gym.Env:
    """The bare environment: time limit and order checks belong to the outside."""
    trust.check_environment(env_id)
    return gym.make(env_id, disable_env_checker=True, **kwargs).unwrapped


def _robotics(env_id: str, **kwargs: Any) -> gym.Env:
    register_robotics(env_id)
    return _inner(env_id, **kwargs)


class PadObservation(gym.ObservationWrapper):
    """Zeros after the observation, up to `size`."""

    def __init__(self, env: gym.Env, size: int) -> None:
        super().__init__(env)
        self.observation_space = spaces.Box(-np.inf, np.inf, (size,), np.float64)
        self._size = size

    def observation(self, observation: np.ndarray) -> np.ndarray:
        padded = np.zeros(self._size)
        padded[: len(observation)] = observation
        return padded


class Kitchen(gym.Wrapper):
    """See `make_kitchen`. Reward: sub-tasks completed in this step; the end: all of them done."""

    def __init__(self, env: gym.Env, tasks: list[str]) -> None:
        super().__init__(env)
        from gymnasium_robotics.envs.franka_kitchen.kitchen_env import OBS_ELEMENT_GOALS, OBS_ELEMENT_INDICES

        self.observation_space = spaces.Box(-np.inf, np.inf, (60,), np.float64)
        self._tasks, self._goal = tasks, np.zeros(30)
        for task in tasks:
            self._goal[OBS_ELEMENT_INDICES[task]] = OBS_ELEMENT_GOALS[task]

    def _convert(self, observation: dict[str, Any]) -> np.ndarray:
        # robot positions 9, robot velocities 9, object positions 21, object velocities 20
        flat = observation["observation"]
        return np.concatenate([flat[:9], flat[18:39], self._goal])

    def reset(self, *, seed: int | None = None, options: Info | None = None) -> tuple[np.ndarray, Info]:
        observation, info = self.env.reset(seed=seed)
        return self._convert(observation), info

    def step(self, action: np.ndarray) -> Step:
        observation, reward, terminated, truncated, info = self.env.step(action)
        info["success"] = len(info["episode_task_completions"]) / len(self._tasks)
        return self._convert(observation), float(reward), bool(terminated), bool(truncated), info


def _distance(first: np.ndarray, second: np.ndarray) -> float:
    return float(np.linalg.norm(first - second))


class Adroit(gym.Wrapper):
    """See `make_adroit`. gymnasium-robotics 1.2 to 1.4 reward the palm's distance from the handle, hammer or ball,
    where D4RL punishes it, and let a dropped pen go on, where D4RL ends the episode."""

    def __init__(self, env: gym.Env, hand: str) -> None:
        super().__init__(env)
        self._hand = hand
        self._reward: Callable[[], tuple[float, bool]] = {
            "pen": self._pen,
            "door": self._door,
            "hammer": self._hammer,
            "relocate": self._relocate,
        }[hand]
        self._ids: dict[tuple[Any, str], int] = {}

    def step(self, action: np.ndarray) -> Step:
        observation, _, _, truncated, info = self.env.step(action)
        reward, dropped = self._reward()
        return observation, reward, dropped, bool(truncated), info

    def _at(self, name: str, kind: Any = mujoco.mjtObj.mjOBJ_SITE) -> np.ndarray:
        """The position of a site or body, by name."""
        base: Any = self.unwrapped
        key = (kind, name)
        if key not in self._ids:
            self._ids[key] = mujoco.mj_name2id(base.model, kind, name)
            if self._ids[key] < 0:
                raise UserError(
                    f"AdroitHand{self._hand.capitalize()}-v1 has no '{name}': this gymnasium-robotics is too new for "
                    "offrl"
                )
        return (base.data.site_xpos if kind == mujoco.mjtObj.mjOBJ_SITE else base.data.xpos)[self._ids[key]]

    def _object(self) -> np.ndarray:
        return self._at("Object", mujoco.mjtObj.mjOBJ_BODY)

    def _pen(self) -> tuple[float, bool]:
        pen, target = (
            self._at("object_top") - self._at("object_bottom"),
            self._at("target_top") - self._at("target_bottom"),
        )
        similarity = float(pen @ target / (np.linalg.norm(pen) * np.linalg.norm(target)))
        distance = _distance(self._object(), self._at("eps_ball"))
        dropped = bool(self._object()[2] < 0.075)
        near = distance < 0.075
        return similarity - distance + 10.0 * (near and similarity > 0.9) + 50.0 * (
            near and similarity > 0.95
        ) - 5.0 * dropped, dropped

    def _door(self) -> tuple[float, bool]:
        base: Any = self.unwrapped
        hinge = float(base.data.joint("door_hinge").qpos[0])
        reach = _distance(self._at("S_grasp"), self._at("S_handle"))
        reward = -0.1 * reach - 0.1 * (hinge - 1.57) ** 2 - 1e-5 * float(np.sum(base.data.qvel**2))
        return reward + 2.0 * (hinge > 0.2) + 8.0 * (hinge > 1.0) + 10.0 * (hinge > 1.35), False

    def _hammer(self) -> tuple[float, bool]:
        base: Any = self.unwrapped
        tool, nail = self._at("tool"), self._at("S_target")
        depth = _distance(nail, self._at("nail_goal"))
        reward = -0.1 * _distance(self._at("S_grasp"), self._object()) - _distance(tool, nail)
        reward -= 10.0 * depth + 1e-2 * float(np.linalg.norm(base.data.qvel))
        return reward + 2.0 * bool(self._object()[2] > 0.04 and tool[2] > 0.04) + 25.0 * (depth < 0.02) + 75.0 * (
            depth < 0.01
        ), False

    def _relocate(self) -> tuple[float, bool]:
        ball, palm, target = self._object(), self._at("S_grasp"), self._at("target")
        distance = _distance(ball, target)
        reward = -0.1 * _distance(palm, ball)
        if ball[2] > 0.04:
            reward += 1.0 - 0.5 * _distance(palm, target) - 0.5 * distance
        return reward + 10.0 * (distance < 0.1) + 20.0 * (distance < 0.05), False


for _name, _entry in (("Ant", "make_ant"), ("Kitchen", "make_kitchen"), ("Adroit", "make_adroit")):
    gym.register(f"offrl/D4RL-{_name}-v0", entry_point=f"offrl.envs.compat:{_entry}")
