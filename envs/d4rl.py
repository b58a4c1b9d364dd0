"""D4RL's names: where each dataset lies, which returns score 0 and 100, and which environment scores a policy today.

The numbers are data (`d4rl.json`); `d4rl` and old gym are never imported. docs/environments.md says what differs from
D4RL's environments."""

from __future__ import annotations

import functools
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from offrl.registry import register
from offrl.tasks.task import Task

# same reference scores for all their data
_ONE_SCALE = ("hopper", "halfcheetah", "walker2d", "ant", "pen", "hammer", "door", "relocate")


@functools.cache
def table() -> dict[str, tuple[str, float, float, int | None]]:
    """name -> (URL, return that scores 0, return that scores 100, steps of an episode), for every D4RL dataset."""
    root = _data()["root"]
    return {name: (root + path, low, high, steps) for name, (path, low, high, steps) in _data()["tasks"].items()}


@functools.cache
def files() -> dict[str, tuple[int, str]]:
    """URL -> (bytes, SHA-256 in hexadecimal digits), for the files of which both are known."""
    return {_data()["root"] + path: (size, digest) for path, (size, digest) in _data()["files"].items()}


@functools.cache
def _data() -> dict[str, Any]:
    return json.loads((Path(__file__).parent / "d4rl.json").read_text())


@register("task", "d4rl")
def lookup(name: str) -> Task | None:
    """The task of a D4RL dataset by its exact name, such as "hopper-medium-v2"; None for any other name."""
    if name not in table():
        return None
    url, low, high, steps = table()[name]
    family = _data()["families"][name.partition("-")[0]]
    return Task(
        name=name,
        env_id=family["env_id"],
        env_kwargs={**family.get("kwargs", {}), **_variant(name)},
        max_episode_steps=steps,
        ref_min=low,
        ref_max=high,
        ref_label="D4RL",
        ref_envs=tuple(family.get("same", ())),
        observation_dim=family["observations"],
        action_dim=family["actions"],
        url=url,
        file=files().get(url),
        note=family["note"],
    )


@register("task_names", "d4rl")
def names() -> list[str]:
    """The names of all D4RL datasets, robot by robot."""
    return list(table())


@register("task_guess", "d4rl")
def guess(stem: str) -> Task | None:
    """The task that a file called `stem` probably belongs to, or None: "hopper_medium", "walker2d-mine-v2", a name of
    D4RL's own files.

    The result keeps the file's name and has no URL. Callers check its dimensions against the data before they trust it.
    """
    name = re.sub(r"\.(hdf5|h5|npz)$", "", stem.lower()).replace("_", "-")
    task = _nearest_known(name)
    return replace(task, name=name, url=None) if task is not None else None


def _nearest_known(name: str) -> Task | None:
    known = table()
    for candidate in (name, name + "-v2", name + "-v1", name + "-v0"):
        if candidate in known:
            return lookup(candidate)
    for other, (url, *_) in known.items():  # files keep odd names: Ant_maze_big-maze_noisy_..., mini_kitchen_...
        if url.rsplit("/", 1)[1].partition(".")[0].lower().replace("_", "-") == name:
            return lookup(other)
    family = name.partition("-")[0]
    if family in _ONE_SCALE:
        return lookup(next(n for n in reversed(known) if n.startswith(family + "-")))
    longest = max(
        (n for n in known if (name + "-").startswith(n.rpartition("-")[0] + "-")),
        key=lambda n: (len(n), n),
        default=None,
    )
    return lookup(longest) if longest else None


def _variant(name: str) -> dict[str, Any]:
    """The settings that distinguish the environments of one family: the maze and its reward, the kitchen's tasks."""
    parts = name.split("-")[1:-1]
    if name.startswith("maze2d-"):
        size = next(w for w in parts if w in ("open", "umaze", "medium", "large"))
        return {"maze": size + ("-eval" if "eval" in parts else ""), "dense": "dense" in parts}
    if name.startswith("antmaze-"):
        size = next(w for w in parts if w in ("umaze", "medium", "large"))
        return {"maze": size + ("-eval" if "eval" in parts else "")}
    if name.startswith("kitchen-"):
        third = ["bottom burner", "light switch"] if "mixed" in parts else ["light switch", "slide cabinet"]
        return {"tasks": ["microwave", "kettle", *third]}
    return {}
