"""D4RL's point and ant mazes on today's MuJoCo, in D4RL's coordinates, with its models, rewards, starts, goals and
endings.

gymnasium-robotics' mazes put the origin in the middle, turn the y axis round, drive the ant with five times the torque
at twice the rate and place the goal anew for an observation that shows it: a policy trained on D4RL's data cannot act
there. Hence these.
"""

from __future__ import annotations

import functools
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import gymnasium as gym
import mujoco
import numpy as np
from gymnasium import spaces
from gymnasium.envs.mujoco import mujoco_rendering

from offrl.envs.generated import BaseEnvironment, Info, Step

POINT_MAZES = {  # "#" wall, "G" goal, "." free; the first index grows downwards and is x
    "open": "####### #.....# #..G..# #.....# #######",
    "umaze": "##### #G..# ###.# #...# #####",
    "umaze-eval": "##### #..G# #.### #...# #####",
    "medium": "######## #..##..# #..#...# ##...### #..#...# #.#..#.# #...#.G# ########",
    "medium-eval": "######## #.....G# #.#.##.# #....#.# ###..### #......# #..##..# ########",
    "large": "############ #....#.....# #.##.#.#.#.# #......#...# #.####.###.# #..#.#.....# ##.#.#.#.### #..#...#.G.# "
    "############",
    "large-eval": "############ #..#...#.G.# ##.###.#.#.# #..#.#.....# #.##.#..##.# #......#...# #.##.#.#.### "
    "#....#.....# ############",
}
ANT_MAZES = {  # "S" start, which is the origin; the second index is x
    "umaze": "##### #S..# ###.# #G..# #####",
    "umaze-eval": "##### #..S# #.### #..G# #####",
    "medium": "######## #S.##..# #..#...# ##...### #..#...# #.#..#.# #...#.G# ########",
    "medium-eval": "######## #S....G# #.#.##.# #....#.# ###..### #......# #..##..# ########",
    "large": "############ #S...#.....# #.##.#.#.#.# #......#...# #.####.###.# #..#.#.....# ##.#.#.#.### #..#...#.G.# "
    "############",
    "large-eval": "############ #S.#...#.G.# ##.###.#.#.# #..#.#.....# #.##.#..##.# #......#...# #.##.#.#.### "
    "#....#.....# ############",
}
ANT_SCALE = 4.0  # metres per cell
REACH = 0.5  # metres from the goal that count as there


def _cells(maze: str, kind: str) -> list[tuple[int, int]]:
    return [(i, j) for i, line in enumerate(maze.split()) for j, cell in enumerate(line) if cell in kind]


