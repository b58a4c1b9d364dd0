"""Progress of long work that is no training: speed, time left, and what else a person wants to see."""

from __future__ import annotations

import sys
import time

from offrl.runs.log import PLAIN_INTERVAL, Pace, duration


class Progress:
    """How far a stage is: a bar on a terminal, a line every ten seconds elsewhere, nothing when quiet."""

    def __init__(self, title: str, total: int, unit: str, quiet: bool, done: int = 0) -> None:
        self.title, self.total, self.unit, self.quiet = title, total, unit, quiet
        now = time.monotonic()
        self.next_line, self.bar = now + PLAIN_INTERVAL / 5, None
        self.seen, self.pace = (now, done), Pace()
        if not quiet and sys.stdout.isatty():
            from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
            from rich.progress import Progress as Bar

            columns = (TextColumn("{task.description}"), BarColumn(bar_width=30), MofNCompleteColumn(), TextColumn("{task.fields[text]}"))
            self.bar = Bar(*columns, refresh_per_second=4)
            self.task = self.bar.add_task(title, total=total, completed=done, text="")
            self.bar.start()

    def update(self, done: int, extra: str = "") -> None:
        """`done` of `total`; `extra` is shown behind speed and ETA."""
        now = time.monotonic()
        rate = self.pace.add(done - self.seen[1], now - self.seen[0])
        self.seen = (now, done)
        left = f"ETA {duration((self.total - done) / rate)}" if rate > 0 and done < self.total else ""
        text = "  ".join(t for t in (f"{rate:,.{0 if rate >= 10 else 1}f} {self.unit}/s", left, extra) if t)
        if self.bar is not None:
            self.bar.update(self.task, completed=min(done, self.total), text=text)
        elif not self.quiet and now >= self.next_line:
            self.next_line = now + PLAIN_INTERVAL
            print(f"{self.title}: {min(done, self.total):,}/{self.total:,} {self.unit}  {text}", flush=True)

    def say(self, text: str) -> None:
        """One line for good."""
        if self.bar is not None:
            self.bar.console.print(text, markup=False, highlight=False)
        elif not self.quiet:
            print(text, flush=True)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self.bar is not None:
            self.bar.stop()
