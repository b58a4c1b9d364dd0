"""Text data in files: JSON lines of canonical episodes (`offrl.data.text.dataset`), and what LMRL-Gym and ArCHer
publish, told apart by content.

Files are UTF-8, one JSON value a line, or one JSON list; a name that ends in .gz, or the content, says that they are
compressed. The first line may be a header: `{"offrl": {"name": ..., "task": ...}}`, where the task is a registered name
or the mapping that offrl writes."""

from __future__ import annotations

import contextlib
import gzip
import itertools
import json
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from offrl import registry
from offrl.data.containers.guard import FREE, GROWTH, from_json, refuse_growth
from offrl.data.dataset import Dataset
from offrl.data.text.dataset import TextBuilder, refuse_settings
from offrl.data.text.lmrl import Form, form_of, is_step
from offrl.errors import UserError, nearest, warn
from offrl.settings.dataset import DatasetConfig
from offrl.tasks.task import Task, lookup, task_from_json

SUFFIXES = (".jsonl", ".ndjson", ".json", ".jsonl.gz", ".ndjson.gz", ".json.gz")
HEADER = "offrl"  # the only key of a header line
_GZIP = b"\x1f\x8b"
MOST_BLANK = 1_000_000  # lines: each takes time, and packs to almost nothing
MOST_FAULTS = 1_000  # that are listed
_DAMAGE = "the file is cut or damaged: copy it again"


@dataclass
class TextFile:
    """A text file as read: the dataset, further metadata of the file, and the faults of the episodes that were left
    out.
    """

    dataset: Dataset
    metadata: dict[str, Any] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)


def named_text(path: Path) -> bool:
    """True for the name of a JSON file."""
    return path.name.lower().endswith(SUFFIXES)


def is_text(path: Path) -> bool:
    """True where the file holds JSON: its first bytes say it, or its name where it is empty or damaged."""
    try:
        with path.open("rb") as raw:
            head = _unpacked(raw).read(64)
    except (OSError, EOFError, zlib.error):
        return named_text(path)
    head = head.removeprefix(b"\xef\xbb\xbf").lstrip()
    return head.startswith((b"{", b"[")) or (
        named_text(path) and not head.startswith((b"\x89HDF", b"PK\x03\x04", b"PAR1"))
    )


def load(path: Path, config: DatasetConfig, faults: bool = False) -> TextFile:
    """The episodes in a file. Raises UserError, with file, line and turn, for the first fault.

    faults: leave faulty episodes out, and say what is wrong with them, instead. Raises UserError still where none is
    left.
    """
    refuse_settings(config, str(path))
    name = path.name
    for suffix in sorted(SUFFIXES, key=len, reverse=True):
        if name.lower().endswith(suffix):
            name = name[: -len(suffix)]
            break
    builder = TextBuilder(name, None, str(path), "file")
    problems: list[str] = []
    metadata: dict[str, Any] = {}
    convert: Form | None = None
    silent, first_silent, begun = 0, "", False
    for label, item in _items(path):
        where = f"{path}: {label}"
        try:
            if isinstance(item, UserError):
                raise item
            if not begun and isinstance(item, dict) and set(item) == {HEADER}:
                metadata = item[HEADER]
                if not isinstance(metadata, dict):
                    raise UserError(f'{where}: the header must be an object, such as {{"offrl": {{"name": "mine"}}}}')
                builder.name, builder.task = str(metadata.get("name") or name), named_task(metadata.get("task"), where)
                continue
            convert = convert or form_of(item, where)
            episode = convert(item, where)
            if episode is None:
                silent, first_silent = silent + 1, first_silent or label
            else:
                builder.add(episode, label)
        except UserError as error:
            if not faults:
                raise
            problems.append(str(error).removeprefix(f"{path}: "))
            if len(problems) == MOST_FAULTS:
                problems.append("there are more faults than these; what follows was not looked at")
                break
        finally:
            begun = True
    if problems and not len(builder):
        raise UserError(f"{path}: {problems[0]}")
    if silent and not len(builder):
        raise UserError(f"{path}: nobody acts in any of its {silent} episodes: there is nothing to learn from")
    dataset = builder.finish()
    if silent:
        text = f"{silent} episode{'s' if silent > 1 else ''} in which nobody acts left out (first: {first_silent})"
        warn(f"{path}: {text}")
        dataset = replace(dataset, notes=(text,))
    return TextFile(without_timeouts(dataset, config), metadata, problems)


def without_timeouts(dataset: Dataset, config: DatasetConfig) -> Dataset:
    """`dataset.drop_timeout_rows`, as `offrl.data.loading.assemble.assemble` does it."""
    if not config.drop_timeout_rows:
        return dataset
    known = dataset.columns["successor_known"] & ~dataset.columns["truncations"]
    return replace(dataset, columns=dataset.columns | {"successor_known": known})


