"""Changes of a written HDF5 file that only HDF5 knows: links, external and virtual storage, types, declared sizes,
attributes.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from tests.fuzz.drafts import Rng

HUGE = (10**6, 3 * 10**8, 10**10)
ELSEWHERE = "/etc/hostname"  # a file of this machine that no dataset may show
Change = Callable[[Rng, Any, str, Path], str]


def change(path: Path, rng: Rng) -> str:
    """Change something in the file at `path`; what."""
    with h5py.File(path, "a") as file:
        names: list[str] = []
        file.visititems(lambda name, item: names.append(name) if isinstance(item, h5py.Dataset) else None)
        names = [n for n in names if not n.startswith("outside")]
        if not names:
            return "as it was"
        name = names[int(rng.integers(len(names)))]
        action = CHANGES[int(rng.integers(len(CHANGES)))]
        return f"{name} ({action.__name__}) {action(rng, file, name, path)}"


def soft_link(rng: Rng, file: Any, name: str, path: Path) -> str:
    form = str(rng.choice(["inside", "dangling", "loop", "two loops"]))
    if form == "inside":
        file.move(name, "hidden/column")
        file[name] = h5py.SoftLink("/hidden/column")
        return "a soft link to itself elsewhere"
    del file[name]
    if form == "two loops":
        file["elsewhere"] = h5py.SoftLink(f"/{name}")
    file[name] = h5py.SoftLink({"dangling": "/nowhere", "loop": f"/{name}", "two loops": "/elsewhere"}[form])
    return f"a soft link: {form}"


def external_link(rng: Rng, file: Any, name: str, path: Path) -> str:
    form = str(rng.choice(["existing", "missing", "itself", "folder", "above"]))
    with h5py.File(path.parent / "outside.h5", "w") as other:
        other["x"] = file[name][()] if file[name].shape is not None else 0
    del file[name]
    target = {
        "existing": "outside.h5",
        "missing": "nowhere.h5",
        "itself": path.name,
        "folder": ".",
        "above": "../outside.h5",
    }[form]
    file[name] = h5py.ExternalLink(target, "/x")
    return f"an external link: {form}"


def external_storage(rng: Rng, file: Any, name: str, path: Path) -> str:
    item = file[name]
    shape, dtype = item.shape or (4,), item.dtype if item.dtype.kind in "biuf" else np.dtype("f4")
    place = str(rng.choice(["outside.bin", "missing.bin", ELSEWHERE]))
    size = int(np.prod(shape)) * dtype.itemsize
    if place == "outside.bin":
        (path.parent / place).write_bytes(bytes(size))
    del file[name]
    file.create_dataset(
        name, shape, dtype, external=[(place if place[0] == "/" else str(path.parent / place), 0, max(size, 1))]
    )
    return f"external storage in {place}"


def virtual(rng: Rng, file: Any, name: str, path: Path) -> str:
    item = file[name]
    if not item.shape or not item.size:
        return "as it was"
    place = str(rng.choice(["outside.h5", "missing.h5", "."]))
    values, dtype, shape = item[()], item.dtype, item.shape
    if place == "outside.h5":
        with h5py.File(path.parent / place, "w") as other:
            other["x"] = values
    layout = h5py.VirtualLayout(shape, dtype)
    layout[...] = h5py.VirtualSource(place, "x", shape)
    del file[name]
    if place == ".":
        file["x"] = values
    file.create_virtual_dataset(name, layout)
    return f"a virtual dataset of {place}"


def declared(rng: Rng, file: Any, name: str, path: Path) -> str:
    """A shape whose rows are not stored."""
    item = file[name]
    tail, dtype = (item.shape or ())[1:], item.dtype if item.dtype.kind in "biuf" else np.dtype("f4")
    rows = (item.shape or (1,))[0] if rng.random() < 0.3 else int(rng.choice(HUGE))
    form = str(rng.choice(["contiguous", "chunks", "gzip", "resized"]))
    if form == "resized" and item.shape and item.size:
        values = item[()]
        del file[name]
        new = file.create_dataset(name, data=values, maxshape=(None, *tail), chunks=True)
        new.resize(rows, 0)
        return f"resized to {rows} rows"
    del file[name]
    options = {"contiguous": {}, "chunks": {"chunks": True}, "gzip": {"chunks": True, "compression": "gzip"}}.get(
        form, {}
    )
    file.create_dataset(name, (rows, *tail), dtype, **options)
    return f"{rows} rows declared, none stored ({form})"


def bomb(rng: Rng, file: Any, name: str, path: Path) -> str:
    """Zeros that unpack to gigabytes."""
    rows, chunk = int(rng.choice([3 * 10**8, 10**9])), 4 << 20
    packed = zlib.compress(bytes(chunk * 4), 9)
    for each in list(file) if rng.random() < 0.3 else [name]:
        if isinstance(file.get(each), h5py.Dataset):
            tail = (file[each].shape or ())[1:]
            del file[each]
            width = int(np.prod(tail, dtype=np.int64)) or 1
            item = file.create_dataset(
                each, (rows, *tail), "f4", chunks=(max(chunk // width, 1), *tail), compression="gzip"
            )
            packed = packed if width == 1 else zlib.compress(bytes(item.chunks[0] * width * 4), 9)
            for start in range(0, rows, item.chunks[0])[:300]:
                item.id.write_direct_chunk((start, *(0 for _ in tail)), packed)
    return f"{rows} rows of packed zeros"


def strange_type(rng: Rng, file: Any, name: str, path: Path) -> str:
    item = file[name]
    rows = (item.shape or (1,))[0]
    form = str(
        rng.choice(
            [
                "compound",
                "vlen",
                "text",
                "bytes",
                "opaque",
                "reference",
                "enum",
                "null",
                "array",
                "group",
                "complex",
                "bad utf-8",
            ]
        )
    )
    values = item[()] if item.shape is not None and item.dtype.kind in "biuf" else np.zeros(rows)
    del file[name]
    if form == "compound":
        file[name] = np.zeros(rows, [("x", "f4"), ("y", "i4")])
    elif form == "vlen":
        new = file.create_dataset(name, (rows,), h5py.vlen_dtype(np.float32))
        for k in range(rows):
            new[k] = np.zeros(k % 3 + 1, np.float32)
    elif form == "text":
        file.create_dataset(name, data=np.array([str(k) for k in range(rows)], object), dtype=h5py.string_dtype())
    elif form == "bad utf-8":
        file.create_dataset(name, data=np.array([b"\xff\xfe"] * rows, object), dtype=h5py.string_dtype())
    elif form == "bytes":
        file[name] = np.array([b"1.5"] * rows)
    elif form == "opaque":
        file[name] = np.zeros(rows, "V4")
    elif form == "reference":
        file.create_dataset(name, data=np.array([file.ref] * rows, object), dtype=h5py.ref_dtype)
    elif form == "enum":
        kind = h5py.enum_dtype({"NO": 0, "YES": 1} if rng.random() < 0.5 else {"A": 0, "B": 3}, basetype="i1")
        file.create_dataset(name, data=(values != 0).astype("i1"), dtype=kind)
    elif form == "null":
        file[name] = h5py.Empty("f4")
    elif form == "array":
        file.create_dataset(name, (rows,), np.dtype(("f4", (2,))))
    elif form == "complex":
        file[name] = np.zeros(rows, np.complex64)
    else:
        file.create_group(name)["inside"] = values
    return f"as {form}"


def attributes(rng: Rng, file: Any, name: str, path: Path) -> str:
    place = file if rng.random() < 0.6 else file[name]
    key = str(rng.choice(["env_id", "dataset_id", "ref_min_score", "ref_max_score", "id", "total_steps", "seed"]))
    form = str(rng.choice(["number", "text", "bytes", "array", "empty", "nan", "compound", "texts"]))
    place.attrs[key] = {
        "number": 7,
        "text": "x",
        "bytes": np.bytes_(b"\xff\xfe"),
        "array": np.zeros((2, 2)),
        "empty": h5py.Empty("f4"),
        "nan": np.nan,
        "compound": np.zeros(1, [("x", "f4")]),
        "texts": ["a", "b"],
    }[form]
    return f"{place.name}: attribute {key} as {form}"


def metadata(rng: Rng, file: Any, name: str, path: Path) -> str:
    """What lies under metadata/, where D4RL and offrl say something about the data."""
    key = str(rng.choice(["metadata/offrl", "metadata/env_id", "metadata/x", "metadata", "infos/y", "infos"]))
    if key in file:
        del file[key]
    form = str(
        rng.choice(
            ["json", "version", "list", "number", "bytes", "array", "null", "compound", "reference", "vlen", "dangling"]
        )
    )
    try:
        file[key] = {
            "json": "{}",
            "version": '{"version": 1, "rows": "x"}',
            "list": "[[]]",
            "number": 1.5,
            "bytes": np.bytes_(b"\xff\xfe"),
            "array": np.array([1, 2]),
            "null": h5py.Empty("f4"),
            "compound": np.zeros((), [("x", "f4")]),
            "reference": file.ref,
            "vlen": "text" * 5,
            "dangling": h5py.SoftLink("/nowhere"),
        }[form]
    except (ValueError, TypeError, OSError):
        return "as it was"
    return f"{key} as {form}"


def filters(rng: Rng, file: Any, name: str, path: Path) -> str:
    """Storage that is sound, though not common."""
    item = file[name]
    if not item.shape or not item.size or item.dtype.kind not in "iuf":
        return "as it was"
    values = item[()]
    del file[name]
    form = str(rng.choice(["shuffle", "fill", "chunk by chunk"]))
    if form == "shuffle":
        file.create_dataset(name, data=values, shuffle=True, compression="gzip", fletcher32=True)
    elif form == "fill":
        file.create_dataset(name, data=values, fillvalue=1, chunks=True)
    else:
        file.create_dataset(name, data=values, chunks=(1,) * values.ndim)
    return f"stored otherwise: {form}"


CHANGES: tuple[Change, ...] = (
    soft_link,
    soft_link,
    external_link,
    external_storage,
    virtual,
    declared,
    declared,
    bomb,
    strange_type,
    strange_type,
    strange_type,
    attributes,
    metadata,
    filters,
)
