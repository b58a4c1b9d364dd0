"""The simulator's states that data hold beside their rows, and environments put into them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from offrl.errors import UserError, first_line

# columns of the arguments of set_state; the last one is of OGBench's scenes and puzzles
STATES = ("infos/qpos", "infos/qvel", "infos/button_states")


def states_of(columns: Mapping[str, np.ndarray], where: str, cure: str) -> list[np.ndarray]:
    """The states of the rows before their actions, [R, ...] for each argument of `set_state`.

    where: the data; cure: ends the message where there are none, a UserError.
    """
    if not {*STATES[:2]} <= columns.keys():
        raise UserError(f"{where} holds no states of MuJoCo (qpos and qvel), {cure}")
    return [columns[name] for name in STATES if name in columns]


def set_state(env: Any, state: Sequence[np.ndarray], name: str, where: str) -> None:
    """Put an environment, called `name`, into a state, which is that `where`. Raises UserError where it takes none."""
    try:
        env.unwrapped.set_state(*(np.asarray(part, np.float64) for part in state))
    except Exception as error:  # third-party environment
        raise UserError(
            f"{name} does not take the states of {where} "
            f"({type(error).__name__}: {first_line(error)}): name the environment that they are of, env=ID"
        ) from error
