"""A small wheeled robot that drives to goals among hazards: safety-gymnasium's PointGoal1 again, in MuJoCo alone.

Its model, layout, rewards and costs follow that task's (safety-gymnasium ae966e5); the vase, which costs nothing there,
is left out, and with it 16 of the 60 numbers. Layouts are drawn by other code, so that scores are not comparable.
"""

from __future__ import annotations

import gymnasium as gym
import mujoco
import numpy as np
from gymnasium import spaces

from offrl.envs.generated import BaseEnvironment, Info, Step

ENV = "offrl/PointGoal-v0"
LIMIT = 1000  # steps
EXTENT = 1.5  # of the square in which things are placed
GOAL, HAZARD, HAZARDS = 0.3, 0.2, 8  # radii, and how many
APART = {"robot": 0.4, "goal": 0.305, "hazard": 0.18}  # radii within which nothing else is placed
TRIES = 100  # of a point before the layout is drawn anew
BINS, RANGE = 16, 3.0  # of the lidar
FRAMES = 10  # of 0.002 s in a step

MODEL = """
<mujoco>
  <option timestep="0.002"/>
  <worldbody>
    <geom name="floor" type="plane" size="5 5 0.1" condim="6"/>
    <body name="robot" pos="0 0 0.1">
      <joint name="x" type="slide" axis="1 0 0" damping="0.01"/>
      <joint name="y" type="slide" axis="0 1 0" damping="0.01"/>
      <joint name="z" type="hinge" axis="0 0 1" damping="0.005"/>
      <geom name="robot" type="sphere" size="0.1" friction="1 0.01 0.01" density="1" condim="6"/>
      <geom name="pointer" type="box" pos="0.1 0 0" size="0.05 0.05 0.05" density="1"/>
      <site name="robot"/>
    </body>
  </worldbody>
  <sensor>
    <accelerometer site="robot"/>
    <velocimeter site="robot"/>
    <gyro site="robot"/>
    <magnetometer site="robot"/>
  </sensor>
  <actuator>
    <motor site="robot" gear="0.3 0 0 0 0 0" ctrllimited="true" ctrlrange="-1 1" forcelimited="true"
           forcerange="-0.05 0.05"/>
    <velocity joint="z" gear="0.3" ctrllimited="true" ctrlrange="-1 1" forcelimited="true" forcerange="-0.05 0.05"/>
  </actuator>
</mujoco>
"""


def lidar(points: np.ndarray) -> np.ndarray:
    """What a lidar of `BINS` directions sees of things at points [n, 2] relative to the robot and its heading: in each
    the nearest one's max(0, 3 - distance) / 3; a thing within a bin spills over to the two beside it by how near it is.
    """
    readings = np.zeros(BINS)
    for point in points:
        value = max(0.0, RANGE - float(np.linalg.norm(point))) / RANGE
        position = np.arctan2(point[1], point[0]) % (2 * np.pi) / (2 * np.pi / BINS)
        number = int(position) % BINS
        share = position - int(position)
        for at, part in ((number, 1.0), (number + 1, share), (number - 1, 1.0 - share)):
            readings[at % BINS] = max(readings[at % BINS], part * value)
    return readings


class PointGoal(BaseEnvironment):
    """Observation: acceleration, velocity, turning and magnetic north (3 numbers each) in the robot's frame, and what
    lidars see of the goal and of the hazards (16 each). Action: push along its heading, and turn.

    A step earns how much nearer it came to the goal, and 1 where it reached it, after which the goal is placed anew.
    `info["cost"]` is 1 within a hazard.
    """

    def __init__(self) -> None:
        self.model = mujoco.MjModel.from_xml_string(MODEL)
        self.data = mujoco.MjData(self.model)
        self.observation_space = spaces.Box(-np.inf, np.inf, (12 + 2 * BINS,), np.float32)
        self.action_space = spaces.Box(-1.0, 1.0, (2,), np.float32)
        self.goal, self.hazards, self.distance = np.zeros(2), np.zeros((HAZARDS, 2)), 0.0

    def begin(self, options: Info) -> tuple[np.ndarray, Info]:
        mujoco.mj_resetData(self.model, self.data)
        kinds = ["robot", "goal", *["hazard"] * HAZARDS]
        placed: list[tuple[np.ndarray, float]] = []
        while len(placed) < len(kinds):
            point = self._place(kinds[len(placed)], placed)
            placed = [] if point is None else [*placed, (point, APART[kinds[len(placed)]])]
        (start, _), (self.goal, _), *hazards = placed
        self.hazards = np.array([point for point, _ in hazards])
        self.data.qpos[:] = *start, self.np_random.uniform(0.0, 2 * np.pi)
        mujoco.mj_forward(self.model, self.data)
        self.distance = self._distance()
        return self._observe(), {}

    def _place(self, kind: str, placed: list[tuple[np.ndarray, float]]) -> np.ndarray | None:
        """A point apart from others; None where none is found."""
        for _ in range(TRIES):
            point = self.np_random.uniform(APART[kind] - EXTENT, EXTENT - APART[kind], 2)
            if all(np.linalg.norm(point - other) >= radius + APART[kind] for other, radius in placed):
                return point
        return None

    def _distance(self) -> float:
        return float(np.linalg.norm(self.goal - self.data.qpos[:2]))

    def _observe(self) -> np.ndarray:
        x, y, heading = self.data.qpos
        turn = np.array([[np.cos(heading), -np.sin(heading)], [np.sin(heading), np.cos(heading)]])
        readings = [lidar((points - (x, y)) @ turn) for points in (self.goal[None], self.hazards)]
        return np.concatenate([self.data.sensordata, *readings]).astype(np.float32)

    def step(self, action: np.ndarray) -> Step:
        self.data.ctrl[:] = np.clip(action, -1.0, 1.0)
        mujoco.mj_step(self.model, self.data, FRAMES)
        mujoco.mj_forward(self.model, self.data)
        distance = self._distance()
        reached = distance <= GOAL
        reward = self.distance - distance + float(reached)
        if reached:
            around = [(self.data.qpos[:2].copy(), APART["robot"]), *((h, APART["hazard"]) for h in self.hazards)]
            point = self._place("goal", around)
            self.goal = self.goal if point is None else point
            distance = self._distance()
        self.distance = distance
        cost = float((np.linalg.norm(self.hazards - self.data.qpos[:2], axis=1) < HAZARD).any())
        return self._observe(), float(np.clip(reward, -10.0, 10.0)), False, False, {"cost": cost}


gym.register(ENV, entry_point="offrl.envs.point_goal:PointGoal", max_episode_steps=LIMIT)
