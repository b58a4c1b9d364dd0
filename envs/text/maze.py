"""LMRL-Gym's maze in words, fully and partially observed (arXiv 2311.18232, section 4 and appendix), written anew from
its rules.

Ten rows and thirteen columns, most of them walls, in the shape of two T's on the bar of a third; the goal is at the
foot of that one."""

from __future__ import annotations

from functools import cache
from typing import Any

import gymnasium as gym

from offrl.envs.generated import BaseEnvironment, Info, TextStep
from offrl.envs.text.space import AnyText
from offrl.errors import UserError, nearest

ENV = "offrl/TextMaze-v0"
# "#" wall, "G" goal; "a" and "b" belong to one of the two upper T's, "." to the lower one, "A" and "B" to an upper one
# and the lower one
LAYOUT = (
    "#############",
    "#aaaaa#bbbbb#",
    "###a#####b###",
    "###a#####b###",
    "###a#####b###",
    "###A.....B###",
    "######.######",
    "######.######",
    "######G######",
    "#############",
)
Cell = tuple[int, int]  # row, column
GOAL: Cell = (8, 6)
MOVES: dict[str, Cell] = {"move left": (0, -1), "move right": (0, 1), "move up": (-1, 0), "move down": (1, 0)}
ACTIONS = tuple(f"{move}\n" for move in MOVES)
SIDES: tuple[tuple[str, Cell], ...] = (
    ("to your right", (0, 1)),
    ("to your left", (0, -1)),
    ("above you", (-1, 0)),
    ("below you", (1, 0)),
)
STARTS: tuple[Cell, ...] = tuple((i, j) for i, row in enumerate(LAYOUT) for j, c in enumerate(row) if c not in "#G")
LIMIT = 101  # the step that fails
DESCRIBE = ("full", "compact", "walls")


def is_wall(cell: Cell) -> bool:
    """True where the cell is a wall."""
    return LAYOUT[cell[0]][cell[1]] == "#"


def after(cell: Cell, move: str) -> Cell:
    """The cell to which a move ("move left") leads: the same one where a wall is."""
    target = (cell[0] + MOVES[move][0], cell[1] + MOVES[move][1])
    return cell if is_wall(target) else target


@cache
def distances() -> dict[Cell, int]:
    """The number of moves from each cell to the goal."""
    known, border = {GOAL: 0}, [GOAL]
    for cell in border:  # it grows while it is read
        for move in MOVES:
            neighbour = after(cell, move)
            if neighbour not in known:
                known[neighbour] = known[cell] + 1
                border.append(neighbour)
    return known


def solve(cell: Cell) -> str:
    """The move of a shortest way to the goal; there is only one."""
    return min(MOVES, key=lambda move: distances()[after(cell, move)])


@cache
def words(cell: Cell, describe: str, spaced_digits: bool = False) -> str:
    """The observation in a cell, as text; see `TextMaze`."""
    if describe == "compact":
        return f"{cell[0]} {cell[1]}\n"
    walls = [side for side, (i, j) in SIDES if is_wall((cell[0] + i, cell[1] + j))]
    if not walls:
        walls_text = "There are no walls near you."
    elif len(walls) == 1:
        walls_text = f"There is a wall {walls[0]}."
    else:
        walls_text = f"There are walls {', '.join(walls)}."
    if describe == "walls":
        return f"{walls_text}\n"
    goal, position = (", ".join(" ".join(str(n)) if spaced_digits else str(n) for n in at) for at in (GOAL, cell))
    return f"The goal is at position {goal}. Your current position is at position {position}. {walls_text}\n"


class TextMaze(BaseEnvironment):
    """Find the goal. Rewards: 0 for reaching it, which ends the episode; -4 for an action that is none, which moves
    nobody; else -1, also for walking into a wall. Step 101 fails whatever is said: -1, no move, and the episode is
    truncated, so nobody who fails gets below -101 by moving.

    Actions: "move left", "move right", "move up", "move down"; a line break may follow. They are info["legal_actions"],
    with it; info["understood"] says whether the last one was one of them.
    describe: "full" (the goal's place, one's own and the walls, in sentences), "compact" (one's row and column alone,
    for tiny models) or "walls" (the sentence about walls alone: partially observed). spaced_digits: write column 10 as
    "1 0", as LMRL-Gym's own data do. `reset(options={"start": (row, column)})` says where to begin, else the seed does.
    Raises UserError for a start that is none."""

    metadata: Info = {"render_modes": ["ansi"], "render_fps": 4}  # noqa: RUF012  # Gymnasium declares it so

    def __init__(self, describe: str = "full", spaced_digits: bool = False, render_mode: str | None = None) -> None:
        if describe not in DESCRIBE:
            raise UserError(f"describe={describe}: choose one of {', '.join(DESCRIBE)}.{nearest(describe, DESCRIBE)}")
        self.describe, self.spaced_digits, self.render_mode = describe, spaced_digits, render_mode
        self.observation_space, self.action_space = AnyText(200), AnyText(1_000)
        self.position, self.steps = STARTS[0], 0

    def begin(self, options: Info) -> tuple[str, Info]:
        start = options.get("start")
        if start is None:
            self.position = STARTS[int(self.np_random.integers(len(STARTS)))]
        else:
            self.position = _start(start)
        self.steps = 0
        return self._said(), {"legal_actions": list(ACTIONS), "success": False}

    def step(self, action: str) -> TextStep:
        self.steps += 1
        failed = self.steps >= LIMIT
        move = action.removesuffix("\n") if isinstance(action, str) else ""
        reward = -1.0
        if not failed and move in MOVES:
            self.position = after(self.position, move)
        elif not failed:
            reward = -4.0
        success = self.position == GOAL
        info = {"legal_actions": list(ACTIONS), "success": success, "understood": move in MOVES}
        return self._said(), 0.0 if success else reward, success, failed and not success, info

    def render(self) -> Any:
        """The maze as lines of text, "@" in one's place."""
        rows = [list(row.translate(str.maketrans("abAB", "...."))) for row in LAYOUT]
        rows[self.position[0]][self.position[1]] = "@"
        return "\n".join("".join(row) for row in rows)

    def _said(self) -> str:
        return words(self.position, self.describe, self.spaced_digits)


def _start(start: Any) -> Cell:
    try:
        row, column = start
        cell = (int(row), int(column))
    except (TypeError, ValueError):
        cell = (-1, -1)
    if cell not in STARTS:
        raise UserError(
            f"start={start!r} is no cell to begin in; a row and a column of one of {', '.join(map(str, STARTS))}"
        )
    return cell


gym.register(ENV, entry_point="offrl.envs.text.maze:TextMaze")
