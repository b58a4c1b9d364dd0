"""Progress of long work: a bar on a terminal and in a notebook, a line now and then elsewhere, nothing when quiet."""

from __future__ import annotations

import html
import math
import sys
import time
from collections.abc import Callable
from typing import Any, TypeVar

from offrl.errors import one_line, say

INTERVAL = 10.0  # seconds between lines when the output is not a terminal
PICTURES = 0.25  # seconds between two of a notebook's bar
FIRST = INTERVAL / 5  # seconds before the first
D = TypeVar("D", bound="Display")


def duration(seconds: float) -> str:
    """`75` -> `1 min 15 s`."""
    if not math.isfinite(seconds):
        return "?"
    total = max(0, round(seconds))
    if total < 60:
        return f"{total} s"
    minutes, remainder = divmod(total, 60)
    if minutes < 60:
        return f"{minutes} min {remainder:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


class Pace:
    """Steps per second of late: what happened `half_life` seconds ago counts half.

    A mean over less would be that of either side where work comes in turns, as updates and rollouts do.
    """

    def __init__(self, half_life: float = 60.0) -> None:
        self.half_life, self.steps, self.seconds = half_life, 0.0, 0.0

    def add(self, steps: float, seconds: float) -> float:
        """Count `steps` more steps, which took `seconds`; the steps per second with them."""
        keep = 0.5 ** (seconds / self.half_life)
        self.steps, self.seconds = keep * self.steps + steps, keep * self.seconds + seconds
        return self.steps / max(self.seconds, 1e-9)


def in_notebook() -> bool:
    """Whether the output is that of a notebook's cell."""
    ipython: Any = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return shell is not None and hasattr(shell, "kernel") and not sys.stdout.isatty()


class NotebookBar:
    """`done` of `total` as a bar with text beside it, below the cell that runs: HTML that IPython replaces in place.
    rich's and tqdm's bars need ipywidgets, which many notebooks lack. total: None where unknown.
    """

    def __init__(self, total: int | None, title: str = "", done: int = 0) -> None:
        self.total, self.title, self.done, self.text = total, title, done, ""
        self.shown_at, self.handle = 0.0, None

    def update(self, done: int, text: str = "", now: bool = False) -> None:
        """Show them, unless the last picture is very young; `now`: in any case."""
        self.done, self.text = done, text
        if now or time.monotonic() - self.shown_at >= PICTURES or done == self.total:
            self._show()

    def stop(self) -> None:
        """Show the last state, which stays."""
        if self.handle is not None:
            self._show()

    def _show(self) -> None:
        from IPython.display import display

        self.shown_at = time.monotonic()
        data = {"text/html": self._html(), "text/plain": self._plain()}
        if self.handle is None:
            self.handle = display(data, raw=True, display_id=True)
        else:
            self.handle.update(data, raw=True)

    def _counts(self) -> str:
        return f"{self.done:,}" if self.total is None else f"{self.done:,}/{self.total:,}"

    def _plain(self) -> str:
        return "  ".join(part for part in (one_line(self.title), self._counts(), one_line(self.text)) if part)

    def _html(self) -> str:
        share = 100.0 * self.done / self.total if self.total else 0.0
        colour = "#009e73" if share >= 100.0 else "#0072b2"
        bar = (
            '<span style="display:inline-block;width:240px;height:10px;border-radius:5px;background:rgba(128,128,128,0.25);'  # noqa: E501
            'overflow:hidden"><span '
            f'style="display:block;height:10px;width:{share:.1f}%;background:{colour}"></span></span>'
        )
        texts = [html.escape(one_line(t)) for t in (self.title, self._counts(), self.text)]
        beside = "".join(f"<span>{text}</span>" for text in texts[1:] if text)
        style = "display:flex;gap:1em;align-items:center;font-family:monospace;font-size:13px;flex-wrap:wrap"
        return f'<div style="{style}">{f"<b>{texts[0]}</b>" if texts[0] else ""}{bar}{beside}</div>'


