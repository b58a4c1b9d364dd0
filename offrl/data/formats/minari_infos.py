"""What Minari datasets hold under infos, by path."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from offrl.data.formats.minari_episodes import episodes
from offrl.data.tables.names import USUAL


def costs_of(folder: Path, form: str) -> dict[str, tuple[str, ...]]:
    """The path under infos of what steps cost, as the first episode has it by name; {} where it has none."""
    for episode in episodes(folder, form, 0):
        infos = episode.infos()
        names = [name for name in USUAL["costs"] if f"infos/{name}" in infos]
        return {"costs": (names[0],)} if names else {}
    return {}


def info_leaves(folder: Path, form: str) -> list[str]:
    """The paths of the infos that every episode has, with one shape or type; text is left out."""
    common: dict[str, Any] | None = None
    for episode in episodes(folder, form, 0):
        infos = episode.infos()
        common = infos if common is None else {k: v for k, v in common.items() if infos.get(k) == v}
        if not common:
            break
    return list(common or {})
