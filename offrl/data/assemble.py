"""From a source's columns, whatever they are, to a `Dataset`: episodes, successors, and actions scaled to [-1, 1]."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from offrl.data.dataset import Dataset, DataSpec
from offrl.data.memory import Memory, chunks
from offrl.errors import UserError, warn
from offrl.settings.dataset import DatasetConfig
from offrl.tasks.task import Task

FLAGS = ("terminations", "truncations")
MANY_JUMPS = 0.1  # share of the rows
CORE = ("observations", "actions", "rewards", *FLAGS, "next_observations")

UNBOUNDED = 1e30  # bounds beyond this are no range: some Boxes have float32's largest number


@dataclass
class RawData:
    """What a source read, unchecked: columns by canonical name, whose lengths may disagree, and what the source knows about them."""

    columns: dict[str, np.ndarray]
    episode_ends: np.ndarray | None = None  # bool [R], True on each episode's last row; None: the flags say it
    name: str = ""
    source: str = "file"  # d4rl | minari | ogbench | d3rlpy | file | arrays | builtin
    path: str = ""
    version: str = ""
    task: Task | None = None
    action_low: Any = None  # the environment's range, a number or one per dimension; None: unknown
    action_high: Any = None
    discrete: bool | None = None  # None: the dtype of the actions says it
    num_actions: int = 0  # 0: the largest action seen, plus 1
    final_observations: np.ndarray | None = None  # [E, *O], the successor of each episode's last row
    final_known: np.ndarray | None = None  # bool [E]: False where `final_observations` merely repeats the last one; None: all are known
    jump_rows: np.ndarray | None = None  # filled by `find_ends`: rows whose stored successor is not the next row's, though no end is marked
    last_complete: bool | None = None  # filled by `find_ends`: False when the data stop inside the last episode
    notes: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)  # what `warn` printed
    about: dict[str, Any] = field(default_factory=dict)  # what the source says of itself (author, algorithm, ...): `offrl data` keeps it
    final_columns: dict[str, np.ndarray] = field(default_factory=dict)  # [E, ...] an extra column after each episode's last row, if known

    @property
    def rows(self) -> int:
        return len(self.columns["observations"]) if "observations" in self.columns else 0

    def warn(self, text: str) -> None:
        """Print a warning about these data, and remember it."""
        self.warnings.append(f"{self.where}: {text}")
        warn(self.warnings[-1])

    @property
    def where(self) -> str:
        return self.path or self.name


def join_observations(values: Mapping[str, Any], keys: list[str] | tuple[str, ...] = (), where: str = "") -> np.ndarray:
    """Dict observations as one float32 array [R, O]: the entries `keys`, by default all of them sorted, flattened and joined."""
    for key in keys:
        if key not in values:
            raise UserError(f"{where}: the observations have no entry '{key}'; they have {', '.join(sorted(values))}")
    entries = [values[k] for k in keys or sorted(values)]
    parts = [join_observations(v, where=where) if isinstance(v, Mapping) else np.asarray(v) for v in entries]
    return np.concatenate([p.reshape(len(p), -1).astype(np.float32, copy=False) for p in parts], axis=1)


def canonical(name: str, values: Any, where: str = "", discrete: bool | None = None) -> np.ndarray:
    """An array of the dtype and rank the column has in a `Dataset`. Copies only where the dtype changes."""
    array = np.asarray(values)
    if array.dtype.kind not in "biuf":
        raise UserError(f"{where}: column '{name}' holds {array.dtype} values, not numbers")
    if name in (*FLAGS, "rewards"):
        if array.ndim == 2 and array.shape[1] == 1:
            array = array[:, 0]
        if name in FLAGS:
            refuse_gaps(name, array, where)
        return array.astype(bool if name in FLAGS else np.float32, copy=False)
    if name == "actions":
        if discrete is None:
            discrete = array.dtype.kind in "biu" and (array.ndim == 1 or array.shape[1:] == (1,))
        if discrete:
            return array.reshape(len(array)).astype(np.int64, copy=False) if array.size == len(array) else array
        return (array[:, None] if array.ndim == 1 else array).astype(np.float32, copy=False)
    if name in ("observations", "next_observations") and array.ndim == 1:
        array = array[:, None]
    if array.dtype.kind == "f" or (name in ("observations", "next_observations") and (array.dtype != np.uint8 or array.ndim < 3)):
        return array.astype(np.float32, copy=False)
    return array.astype({"i": np.int64, "u": array.dtype if array.dtype == np.uint8 else np.int64, "b": bool}[array.dtype.kind], copy=False)


def refuse_gaps(name: str, values: np.ndarray, where: str) -> None:
    """Raises UserError where a column of flags or numbers of episodes has no value in some row: NaN would count as True."""
    if values.dtype.kind == "f" and not (there := np.isfinite(values)).all():
        row = int(np.argmin(there.reshape(len(values), -1).all(1)))
        raise UserError(
            f"{where}: column '{name}' has no value in row {row} ({int((~there).sum()):,} such rows): write 0 or 1, or a number"
        )


def raw_from_arrays(values: Mapping[str, Any], episode_ends: Any, name: str) -> RawData:
    """Copies of a user's arrays. A dict of observations is joined, and its achieved_goal and desired_goal become columns as well."""
    columns: dict[str, np.ndarray] = {}
    for key, value in values.items():
        if isinstance(value, torch.Tensor):
            value = (value.float() if value.dtype == torch.bfloat16 else value).detach().cpu().numpy()
        if isinstance(value, Mapping):
            for goal in ("achieved_goal", "desired_goal"):
                if goal in value and key == "observations":
                    columns[goal + "s"] = canonical(goal + "s", np.array(value[goal]), name)
            value = join_observations(value, where=name)
        try:
            array = np.array(value)
            if not array.ndim:
                raise UserError(f"{name}: column '{key}' is a single value; it needs one for each row")
            columns[key] = canonical(key, array, name)
        except ValueError:
            raise UserError(f"{name}: column '{key}' is not a rectangular array of numbers") from None
    raw = RawData(columns, name=name, source="arrays")
    raw.episode_ends = ends_from(episode_ends, raw.rows, name)
    return raw


