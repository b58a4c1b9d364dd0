"""Errors for people: one line that names what is wrong, where, and the cure."""

from __future__ import annotations

import difflib
import re
import sys
from collections.abc import Iterable
from typing import TextIO

# C0, C1, separators, bidirectional marks, and halves of pairs, which no terminal and no file in UTF-8 can be given
_UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
_warnings: set[str] = set()  # that this process has given


class UserError(Exception):
    """A mistake in the input. The command line prints it as one line and exits with status 2; the message must stand on
    its own.

    The names in it may be those of a stranger's files: its control characters are made `printable`, also for a
    notebook.
    """

    def __init__(self, *message: object) -> None:
        super().__init__(*(printable(part) if isinstance(part, str) else part for part in message))


def out_of_memory(error: Exception) -> bool:
    """Whether memory was asked for that is not there, or more than any machine has."""
    signs = "out of memory", "t allocate memory", "Storage size calculation overflowed"
    return isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and any(s in str(error) for s in signs))


class Interrupted(Exception):
    """A request to stop training, which `step` was reached at; everything is saved."""

    def __init__(self, step: int, run_dir: object) -> None:
        super().__init__(f"stopped at step {step:,}; all is saved in {run_dir}: the same command continues")
        self.step = step


def nearest(name: str, options: Iterable[str]) -> str:
    """`" Did you mean 'x'?"` for the option most like `name`, or an empty string when none is."""
    options = [str(o) for o in options]
    folded = {o.lower().replace("_", "-"): o for o in options}
    close = difflib.get_close_matches(str(name).lower().replace("_", "-"), folded, n=1, cutoff=0.5)
    return f" Did you mean '{folded[close[0]]}'?" if close else ""


def few(name: str, options: Iterable[str], most: int = 5) -> str:
    """`" Did you mean 'x'? Or: y, z."`: the options most like `name`, `most` of them; all where there are no more. ""
    for none.
    """
    options = sorted(map(str, options))
    folded = {o.lower().replace("_", "-"): o for o in options}
    close = [
        folded[c] for c in difflib.get_close_matches(str(name).lower().replace("_", "-"), folded, n=most, cutoff=0.45)
    ]
    alternatives = [o for o in (close if len(options) > most else options) if not close or o != close[0]]
    if likely := nearest(name, options):
        return likely + (f" Or: {', '.join(alternatives)}." if alternatives else "")
    return f" Nearest: {', '.join(close or alternatives)}." if close or len(options) <= most else ""


def some(names: Iterable[str], most: int = 6) -> str:
    """The first few of many names: `a, b and 7 more`."""
    listed = list(names)
    return ", ".join(listed[:most]) + (f" and {len(listed) - most} more" if len(listed) > most else "")


def first_line(error: BaseException) -> str:
    """The message of an exception in one line; its kind where it has none."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def printable(text: str) -> str:
    """`text` as a terminal may get it: control characters other than newline and tab, and marks that turn the direction
    of writing, are shown as \\x1b and the like in place of sent. Names in files of strangers may hold any."""
    return _UNSAFE.sub(lambda m: m[0].encode("unicode_escape").decode(), text)


def one_line(text: str) -> str:
    """As `printable`, and a newline is shown as \\n: a name with one in it begins no line that looks like ours ("no
    faults found").
    """
    return printable(text).replace("\n", "\\n")


def say(*lines: str, file: TextIO | None = None) -> None:
    """Print lines, each of which stays one; offrl prints in no other way, for any text may hold names from files of
    strangers.

    file: a stream; None: standard output.
    """
    if lines:
        print(*map(one_line, lines), sep="\n", file=file, flush=True)


def note(message: str) -> None:
    """One line on standard error: how what was asked for is understood."""
    say(f"offrl: note: {message}", file=sys.stderr)


def warn(message: str) -> None:
    """One line on standard error; for what a person should know but that does not stop the work."""
    _warnings.add(message)
    say(f"offrl: warning: {message}", file=sys.stderr)


def unsaid(notes: Iterable[str]) -> list[str]:
    """The notes that no warning of this process ended with: those about data were given when these were read."""
    return [note for note in notes if not any(warning.endswith(note) for warning in _warnings)]
