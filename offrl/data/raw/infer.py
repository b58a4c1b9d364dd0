"""Inference of what raw columns leave open: the ends of episodes, the range of actions, the task."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from offrl.data.dataset import DataSpec
from offrl.data.memory import chunks, rows_at_once
from offrl.data.raw import RawData
from offrl.data.raw.streams import streams_of
from offrl.errors import UserError
from offrl.system import trust
from offrl.tasks.custom import in_file
from offrl.tasks.task import Task

MANY_JUMPS = 0.1  # share of the rows  # that a file may have: more, and it is the stored successors that are wrong
UNIT = 0.999  # largest action from which on those in [-1, 1] count as filling it
UNBOUNDED = 1e30  # bounds beyond this are no range: some Boxes have float32's largest number


def step_limit(task: Task | None) -> int | None:
    """Steps after which the task's environment stops an episode."""
    if task is None or task.max_episode_steps is not None:
        return None if task is None else task.max_episode_steps
    if task.env_id is None or not trust.importable(task.env_id) or in_file(task.env_id):
        return None
    try:
        import gymnasium

        return gymnasium.spec(task.env_id).max_episode_steps
    except Exception:  # an environment that is not installed
        return None


def jumps(raw: RawData) -> np.ndarray:
    """Rows i whose stored successor is not observation i + 1; bool [R], False on the last row."""
    observations, successors = raw.columns["observations"], raw.columns["next_observations"]
    jump = np.zeros(len(observations), bool)
    for part in chunks(len(observations) - 1, rows_at_once(observations)):
        a, b = successors[part], observations[part.start + 1 : part.stop + 1]
        if not np.array_equal(a, b):
            a, b = a.reshape(len(a), -1).astype(np.float32), b.reshape(len(b), -1).astype(np.float32)
            jump[part] = (np.abs(a - b) > 1e-6 * np.maximum(1.0, np.abs(b))).any(1)
    return jump


