"""The simulator's states that a dataset holds beside its rows, and environments put into them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from offrl.data.formats.provenance import INFOS
from offrl.data.raw import RawData
from offrl.errors import UserError, first_line

STATES = ("qpos", "qvel", "button_states")  # arguments of set_state; the last one of OGBench's scenes and puzzles


def states_of(raw: RawData, cure: str) -> list[np.ndarray]:
    """The states of the rows before their actions, [R, ...] for each argument of `set_state`.

    cure: ends the message where there are none, a UserError.
    """
    if not {INFOS + "qpos", INFOS + "qvel"} <= raw.columns.keys():
        raise UserError(f"{raw.where} holds no states of MuJoCo (qpos and qvel), {cure}")
    return [raw.columns[INFOS + name] for name in STATES if INFOS + name in raw.columns]


def set_state(env: Any, states: Sequence[np.ndarray], row: int, name: str, where: str) -> None:
    """Put an environment, called `name`, into the state of a row of `where`. Raises UserError where it takes none."""
    try:
        env.unwrapped.set_state(*(np.asarray(part[row], np.float64) for part in states))
    except Exception as error:  # third-party environment
        raise UserError(
            f"{name} does not take the states of {where}, row {row} "
            f"({type(error).__name__}: {first_line(error)}): name the environment that they are of, env=ID"
        ) from error
