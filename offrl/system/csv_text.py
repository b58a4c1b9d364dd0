"""CSV, for people and for our own readers. Spreadsheets take a text that begins with = + - @ for a formula, and names
come from files of strangers: such a text is written with an apostrophe before it (`trust.cell`) and read without it, so
that it is the same again."""

from __future__ import annotations

import csv
import functools
import io
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from offrl.errors import printable
from offrl.system import trust


def text_of(rows: Iterable[Sequence[Any]]) -> str:
    """Rows as the text of a CSV file: None is an empty cell, a newline in a text a blank, numbers are written so that
    reading them back gives the same bits."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(
        [_written(x) if isinstance(x, str) else x for x in row] for row in rows
    )
    return text.getvalue()


def rows_of(text: str) -> Iterator[list[str]]:
    """The rows of a CSV file from its text, the header first, empty lines as []. Raises csv.Error."""
    reader = csv.reader(text.replace("\0", "").split("\n"))
    return map(_row, reader) if "'" in text else reader


def read(path: Path) -> list[dict[str, str]]:
    """The rows of a CSV file by its header; the last columns of a short row are empty, and what is too many is left
    out.

    Raises OSError, ValueError for a file that is no text in UTF-8, and csv.Error.
    """
    header, *rows = [row for row in rows_of(path.read_text(encoding="utf-8-sig")) if row] or [[]]
    return [{**dict.fromkeys(header, ""), **dict(zip(header, row, strict=False))} for row in rows]


def lines_of(lines: Iterable[str], delimiter: str) -> Any:
    """A reader (csv.reader) of a person's own table: cells as they stand, for its apostrophes are its own."""
    return csv.reader(lines, delimiter=delimiter)


@functools.lru_cache(4096)
def _written(text: str) -> str:
    return trust.cell(printable(text.replace("\n", " ")))


def _row(cells: list[str]) -> list[str]:
    return [trust.cell_text(x) for x in cells]