def find_ends(raw: RawData, split_jumps: bool = True) -> np.ndarray:
    """The last rows of the episodes, bool [R]. Notes what had to be inferred; sets `raw.last_complete` and
    `raw.jump_rows`.

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
        limit = step_limit(raw.task)
        if limit:
            bounds = np.flatnonzero(np.concatenate([[True], ends[:-1], [True]])) if rows else np.zeros(1, np.int64)
            for start, stop in zip(bounds[:-1], bounds[1:], strict=True):
                ends[start + limit - 1 : stop : limit] = True
        if int(ends.sum()) > marked:
            reasons = ["jumps"] * ("next_observations" in columns) + [f"the limit of {limit} steps"] * bool(limit)
            reason = " and ".join(reasons)
            raw.note(f"no time-outs in the file: {int(ends.sum()) - marked} episode ends inferred from {reason}")
    elif "next_observations" in columns:
        jump_rows = np.flatnonzero(jumps(raw) & ~ends)
        raw.jump_rows = jump_rows
        # more than that, and it is the stored successors that are wrong
        if split_jumps and len(jump_rows) <= MANY_JUMPS * rows:
            ends[jump_rows] = True
    raw.last_complete = bool(rows and ends[-1])
    if rows:
        ends[-1] = True
    return ends


def action_range(raw: RawData) -> tuple[np.ndarray, np.ndarray]:
    """The environment's range of each action dimension, lowest and highest, [A] float32.

    Where nobody knows it: [-1, 1] if the data fit, else the data's own range, with a note.
    """
    actions = raw.columns["actions"]
    width = actions.shape[1] if actions.ndim > 1 else 1
    low, high = np.full(width, -np.inf, np.float32), np.full(width, np.inf, np.float32)
    if raw.action_low is not None and raw.action_high is not None:
        for bounds, key in ((low, "action_low"), (high, "action_high")):
            array = np.asarray(getattr(raw, key), np.float32).reshape(-1)
            if array.size not in (1, width):
                raise UserError(f"{raw.where}: {key} has {array.size} values but the actions have {width} dimensions")
            bounds[:] = array
    elif raw.task is not None and (raw.task.env_id or raw.task.env_factory):
        if raw.task.env_id and not trust.importable(raw.task.env_id):
            raw.note(
                f"its environment, {raw.task.env_id}, is named by the file alone: its module is not imported to ask "
                "for its range"
            )
        space = action_space(raw.task)  # of choices none has a range: the data's own has to do
        if hasattr(space, "low") and space.low.size == width:
            low, high = (bound.reshape(-1).astype(np.float32) for bound in (space.low, space.high))
    open_ends = ~((np.abs(low) < UNBOUNDED) & (np.abs(high) < UNBOUNDED))
    if raw.source != "minari" and not open_ends.any() and _scaled(actions.reshape(len(actions), width), low, high):
        raw.warn(
            f"the actions end at exactly -1 or 1 inside the wider range {listed(low)} to {listed(high)}, as scaled "
            f"ones do (Stable-Baselines3's buffers hold such): if they are scaled, {unscale(low, high)}"
        )
    if raw.range_known is None:
        raw.range_known = not open_ends.any()
    if open_ends.any() and len(actions):
        smallest, largest = np.full(width, np.inf, np.float32), np.full(width, -np.inf, np.float32)
        for part in chunks(len(actions)):  # fmin and fmax pass over NaN, which is reported elsewhere
            smallest = np.fmin(smallest, np.fmin.reduce(actions[part], 0))
            largest = np.fmax(largest, np.fmax.reduce(actions[part], 0))
        smallest = np.nan_to_num(smallest, posinf=-1.0, neginf=-1.0)
        largest = np.nan_to_num(largest, posinf=1.0, neginf=1.0)
        if (smallest[open_ends] >= -1.0001).all() and (largest[open_ends] <= 1.0001).all():
            if onesided := np.flatnonzero(open_ends & (smallest >= 0.0) & (largest > 0.0)).tolist():
                raw.note(
                    "the action range is not known; taking [-1, 1], of which the data use "
                    f"[{smallest[onesided[0]]:.4g}, {largest[onesided[0]]:.4g}] in dimension {onesided[0]} (or set "
                    "dataset.action_low and dataset.action_high)"
                )
            smallest, largest = np.full(width, -1.0, np.float32), np.full(width, 1.0, np.float32)
        else:
            flat = largest - smallest < 1e-6  # a constant dimension has no range to scale by
            smallest, largest = np.where(flat, smallest - 1.0, smallest), np.where(flat, largest + 1.0, largest)
            pairs = ", ".join(f"[{a:.4g}, {b:.4g}]" for a, b in zip(smallest[:4], largest[:4], strict=True)) + (
                ", ..." if width > 4 else ""
            )
            raw.note(
                f"the action range is not known; taking the data's own: {pairs} (or set dataset.action_low and "
                "dataset.action_high)"
            )
        low, high = np.where(open_ends, smallest, low), np.where(open_ends, largest, high)
    if not (low < high).all():
        raise UserError(f"{raw.where}: action_low must be below action_high in every dimension")
    raw.action_low, raw.action_high = low, high
    return low, high


def _scaled(actions: np.ndarray, low: np.ndarray, high: np.ndarray) -> bool:
    """Whether actions [R, A] fill [-1, 1], and no more, in a dimension of which the range [A] reaches further."""
    wider = (low <= -1.0) & (high >= 1.0) & (high - low > 2.01)
    if not wider.any() or not len(actions):
        return False
    size = np.max([np.fmax.reduce(np.abs(actions[part]), 0) for part in chunks(len(actions))], 0)
    return bool((size <= 1.0 + 1e-6).all() and (size[wider] >= UNIT).any())


def unscale(low: np.ndarray, high: np.ndarray) -> str:
    """What to do with actions that were scaled to [-1, 1] from the range [A], lowest and highest."""
    return f"take actions = low + (actions + 1) / 2 * (high - low), low={listed(low)}, high={listed(high)}"


def listed(values: np.ndarray) -> str:
    """Bounds [A] as a setting takes them: one number where all are the same."""
    numbers = values.tolist()
    return f"[{','.join(f'{v:g}' for v in (numbers[:1] if len(set(numbers)) == 1 else numbers))}]"


def count_from_zero(raw: RawData) -> None:
    """Choices as numbers from 0 where the environment numbers its own from another, and the data are seen to do so; in
    place.

    `num_actions`, where given, says that they count from 0. Raises UserError where they may be either.
    """
    task = raw.task
    if task is None or task.action_start is not None or not (task.env_id or task.env_factory):
        return
    space = action_space(task)
    start, count = int(getattr(space, "start", 0)), int(getattr(space, "n", 0))
    actions = raw.columns["actions"]
    if not start or not len(actions):
        return
    low, high = int(actions.min()), int(actions.max())
    from_start = start <= low and high < start + count and not raw.num_actions
    from_zero = low >= 0 and high < count
    if from_start and from_zero:
        raise UserError(two_numberings(raw.where, low, high, start, count))
    if from_start:
        raw.note(f"actions: the environment's numbers {start} to {start + count - 1}, counted from 0 in the data")
        raw.columns["actions"] = actions - start
    if from_start or from_zero:
        raw.task, raw.num_actions = replace(task, action_start=start), raw.num_actions or count


def two_numberings(name: str, low: int, high: int, start: int, count: int) -> str:
    """The message for choices, `low` to `high` in the data, of which nobody knows whether they count from 0 or as the
    environment's.
    """
    return (
        f"{name}: the actions are {low} to {high}, and the environment numbers its {count} choices {start} to "
        f"{start + count - 1}, so that they may be its numbers or count from 0: of its numbers take actions - "
        f"({start}); where they count from 0, say how many there are, offrl.from_arrays(..., num_actions={count})"
    )


def action_space(task: Task) -> Any:
    """The space of the environment's actions, or None where it cannot be made here, or only a file names its module."""
    if task.env_id and not trust.importable(task.env_id):
        return None
    try:
        from offrl.tasks.environments import make_env

        env = make_env(task)
        env.close()
        return env.action_space
    except Exception:  # not installed
        return None


