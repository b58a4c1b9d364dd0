"""The runs of a rung, one after the other here, or side by side: in processes of this machine, or as tasks of Ray.

A run's bits do not depend on where it trains: the number of replicas in one program is fixed before (`plan.GROUP`).
"""

from __future__ import annotations

import importlib.util
import json
import logging
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from offrl.errors import UserError
from offrl.settings.evaluation import cores
from offrl.system import files
from offrl.system.progress import StageProgress
from offrl.tuning.plan import Tune
from offrl.tuning.search.training import DataSets, RungRun, train_rung

SPECS = "cells"


def train_all(work: Tune, runs: Sequence[RungRun], title: str, show: StageProgress) -> dict[str, Any]:
    """Train these runs to their ends; returns what the stage's file says of it. Raises UserError where one failed."""
    launcher = work.config.launcher
    show.tell(title)
    if launcher == "none" or len(runs) == 1:
        for run in runs:
            train_rung(run, work.data)
    elif launcher == "local":
        _in_processes(work, runs)
    else:
        _by_ray(work, runs)
    return {"runs": [run.directory.name for run in runs], "settings": [list(run.trials) for run in runs]}


def write_spec(folder: Path, run: RungRun) -> Path:
    """What a process needs to train a run, as a file."""
    path = folder / SPECS / f"{run.directory.name}.json"
    files.write_text(path, json.dumps(asdict(run), default=str) + "\n")
    return path


def read_spec(path: Path) -> RungRun:
    """The inverse of `write_spec`; the file is this program's own."""
    spec = json.loads(path.read_text(encoding="utf-8"))
    origin = Path(spec["origin"]) if spec["origin"] else None
    settings = {**spec["settings"], "quiet": True, "workers": 1}
    return RungRun(Path(spec["directory"]), settings, tuple(spec["trials"]), origin, tuple(spec["origin_indices"]))


def _in_processes(work: Tune, runs: Sequence[RungRun]) -> None:
    jobs = min(work.config.jobs or cores(), len(runs))
    waiting = [write_spec(work.folder, run) for run in runs]
    working: dict[Path, subprocess.Popen[str]] = {}
    problem = ""
    try:
        while waiting or working:
            while waiting and len(working) < jobs and not problem:
                path = waiting.pop(0)
                command = [sys.executable, "-m", "offrl.tuning.search.launch", str(path)]
                working[path] = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
            for path, process in list(working.items()):
                if process.poll() is None:
                    continue
                _, errors = process.communicate()
                del working[path]
                if process.returncode:
                    line = (errors.strip().splitlines() or ["no reason given"])[-1].removeprefix("offrl: error: ")
                    problem = problem or f"{path.stem}: its process ended with status {process.returncode} ({line})"
            if problem and not working:
                raise UserError(f"{problem}; what is done is saved, and the same command goes on")
            time.sleep(0.05)
    finally:
        for process in working.values():
            process.terminate()
        for process in working.values():
            process.communicate()


def _by_ray(work: Tune, runs: Sequence[RungRun]) -> None:
    if importlib.util.find_spec("ray") is None:
        raise UserError("launcher=ray needs pip install 'offrl[ray]'")
    import ray

    started = not ray.is_initialized()
    if started:
        ray.init(num_cpus=work.config.jobs, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    try:
        remote = ray.remote(num_cpus=1)(main)
        tasks = [remote.remote([str(write_spec(work.folder, run).resolve())]) for run in runs]
        statuses = ray.get(tasks)
    finally:
        if started:
            ray.shutdown()
    if bad := [run.directory.name for run, status in zip(runs, statuses, strict=True) if status]:
        raise UserError(f"{bad[0]} failed on its worker; what is done is saved, and launcher=none shows why")


def main(arguments: Sequence[str]) -> int:
    """Train the run of one file: the whole of a worker process."""
    from offrl.errors import Interrupted, say

    try:
        train_rung(read_spec(Path(arguments[0])), DataSets())
    except UserError as error:
        say(f"offrl: error: {error}", file=sys.stderr)
        return 2
    except Interrupted:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
