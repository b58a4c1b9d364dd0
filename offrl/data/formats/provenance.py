"""The record of a file by `write_data` beyond its layout, so that offrl reads back exactly what was written.

A layout made for other programs says less than `RawData` holds, or says it differently: D4RL's has a flag on the last
row even where the data merely stop, Minari's needs an observation after an episode's last step even where nobody knows
it. So the file is written as others expect it, and a record (JSON) says what was really there. Programs that do not
know the record lose nothing that they could use."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from offrl.data.containers.guard import from_json
from offrl.data.dataset import DataSpec
from offrl.data.memory import chunks, rows_at_once
from offrl.data.raw import FLAGS, RawData
from offrl.data.raw.infer import fitting_task, spec_of, starts_elsewhere
from offrl.errors import UserError, warn
from offrl.settings.kinds import misfit
from offrl.tasks.task import Task, recorded_arguments

VERSION = 1
# said by `spec`, or of one file only
_OF_THE_TASK = ("env_id", "env_kwargs", "ref_min_score", "ref_max_score", "ref_label", "dataset_id")
INFOS = "infos/"  # columns of this prefix are kept, and loaded only when `dataset.fields` asks for them


@dataclass
class Record:
    """See the module. Episodes are counted from 0."""

    rows: int
    episodes: int
    spec: DataSpec  # action range, kind of the actions and task
    columns: list[str]  # of `RawData.columns`, those under infos/ left out
    infos: list[str] = field(default_factory=list)  # those under infos/
    finals: bool = False  # `final_observations` were there
    complete: bool = True  # False: the data stop inside the last episode
    # episodes whose last row had no flag in the columns, though one was written
    unmarked: list[int] = field(default_factory=list)
    # episodes whose last successor is not known, though something had to be written
    unknown: list[int] = field(default_factory=list)
    successors: str = "next row"  # next_observations are the rows after them, or "stored" where they differ somewhere
    final_columns: list[str] = field(default_factory=list)
    about: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Plain values. Raises UserError where the task or what is said about the data holds what JSON cannot."""
        plain = {k: v for k, v in vars(self).items() if k not in ("spec", "about")}
        value = {
            "version": VERSION,
            **plain,
            "spec": to_plain(self.spec.to_json(), "the task"),
            "about": to_plain(self.about, "about"),
        }
        return {**value, "sha256": _digest(value)}

    @classmethod
    def from_json(cls, value: Any) -> Record:
        """The inverse. Raises ValueError for anything else: a later version, or a record that was damaged or edited."""
        if not isinstance(value, Mapping) or not isinstance(value.get("version"), int):
            raise ValueError("it is no record of offrl")
        if value["version"] != VERSION:
            raise ValueError(f"it was written by a newer offrl, layout {value['version']}")
        if value.get("sha256") != _digest({k: v for k, v in value.items() if k != "sha256"}):
            raise ValueError("it was damaged or edited: its checksum does not match")
        plain: dict[str, Any] = {k: value.get(k) for k in cls.__dataclass_fields__ if k != "spec"}
        if wrong := misfit(plain, cls, ""):
            raise ValueError(f"it is of another kind than offrl writes: {wrong}")
        try:
            return cls(**plain, spec=DataSpec.from_json(value["spec"]))
        except (UserError, KeyError) as error:
            raise ValueError(f"its 'spec' is of another kind than offrl writes: {error}") from None


def read_record(read: Callable[[], Any], where: str) -> Record | None:
    """The record that `read` gives as JSON's values; None, with a warning, where it cannot be used."""
    try:
        return Record.from_json(read())
    except (ValueError, RecursionError) as error:
        warn(f"{where} cannot be read ({error}); the file is read by its layout alone")
        return None


