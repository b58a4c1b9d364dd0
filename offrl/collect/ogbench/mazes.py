"""Point mazes, driven towards the next cell on the way to a goal."""

from __future__ import annotations

from typing import Any

import numpy as np

from offrl.collect.config import CollectConfig
from offrl.collect.ogbench.rows import Rows, empty, keep

MAZE_NOISE = 0.5  # OGBench's --noise
STITCH_CELLS, EXPLORE_STEPS = 4, 10


def cells(maze: np.ndarray) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """(free cells, those that are no straight corridor: ends, corners and junctions) of a map whose walls are 1."""
    free = [(int(i), int(j)) for i, j in np.argwhere(maze == 0)]

    def corridor(i: int, j: int) -> bool:
        north, south, west, east = (maze[i + a, j + b] == 0 for a, b in ((-1, 0), (1, 0), (0, -1), (0, 1)))
        return (north and south and not west and not east) or (west and east and not north and not south)

    return free, [c for c in free if not corridor(*c)]


def at_distance(maze: np.ndarray, start: tuple[int, int], steps: int) -> list[tuple[int, int]]:
    """The cells whose shortest way from `start` has `steps` steps."""
    ring, visited = [start], {start}
    for _ in range(steps):
        after = dict.fromkeys((i + a, j + b) for i, j in ring for a, b in ((-1, 0), (1, 0), (0, -1), (0, 1)))
        ring = [
            c
            for c in after
            if c not in visited and 0 <= c[0] < maze.shape[0] and 0 <= c[1] < maze.shape[1] and maze[c] == 0
        ]
        visited |= set(ring)
    return ring


def play_maze(env: Any, config: CollectConfig, seed: int) -> Rows:
    """One episode: towards the next cell on the way to the goal, with noise; navigate draws a new goal at each one
    reached.
    """
    base = env.unwrapped
    free, vertices = cells(base.maze_map)

    def draw(options: list[tuple[int, int]]) -> tuple[int, int]:
        return options[np.random.randint(len(options))]

    start = draw(free)
    goal = (
        draw(at_distance(base.maze_map, start, STITCH_CELLS) or [start]) if config.kind == "stitch" else draw(vertices)
    )
    observation, _ = env.reset(seed=seed, options={"task_info": {"init_ij": start, "goal_ij": goal}})
    noise = MAZE_NOISE if config.oracle_noise is None else config.oracle_noise
    rows = empty(base)
    direction, over, step = np.zeros(2), False, 0
    while not over:
        if config.kind != "explore":
            position = base.get_xy()
            direction = base.get_oracle_subgoal(position, base.cur_goal_xy)[0] - position
        elif step % EXPLORE_STEPS == 0:
            direction = np.random.normal(size=2)
        unit = direction / (np.linalg.norm(direction) + 1e-6)
        action = np.clip(unit + np.random.normal(0.0, noise, 2), -1.0, 1.0)
        next_observation, _, terminated, truncated, info = env.step(action)
        over = bool(terminated or truncated)
        keep(rows, observation, action, over, info)
        if info["success"] and config.kind == "navigate":
            base.set_goal(goal_xy=base.add_noise(base.ij_to_xy(draw(vertices))))
        observation, step = next_observation, step + 1
    return rows