def ends_from(values: Any, rows: int, where: str) -> np.ndarray | None:
    """Flags [R] from flags or from the row numbers of the last rows."""
    if values is None:
        return None
    ends = values.detach().cpu().numpy() if isinstance(values, torch.Tensor) else np.asarray(values)
    if ends.dtype == bool or (len(ends) == rows and rows > 1 and np.isin(ends, (0, 1)).all()):
        return ends.reshape(-1).astype(bool)
    if ends.ndim != 1 or not np.equal(np.mod(ends, 1), 0).all() or (len(ends) and (ends.min() < 0 or ends.max() >= rows)):
        raise UserError(f"{where}: episode_ends must be flags, one per row, or row numbers from 0 to {rows - 1}")
    flags = np.zeros(rows, bool)
    flags[ends.astype(np.int64)] = True
    return flags


def _limit(task: Task | None) -> int | None:
    """Steps after which the task's environment stops an episode."""
    if task is None or task.max_episode_steps is not None or task.env_id is None:
        return task.max_episode_steps if task else None
    try:
        import gymnasium

        return gymnasium.spec(task.env_id).max_episode_steps
    except Exception:  # an environment that is not installed
        return None


def jumps(raw: RawData) -> np.ndarray:
    """Rows i whose stored successor is not observation i + 1; bool [R], False on the last row."""
    observations, successors = raw.columns["observations"], raw.columns["next_observations"]
    found = np.zeros(len(observations), bool)
    for part in chunks(len(observations) - 1):
        a, b = successors[part], observations[part.start + 1 : part.stop + 1]
        if not np.array_equal(a, b):
            a, b = a.reshape(len(a), -1).astype(np.float32), b.reshape(len(b), -1).astype(np.float32)
            found[part] = (np.abs(a - b) > 1e-6 * np.maximum(1.0, np.abs(b))).any(1)
    return found


