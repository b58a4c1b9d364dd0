"""What goes wrong in JSON values that a script writes."""

from __future__ import annotations

import copy
from typing import Any

from tests.fuzz.drafts import Rng

JUNK = (
    None,
    True,
    False,
    -1,
    0,
    1,
    2,
    10**10,
    1e308,
    -0.5,
    float("nan"),
    "",
    "x",
    "3",
    [],
    [1],
    [[1, 2]],
    {},
    {"type": "Box"},
    "episode_0",
)


def json_slip(lines: list[Any], rng: Rng) -> str:
    """Drop, rename, copy or replace a value somewhere inside a list of JSON values, in place."""
    place: Any = lines
    path: list[Any] = []
    while True:
        keys = sorted(place) if isinstance(place, dict) else list(range(len(place)))
        if not keys:
            place.append(JUNK[int(rng.integers(len(JUNK)))]) if isinstance(place, list) else place.update(x=1)
            return f"{path}: something more"
        key = keys[int(rng.integers(len(keys)))]
        path.append(key)
        if not isinstance(place[key], dict | list) or (path[1:] and rng.random() < 0.35):
            break
        place[key] = copy.copy(place[key])
        place = place[key]
    action = str(rng.choice(["drop", "replace", "rename", "copy"], p=[0.25, 0.5, 0.15, 0.1]))
    if action == "replace":
        place[key] = copy.deepcopy(JUNK[int(rng.integers(len(JUNK)))])
        return f"{path} = {place[key]!r}"
    value = place.pop(key) if action != "copy" else place[key]
    if isinstance(place, dict) and action != "drop":
        place[f"{key}x"] = value
    elif action == "copy":
        place.append(value)
    return f"{path}: {action}"
