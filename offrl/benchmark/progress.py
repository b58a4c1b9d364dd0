"""Progress of a benchmark's cells while they train, the end of those that train elsewhere, and the table of all:
datasets x algorithms, and what is not in it and why.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from offrl.benchmark import plan
from offrl.benchmark.plan import Cell
from offrl.errors import UserError, say
from offrl.runs.run import SavedRun
from offrl.runs.tables import Result, interval_text, print_table
from offrl.settings.replicas import cell_name
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
            outcome = f"{last_scores(self.folder / run)}{'; ' + status['note'] if status.get('note') else ''}"
        else:
            outcome = f"failed: {status.get('error') or 'no reason given'}"
        remaining = f"; {self.time_left()}" if len(self.ended) < len(self.cells) else ""
        self.say(f"{self._title(run)}: {outcome} ({duration(self.ended[run])}{remaining})")

    def time_left(self) -> str:
        """`5 left, about 14 s`: the time of the cells so far, times those that are left."""
        remaining = len(self.cells) - len(self.ended)
        mean = sum(self.ended.values()) / len(self.ended) if self.ended else float("nan")
        return f"{remaining} left, about {duration(remaining * mean / self.at_once)}"

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
        eta = progress.time_left() if progress.ended else ""
        display.show(len(progress.ended), "  ".join(t for t in (eta, progress.at_work()) if t))

    def watch() -> None:
        stop_time = 0.0
        while not over.wait(POLL_SECONDS):
            with contextlib.suppress(OSError):
                progress.look(token)
                show()
            if not stop.exists():
                continue
            stop_time = stop_time or time.monotonic()
            if time.monotonic() - stop_time > 2.0 and not any(plan.at_work(progress.folder, r) for r in progress.cells):
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


RAW = "r"  # marks a raw return


def last_scores(run_dir: Path) -> str:
    """The last evaluation of a run in a few words: `score 62.1 [58.0, 66.2]`."""
    try:
        results = SavedRun(run_dir).results()
    except UserError as error:
        return f"not readable ({error})"
    if not results:
        return "trained, not scored"
    unit = "score" if results[0].score else "return"
    values = [(r.score or r.returns) for r in results]
    if len(values) == 1:
        return f"{unit} {interval_text(values[0])}"
    return (
        f"{unit} {min(v[0] for v in values):.1f} .. {max(v[0] for v in values):.1f} over {len(values)} cells of its "
        "grid"
    )


def show_table(folder: Path, record: Mapping[str, Any]) -> dict[str, str]:
    """Print the table of all cells of a benchmark, and its footnotes; returns {run: why it is not done}."""
    datasets = list(dict.fromkeys(c["dataset"] for c in record["cells"]))
    columns: dict[str, dict[str, str]] = {}  # heading -> dataset -> text
    notes: dict[str, list[str]] = {}  # why a number is raw or missing -> datasets
    bad: dict[str, str] = {}
    for algorithm in dict.fromkeys(c["algorithm"] for c in record["cells"]):
        for c in (c for c in record["cells"] if c["algorithm"] == algorithm):
            status = plan.read_status(folder, c["run"])
            if not plan.finished(folder, c["run"], 0):
                bad[c["run"]] = _why(folder, c["run"], status)
                columns.setdefault(algorithm, {})[c["dataset"]] = (
                    "failed" if status.get("status") == "failed" else "not done"
                )
                continue
            try:
                run = SavedRun(folder / c["run"])
                results = run.results()
            except UserError as error:
                bad[c["run"]] = str(error)
                columns.setdefault(algorithm, {})[c["dataset"]] = "not readable"
                continue
            if note := _note(run, results):
                notes.setdefault(note, [])
                notes[note] += [c["dataset"]] * (c["dataset"] not in notes[note])
            if status.get("steps", 0) < record["steps"]:
                notes.setdefault(f"after {status.get('steps', 0):,} updates", []).append(c["run"])
            if not results:
                columns.setdefault(algorithm, {})[c["dataset"]] = "-"
            for result in results:
                heading = f"{algorithm} {cell_name(result.values)}" if result.values else algorithm
                columns.setdefault(heading, {})[c["dataset"]] = _text(result)
    seeds = len(record["seeds"])
    mean = f"mean over {seeds} seeds [95% interval]" if seeds > 1 else "one seed"
    title = f"{record['suite']}: last evaluation, {mean}, after {record['steps']:,} updates"
    rows = [[d, *(column.get(d, "") for column in columns.values())] for d in datasets]
    print_table(["dataset", *columns], rows, title)
    for note, names in notes.items():
        say(f"{note}: {', '.join(names)}")
    return bad


def _text(result: Result) -> str:
    return interval_text(result.score) if result.score else f"{interval_text(result.returns)} {RAW}"


def _note(run: SavedRun, results: list[Result]) -> str:
    """Why a cell has no normalised score, or an empty string."""
    if results and results[0].score:
        return ""
    task = run.record["spec"].get("task")
    if not results:
        reason = (task or {}).get("note") or "no environment is known for it; eval.env=ID names one"
        off = "eval.env=none" if run.record.get("env") == "none" else reason
        return f"- trained, not scored ({off})"
    return f"{RAW} raw return: no reference scores are known that would normalise it"


def _why(folder: Path, run: str, status: Mapping[str, Any]) -> str:
    """Why a cell is not done, in one line."""
    if plan.at_work(folder, run):
        return f"still at work in process {status.get('pid')} on {status.get('host')}"
    if status.get("status") == "failed":
        return f"failed: {status.get('error') or 'no reason given'}"
    if status.get("status") == "done":
        return "its run directory is gone; the same command trains it again"
    return f"{status.get('error') or 'interrupted'}; the same command continues it" if status else "not begun"
