"""Rollouts padded to one length, [N, T, ...] with masks [N, T] or [N, T, 1]: ImagineBench (arXiv 2505.10010) and
whoever stores them so.

Three containers: npz and HDF5 with a key per array, and the Parquet files that ImagineBench publishes, with a row per
rollout: `KEY_data` holds the bytes of its array, `KEY_shape` the shape of all rollouts together, `KEY_dtype` the type,
`row_index` its place.

An observation ends with the encoding of the rollout's instruction, in some files. Others have the instruction as a text
(`instructions`), and its encoding elsewhere: `dataset.instruction_encodings` names that file, and encodings are
appended to the observations here."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from offrl.data.containers.file_type import file_type
from offrl.data.containers.guard import reading, refuse_growth
from offrl.data.containers.hdf5 import hdf5_keys, open_hdf5, refuse_groups, value_of
from offrl.data.containers.npz import NUMBERS, Npz
from offrl.data.containers.parquet import open_parquet
from offrl.data.memory import Memory
from offrl.data.raw import RawData, canonical, ends_of, lost
from offrl.errors import UserError, nearest
from offrl.settings.dataset import DatasetConfig

MASKS = ("masks", "action_masks")
FLAGS = {"terminations": ("terminations", "terminals"), "truncations": ("truncations", "timeouts")}
ENCODINGS = ("instruction_encodings", "encodings")  # numbers [N, W] or [N, T, W] in the file itself
TEXTS = "instructions"
_WANTED = (
    "observations",
    "actions",
    "rewards",
    *MASKS,
    *(n for names in FLAGS.values() for n in names),
    *ENCODINGS,
    TEXTS,
)


def padded(shapes: Mapping[str, tuple[int, ...]]) -> bool:
    """True where arrays of these shapes are padded rollouts."""
    masks = next((shapes[name] for name in MASKS if name in shapes), ())
    observations = shapes.get("observations", ())
    return (
        len(observations) >= 3
        and len(masks) >= 2
        and tuple(masks[:2]) == tuple(observations[:2])
        and tuple(masks[2:]) in ((), (1,))
    )


def is_padded(path: Path, kind: str) -> bool:
    """True where a file of the kind hdf5, npz or parquet holds padded rollouts."""
    if kind == "npz":
        return padded({name: shape for name, (shape, _) in Npz(path).shapes.items()})
    if kind == "hdf5":
        with open_hdf5(path) as file:
            names = [name for name in ("observations", *MASKS) if hasattr(file.get(name), "shape")]
            return padded({name: tuple(file[name].shape or ()) for name in names})
    try:
        import pyarrow.parquet as pq

        parts = {"row_index", "observations_data", "observations_dtype", "observations_shape"}  # ImagineBench's
        return parts <= set(pq.ParquetFile(path).schema_arrow.names)
    except Exception:  # no pyarrow, or a damaged file: the reader of plain files says so
        return False


def read(path: Path, config: DatasetConfig, memory: Memory) -> RawData:
    """The valid steps of all rollouts, one after the other.

    A rollout shorter than T ended there by itself (a termination), unless the file has flags that say otherwise; one
    that fills all T steps was cut off (a time-out). So does ImagineBench's own conversion for OfflineRL. Raises
    UserError, naming the rollout.
    """
    arrays, where = _arrays(path), str(path)
    for name in ("observations", "actions", "rewards"):
        if name not in arrays:
            raise UserError(f"{where} has no '{name}'.{nearest(name, arrays)} It has: {', '.join(sorted(arrays))}")
    mask = next((arrays[name] for name in MASKS if name in arrays), None)
    if mask is None:
        raise UserError(f"{where} has no 'masks', which say where padding begins; it has: {', '.join(sorted(arrays))}")
    observations = arrays["observations"]
    count, steps = observations.shape[:2]
    if not ((mask == 0) | (mask == 1)).all():
        raise UserError(f"{where}: its masks hold other numbers than 0 and 1")
    valid = mask.reshape(count, -1) != 0
    for name in _WANTED:
        if name in arrays and name != TEXTS and name not in ENCODINGS and arrays[name].shape[:2] != (count, steps):
            raise UserError(
                f"{where}: '{name}' has shape {list(arrays[name].shape)}; {[count, steps]} rollouts and steps are due"
            )
    lengths = valid.sum(1)
    holes = np.flatnonzero((valid != (np.arange(steps) < lengths[:, None])).any(1))
    if len(holes):
        raise UserError(f"{where}: the mask of rollout {holes[0]} has gaps; padding must stand at the end")
    if not lengths.any():
        raise UserError(f"{where}: its masks mark no step as valid")
    notes: list[str] = []
    actions = arrays["actions"]
    discrete = actions.dtype.kind in "biu" and (actions.ndim == 2 or actions.shape[2:] == (1,))
    columns = {name: canonical(name, arrays[name][valid], where, discrete, notes) for name in ("actions", "rewards")}
    columns["observations"] = _observations(
        observations, valid, _encodings(arrays, count, config, where), memory, where
    )
    ends = ends_of(lengths)
    flags = {name: next((arrays[n] for n in names if n in arrays), None) for name, names in FLAGS.items()}
    raw = RawData(columns, episode_ends=ends, name=path.stem, source="file", path=where, notes=notes)
    if text := lost("observations", observations[valid]):
        raw.note(text)
    if all(value is None for value in flags.values()):
        columns["terminations"] = ends & np.repeat(lengths < steps, lengths)
        if full := int((lengths == steps).sum()):
            raw.notes.append(
                f"{full:,} of {count:,} rollouts fill all {steps} steps and count as cut off, the others as ended by "
                "themselves"
            )
    for name, value in flags.items():
        if value is not None:
            columns[name] = canonical(name, value.reshape(count, steps)[valid], where)
    if (empty := int((lengths == 0).sum())) > 0:
        raw.notes.append(f"left out: {empty:,} rollouts without a valid step")
    if TEXTS in arrays and config.instruction_encodings is None and not any(name in arrays for name in ENCODINGS):
        raw.notes.append(
            "instructions are texts and not part of the observations; dataset.instruction_encodings=FILE appends their "
            "encodings"
        )
    return raw


def _observations(
    observations: np.ndarray, valid: np.ndarray, encodings: np.ndarray | None, memory: Memory, where: str
) -> np.ndarray:
    """The valid ones float32 [R, D + W], with the encodings [N, W] or [N, T, W] of their instructions."""
    if encodings is None:
        return canonical("observations", observations[valid], where)
    if observations.ndim != 3:
        raise UserError(
            f"{where}: encodings are appended to flat observations only; these have shape "
            f"{list(observations.shape[2:])}"
        )
    width = observations.shape[2]
    out = memory.empty("observations", (int(valid.sum()), width + encodings.shape[-1]), np.float32)
    out[:, :width] = observations[valid]
    out[:, width:] = np.repeat(encodings, valid.sum(1), 0) if encodings.ndim == 2 else encodings[valid]
    return out


def _encodings(arrays: Mapping[str, np.ndarray], count: int, config: DatasetConfig, where: str) -> np.ndarray | None:
    """[N, W] or [N, T, W] float32: the file's own, or of its texts."""
    for name in ENCODINGS:
        if name in arrays:
            values = arrays[name]
            if (
                values.dtype.kind not in "biuf"
                or values.ndim not in (2, 3)
                or values.shape[:-1] not in ((count,), arrays["observations"].shape[:2])
            ):
                raise UserError(
                    f"{where}: '{name}' has shape {list(values.shape)}; numbers [{count}, W] are due, one encoding for "
                    "each rollout"
                )
            return values.astype(np.float32)
    if config.instruction_encodings is None:
        return None
    path = Path(config.instruction_encodings).expanduser()
    if TEXTS not in arrays:
        raise UserError(f"{where} has no '{TEXTS}', whose encodings dataset.instruction_encodings={path} would give")
    known = read_encodings(path)
    encodings = []
    for rollout, text in enumerate(arrays[TEXTS].reshape(count, -1)[:, 0].tolist()):
        if str(text) not in known:
            raise UserError(
                f"{where}: {path} has no encoding of the instruction of rollout {rollout}, "
                f"'{text}'.{nearest(str(text), known)}"
            )
        encodings.append(known[str(text)])
    return np.stack(encodings)


