"""robomimic's HDF5 files (arXiv 2108.03298): a group for each demonstration, with its observations by their keys, and
masks that name parts of the demonstrations.

Nothing that a file says of its environment (`env_args`) is imported: it is kept as a text.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from offrl.data.containers.guard import reading, refuse_growth
from offrl.data.containers.hdf5 import open_hdf5, refuse_absent, refuse_loops, value_of
from offrl.data.containers.images import frame_shape, row_parts
from offrl.data.containers.stored import Stored
from offrl.data.formats.minari_episodes import numbered
from offrl.data.memory import Memory
from offrl.data.raw import CORE, RawData, canonical, ends_of
from offrl.data.raw.streams import RawStream
from offrl.errors import UserError, nearest, one_line, some
from offrl.settings.dataset import DatasetConfig
from offrl.tasks.entries import entries

KEYS = {"actions": "actions", "rewards": "rewards", "terminations": "dones"}  # our columns, and theirs


def demonstrations(file: Any) -> list[str]:
    """The names of the groups in `data` of an h5py.File, "demo_10" after "demo_9"; [] where it has none."""
    return numbered(data, "demo_") if hasattr(data := file.get("data"), "keys") else []


def read(path: Path, config: DatasetConfig, memory: Memory) -> RawData:
    """The demonstrations one after another: the vectors of `dataset.observation_keys` (default: all, sorted) joined,
    its images (default: none where there are vectors) as streams.

    `dones` mark successes, the ends of recordings, or both, as the extraction was told: a demonstration's last row is a
    termination where it is done and has a reward above 0, else a time-out. `next_obs` give what follows the last row.
    Raises UserError where they are not the next row's observations elsewhere.
    """
    with open_hdf5(path) as file:
        raw = _Reader(file, path, config, memory).read()
        if "env_args" in file["data"].attrs:
            refuse_loops(path)
            with reading(f"{path}: the attribute 'env_args'"):
                text = file["data"].attrs["env_args"]
                text = text.decode(errors="replace") if isinstance(text, bytes) else str(text)
            raw.metadata["env_args"] = one_line(" ".join(text.split()))[:2000]
    return raw


class _Reader:
    """Arrays for all steps of a file, and the reading of one demonstration after another into them."""

    def __init__(self, file: Any, path: Path, config: DatasetConfig, memory: Memory) -> None:
        self.file, self.path, self.memory = file, path, memory
        if wrong := [name for name in config.fields if name in CORE and name not in KEYS]:
            raise UserError(
                f"dataset.fields.{wrong[0]} is not for robomimic's files, such as {path}: dataset.observation_keys "
                "chooses observations, and a demonstration is an episode"
            )
        self.judged = "terminations" not in config.fields  # else the flags are taken as they are
        self.keys: dict[str, str] = KEYS | config.fields
        self.lengths = {  # a single value counts as a row, for `_checked` to refuse
            demo: count
            for demo in self._masked(config.mask)
            if (count := (self._item(demo, self.keys["actions"]).shape or (1,))[0])
        }
        if not self.lengths:
            raise UserError(f"{path} holds no demonstration with a step; it is incomplete")
        rows, demos, first = sum(self.lengths.values()), len(self.lengths), next(iter(self.lengths))
        self.shapes: dict[str, tuple[int, ...]] = {}  # of a row of each key, as the first demonstration has it
        frames = self._choose(config.observation_keys, first)
        self.following = all(f"{d}/next_{k}" in file for d in self.lengths for k in (*self.vectors, *frames))
        self.repeats = self.following  # whether each next_obs ends with the last observation again
        count = rows + demos * self.following  # of images
        width = sum(math.prod(self.shapes[key]) for key in self.vectors)
        numbers = width + sum(math.prod(self._item(first, key).shape[1:]) for key in self.keys.values())
        size = 4 * rows * numbers + count * sum(map(math.prod, frames.values()))
        refuse_growth(f"{path}: its {demos:,} demonstrations", size, path.stat().st_size)
        self.observations = memory.empty("observations", (rows, width), np.float32)
        self.finals = np.zeros((demos, width), np.float32)
        self.pixels = {k: memory.empty(k, (count, *shape), np.uint8) for k, shape in frames.items()}
        self.columns: dict[str, np.ndarray] = {}
        self.samples = Stored(rows)

    def _masked(self, mask: str) -> list[str]:
        """The demonstrations of a mask, in the order of their numbers; all without one."""
        names = [f"data/{name}" for name in demonstrations(self.file)]
        if not mask:
            return names
        masks = sorted(self.file.get("mask", ()))
        if mask not in masks:
            known = ", ".join(masks) or "none; leave dataset.mask out"
            raise UserError(f"{self.path} has no mask '{mask}' (dataset.mask).{nearest(mask, masks)} It has {known}")
        values = np.asarray(value_of(self._item("mask", mask), str(self.path), "SO"))
        members = {f"data/{str(v, 'utf-8', 'replace')}" for v in values.reshape(-1).tolist()}
        if absent := members.difference(names):
            raise UserError(
                f"{self.path}: the mask '{mask}' names {min(absent)}, which is not there: write the mask again, or get "
                "the whole file"
            )
        return [name for name in names if name in members]

    def _item(self, demo: str, key: str) -> Any:
        """An h5py dataset. Raises UserError where there is none."""
        item = self.file.get(f"{demo}/{key}")
        if not hasattr(item, "shape"):
            raise UserError(f"{self.path}: {demo} has no '{key}'; the file is damaged or incomplete")
        return item

    def _choose(self, keys: Sequence[str], demo: str) -> dict[str, tuple[int, ...]]:
        """Set the keys of `vectors` and of those that are `unused`. The keys of images, with (H, W, C) of each, as the
        first demonstration has them.
        """
        if not hasattr(group := self.file.get(f"{demo}/obs"), "keys"):
            raise UserError(
                f"{self.path}: {demo} has no group 'obs': the file is raw, with the simulator's states alone; extract "
                "observations first: python -m robomimic.scripts.dataset_states_to_obs --dataset "
                f"{self.path} --output_name observed.hdf5 --done_mode 2 (--camera_names agentview for images)"
            )
        arrays = {key: item for key, item in group.items() if hasattr(item, "shape")}  # groups may hold one another
        items = {f"obs/{key}": item for (key,), item in entries(arrays, keys, f"{self.path}: the observations")}
        ranks = {key: len(item.shape or ()) for key, item in items.items()}
        images = [k for k, rank in ranks.items() if rank > 3 or (rank == 3 and items[k].dtype == np.uint8)]
        self.vectors = [k for k in ranks if k not in images and (keys or ranks[k] < 3)]
        if not keys:
            images = [] if self.vectors else [k for k in images if items[k].dtype == np.uint8] or images
        self.unused = [k for k in items if k not in self.vectors and k not in images]
        if not self.vectors and not images:
            raise UserError(
                f"{self.path}: {demo} has neither vectors nor images in 'obs'; extract the observations again"
            )
        frames = {}
        for key in self.vectors + images:
            item = self._checked(demo, key)
            if key in images:
                frames[key] = frame_shape(
                    item.shape, item.dtype, partial(item.__getitem__, slice(0, 1)), f"{self.path}: '{demo}/{key}'"
                )
        return frames

    def _checked(self, demo: str, key: str) -> Any:
        """An h5py dataset of numbers. Raises UserError for another shape than is due."""
        item, where = self._item(demo, key), f"{self.path}: '{demo}/{key}'"
        shape = tuple(item.shape or ())
        due = (self.lengths[demo], *self.shapes.setdefault(key.removeprefix("next_"), shape[1:]))
        if shape != due:
            raise UserError(
                f"{where} has shape {list(shape)}, expected {list(due)}: one row per action, and the same sizes in all "
                "demonstrations, are due"
            )
        if item.dtype.kind not in "biuf":
            raise UserError(f"{where} holds {item.dtype} values, not numbers")
        refuse_absent(item.id, where, self.file)
        return item

    def _numbers(self, demo: str, key: str) -> np.ndarray:
        with reading(f"{self.path}: '{demo}/{key}'"):
            return np.asarray(self._checked(demo, key)[()])

    def read(self) -> RawData:
        """Read all demonstrations."""
        row = 0
        for number, (demo, steps) in enumerate(self.lengths.items()):
            rows, looked, at = slice(row, row + steps), self.samples.looks_at(row), 0
            for name, key in self.keys.items():
                self._add(name, demo, key, rows, looked)
            for key in self.vectors:
                values = self._numbers(demo, key)
                out = self.observations[rows, at : at + math.prod(values.shape[1:])]
                out[:] = values.reshape(out.shape)
                if looked:
                    self.samples.keep(f"'{key}'", values)
                if self.following:
                    successors = self._numbers(demo, f"next_{key}")
                    self._compare(f"{demo}/next_{key}", successors[:-1], values[1:], 0)
                    self.finals[number, at : at + out.shape[1]] = successors[-1].reshape(-1)
                    self.repeats &= np.array_equal(successors[-1], values[-1])
                at += out.shape[1]
            for key, pixels in self.pixels.items():
                start = row + number * self.following
                self._add_images(demo, key, pixels[start : start + steps + self.following], looked)
            row += steps
        return self.result()

    def _add(self, name: str, demo: str, key: str, rows: slice, looked: bool) -> None:
        """One demonstration's rows of a column."""
        values, where = self._numbers(demo, key), f"{self.path}: '{demo}/{key}'"
        part = canonical(name, values, where, False if name == "actions" else None)
        if name not in self.columns:
            self.columns[name] = self.memory.empty(name, (len(self.observations), *part.shape[1:]), part.dtype)
        np.copyto(self.columns[name][rows], part)  # refuses another type
        if looked and part.dtype == np.float32:
            self.samples.keep(name, values)

    def _add_images(self, demo: str, key: str, out: np.ndarray, looked: bool) -> None:
        """One demonstration's images into `out`, uint8 [T, H, W, C], with next_obs [T + 1, H, W, C]. looked: compare
        all of next_obs.
        """
        steps = self.lengths[demo]
        for name in (key, f"next_{key}")[: 1 + self.following]:
            item, where = self._checked(demo, name), f"{self.path}: '{demo}/{name}'"
            if item.dtype != np.uint8:
                raise UserError(f"{where} holds {item.dtype} values; uint8 is due, as in the others")
            with reading(where):
                if name == key:
                    item.read_direct(out[:steps].reshape(item.shape))
                    continue
                out[steps] = item[steps - 1].reshape(out.shape[1:])
                self.repeats &= np.array_equal(out[steps], out[steps - 1])
                for part in row_parts(item) if looked else ():
                    stop = min(part.stop, steps - 1)
                    values = item[part.start : stop].reshape(-1, *out.shape[1:])
                    self._compare(f"{demo}/{name}", values, out[part.start + 1 : stop + 1], part.start)

    def _compare(self, key: str, successors: np.ndarray, values: np.ndarray, start: int) -> None:
        """Raises UserError unless `successors` of the rows from `start` on are the observations of the rows after."""
        if not np.array_equal(successors, values):
            row = start + int(np.argmax((successors != values).reshape(len(values), -1).any(1)))
            raise UserError(
                f"{self.path}: '{key}' of row {row} is not the observation of row {row + 1}, so that rows do not "
                "follow one another: extract the observations again, or delete the groups 'next_obs' where they do"
            )

    def result(self) -> RawData:
        """The columns of all demonstrations."""
        lengths = np.array(list(self.lengths.values()))
        ends, numbers = ends_of(lengths), np.arange(len(lengths)) * self.following
        raw = RawData(self.columns, ends, name=self.path.stem, source="robomimic", path=str(self.path), discrete=False)
        raw.notes = self.samples.notes()
        self.columns["observations"] = self.observations
        self._mark(raw, ends)
        entries, final = np.arange(len(ends)) + np.repeat(numbers, lengths), None
        if self.repeats:
            raw.note("next_obs end with the last observation again: what followed the demonstrations is not known")
        elif not self.following:
            raw.note("not all demonstrations have next_obs: what followed them is not known")
        else:
            final = np.cumsum(lengths) + numbers
            raw.final_observations = self.finals if self.vectors else None
        raw.streams = {k.removeprefix("obs/"): RawStream(v, entries, final) for k, v in self.pixels.items()}
        if self.unused:
            raw.left_out = self.unused
            raw.note(f"not used: {some(self.unused)} (dataset.observation_keys names the observations that are)")
        return raw

    def _mark(self, raw: RawData, ends: np.ndarray) -> None:
        """The flags, from `dones` and rewards."""
        done, rewards = self.columns["terminations"], self.columns["rewards"]
        success = done & (rewards > 0.0) if self.judged else done
        # then dones mark the ends of recordings, and no reward says which of them are successes
        dense = self.judged and bool(done[ends].all()) and len(np.unique(rewards[rewards > 0.0])) > 1
        terminations = success & ends & (not dense)
        if cut := int((done & ends & ~terminations).sum()):
            reason = "and rewards are dense" if dense else "without a reward above 0"
            raw.note(
                f"{cut:,} of {len(self.lengths):,} demonstrations end with dones {reason}: these count as cut off "
                "(dataset.fields.terminations=dones: as terminations)"
            )
        if early := int((success & ~ends).sum()):
            raw.note(
                f"{early:,} rows before the last of their demonstration are successes, too: it goes on after them, and "
                "ends with its last row"
            )
        self.columns |= {"terminations": terminations, "truncations": ends & ~terminations}
