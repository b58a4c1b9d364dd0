"""Drafts written to files, each container in the forms that programs give it."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tests.fuzz import records
from tests.fuzz.drafts import Draft, Rng, Table


def write(draft: Draft, folder: Path, rng: Rng) -> Path:
    """Write `draft` under `folder`; the path to load."""
    path = folder / draft.name
    if draft.container == "hdf5":
        _hdf5(path, draft, rng)
    elif draft.container == "npz":
        (np.savez if rng.random() < 0.5 else np.savez_compressed)(
            path, **{k.replace("/", "_"): v for k, v in draft.tables[""].items()}
        )
    elif draft.container == "parquet":
        _parquet(path, draft.tables[""], rng)
    elif draft.container == "json":
        _json(path, draft.lines, rng)
    elif draft.container == "lerobot":
        (path / "meta").mkdir(parents=True)
        (path / "meta" / "info.json").write_text(json.dumps(draft.meta))
        (path / "meta" / "episodes.jsonl").write_text("".join(json.dumps(line) + "\n" for line in draft.lines))
        (path / "data" / "chunk-000").mkdir(parents=True)
        for name, table in draft.tables.items():
            file = path / f"data/chunk-000/episode_{int(name.removeprefix('episode_')):06d}.parquet"
            pq.write_table(pa.table({k: arrow_array(v, True) for k, v in table.items()}), file)
    elif draft.container == "record":
        records.write(draft, path)
    else:
        data = path / "data"
        data.mkdir(parents=True)
        (data / "metadata.json").write_text(json.dumps(draft.meta))
        if draft.container == "minari":
            _hdf5(data / "main_data.hdf5", draft, rng)
        else:
            _arrow(data, draft, rng)
    return path


def _hdf5(path: Path, draft: Draft, rng: Rng) -> None:
    latest = bool(rng.random() < 0.35)
    with h5py.File(path, "w", libver="latest" if latest else None) as file:
        for key, value in draft.attributes.items():
            file.attrs[key] = value
        for number, (prefix, table) in enumerate(draft.tables.items()):
            group = file.create_group(prefix, track_order=bool(rng.random() < 0.2)) if prefix else file
            if prefix:
                group.attrs["id"], group.attrs["total_steps"] = number, len(np.atleast_1d(table.get("rewards", 0)))
            for name, values in table.items():
                put(group, name, values, rng)


def put(group: Any, name: str, values: Any, rng: Rng) -> None:
    """One HDF5 dataset, contiguous or in chunks, with any of the common filters."""
    values = np.asarray(values)
    if values.dtype.kind in "UO":
        group.create_dataset(name, data=values.astype(object), dtype=h5py.string_dtype())
        return
    if values.dtype.kind in "Mm":
        values = values.view(np.int64)
    options: dict[str, Any] = {}
    if values.ndim and values.size and rng.random() < 0.5:
        options = {"chunks": True}
        options["chunks"] = tuple(int(rng.integers(1, n + 1)) for n in values.shape) if rng.random() < 0.5 else True
        filters = rng.choice(["", "gzip", "lzf", "shuffle", "fletcher32", "unlimited"])
        if filters in ("gzip", "lzf"):
            options["compression"] = str(filters)
        elif filters == "unlimited":
            options["maxshape"] = (None,) * values.ndim
        elif filters:
            options[str(filters)] = True
    group.create_dataset(name, data=values, **options)


def _series(table: Table, name: str) -> bool:
    values = table[name]
    return isinstance(values, np.ndarray) and values.ndim == 2 and 0 < values.shape[1] < 20


def _parquet(path: Path, table: Table, rng: Rng) -> None:
    columns: dict[str, Any] = {}
    spread = bool(rng.random() < 0.4)
    for name, values in table.items():
        if spread and _series(table, name):
            columns |= {f"{name}_{k}": pa.array(np.ascontiguousarray(values[:, k])) for k in range(values.shape[1])}
        else:
            columns[name] = arrow_array(values, bool(rng.random() < 0.5))
    rows = max((len(c) for c in columns.values()), default=0)
    lengths = {len(c) for c in columns.values()}
    if len(lengths) > 1:  # Parquet has one length: the others are filled up with nulls
        columns = {k: pa.concat_arrays([c, pa.nulls(rows - len(c), c.type)]) for k, c in columns.items()}
    compression = str(rng.choice(["none", "snappy", "gzip", "zstd"]))
    pq.write_table(pa.table(columns), path, compression=compression, row_group_size=int(rng.choice([3, 7, 10**6])))


def arrow_array(values: Any, fixed: bool) -> Any:
    """Numbers [R], or [R, ...] as (nested) lists."""
    if isinstance(values, list):
        return pa.array(values)
    values = np.asarray(values)
    if values.dtype.kind in "c":
        values = values.astype(str)
    if values.dtype.kind == "f" and values.dtype.itemsize > 8:
        values = values.astype(np.float64)
    if values.ndim == 0:
        return pa.array([values.item()])
    if values.ndim == 1:
        return pa.array(values.tolist() if values.dtype.kind in "SUO" else np.ascontiguousarray(values))
    flat = arrow_array(values.reshape(-1, *values.shape[2:]), fixed)
    if fixed and values.shape[1]:
        return pa.FixedSizeListArray.from_arrays(flat, values.shape[1])
    return pa.ListArray.from_arrays(np.arange(len(values) + 1, dtype=np.int32) * values.shape[1], flat)


def _arrow(data: Path, draft: Draft, rng: Rng) -> None:
    """Minari's Arrow or Parquet: a folder for each episode, T + 1 rows in every column."""
    form = draft.meta.get("data_format", "arrow")
    form = form if form in ("arrow", "parquet") else "arrow"
    fixed = bool(rng.random() < 0.7)
    for prefix, table in draft.tables.items():
        rows = max((len(np.atleast_1d(v)) for v in table.values()), default=0)
        columns: dict[str, Any] = {}
        nested: dict[str, dict[str, Any]] = {}
        for name, values in table.items():
            array = arrow_array(_one_more(values, rows), fixed)
            top, _, inside = name.partition("/")
            if inside:
                nested.setdefault(top, {})[inside] = array
            else:
                columns[top] = array
        for top, parts in nested.items():
            columns[top] = pa.StructArray.from_arrays(list(parts.values()), names=list(parts))
        folder = data / prefix.removeprefix("episode_")
        folder.mkdir()
        table_ = pa.table(columns)
        if form == "parquet":
            pq.write_table(table_, folder / "part-0.parquet")
        else:
            with pa.ipc.new_file(folder / "part-0.arrow", table_.schema) as writer:
                writer.write_table(table_)
        (folder / "metadata.json").write_text(json.dumps({"id": prefix}))


def _one_more(values: Any, rows: int) -> np.ndarray:
    values = np.atleast_1d(np.asarray(values))
    if len(values) != rows - 1:
        return values
    filler = (
        values[-1:] if values.dtype.kind in "OSU" and len(values) else np.zeros((1, *values.shape[1:]), values.dtype)
    )
    return np.concatenate([values, filler])


def _json(path: Path, lines: list[Any], rng: Rng) -> None:
    if rng.random() < 0.15 and not path.name.endswith(".gz"):
        text = json.dumps(lines, indent=2 if rng.random() < 0.5 else None)  # one list
    else:
        text = "\n".join(json.dumps(line, ensure_ascii=bool(rng.random() < 0.5)) for line in lines) + "\n"
    data = text.encode()
    path.write_bytes(gzip.compress(data) if path.name.endswith(".gz") else data)
