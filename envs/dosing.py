"""A drug that is given in doses: for limits of costs and for policies that leave what the data show, with an optimum
that a grid knows (`scripts/bench/dosing.py`).

The effect grows with the concentration in the blood up to `TARGET`; above `TOXIC` each step costs 1, so that the best
treatment breaks any limit. Doses above `REACTION` do harm, which the data do not show: none of theirs is as large.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from offrl.envs.generated import BaseEnvironment, Info, Step, raw_data, register_generated, side_by_side
from offrl.tasks.task import Task

if TYPE_CHECKING:
    from offrl.data.raw import RawData

NAME = "dosing"
ENV = "offrl/Dosing-v0"
KEEP, GAIN, NOISE = 0.8, 0.5, 0.06  # of the concentration from step to step; of a dose; of its logarithm
TARGET, TOXIC, REACTION, HARM = 1.5, 1.2, 0.8, 20.0
START, LIMIT = 0.4, 30  # largest first concentration; steps
EPISODES, LARGEST = 1000, 0.75  # of the data, and their largest dose


def follow(concentration: np.ndarray, dose: np.ndarray, noise: np.ndarray) -> np.ndarray:
    """The next concentration [...], noise being standard normal."""
    return (KEEP * concentration + GAIN * dose) * np.exp(NOISE * noise)


def reward(dose: np.ndarray, after: np.ndarray) -> np.ndarray:
    """[...] of a dose and the concentration after it."""
    return 1.0 - (after - TARGET) ** 2 - HARM * np.maximum(dose - REACTION, 0.0)


class Dosing(BaseEnvironment):
    """Observation: the concentration. Action: a dose of 0 to 1. `info["cost"]` is 1 above the toxic concentration."""

    def __init__(self) -> None:
        self.observation_space = spaces.Box(0.0, np.inf, (1,), np.float32)
        self.action_space = spaces.Box(0.0, 1.0, (1,), np.float32)
        self.concentration = np.zeros(1)

    def begin(self, options: Info) -> tuple[np.ndarray, Info]:
        self.concentration = self.np_random.uniform(0.0, START, 1)
        return self.concentration.astype(np.float32), {}

    def step(self, action: np.ndarray) -> Step:
        dose = np.clip(np.asarray(action, np.float64), 0.0, 1.0)
        self.concentration = follow(self.concentration, dose, self.np_random.standard_normal(1))
        after = self.concentration
        cost = float(after[0] > TOXIC)
        return after.astype(np.float32), float(reward(dose, after)[0]), False, False, {"cost": cost}


gym.register(ENV, entry_point="offrl.envs.dosing:Dosing", max_episode_steps=LIMIT)

TASK = Task(name=NAME, env_id=f"offrl.envs.dosing:{ENV}", max_episode_steps=LIMIT, observation_dim=1, action_dim=1)


def generate(seed: int, episodes: int) -> RawData:
    """Treatments towards concentrations of 0.5 to 1.4, with noise on each dose."""
    draw = np.random.Generator(np.random.PCG64(seed))
    concentration, aim = draw.uniform(0.0, START, (episodes, 1)), draw.uniform(0.5, 1.4, (episodes, 1))
    steps = []
    for _ in range(LIMIT):
        dose = (1.0 - KEEP) / GAIN * aim + 0.2 * (aim - concentration) + 0.08 * draw.standard_normal((episodes, 1))
        dose = np.clip(dose, 0.0, LARGEST)
        after = follow(concentration, dose, draw.standard_normal((episodes, 1)))
        columns = {"observations": concentration, "actions": dose, "next_observations": after}
        steps.append({**columns, "rewards": reward(dose, after)[:, 0], "costs": (after[:, 0] > TOXIC).astype(float)})
        concentration = after
    return raw_data(side_by_side(steps), TASK, seed, action_low=np.float32(0.0), action_high=np.float32(1.0))


register_generated(TASK, lambda: generate(0, EPISODES))