class _Maze(BaseEnvironment):
    """A MuJoCo model from XML text; subclasses say what a step does."""

    metadata: Info = {"render_modes": ["human", "rgb_array", "depth_array"]}  # noqa: RUF012  # Gymnasium declares it so

    def __init__(self, xml: str, frame_skip: int, observations: int, render_mode: str | None, **render: Any) -> None:
        self.model = mujoco.MjModel.from_xml_string(xml)
        self.data = mujoco.MjData(self.model)
        self.frame_skip, self.render_mode, self._render = frame_skip, render_mode, render
        self.metadata = {**self.metadata, "render_fps": round(1.0 / (self.model.opt.timestep * frame_skip))}
        self.observation_space = spaces.Box(-np.inf, np.inf, (observations,), np.float64)
        self.action_space = spaces.Box(-1.0, 1.0, (self.model.nu,), np.float32)
        self.goal = np.zeros(2)
        self._renderer: Any = None

    def set_state(self, qpos: np.ndarray, qvel: np.ndarray) -> None:
        """Put the simulator into a state, as Gymnasium's MuJoCo environments do."""
        mujoco.mj_resetData(self.model, self.data)
        self.data.qpos[:], self.data.qvel[:] = qpos, qvel
        # one that the XML puts at 0 0 0 would stay there
        self.model.site("target").pos[:2] = self.goal + self._origin()
        mujoco.mj_forward(self.model, self.data)

    def _origin(self) -> np.ndarray:
        return np.zeros(2)

    def _simulate(self, action: np.ndarray) -> None:
        self.data.ctrl[:] = np.clip(action, -1.0, 1.0)
        mujoco.mj_step(self.model, self.data, nstep=self.frame_skip)

    def _get_obs(self) -> np.ndarray:
        return np.concatenate([self.data.qpos, self.data.qvel])

    def _told(self) -> Info:
        """The info of a reset: "goal" is the current observation moved to the goal, for goal-conditioned policies (as
        HIQL's on D4RL).
        """
        observation = self._get_obs()
        observation[:2] = self.goal
        return {"success": False, "goal": observation}

    def _distance(self) -> float:
        return float(np.linalg.norm(self.data.qpos[:2] - self.goal))

    def render(self) -> Any:
        """A frame in the environment's render mode, by Gymnasium's own MuJoCo renderer."""
        if self.render_mode is None:
            raise gym.error.ResetNeeded("make the environment with a render_mode to render it")
        if self._renderer is None:
            size = self.model.vis.global_.offwidth, self.model.vis.global_.offheight  # without them Gymnasium 1.4 fails
            self._renderer = mujoco_rendering.MujocoRenderer(self.model, self.data, self._render, *size)
        return self._renderer.render(self.render_mode)

    def close(self) -> None:
        if self._renderer is not None:
            self._renderer.close()
            self._renderer = None


class Maze2d(_Maze):
    """A ball pushed through a maze. Observation: x, y and their velocities. Reward: 1 near the goal, or exp(-distance).
    Never ends.
    """

    def __init__(self, maze: str = "umaze", dense: bool = False, render_mode: str | None = None) -> None:
        text = POINT_MAZES[maze]
        super().__init__(_point_xml(text), 1, 4, render_mode, distance=12.5 if maze.startswith("large") else 8.8)
        self.dense = dense
        self._starts = np.array(_cells(text, ".") + _cells(text, "G"), dtype=np.float64)
        self.goal = np.array(_cells(text, "G")[0], dtype=np.float64)

    def _origin(self) -> np.ndarray:
        return np.ones(2)

    def begin(self, options: Info) -> tuple[np.ndarray, Info]:
        start = self._starts[self.np_random.integers(len(self._starts))]
        self.set_state(start + self.np_random.uniform(-0.1, 0.1, 2), 0.1 * self.np_random.standard_normal(2))
        return self._get_obs(), {**self._told(), "success": self._distance() <= REACH}

    def step(self, action: np.ndarray) -> Step:
        np.clip(self.data.qvel, -5.0, 5.0, out=self.data.qvel)
        self._simulate(action)
        distance = self._distance()
        success = distance <= REACH
        return (
            self._get_obs(),
            float(np.exp(-distance)) if self.dense else float(success),
            False,
            False,
            {"success": success},
        )


class AntMaze(_Maze):
    """An ant in a maze. Observation: 15 positions (x, y first) and 14 velocities. Reward 1, and the end, within 0.5 m
    of a hidden goal.
    """

    def __init__(self, maze: str = "umaze", render_mode: str | None = None) -> None:
        text = ANT_MAZES[maze]
        super().__init__(_ant_xml(text), 5, 29, render_mode, distance=40.0)
        self._zero = np.array(_cells(text, "S")[0])
        self._rest = self.data.qpos.copy()
        self._goal_cell = np.array(_cells(text, "G")[0])

    def begin(self, options: Info) -> tuple[np.ndarray, Info]:
        centre = (self._goal_cell - self._zero)[::-1] * ANT_SCALE
        noise = self.np_random.uniform(0.0, 0.25 * ANT_SCALE, 2) + self.np_random.uniform(0.0, 0.125 * ANT_SCALE, 2)
        self.goal = np.maximum(centre + noise, 0.0)
        qpos = self._rest + self.np_random.uniform(-0.1, 0.1, self.model.nq)
        self.set_state(qpos, 0.1 * self.np_random.standard_normal(self.model.nv))
        return self._get_obs(), self._told()

    def step(self, action: np.ndarray) -> Step:
        self._simulate(action)
        success = self._distance() <= REACH
        return self._get_obs(), float(success), success, False, {"success": success}


