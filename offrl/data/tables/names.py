"""Names of columns: which ones mean what, in files, tables, arrays and settings alike (ours, Gymnasium's, d3rlpy's,
D4RL's, LeRobot's).
"""

from __future__ import annotations

import re

VECTORS = ("observations", "next_observations", "actions")
SINGLE = (
    "rewards",
    "terminations",
    "truncations",
    "dones",
    "episode_ends",
    "episode_ids",
    "time",
    "final_observations",
    "costs",
)
REQUIRED = ("observations", "actions", "rewards")
# Usual names, lower case. Of a vector: its name, or with numbers or words after it (obs_0, obs_temperature); short ones
# with numbers only.
STEMS = {
    "observations": ("observations", "observation", "obs", "states", "state"),
    "next_observations": ("next_observations", "next_observation", "next_obs", "obs_next", "next_states", "next_state"),
    "actions": ("actions", "action", "act"),
}
LETTERS = {"observations": ("o", "s"), "actions": ("a",), "next_observations": ()}
USUAL = {
    "rewards": ("rewards", "reward", "rew", "next.reward"),
    "terminations": (
        "terminations",
        "terminals",
        "termination",
        "terminal",
        "terminated",
        "is_terminal",
        "next.terminated",
    ),
    "truncations": (
        "truncations",
        "timeouts",
        "truncation",
        "timeout",
        "truncated",
        "timelimit.truncated",
        "next.truncated",
    ),
    "dones": ("dones", "done", "is_done", "next.done"),  # in Gym's sense: either kind of end
    "episode_ends": ("episode_ends", "episode_end", "episode_terminals", "is_last"),
    "episode_ids": (
        "episode_ids",
        "episode_id",
        "episode",
        "episodes",
        "episode_index",
        "trajectory",
        "trajectory_id",
        "traj_id",
    ),
    "time": ("time", "timestamp", "timestamps", "datetime", "date_time", "date"),
    "costs": ("costs", "cost"),
    "episode_starts": ("episode_starts", "episode_start", "is_first"),
    "final_observations": ("final_observations",),
}
# Columns whose meaning would change the data: one that nothing takes is refused.
MEANINGS = {
    "terminations": "terminations",
    "truncations": "truncations",
    "dones": "ends of episodes",
    "episode_ends": "ends of episodes",
    "episode_ids": "episodes",
    "time": "times",
    "costs": "costs",
    "episode_starts": "starts of episodes",
}


def column_of(word: str) -> str:
    """Our name of the column that is called `word`; the word itself where it is no usual name."""
    lower = word.lower().strip()
    known = (column for names in (STEMS, USUAL) for column, usual in names.items() if lower in usual)
    return next((column for column in known if column != "episode_starts"), word)


def meaning(word: str) -> str:
    """The key of `MEANINGS` that a column called `word`, or one of a series of that name, has; "" for other names."""
    names = {word.lower().strip(), re.sub(r"[_.\-\[ ]?\d+\]?$", "", word.lower().strip())}
    return next((column for column in MEANINGS if names & {*USUAL[column]}), "")
