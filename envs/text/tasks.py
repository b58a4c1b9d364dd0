"""The text tasks and datasets that can be named.

Their reference scores are LMRL-Gym's (arXiv 2311.18232, table of normalised scores): its minimum scores 0 and its
maximum 100, and between them a score is linear. LMRL-Gym itself normalises in two pieces, from the minimum (0) to the
average of its data (50) and from there to the maximum (100); with its averages (-83, -83, -4.12, 0.21, 0.586) that can
be had from a return.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offrl.envs.text import maze, maze_data, wordle_play
from offrl.registry import register
from offrl.tasks.task import Task

if TYPE_CHECKING:
    from offrl.data.dataset import Dataset

LABEL = "LMRL-Gym"
_STARTS: tuple[dict[str, Any], ...] = tuple({"start": list(cell)} for cell in maze.STARTS)  # as JSON has them
_ROWS: dict[str, dict[str, Any]] = json.loads((Path(__file__).parent / "tasks.json").read_text(encoding="utf-8"))
TASKS = {
    name: Task(name=name, ref_label=LABEL, starts=_STARTS if name.startswith("text-maze") else (), **row)
    for name, row in _ROWS.items()
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


def _load(name: str) -> Dataset:
    from offrl.data.text.dataset import from_episodes

    return from_episodes(DATA[name](), name=name, task=TASKS[name], source="offrl")


for _name in DATA:
    register("dataset", _name)(lambda config, name=_name: _load(name))