def find_ends(raw: RawData, split_jumps: bool = True) -> np.ndarray:
    """The last rows of the episodes, bool [R]. Notes what had to be inferred; sets `raw.last_complete` and `raw.jump_rows`.

    `split_jumps`: an unmarked jump ends an episode, too. Reports of faults count episodes as the file marks them.
    """
    columns, rows = raw.columns, raw.rows
    ends = np.zeros(rows, bool)
    for flags in (raw.episode_ends, columns.get("terminations"), columns.get("truncations")):
        if flags is not None:
            ends |= flags
    if raw.episode_ends is None and "truncations" not in columns:  # D4RL's first files: time-outs are not marked
        marked = int(ends.sum())
        if "next_observations" in columns:
            ends |= jumps(raw)
        limit = _limit(raw.task)
        if limit:
            bounds = np.flatnonzero(np.concatenate([[True], ends[:-1], [True]])) if rows else np.zeros(1, np.int64)
            for start, stop in zip(bounds[:-1], bounds[1:], strict=True):
                ends[start + limit - 1 : stop : limit] = True
        if int(ends.sum()) > marked:
            reason = " and ".join(
                r for r, used in (("jumps", "next_observations" in columns), (f"the limit of {limit} steps", limit)) if used
            )
            _note(raw, f"no time-outs in the file: {int(ends.sum()) - marked} episode ends inferred from {reason}")
    elif "next_observations" in columns:
        found = np.flatnonzero(jumps(raw) & ~ends)
        raw.jump_rows = found
        if split_jumps and len(found) <= MANY_JUMPS * rows:  # more than that, and it is the stored successors that are wrong
            ends[found] = True
    raw.last_complete = bool(rows and ends[-1])
    if rows:
        ends[-1] = True
    return ends


def _note(raw: RawData, text: str) -> None:
    if text not in raw.notes:
        raw.notes.append(text)


def action_range(raw: RawData) -> tuple[np.ndarray, np.ndarray]:
    """The environment's range of each action dimension, lowest and highest, [A] float32.

    Where nobody knows it: [-1, 1] if the data fit, else the data's own range, with a note.
    """
    actions = raw.columns["actions"]
    width = actions.shape[1] if actions.ndim > 1 else 1
    if raw.action_low is not None and raw.action_high is not None:
        ranges = []
        for key, value in (("action_low", raw.action_low), ("action_high", raw.action_high)):
            array = np.asarray(value, np.float32).reshape(-1)
            if array.size not in (1, width):
                raise UserError(f"{raw.where}: {key} has {array.size} values but the actions have {width} dimensions")
            ranges.append(np.broadcast_to(array, (width,)).copy())
        low, high = ranges
    else:
        low, high = np.full(width, -np.inf, np.float32), np.full(width, np.inf, np.float32)
        space = None
        if raw.task is not None and (raw.task.env_id or raw.task.env_factory):
            space = environment_range(raw.task)
        if space is not None and len(space[0]) == width:
            low, high = space
    open_ends = ~((np.abs(low) < UNBOUNDED) & (np.abs(high) < UNBOUNDED))
    if open_ends.any() and len(actions):
        smallest, largest = np.full(width, np.inf, np.float32), np.full(width, -np.inf, np.float32)
        for part in chunks(len(actions)):  # fmin and fmax pass over NaN, which is reported elsewhere
            smallest = np.fmin(smallest, np.fmin.reduce(actions[part], 0))
            largest = np.fmax(largest, np.fmax.reduce(actions[part], 0))
        smallest, largest = np.nan_to_num(smallest, posinf=-1.0, neginf=-1.0), np.nan_to_num(largest, posinf=1.0, neginf=1.0)
        if (smallest[open_ends] >= -1.0001).all() and (largest[open_ends] <= 1.0001).all():
            smallest, largest = np.full(width, -1.0, np.float32), np.full(width, 1.0, np.float32)
        else:
            flat = largest - smallest < 1e-6  # a constant dimension has no range to scale by
            smallest, largest = np.where(flat, smallest - 1.0, smallest), np.where(flat, largest + 1.0, largest)
            pairs = ", ".join(f"[{a:.4g}, {b:.4g}]" for a, b in zip(smallest[:4], largest[:4], strict=True)) + (
                ", ..." if width > 4 else ""
            )
            _note(raw, f"the action range is not known; taking the data's own: {pairs} (or set dataset.action_low and dataset.action_high)")
        low, high = np.where(open_ends, smallest, low), np.where(open_ends, largest, high)
    if not (low < high).all():
        raise UserError(f"{raw.where}: action_low must be below action_high in every dimension")
    raw.action_low, raw.action_high = low, high
    return low, high


