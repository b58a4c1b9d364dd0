"""The rows of a recorded episode, in OGBench's columns."""

from __future__ import annotations

from typing import Any

import numpy as np

from offrl.collect.episodes import Episode

COLUMNS = ("observations", "actions", "terminals", "qpos", "qvel")
# of environments that have buttons (scene, puzzle): what of a task is done can be told with these alone
BUTTONS = "button_states"
Rows = dict[str, list[Any]]


def empty(base: Any) -> Rows:
    """The columns that are recorded in an environment without wrappers, without rows."""
    names = (*COLUMNS, BUTTONS) if hasattr(base, "_cur_button_states") else COLUMNS
    return {name: [] for name in names}


def keep(rows: Rows, observation: Any, action: np.ndarray, over: bool, info: dict[str, Any]) -> None:
    """Add a row: the state before an action, the action, and whether the episode ended with it."""
    values = {
        "observations": observation,
        "actions": action,
        "terminals": over,
        "qpos": info["prev_qpos"],
        "qvel": info["prev_qvel"],
    }
    for name in rows:
        rows[name].append(np.array(info["prev_button_states"] if name == BUTTONS else values[name]))


def as_episode(rows: Rows) -> Episode:
    """An episode with columns of OGBench's types, whose observation after the last step is not kept."""
    types = {"terminals": bool, BUTTONS: np.int64}
    columns = {name: np.asarray(values, types.get(name, np.float32)) for name, values in rows.items()}
    return Episode(columns, np.zeros(0, np.float32))
