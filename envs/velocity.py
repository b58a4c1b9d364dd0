"""MuJoCo's robots with a limit of their speed, as safety-gymnasium's velocity tasks: a step above it costs 1.

Rewards, endings and physics are those of Gymnasium's v4 robots, as there; so are the thresholds, half the speed of a
converged policy of PPO, and the reference returns DSRL's (arXiv 2306.09303).
"""

from __future__ import annotations

import re
from typing import Any

import gymnasium as gym
import numpy as np

from offrl.registry import register
from offrl.system import trust
from offrl.tasks.task import Task

# robot: (threshold, whether speed is that in the plane, DSRL's smallest and largest return of an episode)
ROBOTS: dict[str, tuple[float, bool, float | None, float | None]] = {
    "Ant": (2.6222, True, 6.1519, 2976.2766),
    "HalfCheetah": (3.2096, False, 5.7510, 2806.9331),
    "Hopper": (0.7402, False, 37.0515, 1911.3967),
    "Humanoid": (1.4149, True, None, None),
    "Swimmer": (0.2282, False, 0.0711, 238.9583),
    "Walker2d": (2.3415, False, 18.6685, 3418.2239),
}
LIMIT = 1000  # steps
DSRL = re.compile(r"Safety([A-Z][a-z0-9]+[A-Za-z0-9]*)Velocity(Gymnasium)?-v1\b.*")


class VelocityCost(gym.Wrapper):
    """`info["cost"]` is 1 after a step of more than `threshold` along x, or in the plane, and else 0."""

    def __init__(self, env: gym.Env, threshold: float, planar: bool) -> None:
        super().__init__(env)
        self.threshold, self.planar = threshold, planar

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        observation, reward, terminated, truncated, info = self.env.step(action)
        speed = np.hypot(info["x_velocity"], info["y_velocity"]) if self.planar else info["x_velocity"]
        return observation, reward, terminated, truncated, {**info, "cost": float(speed > self.threshold)}


def make(robot: str, **kwargs: Any) -> gym.Env:
    """`robot` is one of `ROBOTS`."""
    trust.check_environment(f"{robot}-v4")
    threshold, planar, *_ = ROBOTS[robot]
    return VelocityCost(gym.make(f"{robot}-v4", disable_env_checker=True, **kwargs).unwrapped, threshold, planar)


for _robot in ROBOTS:
    gym.register(
        f"offrl/{_robot}Velocity-v0",
        entry_point="offrl.envs.velocity:make",
        max_episode_steps=LIMIT,
        kwargs={"robot": _robot},
    )


def task_of(robot: str) -> Task:
    """The task of a robot of `ROBOTS`."""
    *_, low, high = ROBOTS[robot]
    return Task(
        name=f"{robot}Velocity",
        env_id=f"offrl.envs.velocity:offrl/{robot}Velocity-v0",
        max_episode_steps=LIMIT,
        ref_min=low,
        ref_max=high,
        ref_label="" if low is None else "DSRL",
    )


@register("task_guess", "dsrl")
def guess(stem: str) -> Task | None:
    """The task of a file of DSRL's by its name, SafetyHopperVelocityGymnasium-v1-250-2240; None for other names."""
    match = DSRL.fullmatch(stem)
    return task_of(match[1]) if match and match[1] in ROBOTS else None
