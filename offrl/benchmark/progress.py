"""Progress of a benchmark's cells while they train, and the end of those that train elsewhere."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from offrl.benchmark import plan, table
from offrl.benchmark.plan import Cell
from offrl.errors import say
from offrl.system.files import open_to_append
from offrl.system.progress import Display, duration

POLL_SECONDS = 0.5
TAIL = 1 << 16  # bytes of metrics.jsonl that are read for its last line


class GridProgress:
    """A line for each cell that begins or ends, with what is left of the grid."""

    def __init__(self, folder: Path, todo: Sequence[Cell], at_once: int, say: Callable[[str], None]) -> None:
        self.folder, self.say, self.at_once = folder, say, at_once
        self.cells = {c.run: c for c in todo}
        self.began: dict[str, float] = {}
        self.ended: dict[str, float] = {}  # run -> seconds

    def begins(self, run: str) -> None:
        if run not in self.began:
            self.began[run] = time.monotonic()
            self.say(f"[{len(self.began)}/{len(self.cells)}] {self._title(run)} ...")

    def ends(self, run: str) -> None:
        if run in self.ended:
            return
        self.ended[run] = time.monotonic() - self.began.get(run, time.monotonic())
        status = plan.read_status(self.folder, run)
        if status.get("status") == "done":
            words = f"{table.words(self.folder / run)}{'; ' + status['note'] if status.get('note') else ''}"
        else:
            words = f"failed: {status.get('error') or 'no reason given'}"
        left = f"; {self.left()}" if len(self.ended) < len(self.cells) else ""
        self.say(f"{self._title(run)}: {words} ({duration(self.ended[run])}{left})")

    def left(self) -> str:
        """`5 left, about 14 s`: the time of the cells so far, times those that are left."""
        left = len(self.cells) - len(self.ended)
        mean = sum(self.ended.values()) / len(self.ended) if self.ended else float("nan")
        return f"{left} left, about {duration(left * mean / self.at_once)}"

    def look(self, token: str) -> None:
        """Find out from the files which cells began and ended."""
        for run in self.cells:
            status = plan.read_status(self.folder, run)
            if status.get("token") == token and run not in self.ended:
                self.begins(run)
                if status["status"] != "running":
                    self.ends(run)

    def at_work(self) -> str:
        """The cells that train now, and how far each is: `iql-hopper-medium-v2 45%`."""
        now = [r for r in self.began if r not in self.ended]
        return ", ".join(f"{r} {100 * _step(self.folder / r) // self.cells[r].config.steps}%" for r in now)

    def _title(self, run: str) -> str:
        return f"{self.cells[run].algorithm} on {self.cells[run].dataset}"


def _step(run_dir: Path) -> int:
    """The step of a run's last whole line of metrics."""
    try:
        with open(run_dir / "metrics.jsonl", "rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL))
            return int(json.loads(file.read().split(b"\n")[-2])["step"])
    except (OSError, ValueError, KeyError, IndexError):
        return 0


@contextlib.contextmanager
def watching(progress: GridProgress, token: str, bar: bool) -> Iterator[None]:
    """While a launcher is at work: its cells' files are watched and, after Ctrl-C or SIGTERM, its jobs asked to save
    and stop.

    The request is a file, which reaches jobs on any machine; jobs that had not begun find it when they do. A second
    signal quits at once."""
    stop, over, leave = progress.folder / plan.CELLS / plan.STOP, threading.Event(), threading.Event()

    def handler(number: int, frame: Any) -> None:
        if leave.is_set():
            raise KeyboardInterrupt
        if stop.exists():
            os._exit(128 + number)
        open_to_append(stop).close()
        say("offrl: stopping: the cells at work save first (once more quits without)", file=sys.stderr)

    def show() -> None:
        eta = progress.left() if progress.ended else ""
        display.show(len(progress.ended), "  ".join(t for t in (eta, progress.at_work()) if t))

    def watch() -> None:
        asked = 0.0
        while not over.wait(POLL_SECONDS):
            with contextlib.suppress(OSError):
                progress.look(token)
                show()
            if not stop.exists():
                continue
            asked = asked or time.monotonic()
            if time.monotonic() - asked > 2.0 and not any(plan.at_work(progress.folder, r) for r in progress.cells):
                leave.set()  # what the launcher still waits for has not begun
                signal.raise_signal(signal.SIGINT)
                return

    old = {}
    with contextlib.suppress(ValueError):  # not in the main thread, where Python handles no signals
        old = {s: signal.signal(s, handler) for s in (signal.SIGINT, signal.SIGTERM)}
    with Display(len(progress.cells), quiet=not bar) as display:
        thread = threading.Thread(target=watch, daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            for number, previous in old.items():
                signal.signal(number, previous)
            thread.join()
            with contextlib.suppress(OSError):
                progress.look(token)
                show()
