"""CSV files of any usual dialect: commas, semicolons or tabs, decimal points or commas, UTF-8 or what Excel writes, packed or not."""

from __future__ import annotations

import gzip
import io
import itertools
import re
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np

from offrl.data.containers.guard import reading, refuse_growth
from offrl.errors import UserError
from offrl.system.csv_text import lines_of

SUFFIXES = (".csv", ".tsv", ".csv.gz", ".tsv.gz")
ROWS = 1 << 16  # read at once
LINE = 1 << 20  # characters of the longest line
EMPTY = frozenset({"", "na", "n/a", "#n/a", "nan", "null", "none", "-", "?"})  # lower case: no value
_COMMA = re.compile(r"[+-]?(\d{1,3}(\.\d{3})+|\d*),\d+([eE][+-]?\d+)?")  # a number with a decimal comma


def is_csv(path: Path) -> bool:
    """True for the name of a CSV file."""
    return path.name.lower().endswith(SUFFIXES)


class _DecimalComma(Exception):
    """A number with a decimal comma came where points were expected."""


class CsvFile:
    """A CSV file with a header line. `names` are its columns; `read` gives some of them. Raises UserError for a file that is none."""

    def __init__(self, path: Path) -> None:
        self.path, self.where = path, str(path)
        self.decimal_comma = False
        self.encoding = self._encoding()
        with reading(path, " as CSV"), self._open() as file:
            head = file.readline(LINE)
            while head and not head.strip():
                head = file.readline(LINE)
        if not head.strip():
            raise UserError(f"{path} is empty")
        counts = {mark: _outside_quotes(head).count(mark) for mark in ("\t", ";", ",", "|")}
        self.delimiter = max(counts, key=lambda mark: counts[mark])
        if not counts[self.delimiter]:
            raise UserError(
                f"{path}: its first line, '{head.strip()[:60]}', has no comma, semicolon, tab or bar: it must be the columns' names, "
                "divided by one of them"
            )
        with reading(path, " as CSV"):
            self.names = [n.strip() for n in next(lines_of([head], self.delimiter))]
        if sum(_is_number(n) for n in self.names) > len(self.names) // 2:
            raise UserError(f"{path}: its first line holds numbers ({head.strip()[:60]}): give it a first line with the columns' names")
        twice = sorted({n for n in self.names if n and self.names.count(n) > 1})
        if twice:
            raise UserError(f"{path} has a column twice: {', '.join(twice)}")

    def read(self, wanted: Collection[str], exact: Collection[str] = ()) -> dict[str, np.ndarray]:
        """Columns of R rows: float64 where all values are numbers or missing (NaN), int64 of `exact` ones where all are whole, else texts
        (object).

        Raises UserError, which names the line, for lines of other lengths than the first.
        """
        try:
            return self._read(wanted, exact)
        except _DecimalComma:
            self.decimal_comma = True
            return self._read(wanted, exact)

    def kinds(self) -> dict[str, str]:
        """See `Tabular`; by the first rows."""
        with reading(self.path, " as CSV"), self._open() as file:
            rows = list(itertools.islice(lines_of(self._lines(file), self.delimiter), 1, 50))
        result = {}
        for i, name in enumerate(self.names):
            words = [row[i].strip() for row in rows if len(row) > i and row[i].strip().lower() not in EMPTY]
            date = bool(words) and all(re.match(r"\d{4}-\d\d-\d\d|\d\d?[./]\d\d?[./]\d{4}", w) for w in words)
            result[name] = "time" if date else "number" if all(map(_is_number, words)) else "text"
        return result

    def _read(self, wanted: Collection[str], exact: Collection[str]) -> dict[str, np.ndarray]:
        places = {name: self.names.index(name) for name in wanted}
        parts: dict[str, list[np.ndarray]] = {name: [] for name in wanted}
        texts: set[str] = set()
        with reading(self.path, " as CSV"), self._open() as file:
            reader = lines_of(self._lines(file), self.delimiter)
            next(row for row in reader if row and any(row))
            while block := list(itertools.islice(reader, ROWS)):
                last = reader.line_num
                if any(len(row) != len(self.names) for row in block):
                    self._refuse_lengths(block, last)
                    block = [row for row in block if row]
                    if not block:
                        continue
                columns = list(zip(*block, strict=True))
                for name, place in places.items():
                    values = columns[place]
                    if name not in texts:
                        numbers = self._numbers(values, name in exact)
                        if numbers is not None:
                            parts[name].append(numbers)
                            continue
                        texts.add(name)
                        parts[name] = []
                    parts[name].append(np.array(values, object))
        if late := [n for n in texts if sum(map(len, parts[n])) < max(sum(map(len, p)) for p in parts.values())]:
            again = self._texts(late)  # what were numbers before the first text
            parts.update({n: [again[n]] for n in late})
        return {name: np.concatenate(blocks) if blocks else np.zeros(0) for name, blocks in parts.items()}

    def _texts(self, wanted: Collection[str]) -> dict[str, np.ndarray]:
        """Columns as texts, from the first row on."""
        places = [self.names.index(name) for name in wanted]
        with reading(self.path, " as CSV"), self._open() as file:
            reader = lines_of(self._lines(file), self.delimiter)
            next(row for row in reader if row and any(row))
            rows = [[row[p] for p in places] for row in reader if row]
        return {name: np.array([row[i] for row in rows], object) for i, name in enumerate(wanted)}

    def _numbers(self, values: tuple[str, ...], exact: bool) -> np.ndarray | None:
        """Numbers of texts; None where some are none."""
        if exact:
            try:
                return np.fromiter(map(int, values), np.int64, len(values))
            except (ValueError, OverflowError):
                pass
        if not self.decimal_comma:
            try:
                return np.fromiter(map(float, values), np.float64, len(values))
            except ValueError:
                pass
        out = np.empty(len(values))
        for row, text in enumerate(values):
            text = text.strip()
            if self.decimal_comma:
                text = text.replace(".", "").replace(",", ".") if _COMMA.fullmatch(text) or text.count(".") > 1 else text
            try:
                out[row] = np.nan if text.lower() in EMPTY else float(text)
            except ValueError:
                if self.delimiter != "," and not self.decimal_comma and _COMMA.fullmatch(text):
                    raise _DecimalComma from None
                return None
        return out

    def _refuse_lengths(self, block: list[list[str]], last: int) -> None:
        for i, row in enumerate(block):
            if row and len(row) != len(self.names):
                line = last - len(block) + i + 1
                raise UserError(
                    f"{self.path}: line {line} has {len(row)} values, and the first line names {len(self.names)} columns; correct that line"
                )

    def _encoding(self) -> str:
        """How the file writes letters: a mark at its start, else UTF-8, else Windows' western one, in which no byte is wrong."""
        with reading(self.path, " as CSV"), self._bytes() as file:
            head = file.read(4)
            if head[:2] in (b"\xff\xfe", b"\xfe\xff"):
                return "utf-16"
            if head.startswith((b"PK\x03\x04", b"\x89HDF", b"PAR1", b"\x1f\x8b")):
                raise UserError(f"{self.path} is no CSV file, whatever its name says: it starts with {head!r}")
            try:
                rest = head + file.read(1 << 16)
                rest[: rest.rfind(b"\n") + 1 or None].decode("utf-8")
            except UnicodeDecodeError:
                return "cp1252"
        return "utf-8-sig"

    def _bytes(self) -> IO[bytes]:
        return gzip.open(self.path) if self.path.suffix.lower() == ".gz" else self.path.open("rb")  # type: ignore[return-value]

    def _open(self) -> IO[str]:
        return io.TextIOWrapper(self._bytes(), encoding=self.encoding, errors="replace", newline="")

    def _lines(self, file: IO[str]) -> Iterator[str]:
        """The lines of the file; of a packed one with a limit of what they may grow to."""
        packed = self.path.suffix.lower() == ".gz"
        if not packed:
            yield from file
            return
        size, stored = 0, self.path.stat().st_size
        while line := file.readline(LINE):
            size += len(line)
            if len(line) == LINE:
                raise UserError(f"{self.path} has a line of more than {LINE:,} characters: it is no CSV file, or damaged")
            refuse_growth(str(self.path), size, stored)
            yield line


def _outside_quotes(line: str) -> str:
    return re.sub(r'"[^"]*"', "", line)


def _is_number(text: Any) -> bool:
    try:
        float(str(text).replace(",", "."))
    except ValueError:
        return False
    return str(text).lower() not in ("nan", "inf", "infinity")
