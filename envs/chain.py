"""The crossing of `envs/stitch.py` as a chain of few cells with four actions: one choice at A and one at M decide
everything.

        G
        |
D - A - M - X
        |
        B

Three cells from one letter to the next (A - M two steps), each episode of the data along one way: A -> M -> X earns 1,
A -> D 1.5, B -> M -> G 2; A -> M -> G, which no episode takes, would earn 3. Episodes that are scored begin at A.

For methods that compare what one step is worth: on the plane a step off the best way costs next to nothing, here it
costs the way."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from offrl.envs.generated import of_steps, raw_data, register_generated
from offrl.envs.stitch import BEST, DECOY, NOTE
from offrl.tasks.task import Task

if TYPE_CHECKING:
    from offrl.data.raw import RawData

NAME = "chain-stitch"
ENV = "offrl/ChainStitch-v0"
Cell = tuple[int, int]
HEIGHTS: dict[Cell, float] = {  # a step earns what it climbs; there are no other cells
    (-2, 0): 1.5, (-1, 0): 0.75, (0, 0): 0.0, (1, 0): 0.5, (2, 0): 1.0, (3, 0): 1.0, (4, 0): 1.0,
    (2, -2): 1.0, (2, -1): 1.0, (2, 1): 2.0, (2, 2): 3.0,
}  # fmt: skip
START, GOAL = (0, 0), (2, 2)
ENDS: tuple[Cell, ...] = ((-2, 0), (4, 0), GOAL)
MOVES: tuple[Cell, ...] = ((1, 0), (-1, 0), (0, 1), (0, -1))  # actions 0 to 3
LIMIT = 20  # steps
WASTED = 0.15  # share of the data's actions that are drawn at random
EPISODES = 300
# share of the episodes, start, moves
KINDS = ((0.45, START, (0, 0, 0, 0)), (0.3, START, (1, 1)), (0.25, (2, -2), (2, 2, 2, 2)))


def move(cell: Cell, action: int) -> tuple[Cell, float, bool]:
    """One step: the next cell, the reward, and whether the episode ends. Where there is no cell one stays."""
    after = cell[0] + MOVES[action][0], cell[1] + MOVES[action][1]
    after = after if after in HEIGHTS else cell
    return after, HEIGHTS[after] - HEIGHTS[cell], after in ENDS


def observe(cell: Cell) -> np.ndarray:
    """x and y of a cell, float32 [2]."""
    return np.array(cell, np.float32) / 2.0


TASK = Task(
    name=NAME,
    env_id=f"offrl.envs.point:{ENV}",
    max_episode_steps=LIMIT,
    ref_min=DECOY,
    ref_max=BEST,
    ref_label="offrl",
    observation_dim=2,
    note=NOTE,
)


def generate() -> RawData:
    """Ways of `KINDS` with actions in between that were drawn at random."""
    draw = np.random.Generator(np.random.PCG64(0))
    kinds = np.searchsorted(np.cumsum([share for share, _, _ in KINDS])[:-1], (np.arange(EPISODES) + 0.5) / EPISODES)
    rows = [row for kind in draw.permutation(kinds) for row in play(KINDS[kind][1], KINDS[kind][2], draw)]
    return raw_data(of_steps(rows), TASK, 0, num_actions=len(MOVES))


register_generated(TASK, generate)


def play(start: Cell, moves: tuple[int, ...], draw: np.random.Generator) -> list[tuple[Any, ...]]:
    """The rows of an episode that makes these moves in turn, and others that lead nowhere new in between."""
    rows: list[tuple[Any, ...]] = []
    cell, remaining, ended = start, list(moves), False
    while not ended:
        action = remaining[0]
        if draw.random() < WASTED and len(rows) < LIMIT - len(remaining):
            walls = [a for a in range(len(MOVES)) if move(cell, a)[0] == cell]
            action = int(draw.choice(walls)) if walls else action
        if action == remaining[0]:
            remaining.pop(0)
        after, reward, ended = move(cell, action)
        rows.append((observe(cell), action, np.float32(reward), ended, False, observe(after)))
        cell = after
    return rows
