"""What all readers of strangers' files share: one line for whatever a library raises, and the limit of what a file may
unpack to.
"""

from __future__ import annotations

import contextlib
import json
import lzma
import struct
import tokenize
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

from offrl.errors import UserError

FREE = 256_000_000  # bytes that anything may unpack to
GROWTH = 200  # times what the file holds of it, that anything larger may unpack to; deflate's limit is 1,032
DEPTH = 64  # of lists and objects of JSON, or groups of HDF5, in one another
COLUMNS = 10_000  # of a table, or arrays of a file: what is looked up among them takes long with more
DAMAGED = "the file is damaged or incomplete: get it again"

# What h5py, NumPy, zipfile, zlib and json raise for damaged files. AttributeError, NameError and AssertionError are
# faults of offrl.
_RAISED = (
    OSError,
    RuntimeError,
    ValueError,
    LookupError,
    TypeError,
    ArithmeticError,
    MemoryError,
    EOFError,
    SyntaxError,
    BufferError,
    struct.error,
    zlib.error,
    lzma.LZMAError,
    zipfile.BadZipFile,
    tokenize.TokenError,
)
_MODULES = ("pyarrow", "PIL", "_csv")  # whose own exceptions derive from Exception alone


@contextlib.contextmanager
def reading(where: object, how: str = "", cure: str = DAMAGED) -> Iterator[None]:
    """A context in which what a library raises becomes a UserError: "`where` cannot be read`how` (...); `cure`".

    `where`: the file, and the field and the episode where they are known. The innermost context speaks.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, _RAISED) or type(error).__module__.startswith(_MODULES):
            raise UserError(f"{where} cannot be read{how} ({_reason(error)}); {cure}") from error
        raise


def _reason(error: Exception) -> str:
    """What a library says, in one line."""
    if isinstance(error, MemoryError):
        return "there is not enough memory for it"
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        return error.strerror
    text = " ".join(str(error).split())[:200]
    plain = isinstance(error, OSError | RuntimeError | zlib.error | zipfile.BadZipFile) and text
    return text if plain else f"{type(error).__name__}: {text}".removesuffix(": ")


def from_json(text: str) -> Any:
    """`json.loads` for strangers' texts. Raises ValueError, or RecursionError, also where lists and objects lie deeper
    in one another than `DEPTH`: what walks through them later would not come to an end of them."""
    value = json.loads(text)
    level = [value] if text.count("[") + text.count("{") > DEPTH else []
    for _ in range(DEPTH):
        level = [
            inner for v in level for inner in (v.values() if isinstance(v, dict) else v if isinstance(v, list) else ())
        ]
        if not level:
            return value
    raise ValueError(f"more than {DEPTH} lists or objects lie in one another")


def refuse_growth(where: str, size: int, stored: int) -> None:
    """Raises UserError where `stored` bytes of a file are to become `size` bytes, which is more than honest data do.

    Up to `FREE` bytes anything may (a column of zeros packs to almost nothing); beyond that `GROWTH` times what is
    stored.
    """
    if size > max(FREE, GROWTH * stored):
        raise UserError(
            f"{where} would take {words(size)} of memory, of which the file holds {words(stored)}: more than {GROWTH} "
            f"times as much is refused above {words(FREE)}, for such a file is damaged, or made to exhaust memory; if "
            "it is sound, write it uncompressed"
        )


def refuse_columns(where: str, count: int) -> None:
    """Raises UserError for more columns than a table has."""
    if count > COLUMNS:
        raise UserError(
            f"{where} has {count:,} columns, and {COLUMNS:,} at most are read: leave out those that are not needed, or "
            "write observations and actions as one array each, with numpy.savez"
        )


def refuse_empty_rows(where: str, shape: Sequence[int]) -> None:
    """Raises UserError for a shape that has a length without end and yet no number: no bytes of the file bound it."""
    if 0 in shape and max(shape) > FREE:
        raise UserError(f"{where} declares the shape {list(shape)}, which holds no number; {DAMAGED}")


def words(size: int) -> str:
    """A number of bytes for people."""
    for unit, factor in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if size >= factor:
            return f"{size / factor:,.3g} {unit}" if size < 1e15 else f"{size / factor:.1e} {unit}"
    return f"{size} bytes"