class Display:
    """A bar with text beside it, in a terminal or below a notebook's cell, or lines. In a terminal, rich puts anything
    that is printed meanwhile (warnings too) above the bar.

    stderr: on standard error, where the bar vanishes in the end.
    """

    def __init__(
        self, total: int | None, *, title: str = "", done: int = 0, quiet: bool = False, stderr: bool = False
    ) -> None:
        self.total, self.quiet, self.stderr = total, quiet, stderr
        self.next_line, self.bar = time.monotonic() + FIRST, None
        if not quiet and (sys.stderr if stderr else sys.stdout).isatty():
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
            from rich.progress import Progress as Bar

            self.bar = Bar(
                *([TextColumn("{task.description}", markup=False)] if title else []),
                BarColumn(bar_width=30),
                MofNCompleteColumn(),
                TextColumn("{task.fields[text]}", markup=False),
                TextColumn("{task.fields[extra]}", markup=False, style="bold"),
                console=Console(stderr=stderr, highlight=False),
                refresh_per_second=4,
                transient=stderr,
            )
            self.task = self.bar.add_task(one_line(title), total=total, completed=done, text="", extra="")
            self.bar.start()
        self.cell = NotebookBar(total, title, done) if not quiet and in_notebook() else None

    def show(self, done: int, text: str = "", extra: str = "", line: str = "", now: bool = False) -> bool:
        """Set the bar; elsewhere print `line`, at once if `now`, else when one is due. Returns whether it was shown."""
        if self.bar is not None:
            self.bar.update(self.task, completed=done, text=one_line(text), extra=one_line(extra))
        elif self.cell is not None:
            self.cell.update(done, _joined(text, extra), now)
        elif self.quiet or not (now or time.monotonic() >= self.next_line):
            return False
        else:
            self.next_line = time.monotonic() + INTERVAL
            self.say(line)
        return True

    def say(self, message: str) -> None:
        """Print a line that stays, above the bar."""
        if self.bar is not None:
            self.bar.console.print(one_line(message), markup=False)
        elif message and not self.quiet:
            say(message, file=sys.stderr if self.stderr else None)

    def stop(self) -> None:
        """Take the bar down."""
        if self.bar is not None:
            self.bar.stop()
        if self.cell is not None:
            self.cell.stop()

    def __enter__(self: D) -> D:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def remaining(self, done: int, rate: float) -> str:
        """The time to go at `rate` steps per second; empty when unknown or over."""
        return f"ETA {duration((self.total - done) / rate)}" if self.total and rate > 0 and done < self.total else ""


class Progress(Display):
    """Progress of work that is counted in `unit`, with speed and time to go. total: None where unknown."""

    def __init__(
        self, title: str, total: int | None, unit: str, quiet: bool, done: int = 0, stderr: bool = False
    ) -> None:
        super().__init__(total, title=title, done=done, quiet=quiet, stderr=stderr)
        self.title, self.unit, self.pace, self.last = title, unit, Pace(), (time.monotonic(), done)

    def update(self, done: int, extra: str = "") -> None:
        """`done` of `total`; `extra` is shown behind speed and time to go."""
        now = time.monotonic()
        rate = self.pace.add(done - self.last[1], now - self.last[0])
        self.last = (now, done)
        speed = f"{rate:,.{0 if rate >= 10 else 1}f} {self.unit}/s"
        count = f"{done:,}" if self.total is None else f"{min(done, self.total):,}/{self.total:,}"
        text = _joined(speed, self.remaining(done, rate))
        line = _joined(f"{self.title}: {count} {self.unit}", text, extra)
        self.show(done if self.total is None else min(done, self.total), text, extra, line)


class TrainingProgress(Display):
    """Progress of the updates of N replicas. count: N in words ("4 seeds"), empty for a single one.

    Lines come for each new result of an evaluation and for the end besides those that are due.
    """

    def __init__(
        self, title: str, total: int, replicas: int = 1, count: str = "", start: int = 0, quiet: bool = False
    ) -> None:
        if title and not quiet:
            say(*title.split("\n"))
        super().__init__(total, done=start, quiet=quiet)
        self.updates, self.replicas, self.count = total, replicas, count
        self.extra, self.last_step = "", -1

    def update(self, step: int, rate: float, extra: str = "") -> None:
        """Show `step`, the updates per second and the last evaluation's result, if there is one."""
        news = bool(extra) and extra != self.extra
        self.extra = extra or self.extra
        text = _joined(self._speed(rate), self.remaining(step, rate))
        line = _joined(
            f"step {step:,}/{self.updates:,} ({100 * step // max(1, self.updates)}%)", text, self.extra if news else ""
        )
        finished = step >= self.updates > self.last_step
        if (news or step != self.last_step) and self.show(step, text, self.extra, line, now=news or finished):
            self.last_step = step

    def _speed(self, rate: float) -> str:
        speed, total = (f"{x:,.0f}" if x >= 10 else f"{x:.1f}" for x in (rate, rate * self.replicas))
        return f"{speed} updates/s" + (f" x {self.count} = {total}/s" if self.count else "")


class StageProgress:
    """Lines and bars of long work in stages, such as a tune or a selection; nothing when quiet."""

    def __init__(self, quiet: bool, subtitle: str = "") -> None:
        """subtitle: a second line of each title, of the arithmetic, say."""
        self.quiet, self.subtitle = quiet, subtitle
        self.bar: TrainingProgress | None = None

    def tell(self, *lines: str) -> None:
        """Print lines."""
        self.stop()
        if not self.quiet:
            say(*lines)

    def stage(self, title: str, total: int) -> Callable[[int, float], None]:
        """A bar for one stage, which takes (step, updates a second)."""
        self.stop()
        title = f"{one_line(title)}; {total:,} updates" + (f"\n{self.subtitle}" if self.subtitle else "")
        self.bar = TrainingProgress(title, total, quiet=self.quiet)
        return self.bar.update

    def stop(self) -> None:
        """End the bar."""
        if self.bar is not None:
            self.bar.stop()
            self.bar = None


def _joined(*texts: str) -> str:
    return "  ".join(text for text in texts if text)
