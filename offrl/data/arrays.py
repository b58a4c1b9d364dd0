"""Datasets from arrays in memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from offrl.data.assemble import assemble
from offrl.data.dataset import Dataset
from offrl.data.raw import RawData, canonical, canonical_name, ends_from, join_observations, lost
from offrl.errors import UserError
from offrl.settings.dataset import DatasetConfig
from offrl.system import trust
from offrl.tasks.entries import OWN_ORDER
from offrl.tasks.task import Task


def from_arrays(
    observations: Any,
    actions: Any,
    rewards: Any,
    terminations: Any = None,
    truncations: Any = None,
    next_observations: Any = None,
    episode_ends: Any = None,
    *,
    action_low: float | Sequence[float] | None = None,
    action_high: float | Sequence[float] | None = None,
    num_actions: int | None = None,
    name: str = "arrays",
    task: Task | None = None,
    env: str | None = None,
    clip_actions: bool = False,
    check: bool = True,
    **extra: Any,
) -> Dataset:
    """A dataset from arrays with one row per step, in time order, episode after episode.

    observations [R, *O] (or a dict of them, joined in sorted order); actions [R, A] floats, or integers [R] for a discrete action space
    of `num_actions` (amounts where a range is given instead); rewards [R]; terminations, truncations [R] flags; next_observations like
    observations. `episode_ends` marks the last row of each episode, as flags [R] or as row numbers, where the flags do not. With none of
    the three there is one episode.
    `action_low`, `action_high`: the environment's range. `env`: a Gymnasium id to evaluate in. `extra`: more columns of R rows; D4RL's
    words `terminals` and `timeouts` are taken for terminations and truncations. Raises UserError, naming column, episode and row, when
    the data would corrupt training, and for a column whose name (dones, next_obs, ...) leaves open what it is.
    """
    values = {
        "observations": observations,
        "actions": actions,
        "rewards": rewards,
        "terminations": terminations,
        "truncations": truncations,
        "next_observations": next_observations,
    }
    values = {k: v for k, v in values.items() if v is not None}
    for word, value in extra.items():
        column = canonical_name(word, name)
        if column in values:
            raise UserError(f"{name}: {column} and {word} are the same column; give one of them")
        if value is not None:
            values[column] = value
    keys = () if task is None or task.observation_keys == OWN_ORDER else task.observation_keys
    raw = raw_from_arrays(values, episode_ends, name, keys)
    trust.typed(env)
    raw.task = task if task is not None or env is None else Task(name=name, env_id=env)
    if isinstance(observations, Mapping):
        raw.task = replace(raw.task or Task(name=name), observation_keys=keys or tuple(sorted(observations, key=str)))
    raw.action_low, raw.action_high = action_low, action_high
    raw.num_actions = num_actions or 0
    if action_low is not None:
        raw.as_amounts()
    return assemble(raw, DatasetConfig(name=name, clip_actions=clip_actions, check=check))


def raw_from_arrays(values: Mapping[str, Any], episode_ends: Any, name: str, keys: Sequence[str] = ()) -> RawData:
    """Copies of a user's arrays. A dict of observations is joined, and its achieved_goal and desired_goal become columns as well.

    keys: the entries of a dict that are taken, in that order; all of them, sorted, without.
    """
    columns: dict[str, np.ndarray] = {}
    notes: list[str] = []
    for key, value in values.items():
        if isinstance(value, torch.Tensor):
            value = (value.float() if value.dtype == torch.bfloat16 else value).detach().cpu().numpy()
        if isinstance(value, Mapping):
            for goal in ("achieved_goal", "desired_goal"):
                if goal in value and key == "observations":
                    columns[goal + "s"] = canonical(goal + "s", np.array(value[goal]), name)
            notes += [text for inner, part in _entries(value) if (text := lost(f"{key}, entry {inner}", part))]
            value = join_observations(value, keys, name)
        try:
            array = np.array(value)
            if not array.ndim:
                raise UserError(f"{name}: column '{key}' is a single value; it needs one for each row")
            columns[key] = canonical(key, array, name, notes=None if key == "next_observations" else notes)
        except ValueError:
            raise UserError(f"{name}: column '{key}' is not a rectangular array of numbers") from None
    raw = RawData(columns, name=name, source="arrays", notes=notes)
    raw.episode_ends = ends_from(episode_ends, raw.rows, name)
    return raw


def _entries(values: Mapping[str, Any]) -> list[tuple[str, np.ndarray]]:
    """The arrays of a dict of observations with their names."""
    inner = [_entries(v) if isinstance(v, Mapping) else [(str(k), np.asarray(v))] for k, v in values.items()]
    return [entry for entries in inner for entry in entries]
