"""Errors for people: one line that names what is wrong, where, and the cure."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Iterable


class UserError(Exception):
    """A mistake in the input. The command line prints it as one line and exits with status 2; the message must stand on its own."""


class Interrupted(Exception):
    """A request to stop training; everything is saved."""


def nearest(name: str, options: Iterable[str]) -> str:
    """`" Did you mean 'x'?"` for the option most like `name`, or an empty string when none is."""
    options = [str(o) for o in options]
    folded = {o.lower().replace("_", "-"): o for o in options}
    close = difflib.get_close_matches(str(name).lower().replace("_", "-"), folded, n=1, cutoff=0.5)
    return f" Did you mean '{folded[close[0]]}'?" if close else ""


def first_line(error: BaseException) -> str:
    """The message of an exception in one line; its kind where it has none."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def warn(message: str) -> None:
    """One line on standard error; for what a person should know but that does not stop the work."""
    print(f"offrl: warning: {message}", file=sys.stderr, flush=True)
