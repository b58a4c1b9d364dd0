"""pandas and polars DataFrames as datasets."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from offrl.data.dataset import Dataset
from offrl.data.loading.assemble import assemble
from offrl.data.raw import RawData
from offrl.data.tables.build import build
from offrl.data.tables.tabular import Tabular
from offrl.errors import UserError
from offrl.settings.dataset import DatasetConfig
from offrl.system import trust
from offrl.tasks.task import Task

NAME = "dataframe"
TIMES = ("DatetimeIndex", "PeriodIndex", "TimedeltaIndex")


def is_frame(value: Any) -> bool:
    """Whether `value` is a DataFrame of pandas or polars."""
    return type(value).__name__ == "DataFrame" and hasattr(value, "columns") and hasattr(value, "__getitem__")


class Frame(Tabular):
    """The columns of a DataFrame as a `Tabular`; levels of a pandas index that have a name, or hold times, count as
    columns.

    `time`: the column with the times of the index, "" where it holds none.
    """

    by_column = True

    def __init__(self, frame: Any, where: str) -> None:
        """Raises UserError for what is no DataFrame, and for a column twice."""
        if not is_frame(frame):
            raise UserError(f"{where}: a DataFrame of pandas or polars is due, and this is a {type(frame).__name__}")
        index = getattr(frame, "index", None)
        self.time = ""
        if index is not None:
            names, columns = list(index.names), set(map(str, frame.columns))
            kinds = [type(index.get_level_values(i)).__name__ for i in range(len(names))]
            at = next((i for i, kind in enumerate(kinds) if kind in TIMES), None)
            if at is not None and names[at] is None:
                names[at] = next(
                    word for word in ("time", "index", "index of times") if word not in columns | set(names)
                )
            levels = {str(n) for n in names if n is not None}
            if levels and not levels & columns:
                frame = frame.rename_axis(names).reset_index()
                self.time = "" if at is None else str(names[at])
        self.frame, self.where = frame, where
        self.names = [str(c) for c in frame.columns]
        self.refuse_doubles(self.names)

    def kinds(self) -> dict[str, str]:
        """See `Tabular`; by the types of the columns."""
        kinds = {str(c): getattr(self.frame[c].dtype, "kind", "O") for c in self.frame.columns}
        return {n: "time" if k in "mM" else "number" if k in "iufb" else "text" for n, k in kinds.items()}

    def read(self, names: Collection[str], exact: Mapping[str, str]) -> dict[str, np.ndarray]:
        """Columns as NumPy has them: numbers, datetime64 in UTC, or objects; missing values of numbers as NaN."""
        keys = dict(zip(self.names, self.frame.columns, strict=True))
        return {name: _values(self.frame[keys[name]]) for name in names}


def _values(series: Any) -> np.ndarray:
    """The values [R] of a column; of one that holds arrays or lists of one length [R, A]."""
    kind = getattr(series.dtype, "kind", "")
    if kind in "iufb" and kind and hasattr(series, "hasnans"):
        if kind in "iub" and series.hasnans:
            return np.asarray(series.to_numpy(dtype=np.float64, na_value=np.nan))
        return np.asarray(series.to_numpy(dtype=np.dtype(getattr(series.dtype, "numpy_dtype", series.dtype))))
    if kind == "M" and getattr(series.dtype, "tz", None) is not None:
        series = series.dt.tz_convert("UTC").dt.tz_localize(None)
    values = np.asarray(series.to_numpy())
    if values.dtype.kind == "U":
        return values.astype(object)
    if values.dtype == object and len(values) and isinstance(values[0], list | tuple | np.ndarray):
        try:
            return np.stack([np.asarray(v) for v in values])
        except ValueError:
            raise UserError(f"column '{series.name}' holds lists of different lengths") from None
    return values


def raw_from_frame(frame: Any, config: DatasetConfig, name: str = NAME) -> RawData:
    """The columns of a DataFrame as `config` maps and reads them. Raises UserError."""
    raw = build(Frame(frame, name), config, name=name, source="arrays", example="offrl.from_dataframe(df, ")
    if config.action_low:
        raw.state_range(config.action_low, config.action_high)
    return raw


def from_dataframe(
    frame: Any,
    observations: str | Sequence[Any] | None = None,
    actions: str | Sequence[Any] | None = None,
    rewards: Any = None,
    terminations: Any = None,
    truncations: Any = None,
    episode_ids: str | None = None,
    time: str | None = None,
    *,
    costs: Any = None,
    fields: Mapping[str, Any] | None = None,
    action_low: float | Sequence[float] | None = None,
    action_high: float | Sequence[float] | None = None,
    name: str = NAME,
    env: str | None = None,
    **settings: Any,
) -> Dataset:
    """A dataset from a DataFrame of pandas or polars with one row per step.

    Each of observations, actions, ... is a column's name, a pattern ("flow_*"), {"column": "valve", "scale": 0.01,
    "offset": 0.0}, or a list of these; what is not given is recognised by usual names (obs_0, action, reward, done,
    episode, time, ...). Episode ids may be texts, times numbers or dates: with both, rows are sorted by them. fields:
    more of them, by name. settings: other settings of the data by the names that they have after `dataset.`, such as
    action_kind="multi_discrete", max_gap=600.0, missing="forward", clip_actions=True. env: a Gymnasium id to evaluate
    in. Raises UserError that names column and row.
    """
    arguments = {
        "observations": observations,
        "actions": actions,
        "rewards": rewards,
        "terminations": terminations,
        "truncations": truncations,
        "episode_ids": episode_ids,
        "time": time,
        "costs": costs,
        **(fields or {}),
    }
    mapping = {k: list(v) if isinstance(v, tuple) else v for k, v in arguments.items() if v is not None}
    known = vars(DatasetConfig())
    if unknown := [k for k in settings if k not in known]:
        raise UserError(
            f"from_dataframe has no argument '{unknown[0]}'; a further column is named in fields={{'{unknown[0]}': "
            f"COLUMN}}"
        )
    if (action_low is None) != (action_high is None):
        raise UserError("action_low and action_high must be given together")
    low, high = (
        [] if v is None else [float(x) for x in np.asarray(v, float).reshape(-1)] for v in (action_low, action_high)
    )
    config = DatasetConfig(name=name, fields=mapping, action_low=low, action_high=high, **settings)
    config.validate()
    trust.typed(env)
    raw = raw_from_frame(frame, config, name)
    raw.task = None if env is None else Task(name=name, env_id=env)
    return assemble(raw, replace(config, name=name))
