"""Behaviour in the maze: short walks that stay in a third of it each, so that no way to the goal from afar is in the
data in one piece.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from offrl.envs.text import maze
from offrl.envs.text.maze import Cell

EPISODES = 1_240
LONGEST = 40
SOLVED = 0.15  # share of the walks that take the shortest way
PARTS = ("aA", "bB", "AB.G")  # the letters of `maze.LAYOUT` that make up each part; A and B are where they meet


def part(letters: str) -> frozenset[Cell]:
    """The cells of a part of the maze."""
    return frozenset((i, j) for i, row in enumerate(maze.LAYOUT) for j, c in enumerate(row) if c in letters)


def generate(describe: str = "full", seed: int = 0, episodes: int = EPISODES) -> list[dict[str, Any]]:
    """Walks in the canonical form, as many in each part of the maze as in another, 15% by a solver and 85% at random,
    of at most U(1, 40) steps; they begin in a random cell of their part, and an action that would leave it is drawn
    again.

    The same seed gives the same walks in other words for another `describe`. A walk that its length cuts short is
    truncated. `meta`: the number of its part, and whether it was the solver's.
    """
    draw, env = np.random.Generator(np.random.PCG64(seed)), maze.TextMaze(describe)
    order = draw.permutation(episodes)
    parts = [part(letters) for letters in PARTS]
    walks = []
    for number in order.tolist():
        part_number, solver = number % len(PARTS), bool((number // len(PARTS) + 0.5) * len(PARTS) < SOLVED * episodes)
        walks.append(_walk(env, parts[part_number], solver, int(draw.integers(1, LONGEST + 1)), draw))
        walks[-1]["meta"] = {"part": part_number, "solver": solver}
    return walks


def _walk(
    env: maze.TextMaze, inside: frozenset[Cell], solver: bool, length: int, draw: np.random.Generator
) -> dict[str, Any]:
    starts, moves = sorted(inside - {maze.GOAL}), tuple(maze.MOVES)
    text, _ = env.reset(options={"start": starts[int(draw.integers(len(starts)))]})
    turns: list[dict[str, Any]] = []
    terminated = False
    while not terminated and len(turns) < length:
        move = maze.solve(env.position) if solver else moves[int(draw.integers(len(moves)))]
        while maze.after(env.position, move) not in inside:
            move = moves[int(draw.integers(len(moves)))]
        before, action = text, f"{move}\n"
        text, reward, terminated, _, _ = env.step(action)
        turns.append({"obs": before, "action": action, "reward": reward})
    return {"turns": turns, "final_obs": text, "terminated": terminated, "truncated": not terminated}