def _digest(value: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def to_plain(value: Any, where: str) -> Any:
    """`value` as JSON gives it back, NumPy's numbers and small arrays included. Raises UserError for what JSON cannot
    hold.
    """

    def default(item: Any) -> Any:
        if isinstance(item, np.ndarray | np.generic):
            return item.tolist()
        if isinstance(item, set | frozenset):
            return sorted(item)
        raise UserError(
            f"{where} holds a {type(item).__name__}, which no file of data can keep: give numbers, text, lists or "
            "dictionaries"
        )

    return json.loads(json.dumps(value, default=default))


def describe(raw: RawData, ends: np.ndarray, task: Task | None, metadata: Mapping[str, Any]) -> Record:
    """The record of `raw`, whose episodes end at `ends` (bool [R], by `find_ends`). Fills in the action range."""
    columns, last = raw.columns, np.flatnonzero(ends)
    marked = np.zeros(len(last), bool)
    for name in FLAGS:
        if name in columns:
            marked |= columns[name][last]
    record = Record(raw.rows, len(last), spec_of(raw, task), [c for c in columns if not c.startswith(INFOS)])
    record.infos = sorted(c for c in columns if c.startswith(INFOS))
    record.finals = raw.final_observations is not None
    record.complete = bool(raw.last_complete)
    record.unmarked = np.flatnonzero(~marked).tolist()
    record.final_columns = sorted(k for k in raw.final_columns if k in columns)
    record.about = {
        k: v
        for k, v in (raw.metadata | dict(metadata)).items()
        if k not in _OF_THE_TASK and not k.startswith("metadata/")
    }
    if raw.final_known is not None:
        record.unknown = np.flatnonzero(~raw.final_known).tolist()
    if "next_observations" in columns:
        record.unknown = [
            e
            for e in np.flatnonzero(starts_elsewhere(raw, last)).tolist()
            if identical(columns["next_observations"][last[e]], columns["observations"][(last[e] + 1) % raw.rows])
        ]
        if not follows(raw, ends):
            record.successors = "stored"
    return record


def identical(a: np.ndarray, b: np.ndarray) -> bool:
    """Whether two arrays are the same bit for bit: 0 and -0 are equal, but not to be exchanged."""
    return a.shape == b.shape and a.tobytes() == b.tobytes()


def follows(raw: RawData, ends: np.ndarray) -> bool:
    """True where each stored successor is the next row's observation, bit for bit, wherever no episode ends."""
    observations, successors = raw.columns["observations"], raw.columns["next_observations"]
    for part in chunks(raw.rows - 1, rows_at_once(observations)):
        inside = ~ends[part]
        if not identical(successors[part][inside], observations[part.start + 1 : part.stop + 1][inside]):
            return False
    return True


def written_truncations(raw: RawData, ends: np.ndarray) -> np.ndarray:
    """The flags to write, bool [R]: those recorded, and one on each episode's last row that no flag marks."""
    terminations = raw.columns.get("terminations", np.zeros(raw.rows, bool))
    return raw.columns.get("truncations", np.zeros(raw.rows, bool)) | (ends & ~terminations)


def restore(raw: RawData, record: Record, ends: np.ndarray, explicit: Mapping[str, Any] = {}) -> None:
    """Make `raw`, read from the layout alone and with its episodes' `ends`, what it was when it was written; in place.

    Terminations that the record does not know, but that the file has, stay: without any, nothing but False is written.
    `explicit`: columns that `dataset.fields` names, which stay as they were read.
    """
    last = np.flatnonzero(ends)
    for name in FLAGS:
        added = name in raw.columns and name not in record.columns and name not in explicit
        if added and not (name == "terminations" and raw.columns[name].any()):
            del raw.columns[name]
    if "truncations" in raw.columns and "truncations" not in explicit:
        raw.columns["truncations"][last[record.unmarked]] = False
    raw.episode_ends = ends.copy()
    raw.episode_ends[-1] = record.complete
    spec = record.spec
    raw.task, raw.discrete, raw.num_actions, raw.labels = spec.task, spec.discrete, spec.num_actions, spec.action_labels
    raw.source_columns = {"observations": spec.observation_columns, "actions": spec.action_columns}
    if not spec.discrete:
        raw.action_low, raw.action_high = spec.action_bounds
    raw.metadata = {**raw.metadata, **record.about}
    if record.finals and record.unknown:
        raw.final_known = np.ones(record.episodes, bool)
        raw.final_known[record.unknown] = False


def fits(raw: RawData, record: Record, ends: np.ndarray) -> bool:
    """True where the file still holds the rows and episodes that the record was made for. Warns where it does not."""
    if (raw.rows, int(ends.sum())) == (record.rows, record.episodes):
        return True
    raw.warn(
        f"the file holds {raw.rows} rows in {int(ends.sum())} episodes, but was written with {record.rows} in "
        f"{record.episodes}: it was changed since, and is read by its layout alone"
    )
    return False


def task_of(raw: RawData, metadata: Mapping[str, Any]) -> Task | None:
    """The task to record: that of `raw`, with the environment and the reference scores that `metadata` names."""
    task = fitting_task(raw)
    env_id = metadata.get("env_id")
    if env_id and (task is None or task.env_id != env_id):
        base = task or Task(name=raw.name or str(env_id))
        task = replace(base, env_id=str(env_id), env_kwargs={}, env_factory=None, max_episode_steps=None, note="")
    if task is not None and "env_kwargs" in metadata:
        task = replace(task, env_kwargs=recorded_arguments(metadata["env_kwargs"] or {}))
    low, high = metadata.get("ref_min_score"), metadata.get("ref_max_score")
    if low is not None and high is not None and (task is None or (task.ref_min, task.ref_max) != (low, high)):
        label = str(metadata.get("ref_label") or "the file")
        task = replace(task or Task(name=raw.name), ref_min=float(low), ref_max=float(high), ref_label=label)
    if task is not None and task.env_factory is not None:
        raw.warn("its environment is a function of this program, which no file can keep: it is left out")
        task = replace(task, env_factory=None)
    return task


def extra_columns(record: Record) -> list[str]:
    """The columns that lie under Minari's infos: whatever its layout has no place for."""
    inside = {"observations", "actions", "rewards", *FLAGS}
    if record.successors != "stored":
        inside.add("next_observations")
    if space := dict_space(record):  # of whose entries goals are read
        inside |= {goal + "s" for goal in ("achieved_goal", "desired_goal") if goal in space["subspaces"]}
    return [*(c for c in record.columns if c not in inside), *record.infos]


def dict_space(record: Record) -> dict[str, Any] | None:
    """The Dict space that the observations were joined from, where the source knows it and all of its entries are Boxes
    in the join.
    """
    text, task = record.about.get("observation_space"), record.spec.task
    try:
        space = from_json(text) if isinstance(text, str) else None
    except (ValueError, RecursionError):
        return None
    if not isinstance(space, dict) or space.get("type") != "Dict" or task is None or not task.observation_keys:
        return None
    parts = space["subspaces"]
    if tuple(task.observation_keys) != tuple(sorted(parts)) or any(p["type"] != "Box" for p in parts.values()):
        return None
    width = sum(int(np.prod(p["shape"])) for p in parts.values())
    return space if record.spec.observation_shape == (width,) else None
