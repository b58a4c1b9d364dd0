"""A point that walks to a goal behind a disc, in which each step costs 1: for limits of costs, with a known optimum.

Without a limit the best way is straight, through the disc; with the limit 0 it is along two tangents and the arc
between them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from offrl.envs.generated import GREEN, GREY, RED, BaseEnvironment, Info, Step, discs, raw_data, register_generated
from offrl.tasks.task import Task

if TYPE_CHECKING:
    from offrl.data.raw import RawData

NAME = "forbidden-disc"
ENV = "offrl/ForbiddenDisc-v0"
START, GOAL, RADIUS = np.array([-1.0, 0.0]), np.array([1.0, 0.0]), 0.8  # the disc is round (0, 0)
SPREAD, STEP, REACH, LIMIT = 0.05, 0.1, 0.2, 60  # of starts; of a step; of the goal; steps
EPISODES, NOISE = 600, 0.25  # in the data; standard deviation of its actions about the way


def move(position: np.ndarray, action: np.ndarray) -> tuple[np.ndarray, float, bool]:
    """The next position [2], what the step costs, and whether it reached the goal. Longer actions count as of length
    1.
    """
    position = position + STEP * action / max(1.0, float(np.linalg.norm(action)))
    return position, float(np.linalg.norm(position) < RADIUS), bool(np.linalg.norm(position - GOAL) <= REACH)


def fewest_steps(start: np.ndarray, around: bool) -> int:
    """The steps from `start` [2] to the goal along the shortest way, or the shortest that never enters the disc."""
    if not around:
        return math.ceil((float(np.linalg.norm(GOAL - start)) - REACH) / STEP)
    ends = [float(np.linalg.norm(end)) for end in (start, GOAL)]
    angle = math.acos(float(start @ GOAL) / (ends[0] * ends[1])) - sum(math.acos(RADIUS / end) for end in ends)
    length = RADIUS * angle + sum(math.sqrt(end**2 - RADIUS**2) for end in ends)
    return math.ceil((length - REACH) / STEP)


class ForbiddenDisc(BaseEnvironment):
    """Observation: x and y. Action: the direction of a step and its share of the longest, within the unit disc. Each
    step earns -1 until the goal is reached; `info["cost"]` is 1 within the disc.
    """

    metadata: Info = {"render_modes": ["rgb_array"], "render_fps": 15}  # noqa: RUF012  # Gymnasium declares it so

    def __init__(self, render_mode: str | None = None) -> None:
        self.observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float32)
        self.action_space = spaces.Box(-1.0, 1.0, (2,), np.float32)
        self.render_mode, self.position = render_mode, START

    def begin(self, options: Info) -> tuple[np.ndarray, Info]:
        self.position = START + self.np_random.uniform(-SPREAD, SPREAD, 2)
        return self.position.astype(np.float32), {}

    def step(self, action: np.ndarray) -> Step:
        self.position, cost, over = move(self.position, np.asarray(action, np.float64))
        return self.position.astype(np.float32), -1.0, over, False, {"cost": cost, "success": over}

    def render(self) -> np.ndarray | None:
        """A picture [200, 300, 3] uint8: the disc, the goal and the point."""
        if self.render_mode is None:
            return None
        spots = [(np.zeros(2), RADIUS, GREY), (GOAL, REACH, GREEN), (self.position, 0.05, RED)]
        return discs(np.array([1.5, 1.0]), (200, 300), spots)


gym.register(ENV, entry_point="offrl.envs.forbidden_disc:ForbiddenDisc", max_episode_steps=LIMIT)

TASK = Task(
    name=NAME, env_id=f"offrl.envs.forbidden_disc:{ENV}", max_episode_steps=LIMIT, observation_dim=2, action_dim=2
)
register_generated(TASK, lambda: generate(0, EPISODES))


def generate(seed: int, episodes: int) -> RawData:
    """Ways straight on and around, over two places at a height drawn from [-1.2, 1.2], with noise on each step."""
    draw = np.random.Generator(np.random.PCG64(seed))
    rows: list[dict[str, Any]] = []
    for _ in range(episodes):
        height = draw.uniform(-1.2, 1.2)
        position, waypoints = START + draw.uniform(-SPREAD, SPREAD, 2), [np.array([x, height]) for x in (-0.5, 0.5)]
        for t in range(LIMIT):
            while waypoints and np.linalg.norm(waypoints[0] - position) < 1.5 * STEP:
                waypoints.pop(0)
            heading = (waypoints[0] if waypoints else GOAL) - position
            action = heading / np.linalg.norm(heading) + NOISE * draw.standard_normal(2)
            action /= max(1.0, float(np.linalg.norm(action)))
            after, cost, over = move(position, action)
            rows.append(
                {
                    "observations": position,
                    "actions": action,
                    "rewards": -1.0,
                    "costs": cost,
                    "terminations": over,
                    "truncations": t + 1 == LIMIT and not over,
                    "next_observations": after,
                }
            )
            position = after
            if over:
                break
    from offrl.data.raw import canonical  # which imports torch

    columns = {name: canonical(name, np.array([row[name] for row in rows])) for name in rows[0]}
    return raw_data(columns, TASK, seed, action_low=np.float32(-1.0), action_high=np.float32(1.0))
