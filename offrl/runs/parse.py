"""The files behind scores, parsed: rows of scores.csv and results.csv, settings of config.yaml. A report may read
thousands of them.
"""

from __future__ import annotations

import csv
import functools
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offrl.errors import UserError
from offrl.runs.score import COSTS
from offrl.settings.presets import bounded_tree
from offrl.system.csv_text import rows_of
from offrl.system.trust import read_text, refuse_sparse
from offrl.tasks.provenance import Provenance

if TYPE_CHECKING:
    from offrl.runs.run import SavedRun

# from reading a record that another program or a crash wrote
Damage = (
    KeyError,
    TypeError,
    ValueError,
    AttributeError,
    IndexError,
    RecursionError,
)
LINE = 1 << 26  # characters of a line that are read
PROVENANCE = tuple(f.name for f in fields(Provenance))


def json_of(path: Path) -> Any:
    """What a JSON file holds. Raises OSError, UserError (also for one that is no plain file, or too large), ValueError,
    RecursionError.
    """
    return json.loads(read_text(path))


def whole_rows(
    path: Path, say: Callable[[str], None], trace: Sequence[str] = (), stride: int = 1
) -> Iterator[dict[str, Any]]:
    """The rows of a CSV file; a last line without its end, which a crash cut off, is named by `say` and left out.

    stride: of the rows that agree in the columns `trace` only each `stride`-th is given, those that are final, and at
    the end the last one."""
    try:
        refuse_sparse(path)
        text = path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return
    except OSError as error:
        say(f"{path} cannot be read ({error.strerror}): left out")
        return
    except UserError as error:
        say(f"{error}: left out")
        return
    complete, end, tail = text.rpartition("\n")
    if tail.strip("\0 "):
        say(f"{path}: its last line is half-written: left out")
    if not end:
        if not text:
            say(f"{path} is empty")
        return
    reader = rows_of(complete)
    try:
        header = next(reader, [])
        thinned = reader if stride == 1 or not {*trace} <= {*header} else _thinned(reader, header, trace, stride)
        for row in thinned:
            if row:  # as csv.DictReader: a short row's last values are None, what is too many has the name ""
                yield dict(zip(header, row, strict=True)) if len(row) == len(header) else _uneven(header, row)
    except csv.Error as error:
        say(f"{path}: not all of it can be read ({error})")


def _uneven(header: Sequence[str], row: Sequence[str]) -> dict[str, Any]:
    values: dict[str, Any] = {**dict.fromkeys(header), **dict(zip(header, row, strict=False))}
    return values if len(row) < len(header) else {**values, "": list(row[len(header) :])}


def _thinned(
    rows: Iterator[list[str]], header: Sequence[str], trace: Sequence[str], stride: int
) -> Iterator[list[str]]:
    key = itemgetter(*(header.index(name) for name in trace))
    final = header.index("final") if "final" in header else None
    counts: dict[Any, int] = {}
    last: dict[Any, list[str]] = {}  # of those that were left out
    for row in rows:
        if len(row) != len(header):
            yield row
            continue
        row_key = key(row)
        number = counts[row_key] = counts.get(row_key, 0) + 1
        if number % stride == 0 or (final is not None and row[final] == "true"):
            last.pop(row_key, None)
            yield row
        else:
            last[row_key] = row
    yield from last.values()


def further(row: Mapping[str, Any]) -> dict[str, Any]:
    """The columns of the provenance of a row of scores.csv or results.csv, and those of costs that it has. Raises one
    of `Damage` where it is cut short.
    """
    values = {name: row[name] for name in PROVENANCE}
    if None in values.values():  # the line ends before it
        raise ValueError("no value")
    return values | {name: finite(row[name]) for name in COSTS if row.get(name)}


def finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is no score")
    return value


def header(path: Path) -> str:
    """The first line of a file; empty where there is none."""
    if not path.is_file():  # a FIFO would be waited for
        return ""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.readline(LINE).strip()
    except OSError:
        return ""


def lines_backwards(path: Path, tail: int | None) -> Iterator[dict[str, Any]]:
    """The whole lines of a .jsonl file that can be read, the last first, of its last `tail` bytes or of all."""
    try:
        with open(path, "rb") as file:
            refuse_sparse(path)
            start = 0 if tail is None else max(0, os.fstat(file.fileno()).st_size - tail)
            file.seek(start)
            lines = file.read().split(b"\n")[1 if start else 0 : -1]
    except (OSError, UserError):
        return
    for line in reversed(lines):
        try:
            values = json.loads(line)
            int(values["step"])
        except Damage:
            continue
        yield values


def lines_of(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a .jsonl file that can be read; a half-written line, and a file that is not there, give none."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            yield from objects(iter(lambda: file.readline(LINE), ""))
    except OSError:
        return


def objects(lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    """The JSON objects with a whole number `step` among these lines."""
    for line in lines:
        try:
            values = json.loads(line)
        except ValueError:
            continue
        if isinstance(values, dict) and isinstance(values.get("step"), int):
            yield values


def times(run: SavedRun) -> tuple[float, float, float]:
    """(updates per second over the whole run, seconds of training, seconds of evaluation) from timing.jsonl; NaN where
    it does not say.

    Training is the sum over logged intervals of their updates / speed, and the first updates (with compilation) as they
    were measured."""
    updates = trained = evaluated = 0.0
    first = has_scores = 0.0
    last = 0
    for row in lines_of(run.dir / "timing.jsonl"):
        speed, step = row.get("updates_per_second"), row["step"]
        if isinstance(row.get("evaluation"), (int, float)):
            evaluated += row["evaluation"]
            has_scores = 1.0
        if isinstance(row.get("first_updates"), (int, float)):
            first += row["first_updates"]
            last = max(last, step)
        elif isinstance(speed, (int, float)) and speed > 0 and step > last:
            updates += step - last
            trained += (step - last) / speed
            last = step
    return (
        updates / trained if trained else math.nan,
        trained + first if trained else math.nan,
        evaluated if has_scores else math.nan,
    )


def yaml_or_error(path: Path) -> Any:
    """The content of a YAML file, only to be read, or the error where it cannot be."""
    import yaml

    try:
        return yaml_mapping(read_text(path))
    except (OSError, ValueError, UserError, yaml.YAMLError) as error:
        return error


def yaml_mapping(text: str) -> Any:
    """The content of a YAML file, only to be read. Runs share most of their settings, so each entry's text is parsed
    once.

    Raises yaml.YAMLError.
    """
    blocks = re.split(r"^(?=[A-Za-z_]\w*:)", text, flags=re.M)
    try:
        if blocks[0]:
            raise ValueError("it does not begin with an entry")
        entries = [_entry(block) for block in blocks[1:] or [text]]
        return {name: value for entry in entries for name, value in entry.items()}
    except Exception:  # anything but plain entries, one below the other: as a whole
        return _load(text)


@functools.lru_cache(4096)
def _entry(block: str) -> dict[str, Any]:
    entry = _load(block)
    if list(entry) != [block.partition(":")[0]]:
        raise ValueError("not one entry")
    return entry


def _load(text: str) -> Any:
    import yaml

    loader, tree = bounded_tree(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    return None if tree is None else loader.construct_document(tree)
