"""Datasets from arrays in memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from offrl.data.dataset import Dataset
from offrl.data.loading.assemble import assemble
from offrl.data.raw import RawData, join_observations, lost
from offrl.data.raw.streams import RawImages
from offrl.data.tables.build import build
from offrl.data.tables.keyed import Arrays
from offrl.data.tables.mapping import choose, used_columns
from offrl.data.tables.names import column_of, meaning
from offrl.errors import UserError
from offrl.settings.dataset import DatasetConfig
from offrl.system import trust
from offrl.tasks.entries import OWN_ORDER, entries
from offrl.tasks.task import Task

IMAGES = "images:"  # begins the names of columns of images while the rows are put in order


def from_arrays(
    observations: Any = None,
    actions: Any = None,
    rewards: Any = None,
    terminations: Any = None,
    truncations: Any = None,
    next_observations: Any = None,
    episode_ends: Any = None,
    *,
    dones: Any = None,
    episode_ids: Any = None,
    time: Any = None,
    action_low: float | Sequence[float] | None = None,
    action_high: float | Sequence[float] | None = None,
    action_kind: str = "auto",
    num_actions: int | None = None,
    name: str = "arrays",
    task: Task | None = None,
    env: str | None = None,
    clip_actions: bool = False,
    check: bool = True,
    **extra: Any,
) -> Dataset:
    """A dataset from arrays with one row per step, in time order, episode after episode.

    observations [R, *O] (or a dict of them, joined in sorted order; images are uint8 [R, H, W, C], alone or in the
    dict); actions [R, A] floats, or integers [R] for a discrete action space of `num_actions` (amounts where a range is
    given instead); rewards [R]; terminations, truncations [R] flags; next_observations like observations.
    `episode_ends` marks the last row of each episode, as flags [R] or as row numbers, where the flags do not; `dones`
    [R] marks ends of either kind (terminations, where these are not given). `episode_ids` [R]: numbers or texts, of
    which a change ends an episode; `time` [R]: numbers or datetime64, by which rows are sorted within equal ids. With
    none of these there is one episode. `action_low`, `action_high`: the environment's range. `action_kind`: as
    dataset.action_kind. `env`: a Gymnasium id to evaluate in. `extra`: more columns of R rows. The names that files
    know (`terminals`, `timeouts`, `obs`, `costs`, ...; docs/own-data.md) mean the same here. Raises UserError, naming
    column, episode and row, when the data would corrupt training.
    """
    columns = {
        "observations": observations,
        "actions": actions,
        "rewards": rewards,
        "terminations": terminations,
        "truncations": truncations,
        "next_observations": next_observations,
        "episode_ends": episode_ends,
        "dones": dones,
        "episode_ids": episode_ids,
        "time": time,
    }
    values = {k: v for k, v in (columns | extra).items() if v is not None}
    trust.typed(env)
    low, high = ([] if v is None else np.asarray(v, float).reshape(-1).tolist() for v in (action_low, action_high))
    kind = "discrete" if num_actions and action_kind == "auto" else action_kind
    keys = () if task is None or task.observation_keys == OWN_ORDER else task.observation_keys
    config = DatasetConfig(
        name=name,
        clip_actions=clip_actions,
        check=check,
        action_kind=kind,
        action_low=low,
        action_high=high,
        observation_keys=[*keys],
    )
    config.validate()
    raw = raw_from_arrays(values, config)
    raw.task = task if task is not None or env is None else Task(name=name, env_id=env)
    if isinstance(observations, Mapping):
        raw.task = replace(raw.task or Task(name=name), observation_keys=keys or tuple(sorted(observations, key=str)))
    raw.action_low, raw.action_high = action_low, action_high
    raw.num_actions = num_actions or raw.num_actions
    return assemble(raw, config)


def raw_from_arrays(values: Mapping[str, Any], config: DatasetConfig) -> RawData:
    """Copies of a user's arrays by the names of their columns. A dict of observations is joined, and its achieved_goal
    and desired_goal become columns as well; of its entries those of `config.observation_keys` are taken. Raises
    UserError."""
    arrays: dict[str, np.ndarray] = {}
    notes: list[str] = []
    for key, value in values.items():
        if isinstance(value, torch.Tensor):
            value = (value.float() if value.dtype == torch.bfloat16 else value).detach().cpu().numpy()
        if isinstance(value, Mapping):
            for goal in ("achieved_goal", "desired_goal"):
                if goal in value and column_of(key) == "observations":
                    arrays[goal + "s"] = np.asarray(value[goal])
            notes += [text for inner, part in _entries(value) if (text := lost(f"{key}, entry {inner}", part))]
            shown = [(("/".join(path)), np.asarray(part)) for path, part in entries(value, config.observation_keys)]
            numbers = [
                name for name, part in shown if part.ndim < 4 and not (part.ndim == 3 and part.dtype == np.uint8)
            ]
            arrays |= {f"{IMAGES}{key}/{name}": part for name, part in shown if name not in numbers}
            length = len(shown[0][1]) if shown else 0
            value = join_observations(value, numbers, config.name) if numbers else np.zeros((length, 0), np.float32)
        try:
            arrays[key] = np.asarray(value)
        except ValueError:
            raise UserError(f"{config.name}: column '{key}' is not a rectangular array of numbers") from None
        if not arrays[key].ndim:
            raise UserError(f"{config.name}: column '{key}' is a single value; it needs one for each row")
    example = "offrl.from_arrays("
    used = used_columns(choose(list(arrays), {}, config.name, example=example))
    extra = {key: key for key in arrays if key not in used and meaning(key) in ("", "costs")}
    images = [key for key in arrays if key.startswith(IMAGES)]
    raw = build(
        Arrays(arrays, config.name), replace(config, fields=extra), source="arrays", name=config.name, example=example
    )
    raw.notes = [*dict.fromkeys(notes + raw.notes)]
    for key in images:
        column, _, name = key.removeprefix(IMAGES).partition("/")
        if column_of(column) == "observations":
            following = next((k for k in images if k.endswith(f"/{name}") and k != key), None)
            raw.images[name] = RawImages(raw.columns[key], raw.columns.get(following or ""))
    raw.columns = {name: column for name, column in raw.columns.items() if name not in images}
    return raw


def _entries(values: Mapping[str, Any]) -> list[tuple[str, np.ndarray]]:
    """The arrays of a dict of observations with their names."""
    inner = [_entries(v) if isinstance(v, Mapping) else [(str(k), np.asarray(v))] for k, v in values.items()]
    return [entry for entries in inner for entry in entries]
