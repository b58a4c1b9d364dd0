"""V-D4RL (arXiv 2206.04779): folders of npz files with an episode of 64 x 64 images each, as Dreamer's replay buffers
write them, or of numbered HDF5 files (shards) with 84 x 84 images, channels first, that cut episodes.

A file's row is a state with the action and the reward that led to it: those of an episode's first state are zeros.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from offrl.data.containers.file_type import file_type
from offrl.data.containers.guard import reading, refuse_growth
from offrl.data.containers.hdf5 import hdf5_keys, open_hdf5, refuse_absent, value_of
from offrl.data.containers.images import BLOCK, frame_shape, row_parts
from offrl.data.containers.npz import NUMBERS, Npz
from offrl.data.containers.plain_files import refuse_link
from offrl.data.memory import Memory
from offrl.data.raw import CORE, RawData, as_vector, canonical, ends_of
from offrl.data.raw.streams import CHANNELS, RawStream
from offrl.errors import UserError, nearest
from offrl.settings.dataset import DatasetConfig
from offrl.tasks.entries import PIXELS

FIRST, LAST = 0, 2  # of step_type
_NEEDED = {"npz": ("image", "action", "reward"), "hdf5": ("observation", "action", "reward", "discount", "step_type")}
_FLAGS = {"npz": ("discount", "is_first", "is_terminal"), "hdf5": ()}

_SINGLE = ("reward", "discount", "step_type", "is_first", "is_terminal")  # a number a state


def own(kind: str, keys: set[str]) -> bool:
    """True where a file of the kind npz or hdf5 with these keys is of V-D4RL's layout."""
    marked = kind == "hdf5" or bool(keys & {"is_first", "discount"})
    return marked and keys >= set(_NEEDED.get(kind, ("?",)))


def files(folder: Path) -> list[Path]:
    """The files of a folder in order, shards by their numbers; [] where they are not of this layout, by the first."""
    episodes, shards = sorted(folder.glob("*.npz")), sorted(folder.glob("*.hdf5"), key=_number)
    listed = episodes or shards
    # other files, damaged ones too, are not opened
    if bool(episodes) == bool(shards) or not re.search(r"\d$|^data$", listed[0].stem):
        return []
    for path in listed:
        refuse_link(path, folder)
    if (kind := file_type(listed[0])) == "npz":
        return listed if own(kind, set(Npz(listed[0]).shapes)) else []
    with open_hdf5(listed[0]) as file:
        return listed if own(kind, set(file)) else []


def _number(path: Path) -> tuple[str, int]:
    """A shard's name without its number, and that; -1 without one."""
    number = re.search(r"\d*$", path.stem)
    assert number is not None
    return path.stem[: number.start()], int(number[0] or -1)


def read(paths: Sequence[Path], path: Path, config: DatasetConfig, memory: Memory) -> RawData:
    """Episodes of the transitions from one state to the next, all but the last state of each: what follows that row is
    known. A discount of 0 is a termination, each other end a time-out.

    path: their folder, or the single file. `dataset.observation_keys`: "pixels" (the default), and states that npz
    files hold beside. Raises UserError.
    """
    states = _States(paths, path, config, memory)
    first, arrays = states.first(), states.numbers
    starts = np.flatnonzero(first)
    lengths = np.diff(starts, append=len(first)) - 1
    starts, lengths = starts[lengths > 0], lengths[lengths > 0]
    if not len(starts):
        raise UserError(f"{path} holds no transition, only single states; it is incomplete")
    last = starts + lengths
    ends = ends_of(lengths)
    rows = np.flatnonzero(~np.concatenate([first[1:], [True]]))  # states from which an action was taken
    terminal, notes = np.zeros(len(first), bool), list[str]()
    if "discount" in arrays:
        terminal |= arrays["discount"] == 0
    if "is_terminal" in arrays:
        terminal |= canonical("terminations", arrays["is_terminal"], str(path))
    if not {"discount", "is_terminal"} & set(arrays):
        notes.append("neither discount nor is_terminal in the files: all ends of episodes count as cut off")
    inside = np.flatnonzero(terminal[rows + 1] & ~ends)
    if len(inside):
        raise UserError(
            f"{states.place(int(rows[inside[0]]) + 1)}: discount 0 or is_terminal ends an episode, and it goes on: "
            "mark the next row as a first one (is_first, step_type 0)"
        )
    columns = {}
    for name, key in (("actions", "action"), ("rewards", "reward")):
        columns[name] = canonical(name, arrays[key][rows + 1], str(path), False if name == "actions" else None, notes)
    columns["terminations"] = terminal[rows + 1]
    columns["truncations"] = ends & ~columns["terminations"]
    vectors = [arrays[k].reshape(len(first), -1) for k in states.vectors]
    observed = np.concatenate(vectors, 1) if vectors else np.zeros((len(first), 0), np.float32)
    columns["observations"] = canonical("observations", observed[rows], str(path), notes=notes)
    raw = RawData(columns, ends, name=_name(path), source="vd4rl", path=str(path), discrete=False, notes=notes)
    raw.final_observations = canonical("observations", observed[last], str(path)) if vectors else None
    for name, key in config.fields.items():
        columns[name] = canonical(name, arrays[key][rows], str(path), notes=notes)
        raw.final_columns[name] = canonical(name, arrays[key][last], str(path))
    if states.pixels is not None:
        raw.streams[PIXELS] = RawStream(states.pixels, rows, last)
        if states.kind == "hdf5" and states.pixels.shape[1:3] == (84, 84):
            raw.note("V-D4RL's conversion enlarges images of 64 x 64 to these 84 x 84 ones, by cubic interpolation")
    if states.kind == "hdf5" and (cut := int((arrays["step_type"][last] != LAST).sum())):
        raw.note(f"{cut:,} of {len(last):,} episodes do not end with step_type 2: they count as cut off there")
    return raw