def environment_range(task: Task) -> tuple[np.ndarray, np.ndarray] | None:
    """Bounds of the environment's Box of actions, or None when it cannot be made here or has no such space."""
    try:
        from offrl.tasks.environments import make_env

        env = make_env(task)
        space: Any = env.action_space
        env.close()
        return space.low.reshape(-1).astype(np.float32), space.high.reshape(-1).astype(np.float32)
    except Exception:  # not installed, or discrete: the data's own range has to do
        return None


def fingerprint(raw: RawData, ends: np.ndarray) -> str:
    """sha256 over the names, dtypes, shapes and little-endian bytes of the columns, and the episodes' ends."""
    digest = hashlib.sha256()
    finals = {"final_observations": raw.final_observations, "final_known": raw.final_known}
    extra = {name: values for name, values in finals.items() if values is not None}
    for name, column in sorted((raw.columns | extra | {"ends": ends}).items()):
        little = column.dtype.newbyteorder("<")
        digest.update(f"{name} {little.str} {column.shape} ".encode())
        for part in chunks(len(column)):
            digest.update(np.ascontiguousarray(column[part], little).data)
    return digest.hexdigest()


def starts_elsewhere(raw: RawData, last: np.ndarray) -> np.ndarray:
    """Of all episodes, with these `last` rows, those whose last stored successor is the next one's first observation, bool [E]: nobody
    knows what followed there. After the last episode that is perhaps row 0.

    Of terminations all or none: a task may now and then end where another episode begins.
    """
    observations, successors = raw.columns["observations"], raw.columns["next_observations"]
    same = (successors[last] == observations[(last + 1) % raw.rows]).reshape(len(last), int(np.prod(observations.shape[1:]))).all(1)
    ended = raw.columns.get("terminations", np.zeros(raw.rows, bool))[last]
    judged = same[:-1][ended[:-1]]
    return np.asarray(same if len(judged) >= 2 and judged.all() else same & ~ended)


