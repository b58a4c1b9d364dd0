"""What a file holds, by a slow and plain reading that shares nothing with `offrl.data`: see docs/datasets.md for what
files mean.
"""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

from tests.fuzz.oracle import arrow, columns, hdf5, jsonlines, minari, npz, robots, rollouts
from tests.fuzz.oracle.verdict import Doubts, Refused, Unknown, Verdict


def judge(path: Path, config: dict[str, Any]) -> Verdict:
    """The verdict on the file or folder at `path` under the settings `config` (of which it knows `fields` and
    `observation_keys`)."""
    doubts = Doubts()
    try:
        episodes = _read(path, dict(config.get("fields") or {}), config.get("observation_keys") or [], doubts)
    except Refused as error:
        return Verdict("refuse", str(error), None)
    except (Unknown, MemoryError) as error:
        return Verdict("either", str(error), None)
    if doubts.recorded:
        for truth in episodes:
            truth.complete, truth.successors[-1] = None, ...
    if doubts.blind:
        return Verdict("either", doubts.first, None)
    return (
        Verdict("either", doubts.first, episodes) if doubts.all or doubts.recorded else Verdict("valid", "", episodes)
    )


def _read(path: Path, fields: dict[str, str], keys: list[str], doubts: Doubts) -> Any:
    if path.is_dir() and robots.is_lerobot(path):
        return robots.lerobot(path, keys, doubts)
    if path.is_dir():
        return minari.read(path, doubts)
    head = path.read_bytes()[:64]
    if head.startswith(b"\x1f\x8b"):
        try:
            with gzip.open(path) as file:
                head = file.read(64)
        except Exception:
            return jsonlines.read(path, doubts)
    if head.removeprefix(b"\xef\xbb\xbf").lstrip()[:1] in (b"{", b"["):
        return jsonlines.read(path, doubts)
    if path.name.endswith((".jsonl", ".jsonl.gz")):
        if head.startswith((b"\x89HDF", b"PK\x03\x04", b"PAR1")):
            raise Refused("text by its name, another type by its content")
        return jsonlines.read(path, doubts)
    if head.startswith(b"\x89HDF\r\n\x1a\n"):
        return _keyed(hdf5.File(path, doubts), path, fields, keys, doubts)
    if head.startswith((b"PK\x03\x04", b"PK\x05\x06")):
        return _keyed(npz.File(path, doubts), path, fields, keys, doubts)
    if head.startswith(b"PAR1"):
        return _keyed(arrow.ParquetFile(path, doubts), path, fields, keys, doubts)
    raise Refused("no file of a known type")


def _keyed(file: Any, path: Path, fields: dict[str, str], keys: list[str], doubts: Doubts) -> Any:
    """A file with arrays by their keys. `file` has `keys`, `get(key)` (None where there is no such key) and
    `shape(key)`.
    """
    try:
        if robots.of_robomimic(file):
            return robots.robomimic(file, keys, doubts)
        if robots.of_vd4rl(file):
            return robots.vd4rl(file, doubts)
        if rollouts.fits(file):
            return rollouts.read(file, doubts)
        if isinstance(file, hdf5.File) and rollouts.of_d3rlpy(file):
            return rollouts.d3rlpy(file, doubts)
        table = columns.choose(file, path, fields, doubts)
        return columns.episodes(table, doubts)
    finally:
        file.close()