def header(dataset: Dataset, metadata: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The header line for a dataset: its name, its task, and what else is to be said of it (JSON)."""
    return {
        HEADER: {
            "name": dataset.spec.name,
            **({} if dataset.spec.task is None else {"task": task_words(dataset.spec.task)}),
            **(metadata or {}),
        }
    }


def task_words(task: Task) -> str | dict[str, Any]:
    """A registered task's name, or else what `task_from_json` reads, without a function that makes the environment."""
    if lookup(task.name) == task:
        return task.name
    default = asdict(Task(task.name))
    values = {k: v for k, v in asdict(replace(task, env_factory=None)).items() if v != default[k]}
    return {"name": task.name, **json.loads(json.dumps(values))}


# ---------------------------------------------------------------------------------------------------------------- JSON


def _items(path: Path) -> Iterator[tuple[str, Any]]:
    """(place, value) for each episode, with a UserError in place of a value that cannot be read."""
    if path.stat().st_size == 0:
        raise UserError(f"{path} is empty (0 bytes): download or copy it again")
    lines = _lines(path)
    first, second = next(lines, None), next(lines, None)
    if first is None:
        raise UserError(f"{path} has nothing but blank lines")
    number, text = first
    value = _parse(text, f"{path}: line {number}")
    if (
        isinstance(value, UserError)
        and isinstance(text, str)
        and text.lstrip()[:1] in ("[", "{")
        and second is not None
    ):
        document = _document(path)  # one value over many lines, such as an indented list
        if not isinstance(document, UserError) or path.name.lower().endswith((".json", ".json.gz")):
            value, second = document, None
    if second is None and isinstance(value, list) and not (value and all(is_step(v) for v in value)):
        yield from ((f"episode {k}", v) for k, v in enumerate(value))
        return
    yield f"line {number}", value
    if second is not None:
        for number, text in itertools.chain([second], lines):
            yield f"line {number}", _parse(text, f"{path}: line {number}")


def _lines(path: Path) -> Iterator[tuple[int, str | UserError]]:
    """The lines that are not blank, by their numbers from 1; a UserError where one is not UTF-8, or where the file
    breaks off.
    """
    number, blank = 0, 0
    try:
        with path.open("rb") as raw:
            if (file := _unpacked(raw)) is not raw:  # before any of it is parsed, which takes a hundred times as long
                refuse_growth(f"{path}, unpacked,", _unpacked_size(raw), path.stat().st_size)
                raw.seek(0)
            for number, line in enumerate(file, 1):
                if number == 1:
                    line = line.removeprefix(b"\xef\xbb\xbf")
                if not line.strip():
                    blank += 1
                    if blank > MOST_BLANK:
                        raise UserError(f"{path} has more than {MOST_BLANK:,} blank lines; remove them")
                    continue
                try:
                    yield number, line.decode()
                except UnicodeDecodeError as error:
                    bad = line[error.start]
                    yield (
                        number,
                        UserError(
                            f"{path}: line {number} is not UTF-8 (byte 0x{bad:02x} at {error.start}): save it as UTF-8"
                        ),
                    )
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        yield number + 1, UserError(f"{path}: cannot be unpacked after line {number} ({error}); {_DAMAGE}")
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None


def _unpacked(raw: Any) -> Any:
    """A file of the same content that is not packed; the file itself where it is none of gzip."""
    packed = raw.read(2) == _GZIP
    raw.seek(0)
    return gzip.GzipFile(fileobj=raw) if packed else raw


def _unpacked_size(raw: Any) -> int:
    """The bytes that a gzip file unpacks to, or of a damaged one those before the damage; no more are unpacked than may
    be.
    """
    size, file_size = 0, raw.seek(0, 2)
    raw.seek(0)
    with contextlib.suppress(EOFError, gzip.BadGzipFile, zlib.error), gzip.GzipFile(fileobj=raw) as file:
        while size <= max(FREE, GROWTH * file_size) and (block := file.read(1 << 20)):
            size += len(block)
    return size


def _document(path: Path) -> Any:
    """The file as one JSON value, or a UserError."""
    try:
        with path.open("rb") as raw:
            text = _unpacked(raw).read()
        return _parse(text.decode("utf-8-sig"), f"{path}:")
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        return UserError(f"{path} cannot be read ({error}); {_DAMAGE}")


def _parse(text: str | UserError, where: str) -> Any:
    """A JSON value, or a UserError."""
    if isinstance(text, UserError):
        return text
    try:
        return from_json(text)
    except json.JSONDecodeError as error:
        at = f"column {error.colno}" if not where.endswith(":") else f"line {error.lineno}, column {error.colno}"
        return UserError(f"{where} is not JSON ({error.msg} at {at})".replace(": is not", " is not"))
    except (ValueError, RecursionError) as error:  # a number of thousands of digits; brackets in brackets without end
        return UserError(f"{where} cannot be read as JSON ({error})")


def named_task(value: Any, where: str) -> Task | None:
    """The task that a header names. One that is not known here leaves the data usable, without an environment to score
    in.
    """
    if value is None:
        return None
    if isinstance(value, str):
        task = lookup(value)
        if task is None:
            warn(
                f"{where}: there is no task '{value}' here, so that nothing can be "
                f"scored.{nearest(value, _task_names())}"
            )
        return task
    if not isinstance(value, dict):
        raise UserError(f"{where}: the header's task must be a registered name, or what offrl writes there")
    try:
        return task_from_json(value)
    except UserError as error:
        raise UserError(
            f"{where}: the header's task must be a registered name, or what offrl writes there ({error})"
        ) from None


def _task_names() -> list[str]:
    return [*registry.names("task"), *(name for listed in registry.names("task_names").values() for name in listed())]