@functools.cache
def _point_xml(maze: str) -> str:
    walls = "".join(
        f'<geom conaffinity="1" type="box" pos="{i + 1} {j + 1} 0" size="0.5 0.5 0.2" rgba="0.7 0.5 0.3 1"/>'
        for i, j in _cells(maze, "#")
    )
    return f"""<mujoco model="maze2d">
      <compiler inertiafromgeom="true" angle="radian"/>
      <option timestep="0.01" gravity="0 0 0" iterations="20" integrator="Euler"/>
      <default>
        <joint damping="1" limited="false"/>
        <geom friction="0.5 0.1 0.1" density="1000" margin="0.002" condim="1" contype="2" conaffinity="1"/>
      </default>
      <worldbody>
        <light pos="4 4 10" dir="0 0 -1" directional="true"/>
        <geom name="ground" type="plane" size="40 40 0.25" pos="0 0 -0.1" contype="1" conaffinity="0" rgba="0.2 0.3 0.4 1"/>
        <body name="particle" pos="1.2 1.2 0">
          <geom type="sphere" size="0.1" contype="1" rgba="0.2 0.4 0.9 1"/>
          <joint name="ball_x" type="slide" axis="1 0 0"/>
          <joint name="ball_y" type="slide" axis="0 1 0"/>
        </body>
        <site name="target" pos="1 1 0" size="0.2" rgba="0.6 0.3 0.3 1"/>
        {walls}
      </worldbody>
      <actuator>
        <motor joint="ball_x" ctrlrange="-1 1" ctrllimited="true" gear="100"/>
        <motor joint="ball_y" ctrlrange="-1 1" ctrllimited="true" gear="100"/>
      </actuator>
    </mujoco>"""  # noqa: E501


@functools.cache
def _ant_xml(maze: str) -> str:
    """Gymnasium's ant with D4RL's time step, contact softness and torques (30 where Gymnasium has 150), among walls."""
    import gymnasium.envs.mujoco as package

    root = ET.parse(Path(package.__file__).parent / "assets" / "ant.xml").getroot()
    _find(root, "option").set("timestep", "0.02")
    geom = _find(root, "default/geom")
    geom.set("solref", "0.02 1")
    geom.set("solimp", "0.8 0.8 0.01")
    for motor in root.iter("motor"):
        motor.set("gear", "30")
    world = _find(root, "worldbody")
    height, half = 0.25 * ANT_SCALE, 0.5 * ANT_SCALE
    zero = _cells(maze, "S")[0]
    for i, j in _cells(maze, "#"):
        x, y = (j - zero[1]) * ANT_SCALE, (i - zero[0]) * ANT_SCALE
        shape = {"type": "box", "pos": f"{x} {y} {height}", "size": f"{half} {half} {height}"}
        ET.SubElement(world, "geom", shape | {"contype": "1", "conaffinity": "1", "rgba": "0.7 0.5 0.3 1"})
    ET.SubElement(world, "site", {"name": "target", "pos": "1 1 0", "size": "0.5", "rgba": "0.8 0.2 0.2 0.6"})
    return ET.tostring(root, encoding="unicode")


def _find(root: ET.Element, path: str) -> ET.Element:
    element = root.find(path)
    if element is None:
        raise RuntimeError(f"Gymnasium's ant.xml has no <{path}>")
    return element


gym.register("offrl/D4RL-Maze2d-v0", entry_point="offrl.envs.mazes:Maze2d")
gym.register("offrl/D4RL-AntMaze-v0", entry_point="offrl.envs.mazes:AntMaze")