def assemble(raw: RawData, config: DatasetConfig | None = None, memory: Memory | None = None) -> Dataset:
    """Check the columns, find the episodes and the successors, scale the actions. Uses up `raw`: its arrays may be written to.

    Raises UserError for the first fault that would corrupt training (with `config.check`; faults in shape always).
    """
    from offrl.data.checks import find_faults, form_faults, refuse

    config, memory = config or DatasetConfig(), memory or Memory()
    if raw.discrete is None:
        raw.discrete = "actions" in raw.columns and raw.columns["actions"].dtype.kind in "iu" and raw.columns["actions"].ndim == 1
    if any(f.severity == "corrupting" for f in form_faults(raw)):
        refuse(raw, find_faults(raw))
    columns, rows = dict(raw.columns), raw.rows
    ends = find_ends(raw)
    with ThreadPoolExecutor(1) as pool:  # hashing lets go of the interpreter: values are checked and successors copied meanwhile
        digest = pool.submit(fingerprint, raw, ends)
        refuse(raw, find_faults(raw, clip_actions=config.clip_actions), config.check)
        last = np.flatnonzero(ends)
        start = np.concatenate([[0], last[:-1] + 1])
        terminations = columns.get("terminations", np.zeros(rows, bool))
        observations = columns["observations"]
        known = np.ones(rows, bool)
        if "next_observations" in columns:
            successors = columns["next_observations"]
            elsewhere = starts_elsewhere(raw, last)
            known[last[elsewhere]] = False
            if hidden := int((elsewhere & terminations[last]).sum()):
                _note(raw, f"at {hidden:,} terminals next_observations hold the next episode's start: what they led to is not known")
        else:
            successors = memory.empty("next_observations", observations.shape, observations.dtype)
            for part in chunks(rows - 1):
                successors[part] = observations[part.start + 1 : part.stop + 1]
            if raw.final_observations is not None:
                successors[last] = raw.final_observations
                if raw.final_known is not None:
                    known[last[~raw.final_known]] = False
            else:
                known[last] = False
    unknown = np.flatnonzero(~known)
    successors[unknown] = observations[unknown]
    columns |= {"next_observations": successors, "terminations": terminations, "truncations": ends & ~terminations}
    if config.drop_timeout_rows:
        known &= ~columns["truncations"]
    columns["successor_known"] = known
    low: np.ndarray | None = None
    high: np.ndarray | None = None
    if raw.discrete:
        columns["actions"] = columns["actions"].astype(np.int64, copy=False)
    else:
        low, high = action_range(raw)
        scale_actions(columns["actions"], low, high)
    returns = np.add.reduceat(columns["rewards"], start, dtype=np.float64)
    complete = np.ones(len(last), bool)
    complete[-1] = bool(raw.last_complete)
    spec = DataSpec(
        observation_shape=tuple(observations.shape[1:]),
        action_dim=1 if raw.discrete else columns["actions"].shape[1],
        discrete=bool(raw.discrete),
        num_actions=(raw.num_actions or int(columns["actions"].max()) + 1) if raw.discrete else 0,
        action_low=() if low is None else tuple(low.tolist()),
        action_high=() if high is None else tuple(high.tolist()),
        name=raw.name,
        source=raw.source,
        version=raw.version,
        task=fitting_task(raw),
        goal_dim=columns["achieved_goals"].shape[1] if "achieved_goals" in columns else 0,
    )
    for text in raw.notes:
        raw.warn(text)
    order = [k for k in (*CORE, "successor_known") if k in columns] + sorted(set(columns) - {*CORE, "successor_known"})
    return Dataset(
        columns={k: torch.from_numpy(np.ascontiguousarray(columns[k])) for k in order},
        episode_start=torch.from_numpy(start),
        episode_end=torch.from_numpy(last + 1),
        spec=spec,
        fingerprint=digest.result(),
        raw_returns=torch.from_numpy(returns),
        complete=torch.from_numpy(complete),
        transforms=("clip_actions",) if config.clip_actions else (),
        notes=tuple(raw.notes),
    )


def scale_actions(actions: np.ndarray, low: np.ndarray, high: np.ndarray) -> None:
    """In place, from [low, high] to [-1, 1]; what lies a rounding error outside, or was to be clipped, is clipped."""
    identity = bool((low == -1.0).all() and (high == 1.0).all())
    centre, half = (high.astype(np.float64) + low) / 2, (high.astype(np.float64) - low) / 2
    for part in chunks(len(actions)):
        values = actions[part]
        if not identity:
            values[:] = (values - centre) / half
        np.clip(values, -1.0, 1.0, out=values)


def fitting_task(raw: RawData) -> Task | None:
    """The task, unless the data's shapes say that the guess was wrong."""
    task, width = raw.task, int(np.prod(raw.columns["observations"].shape[1:]))
    if task is None:
        return None
    actions = 1 if raw.discrete else raw.columns["actions"].shape[1]
    for what, ours, theirs in (("observations", width, task.observation_dim), ("actions", actions, task.action_dim)):
        if theirs is not None and theirs != ours:
            _note(raw, f"taken for no known task: '{task.name}' has {theirs}-dimensional {what}, the data {ours}")
            return None
    return task
