"""Steps in the layout of RLDS (arXiv 2111.02767): `is_last` marks a row that holds nothing but the observation an
episode ended in.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from offrl.data.memory import chunks
from offrl.data.raw import RawData

TERMINAL, LAST = "is_terminal", "is_last"
ENDS = ("terminations", "truncations", "episode_ends")


def is_steps(flags: Mapping[str, str]) -> bool:
    """Whether the columns of a file that are ours of ENDS, {ours: the file's}, are RLDS' flags."""
    return flags.get("terminations") == TERMINAL and LAST in (flags.get("truncations"), flags.get("episode_ends"))


def without_last(raw: RawData, last: np.ndarray) -> None:
    """Take the rows `last` [R] out, in place: the row before each ends the episode, terminated where the last step was
    terminal, and leads to its observation. Where columns are of unequal lengths nothing happens, for they will be
    refused."""
    observations, terminal = raw.columns["observations"], raw.columns["terminations"]
    keep = ~last
    if not keep.any() or any(len(column) != len(last) for column in raw.columns.values()):
        return
    followed = np.append(last[1:], False) & keep  # by a last step
    ends = followed if raw.episode_ends is None else followed | (raw.episode_ends & keep)
    # the last episode too, where the recording stopped in it
    rows = np.union1d(np.flatnonzero(ends), np.flatnonzero(keep)[-1:])
    if "next_observations" not in raw.columns:
        raw.final_observations = np.asarray(observations[rows + followed[rows]])
        raw.final_known = None if followed[rows].all() else followed[rows]
    terminated = followed & np.append(terminal[1:], False)
    raw.columns |= {"terminations": terminated, "truncations": followed & ~terminated}
    raw.columns = {name: _kept(column, keep) for name, column in raw.columns.items()}
    raw.episode_ends = ends[keep]
    raw.note(
        f"steps as RLDS has them: the {int(last.sum()):,} rows of {LAST} hold no action, only what the row before "
        "leads to, and are left out"
    )


def _kept(column: np.ndarray, keep: np.ndarray) -> np.ndarray:
    """The rows to keep, moved together in place: a column may be as large as the disk."""
    at = 0
    for part in chunks(len(column)):
        rows = column[part][keep[part]]
        column[at : at + len(rows)] = rows
        at += len(rows)
    return column[:at]
