"""CSV files of any usual dialect: commas, semicolons or tabs, decimal points or commas, UTF-8 or what Excel writes,
packed or not.
"""

from __future__ import annotations

import codecs
import gzip
import io
import itertools
import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import IO

import numpy as np

from offrl.data.containers.guard import reading, refuse_growth
from offrl.data.tables.tabular import Tabular
from offrl.data.tables.values import CODE, DECIMAL_COMMA, EMPTY, WHOLE, Marks, is_number
from offrl.errors import UserError
from offrl.system.csv_text import lines_of

SUFFIXES = (".csv", ".tsv", ".csv.gz", ".tsv.gz")
ROWS = 1 << 16  # read at once
LINE = 1 << 20  # characters of the line of names
_DATE = re.compile(r"\d{4}-\d\d-\d\d|\d\d?[./]\d\d?[./]\d{4}")


def is_csv(path: Path) -> bool:
    """True for the name of a CSV file."""
    return path.name.lower().endswith(SUFFIXES)


class _DecimalComma(Exception):
    """A number with a decimal comma came where points were expected."""


class CsvFile(Tabular):
    """A CSV file with a header line. `names` are its columns; `read` gives some of them. Raises UserError for a file
    that is none.

    Before the header may stand empty lines, Excel's `sep=;` and comments (#); after it a row of units, which is left
    out and noted."""

    def __init__(self, path: Path, decimal: str) -> None:
        """decimal: as `dataset.decimal`."""
        self.path, self.where = path, str(path)
        self.marks = Marks(self.where, decimal)
        self.notes: list[str] = []
        self.encoding = self._encoding()
        head = self._head()
        if not self.delimiter:
            raise UserError(
                f"{path}: its first line, '{head.strip()[:60]}', has no comma, semicolon, tab or bar: it must be the "
                "columns' names, divided by one of them"
            )
        with reading(path, " as CSV"):
            self.names = [n.strip() for n in next(lines_of([head], self.delimiter))]
        if sum(is_number(n) for n in self.names) > len(self.names) // 2:
            raise UserError(
                f"{path}: its first line holds numbers ({head.strip()[:60]}): give it a first line with the columns' "
                "names"
            )
        self.refuse_doubles([n for n in self.names if n])
        self.units = self._units()

    def read(self, names: Collection[str], exact: Mapping[str, str]) -> dict[str, np.ndarray]:
        """Columns of R rows: float64 where all values are numbers or missing (NaN), else texts (object); see `Tabular`.

        Raises UserError, which names the line, for lines of other lengths than the first.
        """
        while True:
            self.marks.begin()
            try:
                columns = self._read(names, exact)
                break
            except _DecimalComma:
                self.marks.comma = True
        self.notes += self.marks.notes()
        return columns

    def kinds(self) -> dict[str, str]:
        """See `Tabular`; by the first rows."""
        rows = self._first_rows(50)[1 if self.units else 0 :]
        result = {}
        for i, name in enumerate(self.names):
            texts = [row[i].strip() for row in rows if len(row) > i and row[i].strip().lower() not in EMPTY]
            date = bool(texts) and all(map(_DATE.match, texts))
            result[name] = "time" if date else "number" if 2 * sum(map(is_number, texts)) >= len(texts) else "text"
        return result

    def _head(self) -> str:
        """The line of names; finds the delimiter, and how many lines stand before the rows."""
        marks, comment = ["\t", ";", ",", "|"], ("", 0)
        line, self.skipped, self.delimiter = "", 0, ""
        with reading(self.path, " as CSV"), self._open() as file:
            for line in iter(lambda: file.readline(LINE), ""):
                self.skipped += 1
                if (stated := re.fullmatch(r'"?sep=(.)"?', line.strip("\r\n"))) and self.skipped == 1:
                    marks = [stated[1]]
                elif line.lstrip().startswith("#"):
                    comment = line.lstrip()[1:].lstrip(" "), self.skipped
                elif line.strip():
                    break
            else:
                line = ""
        if not line.strip() and not comment[0].strip():
            raise UserError(f"{self.path} is empty")
        counts = {mark: _outside_quotes(line or comment[0]).count(mark) for mark in marks}
        most = max(counts, key=lambda mark: counts[mark])
        if counts[most]:
            self.delimiter = most
            measured = any(is_number(v.strip()) or _DATE.match(v.strip()) for v in line.split(most))
            if measured and _outside_quotes(comment[0]).count(most) == counts[most]:
                line, self.skipped = comment  # NumPy writes the names so
        return line or comment[0]

    def _first_rows(self, count: int) -> list[list[str]]:
        with reading(self.path, " as CSV"), self._open() as file:
            reader = lines_of(itertools.islice(file, self.skipped, None), self.delimiter)
            return list(itertools.islice((row for row in reader if row and any(row)), count))

    def _units(self) -> dict[str, str]:
        """The units of the columns, where the row below the names says them: words where the next row has numbers or
        dates.
        """
        rows = self._first_rows(2)
        if len(rows) < 2:
            return {}
        cells = [(a.strip(), b.strip()) for a, b in zip(*rows, strict=False) if a.strip().lower() not in EMPTY]
        measured = [bool(is_number(b) or _DATE.match(b)) and not is_number(a) and not _DATE.match(a) for a, b in cells]
        most = 2 * sum(measured) > len(cells) and not any(is_number(a) and a != "1" for a, _ in cells)
        if not most:
            return {}
        shown = ", ".join(a for a, _ in cells[:6]) + (", ..." if len(cells) > 6 else "")
        self.notes.append(f"the row below the names ({shown}) is taken for units, and left out")
        units = dict(zip(self.names, (cell.strip() for cell in rows[0]), strict=False))
        return {name: unit for name, unit in units.items() if unit.lower() not in EMPTY}

    def _columns(self) -> Iterator[list[tuple[str, ...]]]:
        """The columns as texts, some rows at a time."""
        with reading(self.path, " as CSV"), self._open() as file:
            reader = lines_of(itertools.islice(file, self.skipped, None), self.delimiter)
            if self.units:
                next(row for row in reader if row and any(row))
            while block := list(itertools.islice(reader, ROWS)):
                if any(len(row) != len(self.names) for row in block):
                    block = self._of_one_length(block, self.skipped + reader.line_num)
                if block:
                    yield list(zip(*block, strict=True))

    def _read(self, wanted_names: Collection[str], exact: Mapping[str, str]) -> dict[str, np.ndarray]:
        indices = {name: self.names.index(name) for name in wanted_names}
        texts: set[str] = set()
        while True:
            parts: dict[str, list[np.ndarray]] = {name: [] for name in wanted_names}
            late: set[str] = set()  # columns that began with numbers
            for columns in self._columns():
                for name in wanted_names:
                    values = columns[indices[name]]
                    numbers = None if name in texts | late else self._numbers(name, values, exact.get(name, ""))
                    if numbers is None and name not in texts:
                        (late if parts[name] else texts).add(name)
                    cells = [v.strip() for v in values] if name in exact else values
                    parts[name].append(np.array(cells, object) if numbers is None else numbers)
            if not late:
                break
            texts |= late
        return {name: np.concatenate(blocks) if blocks else np.zeros(0) for name, blocks in parts.items()}

    def _numbers(self, name: str, values: tuple[str, ...], exact: str) -> np.ndarray | None:
        """Numbers of texts; None where some are none. exact: see `Tabular`."""
        if exact:
            texts = [v.strip() for v in values]
            if all(map(WHOLE.fullmatch, texts)):
                try:
                    return np.fromiter(map(int, texts), np.int64, len(texts))
                except OverflowError:
                    return np.array(texts, float) if exact == "whole" else None
            if exact == "name" or (
                exact == "label" and any(map(CODE.fullmatch, texts)) and not any("." in w or "," in w for w in texts)
            ):
                return None
        if "_" in "".join(values):
            return None  # which float would pass over
        if not self.marks.comma:
            try:
                result = np.fromiter(map(float, values), np.float64, len(values))
                if self.delimiter != ",":
                    self.marks.see(name, values)
                return result
            except ValueError:
                pass
        out = np.empty(len(values))
        for row, text in enumerate(values):
            text = text.strip()
            try:
                out[row] = np.nan if text.lower() in EMPTY else float(self.marks.with_point(name, text))
            except ValueError:
                if self.delimiter != "," and not self.marks.comma and DECIMAL_COMMA.fullmatch(text):
                    raise _DecimalComma from None
                return None
        return out

    def _of_one_length(self, block: list[list[str]], last: int) -> list[list[str]]:
        """The rows without empty lines, comments, and the empty value after a last delimiter that the names do not
        have, or have alone.

        last: the number of the last line. Raises UserError for rows of other lengths.
        """
        count, rows = len(self.names), []
        for i, row in enumerate(block):
            if not row or (len(row) != count and row[0].lstrip().startswith("#")):
                continue
            if len(row) == count + 1 and not row[-1].strip():
                row = row[:-1]
            elif len(row) == count - 1 and not self.names[-1]:
                row = [*row, ""]
            if len(row) != count:
                raise UserError(
                    f"{self.path}: line {last - len(block) + i + 1} has {len(row)} values, and the first line names "
                    f"{count} columns; correct that line"
                )
            rows.append(row)
        return rows

    def _encoding(self) -> str:
        """How the file writes letters: a mark at its start, else UTF-8, else Windows' western one, in which no byte is
        wrong. Raises UserError for a packed file that grows too much.
        """
        packed = self.path.suffix.lower() == ".gz"
        with reading(self.path, " as CSV"), self._bytes() as file:
            block = file.read(4)
            if block.startswith((b"PK\x03\x04", b"\x89HDF", b"PAR1", b"\x1f\x8b")):
                raise UserError(f"{self.path} is no CSV file, whatever its name says: it starts with {block!r}")
            encoding = "utf-16" if block[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8-sig"
            decoder, size, more = codecs.getincrementaldecoder("utf-8")(), 0, True
            while more and (packed or encoding == "utf-8-sig"):
                more, size = bool(block), size + len(block)
                if packed:
                    refuse_growth(str(self.path), size, self.path.stat().st_size)
                if encoding == "utf-8-sig":
                    try:
                        decoder.decode(block, not more)
                    except UnicodeDecodeError:
                        encoding = "cp1252"
                block = file.read(1 << 20)
        return encoding

    def _bytes(self) -> IO[bytes]:
        return gzip.open(self.path) if self.path.suffix.lower() == ".gz" else self.path.open("rb")  # type: ignore[return-value]

    def _open(self) -> IO[str]:
        return io.TextIOWrapper(
            self._bytes(), self.encoding, "replace" if self.encoding == "cp1252" else "strict", newline=""
        )


def _outside_quotes(line: str) -> str:
    return re.sub(r'"[^"]*"', "", line)