def starts_elsewhere(raw: RawData, last: np.ndarray) -> np.ndarray:
    """Mask of the episodes, with these `last` rows, whose last stored successor is the next one's first observation,
    bool [E]: nobody knows what followed there. After the last episode that is perhaps row 0.

    Of terminations all or none: a task may now and then end where another episode begins.
    """
    pairs = [(raw.columns["observations"], raw.columns["next_observations"])]
    pairs += [(images.values, images.following) for images in raw.images.values() if images.following is not None]
    same = np.ones(len(last), bool)
    for observations, successors in pairs:
        for part in chunks(len(last), rows_at_once(observations)):
            rows = last[part]
            equal = successors[rows] == observations[(rows + 1) % raw.rows]
            same[part] &= equal.reshape(len(rows), int(np.prod(observations.shape[1:]))).all(1)
    ended = raw.columns.get("terminations", np.zeros(raw.rows, bool))[last]
    judged = same[:-1][ended[:-1]]
    return np.asarray(same if len(judged) >= 2 and judged.all() else same & ~ended)


def fitting_task(raw: RawData) -> Task | None:
    """The task, unless the data's shapes say that the guess was wrong."""
    task, width = raw.task, int(np.prod(raw.columns["observations"].shape[1:]))
    if task is None:
        return None
    actions = 1 if raw.discrete else raw.columns["actions"].shape[1]
    for aspect, recorded, expected in (
        ("observations", width, task.observation_dim),
        ("actions", actions, task.action_dim),
    ):
        if expected is not None and expected != recorded:
            raw.note(f"taken for no known task: '{task.name}' has {expected}-dimensional {aspect}, the data {recorded}")
            return None
    return task


def spec_of(raw: RawData, task: Task | None) -> DataSpec:
    """The specification of the columns. Fills in the action range. Raises UserError where it is none."""
    columns = raw.columns
    low, high = ((), ()) if raw.discrete else action_range(raw)
    return DataSpec(
        observation_shape=tuple(columns["observations"].shape[1:]),
        action_dim=1 if raw.discrete else columns["actions"].shape[1],
        discrete=bool(raw.discrete),
        num_actions=(raw.num_actions or int(columns["actions"].max()) + 1) if raw.discrete else 0,
        action_low=tuple(map(float, low)),
        action_high=tuple(map(float, high)),
        observation_columns=raw.column_specs("observations"),
        action_columns=raw.column_specs("actions"),
        action_labels=raw.labels,
        name=raw.name,
        source=raw.source,
        version=raw.version,
        task=task,
        goal_dim=columns["achieved_goals"].shape[1] if "achieved_goals" in columns else 0,
        streams=streams_of(raw.streams),
        costs="costs" in columns,
    )
