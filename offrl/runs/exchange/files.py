"""Files of results documents: `.json` with one, `.jsonl` with one a line. They are read as data, whoever wrote them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from offrl.errors import UserError
from offrl.runs.exchange.check import check
from offrl.runs.parse import header
from offrl.system import trust
from offrl.system.files import write_text

SUFFIXES = (".json", ".jsonl")
MOST_BYTES = 64_000_000  # of a file
MOST_BRACKETS = 2_000_000  # objects and lists in a file, which take 100 times their bytes when they are read
TABLE_COLUMNS = ("algorithm", "dataset", "seed", "step", "return")  # of a .csv file of scores
HEAD = 1000  # characters within which a file that is no more than met in a folder has the key "schema"


def read(path: str | Path) -> list[dict[str, Any]]:
    """The documents of a .json or .jsonl file, checked; keys that are not known stay in them.

    Raises UserError, in one line with the file and the field, where it cannot be read, is larger than 64 MB, or is no
    results document of version 1.
    """
    return [value for _, value in documents_in(Path(path))]


def documents_in(path: Path) -> list[tuple[str, dict[str, Any]]]:
    """(where it stands, the document) of a file; see `read`."""
    text = _text(path)
    result = [(where, check(_parsed(part, where), where)) for where, part in _parts(path, text)]
    if not result:
        raise UserError(f"{path} is empty: a results file holds one document, or one a line in .jsonl")
    return result


def write(path: str | Path, documents: Sequence[Mapping[str, Any]]) -> Path:
    """Write documents, atomically: one to a .json file, any number to a .jsonl file. Returns the file.

    Raises UserError for another name, for several documents in a .json, for what is no document, and where the disk
    refuses.
    """
    path = Path(path)
    if path.suffix not in SUFFIXES:
        raise UserError(f"{path}: results are written to NAME.json (one document) or NAME.jsonl (one a line)")
    if not documents:
        raise UserError(f"{path}: no results to write")
    if path.suffix == ".json" and len(documents) > 1:
        raise UserError(
            f"{path}: there are {len(documents)} documents, and a .json file holds one: give "
            f"{path.with_suffix('.jsonl')}"
        )
    checked = [check(dict(value), f"document {i} for {path}") for i, value in enumerate(documents, start=1)]
    lines = [json.dumps(value, allow_nan=False, ensure_ascii=False) for value in checked]
    write_text(path, "".join(line.encode("utf-8", "backslashreplace").decode() + "\n" for line in lines))
    return path


def stated_in(folder: Path) -> list[Path]:
    """The files directly in a folder that look like results documents: `"schema"` stands in their first 1,000
    characters.
    """
    result = []
    for path in sorted(folder.iterdir()):
        if path.suffix in SUFFIXES and not path.name.startswith(".") and path.is_file():
            try:
                with open(path, encoding="utf-8", errors="replace") as file:
                    begin = file.read(HEAD)
            except OSError:
                continue
            if '"schema"' in begin and begin.lstrip().startswith("{"):
                result.append(path)
    return result


def _text(path: Path) -> str:
    try:
        text = trust.read_text(path, most=MOST_BYTES)
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror or error}); give a file that exists") from None
    except UnicodeDecodeError:
        raise UserError(f"{path} is no text in UTF-8, and so no results file; write it again") from None
    except UserError as error:
        raise UserError(f"{error}: split it, one document a line in several .jsonl files") from None
    if (count := text.count("{") + text.count("[")) > MOST_BRACKETS:
        raise UserError(
            f"{path} has {count:,} objects and lists, and such a file has {MOST_BRACKETS:,} at most: split it"
        )
    return text.removeprefix("\ufeff")


def _parts(path: Path, text: str) -> Iterator[tuple[str, str]]:
    if path.suffix != ".jsonl":
        if text.strip():
            yield str(path), text
        return
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            yield f"{path}, line {number}", line


def _parsed(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except RecursionError:
        raise UserError(
            f"{where}: it is nested too deeply for a results document; settings are flat, name: value"
        ) from None
    except json.JSONDecodeError as error:
        more = "; several documents stand one a line in a .jsonl file" if error.msg == "Extra data" else ""
        raise UserError(
            f"{where} is no JSON: {error.msg} (line {error.lineno}, column {error.colno}){more}; write it again"
        ) from None
    except ValueError:  # a number of thousands of digits
        raise UserError(f"{where}: it holds a whole number of too many digits; write it again") from None


def is_table(path: Path) -> bool:
    """Whether a file's first line names the columns that a table of scores needs."""
    return path.suffix == ".csv" and {*TABLE_COLUMNS} <= {
        name.strip().strip('"') for name in header(path).lstrip("\ufeff").split(",")
    }