def read_encodings(path: Path) -> dict[str, np.ndarray]:
    """{instruction: [W]} of an npz file with the arrays instructions [M] (texts) and encodings [M, W]. Raises
    UserError.
    """
    cure = (
        "an npz file with the arrays instructions [M] (texts) and encodings [M, W] is due; see docs/language-labels.md"
    )
    setting = f"dataset.instruction_encodings={path}"
    if not path.is_file():
        raise UserError(f"{setting}: there is no such file; {cure}")
    try:
        with reading(path):
            archive = Npz(path)
            texts, values = archive.array(TEXTS, NUMBERS + "U"), archive.array("encodings")
    except UserError as error:
        raise UserError(f"{setting} cannot be read ({str(error).removeprefix(f'{path}: ')}); {cure}") from None
    if texts.ndim != 1 or texts.dtype.kind != "U" or values.ndim != 2 or len(values) != len(texts):
        raise UserError(f"{setting} holds arrays of shape {list(texts.shape)} and {list(values.shape)}; {cure}")
    return dict(zip(texts.tolist(), values.astype(np.float32), strict=True))


# ---- the containers


def _arrays(path: Path) -> dict[str, np.ndarray]:
    """The arrays of a file that are looked at. Nothing is unpickled."""
    kind = file_type(path)
    if kind == "parquet":
        return _parquet(path)
    columns: dict[str, np.ndarray] = {}
    if kind == "npz":
        archive = Npz(path)
        for name in _WANTED:
            if name in archive.shapes:
                columns[name] = archive.array(name, NUMBERS + "U" if name == TEXTS else NUMBERS)
    else:
        with open_hdf5(path) as file:
            items = hdf5_keys(file)
            refuse_groups(file, _WANTED)
            for name in _WANTED:
                if name in items:
                    columns[name] = (
                        _texts(items[name], path) if name == TEXTS else value_of(items[name], str(path), NUMBERS)
                    )
    for name, values in columns.items():
        if name != TEXTS and values.dtype.kind not in "biuf":
            raise UserError(f"{path}: '{name}' holds {values.dtype} values, not numbers")
    return columns