def _name(path: Path) -> str:
    """What to call the data: "walker_walk-random-64px" of .../walker_walk/random/64px."""
    return "-".join(path.resolve().parts[-3:]) if path.name.endswith("px") else path.stem


class _States:
    """All states of the files, one after another."""

    def __init__(self, paths: Sequence[Path], path: Path, config: DatasetConfig, memory: Memory) -> None:
        self.paths, self.path, self.kind = paths, path, file_type(paths[0])
        image, keys = _NEEDED[self.kind][0], config.observation_keys or [PIXELS]
        if wrong := [name for name in config.fields if name in CORE]:
            raise UserError(
                f"dataset.fields.{wrong[0]} is not for V-D4RL's files, such as {paths[0]}: their layout says what "
                "columns are, and dataset.observation_keys chooses observations"
            )
        self.vectors = [k for k in keys if k not in (PIXELS, image)]
        numbers = (*_NEEDED[self.kind][1:], *_FLAGS[self.kind], *self.vectors, *map(str, config.fields.values()))
        optional = _FLAGS[self.kind]
        parts: dict[str, list[np.ndarray]] = {}
        self.counts: list[int] = []
        frame: tuple[int, ...] = ()
        size = stored = 0
        for file in paths:
            shapes = self._shapes(file)
            for key in (image, *numbers):
                if key not in shapes and key not in optional:
                    raise UserError(f"{file} has no '{key}'.{nearest(key, shapes)} It has: {', '.join(sorted(shapes))}")
            count = (shapes[image][0] or (0,))[0]
            size += sum(math.prod(s) * d.itemsize for k, (s, d) in shapes.items() if k in (image, *numbers))
            stored += file.stat().st_size
            refuse_growth(f"{path}: its images", size, stored)
            for key, values in self._read(file, [k for k in numbers if k in shapes]).items():
                if values.shape[:1] != (count,) or (key in _SINGLE and as_vector(values).ndim > 1):
                    raise UserError(f"{file}: '{key}' has shape {list(values.shape)}, for {count} images")
                if key in parts and values.shape[1:] != parts[key][0].shape[1:]:
                    raise UserError(
                        f"{file}: '{key}' has shape {list(values.shape)}; {list(parts[key][0].shape[1:])} a row, as in "
                        f"{paths[0].name}, are due"
                    )
                parts.setdefault(key, []).append(values)
            if len(keys) > len(self.vectors):
                shape = self._frame(file, image, *shapes[image])
                if frame and shape != frame:
                    raise UserError(
                        f"{file}: '{image}' has images of {list(shape)}, and {paths[0].name} of {list(frame)}: take "
                        "data of one size"
                    )
                frame = shape
            self.counts.append(count)
        for key, part in parts.items():
            if len(part) != len(paths):
                raise UserError(f"{path}: '{key}' is in {len(part)} of {len(paths)} files: take data of one kind")
        self.numbers = {key: as_vector(np.concatenate(part)) for key, part in parts.items()}
        self.pixels = None
        if frame:
            self.pixels = memory.empty(PIXELS, (sum(self.counts), *frame), np.uint8)
            at = 0
            for file in paths:
                for block in self._images(file, image):
                    self.pixels[at : at + len(block)] = block
                    at += len(block)

    def _shapes(self, file: Path) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
        if file_type(file) != self.kind:
            raise UserError(f"{file} is no {self.kind} file, as {self.paths[0].name} is: take data of one kind")
        if self.kind == "npz":
            return Npz(file).shapes
        with open_hdf5(file) as opened:
            return {k: (tuple(item.shape or ()), item.dtype) for k, item in hdf5_keys(opened).items()}

    def _read(self, file: Path, keys: Sequence[str]) -> dict[str, np.ndarray]:
        if self.kind == "npz":
            archive = Npz(file)
            return {key: archive.array(key) for key in keys}
        with open_hdf5(file) as opened:
            return {key: np.asarray(value_of(opened[key], str(file), NUMBERS)) for key in keys}

    def _frame(self, file: Path, key: str, shape: tuple[int, ...], dtype: np.dtype) -> tuple[int, ...]:
        """(H, W, C) of a file's images."""
        where = f"{file}: '{key}'"
        if self.kind == "npz":
            return frame_shape(shape, dtype, lambda: next(Npz(file).blocks(key, 1)), where)
        if len(shape) != 4 or shape[1] not in CHANNELS:
            raise UserError(
                f"{where} has shape {list(shape)}; images [R, C, H, W] of 1 to {CHANNELS[-1]} channels are due: move "
                "others to the front (numpy.moveaxis(x, -1, 1)), and take the newest of a stack of frames (x[:, -3:])"
            )
        moved = (shape[0], *shape[2:], shape[1])
        return frame_shape(moved, dtype, lambda: next(self._images(file, key))[:1], where)

    def _images(self, file: Path, key: str) -> Iterator[np.ndarray]:
        """A file's images [n, H, W, C], some at a time."""
        if self.kind == "npz":
            archive = Npz(file)
            width = math.prod(archive.shapes[key][0][1:])
            yield from archive.blocks(key, max(1, BLOCK // width))
            return
        with open_hdf5(file) as opened, reading(where := f"{file}: '{key}'"):
            item = opened[key]
            refuse_absent(item.id, where, opened)
            for part in row_parts(item):
                yield np.moveaxis(item[part], 1, -1)

    def place(self, state: int) -> str:
        """File and row of a state, for messages."""
        at = int(np.searchsorted(np.cumsum(self.counts), state, side="right"))
        return f"{self.paths[at]}: row {state - sum(self.counts[:at])}"

    def first(self) -> np.ndarray:
        """The states that begin an episode, bool [states]. Raises UserError where some before them are missing, and
        where actions or rewards do not come with the state that they led to.
        """
        begins = np.zeros(sum(self.counts), bool)
        heads = np.cumsum([0, *self.counts[:-1]])
        if self.kind == "npz":
            begins[heads] = True
            if "is_first" in self.numbers:
                begins = canonical("terminations", self.numbers["is_first"], f"{self.path}: 'is_first'")
                absent = heads[~begins[heads]]
            else:
                absent = heads[:0]
        else:
            steps = self.numbers["step_type"]
            if len(wrong := np.flatnonzero(~np.isin(steps, (FIRST, 1, LAST)))):
                raise UserError(f"{self.place(int(wrong[0]))}: step_type is {steps[wrong[0]]:g}; 0, 1 and 2 are due")
            begins = steps == FIRST
            after_last = np.concatenate([[True], steps[:-1] == LAST])
            numbers = [_number(file) for file in self.paths]
            gaps = [a[0] != b[0] or b[1] - a[1] != 1 for a, b in zip(numbers, numbers[1:], strict=False)]
            after_last[heads] |= np.array([True, *gaps])
            absent = np.flatnonzero(after_last & ~begins)
        if len(absent):
            raise UserError(
                f"{self.place(int(absent[0]))} goes on with an episode whose states before are missing: name the "
                "folder with all files, and get those that it lacks"
            )
        starts = np.flatnonzero(begins)
        for key in ("action", "reward"):
            values = np.nan_to_num(self.numbers[key].reshape(len(begins), -1)[starts])
            if len(wrong := np.flatnonzero((values != 0).any(1))):
                raise UserError(
                    f"{self.place(int(starts[wrong[0]]))}: '{key}' of an episode's first state is not 0, so that it is "
                    "not what led to the state, as in V-D4RL: write it a row later, zeros first "
                    "(numpy.concatenate([0 * x[:1], x[:-1]]) for each episode)"
                )
        return begins
