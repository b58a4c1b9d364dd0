"""Whole episodes: their columns, the shards they are kept in while a collection grows, and the datasets made of
them.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from offrl.collect.record import KEPT, Stop
from offrl.errors import UserError
from offrl.system import files as checkpoint
from offrl.system.progress import Progress

SHARD_ROWS, SHARD_SECONDS = 50_000, 30.0  # what a kill may cost
FINAL = "final/"  # of a shard: columns after the episodes' last steps
EACH_STEP = "give it in each step, 0 where there is none"  # of costs
MOST_EMPTY = 1000  # units without an episode, in which physics became unstable


@dataclass
class Episode:
    """One episode of T steps. Columns have T rows (observations of each step, before it); `final`: the observation
    after the last step.
    """

    columns: dict[str, np.ndarray]
    final: np.ndarray
    mark: int = 0  # the environment step of training at which it ended, or which policy made it
    images: dict[str, np.ndarray] = field(default_factory=dict)  # by column, after the last step [H, W, C]

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    @property
    def total(self) -> float:
        """The undiscounted return."""
        return float(self.columns["rewards"].sum(dtype=np.float64))


def shards(folder: Path) -> list[tuple[int, int, Path]]:
    """(first, last + 1, file) of the shards in `folder`, in order, up to the first gap."""
    files = sorted(
        (int(m[1]), int(m[2]), p) for p in folder.glob("*.safetensors") if (m := re.fullmatch(r"(\d+)-(\d+)", p.stem))
    )
    result: list[tuple[int, int, Path]] = []
    for first, stop, path in files:
        if first == (result[-1][1] if result else 0):
            result.append((first, stop, path))
    return result


def write_shard(folder: Path, first: int, stop: int, episodes: Sequence[Episode]) -> None:
    """Write the episodes of the units (episodes, waves) first to stop - 1 as one file, or not at all. Raises UserError
    (a full disk).
    """
    names = list(episodes[0].columns) if episodes else []
    tensors = {k: torch.from_numpy(np.concatenate([e.columns[k] for e in episodes])) for k in names}
    if episodes:
        tensors["final"] = torch.from_numpy(np.stack([e.final for e in episodes]))
        for name in episodes[0].images:
            tensors[FINAL + name] = torch.from_numpy(np.stack([e.images[name] for e in episodes]))
    tensors["length"] = torch.tensor([len(e) for e in episodes], dtype=torch.int64)
    tensors["mark"] = torch.tensor([e.mark for e in episodes], dtype=torch.int64)
    metadata = {"kind": "episodes", "columns": names}  # their order, which the file does not keep
    checkpoint.write(folder / f"{first:08d}-{stop:08d}.safetensors", tensors, metadata, KEPT)


def read_shards(paths: Iterable[Path]) -> list[Episode]:
    """The episodes in these files. Raises UserError for a damaged one."""
    episodes: list[Episode] = []
    for path in paths:
        try:
            tensors, metadata = checkpoint.read(path)
        except UserError as error:
            raise UserError(f"{error}; remove it, and run the same command again to record it anew") from None
        arrays = {k: v.numpy() for k, v in tensors.items()}
        lengths, marks, finals = arrays.pop("length"), arrays.pop("mark"), arrays.pop("final", ())
        images = {k.removeprefix(FINAL): arrays.pop(k) for k in list(arrays) if k.startswith(FINAL)}
        stops = np.cumsum(lengths)
        for i, (stop, length) in enumerate(zip(stops, lengths, strict=True)):
            columns = {k: arrays[k][stop - length : stop] for k in metadata.get("columns", arrays)}
            after = {name: frames[i] for name, frames in images.items()}
            episodes.append(Episode(columns, finals[i], int(marks[i]), after))
    return episodes


Play = Callable[[int], list[Episode]]  # a unit of play by its number


def play_units(
    folder: Path,
    stage: Callable[[], contextlib.AbstractContextManager[Play]],
    rows: int | None,
    episodes: int | None,
    title: str,
    quiet: bool,
    stop: Stop,
) -> list[Episode]:
    """The episodes of units (waves, or single episodes) 0, 1, ... until there are so many rows or episodes. What
    `folder` holds of them is not played again, and what is played is kept there, some at a time.

    stage: opens what plays a unit. Raises Stopped; gives nothing where `MOST_EMPTY` units have no episode.
    """
    shard_files = shards(folder)
    result = read_shards(p for _, _, p in shard_files)

    def size(played: Sequence[Episode]) -> int:
        return len(played) if rows is None else sum(map(len, played))

    goal, done, pending = rows or episodes or 0, size(result), list[Episode]()
    number = first = shard_files[-1][1] if shard_files else 0
    if done >= goal:
        return result
    unit, saved = "episodes" if rows is None else "rows", time.monotonic()
    with stage() as play, Progress(title, goal, unit, quiet, done) as bar:
        while done < goal and (done or number < MOST_EMPTY):
            new = play(number)
            number, done = number + 1, done + size(new)
            pending += new
            scored = [e.total for e in pending[-100:] if "rewards" in e.columns]
            bar.update(done, f"return {np.mean(scored):.1f}" if scored else "")
            late = time.monotonic() - saved > SHARD_SECONDS or sum(map(len, pending)) >= SHARD_ROWS
            if late or done >= goal or stop.asked:
                write_shard(folder, first, number, pending)
                result, pending, first, saved = [*result, *pending], [], number, time.monotonic()
                stop.check()
    return result


def first_rows(episodes: Sequence[Episode], rows: int) -> list[Episode]:
    """The first whole episodes that have at least `rows` rows."""
    count, result = 0, []
    for episode in episodes:
        if count >= rows:
            break
        result.append(episode)
        count += len(episode)
    return result


def columns_of(episodes: Sequence[Episode]) -> dict[str, np.ndarray]:
    """The columns of a dataset with next_observations, true at the episodes' ends as well."""
    keys = [k for k in episodes[0].columns if all(k in e.columns for e in episodes)]  # what all of them have
    if "costs" not in keys and any("costs" in e.columns for e in episodes):
        raise UserError(f"the environment gave info['cost'] in some episodes alone: {EACH_STEP}")
    columns = {k: np.concatenate([e.columns[k] for e in episodes]) for k in keys}
    columns["next_observations"] = np.concatenate(
        [np.concatenate([e.columns["observations"][1:], e.final[None]]) for e in episodes]
    )
    return columns


def statistics(episodes: Sequence[Episode]) -> dict[str, Any]:
    """Plain numbers about the episodes, for cards and tables."""
    returns, lengths = np.array([e.total for e in episodes]), np.array([len(e) for e in episodes])
    costs = np.array([e.columns["costs"].sum(dtype=np.float64) for e in episodes if "costs" in e.columns])
    return {
        **({"cost_mean": float(costs.mean()), "cost_max": float(costs.max())} if len(costs) else {}),
        "rows": int(lengths.sum()),
        "episodes": len(episodes),
        "return_mean": float(returns.mean()),
        "return_std": float(returns.std()),
        "return_min": float(returns.min()),
        "return_max": float(returns.max()),
        "length_mean": float(lengths.mean()),
        "terminations": int(sum(e.columns["terminations"][-1] for e in episodes)),
        "truncations": int(sum(e.columns["truncations"][-1] for e in episodes)),
    }
