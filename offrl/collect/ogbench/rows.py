"""The rows of a recorded episode, in OGBench's columns."""

from __future__ import annotations

from typing import Any

import numpy as np

COLUMNS = ("observations", "actions", "terminals", "qpos", "qvel")
# of environments that have buttons (scene, puzzle): what of a task is done can be told with these alone
BUTTONS = "button_states"
Rows = dict[str, list[Any]]


def columns_of(base: Any) -> tuple[str, ...]:
    """The columns that are recorded in an environment without wrappers."""
    return (*COLUMNS, BUTTONS) if hasattr(base, "_cur_button_states") else COLUMNS


def empty(base: Any) -> Rows:
    """The columns without rows."""
    return {name: [] for name in columns_of(base)}


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


def column_type(name: str) -> Any:
    """OGBench's type of a column."""
    return {"terminals": bool, BUTTONS: np.int64}.get(name, np.float32)


def joined(episodes: list[Rows]) -> dict[str, np.ndarray]:
    """The columns of several episodes, and "length" [episodes]."""
    columns = {k: np.concatenate([np.asarray(e[k], column_type(k)) for e in episodes]) for k in episodes[0]}
    return {**columns, "length": np.array([len(e["terminals"]) for e in episodes], np.int64)}
