"""Bytes of a written file that were lost or changed on the way, and changes that only one container allows."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tests.fuzz import archives, links, records
from tests.fuzz.drafts import Draft, Rng
from tests.fuzz.json_slips import json_slip


def bytes_of(path: Path, rng: Rng) -> str:
    """Damage the file, or a file in the folder, at `path`; what."""
    files = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
    if not files:
        return "as it was"
    target = files[int(rng.integers(len(files)))]
    data = bytearray(target.read_bytes())
    if not data:
        return "as it was"
    form = str(
        rng.choice(
            ["flip", "flip", "flip", "head", "cut", "cut", "zeros", "swap", "insert", "remove", "nothing", "noise"]
        )
    )
    where = int(rng.integers(len(data)))
    length = int(rng.integers(1, max(2, min(2000, len(data) // 4))))
    if form == "flip":
        for _ in range(int(rng.choice([1, 2, 8, 40]))):
            data[int(rng.integers(len(data)))] ^= 1 << int(rng.integers(8))
    elif form == "head":  # where formats keep what they say of themselves
        for _ in range(int(rng.integers(1, 4))):
            data[int(rng.integers(min(len(data), 2048)))] = int(rng.choice([0, 1, 127, 128, 255]))
    elif form == "cut":
        del data[where:]
    elif form == "zeros":
        data[where : where + length] = bytes(len(data[where : where + length]))
    elif form == "noise":
        data[where : where + length] = rng.bytes(len(data[where : where + length]))
    elif form == "swap":
        other = int(rng.integers(len(data)))
        a, b = data[where : where + length], data[other : other + length]
        if len(a) == len(b):
            data[where : where + length], data[other : other + length] = b, a
    elif form == "insert":
        data[where:where] = rng.bytes(int(rng.integers(1, 9)))
    elif form == "remove":
        del data[where : where + int(rng.integers(1, 9))]
    else:
        data = bytearray()
    target.write_bytes(bytes(data))
    return f"{target.relative_to(path) if path.is_dir() else path.name}: bytes: {form} at {where}"


def structure(draft: Draft, path: Path, rng: Rng) -> str:
    """Change what was written in a way of its container; what."""
    if draft.container == "record":
        if rng.random() < 0.6:
            return records.change(path, rng)
        return links.change(path if path.is_file() else path / "data" / "main_data.hdf5", rng)
    if draft.container in ("hdf5", "minari"):
        return links.change(path if draft.container == "hdf5" else path / "data" / "main_data.hdf5", rng)
    if draft.container == "npz":
        return archives.change(path, rng)
    if draft.container == "parquet":
        return _parquet(path, rng)
    if draft.container == "lerobot":
        files = sorted(path.rglob("*.parquet"))
        return _parquet(files[int(rng.integers(len(files)))], rng)
    if draft.container == "arrow":
        return _episodes(path / "data", rng)
    return _raw_json(path, rng)


def _parquet(path: Path, rng: Rng) -> str:
    table = pq.read_table(path)
    if not table.num_columns:
        return "as it was"
    k = int(rng.integers(table.num_columns))
    name, rows = table.column_names[k], table.num_rows
    form, column = _column(rng, table.column(k).combine_chunks(), rows)
    if form == "same name":
        table = table.append_column(name, table.column(k))
    elif form == "gap":
        table = table.drop_columns([name]).append_column(f"{name.rsplit('_', 1)[0]}_7", table.column(k))
    else:
        table = table.set_column(k, name, column)
    pq.write_table(table, path)
    return f"{name}: {form}"


def _column(rng: Rng, values: pa.Array, rows: int) -> tuple[str, pa.Array]:
    form = str(
        rng.choice(
            [
                "null",
                "nulls",
                "uneven",
                "text",
                "struct",
                "map",
                "decimal",
                "time",
                "dictionary",
                "same name",
                "gap",
                "binary",
                "half",
            ]
        )
    )
    some = np.arange(rows)
    if form in ("null", "nulls"):
        mask = pa.array(some == int(rng.integers(max(rows, 1))) if form == "null" else some >= 0)
        return form, pa.compute.if_else(mask, pa.nulls(rows, values.type), values) if rows and not pa.types.is_nested(
            values.type
        ) else pa.nulls(rows)
    made = {
        "uneven": lambda: pa.array([[0.5] * (k % 3) for k in some]),
        "text": lambda: pa.array([str(k) for k in some]),
        "struct": lambda: pa.array([{"x": 1.0} for _ in some], pa.struct([("x", pa.float32())])),
        "map": lambda: pa.array([[("x", 1.0)] for _ in some], pa.map_(pa.string(), pa.float32())),
        "decimal": lambda: pa.array(some.tolist()).cast(pa.decimal128(22, 2)),
        "time": lambda: pa.array(some, pa.timestamp("s")),
        "dictionary": lambda: pa.array([float(k % 2) for k in some]).dictionary_encode(),
        "binary": lambda: pa.array([b"x"] * rows, pa.binary()),
        "half": lambda: pa.array(np.full(rows, 0.5)),
    }
    return form, made.get(form, lambda: values)()


def _episodes(data: Path, rng: Rng) -> str:
    """A change of one episode's folder in Minari's Arrow storage."""
    folders = sorted(p for p in data.iterdir() if p.is_dir())
    if not folders:
        return "as it was"
    folder = folders[int(rng.integers(len(folders)))]
    file = sorted(p for p in folder.iterdir() if p.name != "metadata.json")[0]
    form = str(
        rng.choice(["no file", "two files", "stranger", "other format", "column", "column", "column", "rows", "link"])
    )
    if form == "no file":
        file.unlink()
    elif form == "two files":
        (folder / f"part-1{file.suffix}").write_bytes(file.read_bytes())
    elif form == "stranger":
        (data / "notes").mkdir()
        (folder / "notes.txt").write_text("hello")
    elif form == "link":
        (folder / "part-0.link").symlink_to("/etc/hostname")
    else:
        arrow = file.suffix == ".arrow"
        table = pa.ipc.open_file(pa.BufferReader(file.read_bytes())).read_all() if arrow else pq.read_table(file)
        if form == "rows":
            table = table.slice(0, int(rng.integers(0, table.num_rows + 1)))
        elif form == "column" and table.num_columns:
            k = int(rng.integers(table.num_columns))
            form, column = _column(rng, table.column(k).combine_chunks(), table.num_rows)
            if form in ("same name", "gap"):
                table = table.drop_columns([table.column_names[k]])
            else:
                table = table.set_column(k, table.column_names[k], column)
            form = f"column {k}: {form}"
        else:
            arrow = not arrow
        if arrow:
            with pa.ipc.new_file(file, table.schema) as writer:
                writer.write_table(table)
        else:
            pq.write_table(table, file)
    return f"episode {folder.name}: {form}"


def _raw_json(path: Path, rng: Rng) -> str:
    """JSON that no program writes, but persons do."""
    if path.suffix == ".gz":
        return bytes_of(path, rng)
    text = path.read_text()
    form = str(
        rng.choice(
            [
                "comma",
                "quotes",
                "nan",
                "deep",
                "long number",
                "twice",
                "latin",
                "mark",
                "surrogate",
                "blank",
                "half line",
                "value",
            ]
        )
    )
    if form == "value":
        lines = (
            [json.loads(line) for line in text.splitlines() if line.strip()]
            if not text.startswith("[\n")
            else json.loads(text)
        )
        what = json_slip(lines, rng)
        path.write_text("\n".join(json.dumps(line) for line in lines))
        return what
    changed = {
        "comma": lambda: text.replace("}", ",}", 1),
        "quotes": lambda: text.replace('"', "'"),
        "nan": lambda: text.replace('"reward": ', '"reward": NaN, "x": ', 1),
        "deep": lambda: text + "[" * 5000 + "\n",
        "long number": lambda: text.replace('"reward": ', '"reward": 1' + "0" * 5000 + ', "x": ', 1),
        "twice": lambda: text.replace('"terminated": ', '"terminated": true, "terminated": ', 1),
        "mark": lambda: "\ufeff" + text,
        "surrogate": lambda: text.replace('"action": "', '"action": "\\ud800', 1),
        "blank": lambda: "\n\n" + text.replace("\n", "\n\n"),
        "half line": lambda: text.rstrip()[: -int(rng.integers(1, 30))],
    }
    path.write_bytes(text.encode("utf-16") if form == "latin" else changed[form]().encode())
    return f"JSON: {form}"
