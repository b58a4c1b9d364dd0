"""`write_data`: raw columns as a D4RL HDF5 file or a Minari dataset, which other programs read and offrl reads back bit
for bit.

Written beside the target, read back, compared, and only then renamed into place: what stands there is whole, or was
there before."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from offrl.data.containers.hdf5_sink import new_hdf5
from offrl.data.formats import d4rl, lerobot, minari
from offrl.data.formats.provenance import Record, describe, identical, task_of, written_truncations
from offrl.data.loading.assemble import fingerprint
from offrl.data.memory import IN_MEMORY, Memory, chunks, next_rows
from offrl.data.raw import RawData, canonical
from offrl.data.raw.infer import find_ends
from offrl.data.writing import write_lerobot as lerobot_layout
from offrl.data.writing import write_minari as minari_layout
from offrl.data.writing.output_path import atomic_output, output_path, write_error
from offrl.data.writing.pixels import with_pixels
from offrl.errors import UserError
from offrl.settings.dataset import DatasetConfig

CHUNK = 1 << 20  # bytes of a compressed block
NAMES = {"terminations": "terminals", "truncations": "timeouts"}  # D4RL's words
Progress = Callable[[float], None]  # called with the share that is done, from 0 to 1


def write_data(
    raw: RawData,
    target: str | Path,
    form: str = "d4rl",
    metadata: Mapping[str, Any] | None = None,
    *,
    force: bool = False,
    progress: Progress | None = None,
    memory: Memory = IN_MEMORY,
    fps: float | None = None,
) -> Path:
    """Write `raw` to `target` and return the path: that of the file, or of the Minari dataset's folder.

    raw: columns as recorded (actions unscaled), all of the same length; floats become float32 and integers int64 (uint8
    stays), as in every load. Columns named "infos/..." are loaded again only by `dataset.fields`.
    target: for "d4rl" a path that ends in .hdf5 or .h5; for "minari" an id (ns/name-v0, written where Minari keeps
    datasets) or a folder. metadata: what to say of the data, besides `raw.metadata`, which it overrides: env_id,
    env_kwargs, env_spec and eval_env_spec (JSON), ref_min_score and ref_max_score (undiscounted returns that score 0
    and 100), dataset_id, algorithm_name, author, author_email, code_permalink, description, requirements; whatever else
    JSON can hold is kept as well.
    fps: rows per second, which LeRobot data need.
    force: replace what is at `target`. memory: where columns are put that are made or read back.

    Raises UserError when `raw` is no dataset, `target` does not fit or exists, the disk is full, or what is read back
    differs."""
    if form == "jsonl":
        raise UserError(
            f"{target}: JSON lines hold texts, and {raw.where} holds numbers: write .hdf5 or a Minari dataset"
        )
    aliases = {"algorithm": "algorithm_name", "email": "author_email"}  # Minari's words
    metadata = {aliases.get(k, k): v for k, v in (metadata or {}).items() if v is not None}
    name = str(metadata.get("dataset_id") or "")
    path, data_id = output_path(target, form, name, force)
    raw = canonical_raw(raw if form == "lerobot" else with_pixels(raw, memory))
    ends = find_ends(raw)
    if form == "lerobot":
        return _write_lerobot(path, raw, ends, fps, metadata, _steps(progress, raw), memory)
    record = describe(raw, ends, task_of(raw, metadata), metadata)
    advance = _steps(progress, raw)
    with atomic_output(path) as written:
        if form == "d4rl":
            write_d4rl(written, raw, ends, record, advance, name, memory)
            reread = d4rl.read(written, _reading(record), memory)
        else:
            minari_layout.write(written, data_id, raw, ends, record, advance)
            reread = minari.read(written, _reading(record), memory)
        _compare(raw, reread, ends, record, path)
        del reread
    if form == "minari":
        add_namespaces(path, data_id)
    return path


def _write_lerobot(
    path: Path,
    raw: RawData,
    ends: np.ndarray,
    fps: float | None,
    metadata: Mapping[str, Any],
    advance: Callable[[int], None],
    memory: Memory,
) -> Path:
    fps = lerobot_layout.refuse_other(raw, ends, fps)
    with atomic_output(path) as written:
        lerobot_layout.write(written, raw, ends, fps, metadata, advance)
        fields = {k: lerobot_layout.features_of(k) for k in raw.columns if k not in lerobot_layout.KNOWN}
        reread = lerobot.read(written, DatasetConfig(fields=fields), memory)
        same = {k: identical(raw.columns[k], v) for k, v in reread.columns.items() if k in raw.columns}
        refuse_difference({**same, "episodes": np.array_equal(ends, find_ends(reread))}, path)
    return path


def add_namespaces(path: Path, data_id: str) -> None:
    """Write the files that Minari expects beside the dataset at `path`."""
    try:
        minari_layout.add_namespaces(path, data_id)
    except OSError as error:
        raise write_error(error, path) from None


def canonical_raw(raw: RawData) -> RawData:
    """`raw` with every column in the dtype and rank of a `Dataset`; copies only what changes. Raises UserError where
    they do not fit.
    """
    from offrl.data.raw.checks import form_faults, refuse

    columns = {k: canonical(k, v, raw.where, raw.discrete if k == "actions" else None) for k, v in raw.columns.items()}
    finals = (
        None if raw.final_observations is None else canonical("next_observations", raw.final_observations, raw.where)
    )
    known = None if raw.final_known is None or raw.final_known.all() else raw.final_known.astype(bool)
    if finals is not None and "next_observations" in columns:
        finals = known = None  # they say the same
    raw = replace(raw, columns=columns, final_observations=finals, final_known=known)
    raw.settle_kind()
    if raw.episode_ends is not None:
        raw.episode_ends = np.asarray(raw.episode_ends, bool)
    refuse(raw, form_faults(raw))
    raw.final_columns = {k: canonical(k, v, raw.where) for k, v in raw.final_columns.items()}
    return raw


def _reading(record: Record) -> DatasetConfig:
    """Settings that read everything back, the columns under infos/ too."""
    return DatasetConfig(fields={name: name for name in record.infos})


# -------------------------------------------------------------------------------------------------------------------
# D4RL


def write_d4rl(
    path: Path,
    raw: RawData,
    ends: np.ndarray,
    record: Record,
    advance: Callable[[int], None],
    data_id: str,
    memory: Memory,
) -> None:
    """D4RL's layout. What has no row for each step lies under metadata/, where D4RL's readers leave it alone."""
    columns = dict(raw.columns)
    columns["terminations"] = columns.get("terminations", np.zeros(raw.rows, bool))
    columns["truncations"] = written_truncations(raw, ends)
    reserved = {"metadata", "infos", *NAMES.values()}
    with new_hdf5(path) as (file, sink):

        def wrote(size: int) -> None:
            sink.check()
            advance(size)

        for name, column in columns.items():
            if name in reserved or name.startswith("metadata/"):
                raise UserError(f"{raw.where}: a column cannot be called '{name}' in D4RL's layout; rename it")
            _put(file, NAMES.get(name, name), column, wrote)
        if "next_observations" not in columns and raw.final_observations is not None:
            successors = next_rows(raw.columns["observations"], memory)
            successors[np.flatnonzero(ends)] = raw.final_observations
            _put(file, "next_observations", successors, wrote)
        for name in record.final_columns:
            file[f"metadata/offrl_final/{name}"] = raw.final_columns[name]
        task = record.spec.task
        texts = {
            "env_id": task.env_id if task else None,
            **record.about,
            "algorithm": record.about.get("algorithm_name"),
        }
        for key, value in texts.items():
            if key in ("author", "author_email") and isinstance(value, list | set | tuple):
                value = ", ".join(map(str, value))
            if isinstance(value, str | int | float) and "/" not in key and key != "algorithm_name":
                file[f"metadata/{key}"] = value
        for key, value in raw.metadata.items():
            if key.startswith("metadata/"):
                file[key] = value
        if task is not None and task.env_id:
            file.attrs["env_id"] = task.env_id
        if task is not None and task.ref_min is not None and task.ref_max is not None:
            file.attrs["ref_min_score"], file.attrs["ref_max_score"] = task.ref_min, task.ref_max
        if data_id:
            file.attrs["dataset_id"] = data_id
        file[d4rl.RECORD] = json.dumps(record.to_json())


def _put(file: Any, key: str, column: np.ndarray, advance: Callable[[int], None]) -> None:
    """One column, in compressed blocks."""
    rows, options = _blocks(column)
    item = file.create_dataset(key, column.shape, column.dtype, **options)
    for part in chunks(len(column), rows):
        item[part] = column[part]
        advance(column[part].nbytes)


def _blocks(column: np.ndarray) -> tuple[int, dict[str, Any]]:
    """The number of rows to write at once, a multiple of the rows in a block; and the options with which HDF5 stores
    the column.
    """
    row = int(np.prod(column.shape[1:], dtype=np.int64)) * column.dtype.itemsize
    if not column.size:
        return 1, {}
    block = max(1, min(len(column), CHUNK // row))
    options = {
        "chunks": (block, *column.shape[1:]),
        "compression": "gzip",
        "compression_opts": 4,
        "shuffle": column.dtype.itemsize > 1,
    }
    return max(block, (1 << 24) // row // block * block), options


# ------------------------------------------------------------------------------------------------------ comparison


def _compare(raw: RawData, reread: RawData, ends: np.ndarray, record: Record, path: Path) -> None:
    """Raises UserError unless `again`, read from what was written, is what was to be written."""
    reread_ends = find_ends(reread)
    same = {
        "columns": fingerprint(raw, ends) == fingerprint(reread, reread_ends),
        "last episode": raw.last_complete == reread.last_complete,
        "task": reread.task == Record.from_json(record.to_json()).spec.task,
        "kind of action": reread.discrete == raw.discrete
        and (not raw.discrete or reread.num_actions == record.spec.num_actions),
        "action range": raw.discrete
        or (np.array_equal(reread.action_low, raw.action_low) and np.array_equal(reread.action_high, raw.action_high)),
        **{
            k: k in reread.final_columns and identical(raw.final_columns[k], reread.final_columns[k])
            for k in record.final_columns
        },
    }
    refuse_difference(same, path)


def refuse_difference(same: Mapping[str, bool], path: Path) -> None:
    """Raises UserError unless all that was read back, by its name, is the same."""
    if wrong := [name for name, fine in same.items() if not fine]:
        raise UserError(
            f"what was read back from the file for {path} differs ({', '.join(wrong)}): nothing was put there. A "
            "failing disk, or a fault of offrl: please report it"
        )


def _steps(progress: Progress | None, raw: RawData) -> Callable[[int], None]:
    """A function to call with the number of bytes written, which reports progress."""
    total, done = sum(c.nbytes for c in raw.columns.values()), 0

    def advance(more: int) -> None:
        nonlocal done
        done += more
        if progress is not None:
            progress(min(1.0, done / max(1, total)))

    return advance
