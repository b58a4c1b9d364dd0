"""The environments of `envs/stitch.py` and `envs/chain.py`, in which their stitched routes are scored."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from offrl.envs import chain
from offrl.envs.generated import GREEN, GREY, RED, BaseEnvironment, Info, Step, discs
from offrl.envs.stitch import EDGE, ENV, LIMIT, PLACES, REACH, SPREAD, move


class PointStitch(BaseEnvironment):
    """Observation: x and y. Action: how far to move along each, in [-1, 1]. `info["success"]`: the goal G was
    reached.
    """

    metadata: Info = {"render_modes": ["rgb_array"], "render_fps": 15}  # noqa: RUF012  # Gymnasium declares it so

    def __init__(self, render_mode: str | None = None) -> None:
        self.observation_space = spaces.Box(-EDGE.astype(np.float32), EDGE.astype(np.float32), dtype=np.float32)
        self.action_space = spaces.Box(-1.0, 1.0, (2,), np.float32)
        self.render_mode = render_mode
        self.position = np.array(PLACES["A"])

    def begin(self, options: Info) -> tuple[np.ndarray, Info]:
        self.position = np.array(PLACES["A"]) + self.np_random.uniform(-SPREAD, SPREAD, 2)
        return self.position.astype(np.float32), {"success": False}

    def step(self, action: np.ndarray) -> Step:
        self.position, reward, over = move(self.position, np.asarray(action, np.float64))
        success = over and bool(np.linalg.norm(self.position - np.array(PLACES["G"])) <= REACH)
        return self.position.astype(np.float32), reward, over, False, {"success": success}

    def render(self) -> np.ndarray | None:
        """A picture [200, 350, 3] uint8: the ends' discs and the point."""
        if self.render_mode is None:
            return None
        colours = {"D": (230, 170, 80), "X": GREY, "G": GREEN}
        spots = [(PLACES[name], REACH, colour) for name, colour in colours.items()]
        return discs(EDGE, (200, 350), [*spots, (self.position, 0.04, RED)])


class ChainStitch(BaseEnvironment):
    """Observation: x and y of the cell, halved. Action: 0 to 3, along +x, -x, +y or -y. `info["success"]`: the goal G
    was reached.
    """

    def __init__(self) -> None:
        self.observation_space = spaces.Box(-1.0, 2.0, (2,), np.float32)
        self.action_space = spaces.Discrete(len(chain.MOVES))
        self.cell = chain.START

    def begin(self, options: Info) -> tuple[np.ndarray, Info]:
        self.cell = chain.START
        return chain.observe(self.cell), {"success": False}

    def step(self, action: int) -> Step:
        self.cell, reward, over = chain.move(self.cell, int(action))
        return chain.observe(self.cell), reward, over, False, {"success": self.cell == chain.GOAL}


gym.register(chain.ENV, entry_point="offrl.envs.point:ChainStitch", max_episode_steps=chain.LIMIT)
gym.register(ENV, entry_point="offrl.envs.point:PointStitch", max_episode_steps=LIMIT)
