"""The text tasks and datasets that can be named.

Their reference scores are LMRL-Gym's (arXiv 2311.18232, table of normalised scores): its minimum scores 0 and its
maximum 100, and between them a score is linear. LMRL-Gym itself normalises in two pieces, from the minimum (0) to the
average of its data (50) and from there to the maximum (100); with its averages (-83, -83, -4.12, 0.21, 0.586) that can
be had from a return.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from offrl.envs.text import maze, maze_data, wordle, wordle_play
from offrl.registry import register
from offrl.tasks.task import Task

if TYPE_CHECKING:
    from offrl.data.dataset import Dataset
    from offrl.settings.dataset import DatasetConfig

LABEL = "LMRL-Gym"
_STARTS: tuple[dict[str, Any], ...] = tuple({"start": list(cell)} for cell in maze.STARTS)  # as JSON has them
_MAZE = Task(
    name="text-maze",
    env_id=f"offrl.envs.text.maze:{maze.ENV}",
    env_kwargs={"describe": "full"},
    ref_min=-101.0,
    ref_max=-6.84,
    ref_label=LABEL,
    starts=_STARTS,
    note="episode e begins in cell e mod 25 of the 25; a score is linear between LMRL-Gym's minimum and maximum",
)
TASKS: dict[str, Task] = {
    "text-maze": _MAZE,
    "text-maze-compact": replace(
        _MAZE,
        name="text-maze-compact",
        env_kwargs={"describe": "compact"},
        note=f"{_MAZE.note}; observations are a row and a column",
    ),
    "text-maze-po": replace(
        _MAZE,
        name="text-maze-po",
        env_kwargs={"describe": "walls"},
        ref_max=-25.75,
        note=f"{_MAZE.note}; observations name walls alone",
    ),
    "text-wordle": Task(
        name="text-wordle",
        env_id=f"offrl.envs.text.wordle:{wordle.ENV}",
        ref_min=-6.0,
        ref_max=-1.94,
        ref_label=LABEL,
        note="a word list of offrl's own, a little easier than LMRL-Gym's: its best known player scores above 100",
    ),
    "text-chess": Task(
        name="text-chess",
        env_id="offrl.envs.text.chess_env:offrl/TextChess-v0",
        ref_min=-401.0,
        ref_max=1.0,
        ref_label=LABEL,
        note="against stockfish with a node limit; needs the packages chess and stockfish",
    ),
    "text-chess-endgames": Task(
        name="text-chess-endgames",
        env_id="offrl.envs.text.chess_env:offrl/TextChess-v0",
        env_kwargs={"endgames": True},
        ref_min=-1.0,
        ref_max=1.0,
        ref_label=LABEL,
        note="against stockfish with a node limit; needs the packages chess and stockfish",
    ),
    "text-nav": Task(
        name="text-nav",
        env_id="offrl.envs.text.textworld_env:offrl/TextNav-v0",
        ref_min=0.0,
        ref_max=1.0,
        ref_label=LABEL,
        note="needs the package textworld",
    ),
}
FAMILIES: dict[str, Callable[[str], Task]] = {
    "text-gem-": lambda name: Task(
        name=f"text-gem-{name}",
        env_id="offrl.envs.text.gem_env:offrl/TextGem-v0",
        env_kwargs={"name": name if ":" in name else f"game:{name}"},
        note="needs the package gem-llm",
    ),
    "text-babyai-": lambda name: Task(
        name=f"text-babyai-{name}",
        env_id="offrl.envs.text.babyai:offrl/TextBabyAI-v0",
        env_kwargs={"level": f"BabyAI-{name}"},
        note="needs the package minigrid",
    ),
}


@register("task", "text")
def lookup(name: str) -> Task | None:
    """A text task by its exact name, or by that of a family and of what it adapts: "text-gem-Hangman-v0-easy",
    "text-babyai-GoTo-v0". None for any other name."""
    if name in TASKS:
        return TASKS[name]
    for family, make in FAMILIES.items():
        if name.startswith(family) and len(name) > len(family):
            return make(name[len(family) :])
    return None


# walks in the maze (`maze_data.generate`), described in one way or another, and games of Wordle: the same each time
DATA: dict[str, Callable[[], list[dict[str, Any]]]] = {
    "text-maze": lambda: maze_data.generate("full"),
    "text-maze-compact": lambda: maze_data.generate("compact"),
    "text-maze-po": lambda: maze_data.generate("walls"),
    "text-wordle": wordle_play.generate,
}


def _loader(name: str) -> Callable[[DatasetConfig], Dataset]:
    def load(config: DatasetConfig) -> Dataset:
        from offrl.data.text.dataset import from_episodes

        return from_episodes(DATA[name](), name=name, task=TASKS[name], source="offrl")

    load.__qualname__ = f"text.{name}"
    return load


for _name in DATA:
    register("dataset", _name)(_loader(_name))