def _texts(item: Any, path: Path) -> np.ndarray:
    """A dataset of texts as NumPy's texts."""
    values = value_of(item, str(path), "OSU")
    with reading(f"{path}: '{TEXTS}'"):
        texts = [v.decode() if isinstance(v, bytes) else str(v) for v in np.asarray(values).reshape(-1).tolist()]
        refuse_growth(f"{path}: '{TEXTS}'", 4 * len(texts) * max(map(len, texts), default=0), path.stat().st_size)
        return np.array(texts, np.str_).reshape(np.shape(values))


def _parquet(path: Path) -> dict[str, np.ndarray]:
    file = open_parquet(path)
    with reading(path, " as Parquet"):
        names, count = set(file.schema_arrow.names), file.metadata.num_rows
        order = file.read(columns=["row_index"])["row_index"].to_numpy()
        if sorted(order.tolist()) != list(range(count)):
            raise UserError(
                f"{path}: its column row_index does not number {count} rollouts from 0; the file is incomplete"
            )
        columns = {}
        for name in _WANTED:
            if f"{name}_data" in names:
                columns[name] = _numbers(file, path, name, order)
            elif name == TEXTS and (lists := names & {f"list_{name}_data", f"list_{name}"}):
                columns[name] = _texts_of(file, max(lists), order)
    return columns


def _numbers(file: Any, path: Path, name: str, order: np.ndarray) -> np.ndarray:
    """An array whose rollouts stand as bytes, or as lists, in one column."""
    head = file.read_row_group(0, columns=[f"{name}_shape", f"{name}_dtype"]).slice(0, 1).to_pylist()[0]
    shape = tuple(int(part) for part in str(head[f"{name}_shape"]).strip("() ").split(",") if part.strip())
    try:
        dtype = np.dtype(str(head[f"{name}_dtype"]))
    except TypeError:
        raise UserError(f"{path}: '{name}' has the unknown type {head[f'{name}_dtype']}") from None
    if name == TEXTS:
        return _texts_of(file, f"{name}_data", order)
    if dtype.kind not in "biuf":
        raise UserError(f"{path}: '{name}' holds {dtype} values, not numbers")
    shape = (len(order), *shape[1:])
    refuse_growth(f"{path}: '{name}'", math.prod(shape) * dtype.itemsize, path.stat().st_size)
    out = np.zeros(shape, dtype)
    at = 0
    for batch in file.iter_batches(columns=[f"{name}_data"], batch_size=64):
        for value in batch.column(0).to_pylist():
            row = np.frombuffer(value, dtype) if isinstance(value, bytes) else np.asarray(value, dtype).reshape(-1)
            if row.size != math.prod(shape[1:]):
                raise UserError(
                    f"{path}: '{name}' of rollout {order[at]} has {row.size} numbers; its shape says {list(shape[1:])}"
                )
            out[order[at]] = row.reshape(shape[1:])
            at += 1
    return out


def _texts_of(file: Any, name: str, order: np.ndarray) -> np.ndarray:
    """The texts of a column, of lists the first in each, by the numbers of their rollouts."""
    texts = [""] * len(order)
    for value, rollout in zip(file.read(columns=[name]).column(0).to_pylist(), order.tolist(), strict=True):
        while isinstance(value, (list, tuple)) and value:
            value = value[0]
        texts[rollout] = str(value)
    return np.array(texts, np.str_)
