"""What strangers' files and folders must be before they are opened: plain files, that lie where they seem to, of a size
to be parsed.
"""

from __future__ import annotations

import contextlib
import gzip
import os
import stat
from collections.abc import Sequence
from pathlib import Path

from offrl.data.containers.guard import reading, refuse_columns
from offrl.errors import UserError
from offrl.system import trust

HEAD = 1 << 22  # bytes of the first line of a CSV file
BLANK = 1 << 16  # lines before it


def refuse_special(path: Path) -> None:
    """Raises UserError for what is neither file nor folder: to open a pipe waits, maybe for ever, for somebody who
    writes into it.
    """
    with contextlib.suppress(OSError, ValueError):  # whoever opens it says why it cannot be
        mode = os.stat(path).st_mode
        if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
            raise UserError(
                f"{path} is no plain file but a pipe, a socket or a device, which may never end; write what it gives "
                "to a file"
            )


def refuse_link(path: Path, root: Path) -> None:
    """Raises UserError where `path`, which nobody typed, is a link that leads out of the folder `root`: what it leads
    to is no part of the data, and would come out as if it were."""
    inside = os.path.realpath(root)
    if os.path.commonpath([inside, target := os.path.realpath(path)]) != inside and not trust.granted():
        raise UserError(
            f"{path} is a link that leads out of the data, to {target}: put the file or folder itself in its place, or "
            "say trust=true"
        )


def refuse_wide(path: Path) -> None:
    """Raises UserError for a CSV file whose first line names more columns than a table has, before anything is
    parsed.
    """
    with reading(path, " as CSV"), gzip.open(path) if path.suffix.lower() == ".gz" else path.open("rb") as file:
        heads = (file.readline(HEAD) for _ in range(BLANK))
        if (head := next((line for line in heads if not line or line.strip()), None)) is None:
            raise UserError(f"{path} begins with {BLANK:,} blank lines; remove them")
    refuse_columns(str(path), max(head.count(mark) for mark in (b",", b";", b"\t", b"|")) + 1)


def refuse_tables(paths: Sequence[Path], by_name: bool) -> None:
    """Raises UserError for tables that are no plain files, for CSV that is too wide, and, where they were listed in a
    folder and nobody typed their names, for links that lead out of it."""
    for path in paths:
        refuse_special(path)
        if path.name.lower().endswith((".csv", ".tsv", ".csv.gz", ".tsv.gz")) and path.is_file():
            refuse_wide(path)
        if not by_name and path.is_symlink():
            refuse_link(path, path.parent)
