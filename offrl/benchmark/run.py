"""`offrl benchmark`: plan the cells, train those that are not done, and say what came out."""

from __future__ import annotations

import contextlib
import os
import sys
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from offrl import errors
from offrl.benchmark import cell, plan, suites
from offrl.benchmark.launch import Jobs, jobs_of
from offrl.benchmark.launch import load as load_launcher
from offrl.benchmark.plan import Cell
from offrl.benchmark.progress import GridProgress, show_table, watching
from offrl.errors import UserError
from offrl.runs.tables import print_table, report_command
from offrl.system import children, trust


def benchmark(values: Mapping[str, Any]) -> int:
    """Run a benchmark with settings {name: value} as on the command line; returns the exit status: 0, or 1 where a cell
    failed.

    Raises UserError for a mistake in the settings, before anything is trained, and KeyboardInterrupt when it was
    stopped.
    """
    command = plan.read(values)
    suite = suites.load(command.config.suite, command.config.datasets)
    launcher = load_launcher(command.config.launcher, command.launcher)
    folder = plan.folder_of(command, suite)
    trust.check_folder(folder, skip=".submitit")  # its own links are absolute, and lead out once the folder has moved
    cells = plan.cells_of(command, suite, folder)
    jobs = jobs_of(launcher, folder, command.config.jobs)
    if command.config.dry_run:
        _show(folder, cells)
        return 0

    def say(text: str) -> None:
        if not command.config.quiet:
            errors.say(text)

    with _alone(folder):
        record = plan.begin(folder, command, suite, cells)
        if suite.note:
            say(f"{suite.name}: {suite.note}")
        requested = {c.run for c in cells}
        states = {c.run: _state(folder, c, command.config.retry) for c in cells}
        todo = [c for c in cells if states[c.run] == "to do"]
        counts = {s: sum(v == s for v in states.values()) for s in ("done", "failed", "at work")}
        summary = "".join(f", {n} {s}" for s, n in counts.items() if n)
        say(
            f"{suite.name}: {len(cells)} cells, {len(record['seeds'])} seeds each, in {folder}{summary}; {len(todo)} "
            "to train"
        )
        try:
            _train(folder, todo, jobs, command.config.quiet, say)
        except KeyboardInterrupt:
            _results(folder, say)
            raise
        bad = show_table(folder, record)
        _results(folder, say)
        for run, reason in bad.items():
            errors.say(
                f"offrl: {'' if run in requested else '(of an earlier command) '}{run}: {reason}", file=sys.stderr
            )
        return 1 if requested & set(bad) else 0


def _train(folder: Path, todo: Sequence[Cell], jobs: Jobs | None, quiet: bool, say: Callable[[str], None]) -> None:
    """Train the cells. Raises KeyboardInterrupt when asked to stop, when all is saved."""
    (folder / plan.CELLS / plan.STOP).unlink(missing_ok=True)
    if not todo:
        return
    token = uuid.uuid4().hex[:12]
    jobs_by_run = {c.run: {"dataset": c.dataset, "steps": c.config.steps, "values": c.values} for c in todo}
    if jobs is None:
        progress = GridProgress(folder, todo, 1, say)
        for c in todo:
            progress.begins(c.run)
            cell.train(folder, c.run, jobs_by_run[c.run], token, in_parallel=False)
            progress.ends(c.run)
        return
    bar = sys.stdout.isatty() and not quiet
    spec = {"token": token, "command": children.address(), "cwd": os.getcwd(), "cells": jobs_by_run}
    with (
        cell.write_job_spec(folder, spec),
        watching(GridProgress(folder, todo, min(jobs.at_once, len(todo)), say), token, bar),
    ):
        jobs.run([c.run for c in todo], token)
    if (folder / plan.CELLS / plan.STOP).exists():
        raise KeyboardInterrupt


def _state(folder: Path, c: Cell, retry: bool) -> str:
    """done, at work, failed, or to do."""
    if plan.finished(folder, c.run, c.config.steps):
        return "done"
    if plan.at_work(folder, c.run):
        return "at work"
    return "failed" if not retry and plan.read_status(folder, c.run).get("status") == "failed" else "to do"


def _show(folder: Path, cells: Sequence[Cell]) -> None:
    """The text that `dry_run` prints."""
    rows = []
    for c in cells:
        exists = (folder / plan.CELLS).is_dir()
        state = _state(folder, c, retry=False) if exists else "to do"
        rows.append([c.dataset, c.algorithm, c.config.experiment, f"{c.config.steps:,}", c.config.eval.episodes, state])
    print_table(
        ["dataset", "algorithm", "settings of", "updates", "episodes", "state"], rows, f"{len(cells)} cells in {folder}"
    )


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """One command at a time in a benchmark's folder. Raises UserError where another one is at work there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with plan.hold(folder / ".lock") as lock:
            if not lock:
                raise UserError(f"another offrl benchmark is at work in {folder}; wait for it, or choose another name=")
            yield
    except (FileExistsError, NotADirectoryError):
        raise UserError(
            f"{folder} cannot be a folder: a file is in its place; choose another name= or runs_dir="
        ) from None


def _results(folder: Path, say: Callable[[str], None]) -> None:
    """Write results.csv and results.parquet."""
    from offrl.runs import comparable, results

    try:
        scores = results.collect([folder])
    except UserError:  # nothing was scored yet
        return
    written = results.write(scores, folder / "results.csv")
    say(f"results: {', '.join(str(p) for p in written)}")
    if scores.scores:
        for line in (*comparable.difference_lines(scores), *report_command(folder)):
            say(line)
