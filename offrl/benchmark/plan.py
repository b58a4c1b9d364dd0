"""From a command to cells: what is trained, under which settings, in which folder; and the files that say how far each
cell is.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

from offrl.benchmark.config import BenchmarkConfig
from offrl.benchmark.suites import Suite
from offrl.errors import UserError, nearest
from offrl.runs import record as runs
from offrl.settings.compose import compose, fill, flatten
from offrl.settings.field import file_name, plain_name
from offrl.settings.kinds import misfit
from offrl.settings.presets import algorithm_group
from offrl.settings.train import TrainConfig, seed_list
from offrl.system import trust
from offrl.system.files import write_text
from offrl.system.locks import lock

VERSION = 1
RECORD, CELLS, PLAN, STOP = "benchmark.json", "cells", "plan.json", "stop"
PARTS = "parts"  # what cells need trained first: values, world models


OWN = tuple(BenchmarkConfig.__dataclass_fields__)
TRAIN = tuple(TrainConfig.__dataclass_fields__)
NOT_HERE = {  # settings of `offrl train` that a grid of runs decides itself
    "algo": "algos=a,b says which algorithms",
    "dataset": "datasets=a,b says which datasets",
    "compare": "algos=a,b says which algorithms",
    "label": "",
    "resume": "the same command continues a benchmark",
    "match": "",
    "given": "",
}


@dataclass(frozen=True)
class Command:
    """A command, sorted by whom its settings are for."""

    config: BenchmarkConfig
    train: dict[str, Any]  # for every cell
    algorithms: dict[str, dict[str, Any]]  # for the cells of one algorithm
    launcher: dict[str, Any]


@dataclass(frozen=True)
class Cell:
    """One dataset and one algorithm: a run with all its seeds."""

    dataset: str  # what tables call it
    algorithm: str
    run: str  # its run directory, in the benchmark's folder
    values: dict[str, Any]  # settings for `compose`
    config: TrainConfig


def read(values: Mapping[str, Any]) -> Command:
    """Sort a command's settings. Raises UserError for unknown names, and for algorithms that are not there."""
    flat = flatten(values)
    algos = flat.get("algos", BenchmarkConfig().algos)
    algos = [algorithm_group(str(a)) for a in (algos if isinstance(algos, list) else [algos])]
    fields: dict[str, Any] = {"algos": algos} if algos else {}
    train: dict[str, Any] = {}
    algorithms: dict[str, dict[str, Any]] = {a: {} for a in algos}
    launcher: dict[str, Any] = {}
    for name, value in flat.items():
        head, _, suffix = name.partition(".")
        if head == "launcher" and suffix:
            launcher[suffix] = value
        elif name in OWN:
            fields.setdefault(name, value)
        elif suffix and head.replace("-", "_") in algorithms:
            algorithms[head.replace("-", "_")][suffix if suffix.partition(".")[0] in TRAIN else f"algo.{suffix}"] = (
                value
            )
        elif name in NOT_HERE:
            raise UserError(f"{name}= is not for offrl benchmark{': ' + NOT_HERE[name] if NOT_HERE[name] else ''}")
        elif head in TRAIN:
            train[name] = value
        else:
            known = [*OWN, *TRAIN, *algorithms]
            problem = f"{head} is none of algos=[{','.join(algos)}]" if suffix else f"unknown setting '{name}'"
            raise UserError(f"{name}=: {problem}.{nearest(head, known)} `offrl benchmark --help` lists the settings")
    for name in ("name", "runs_dir"):
        if fields.get(name) is not None:
            fields[name] = str(fields[name])
    config = fill(BenchmarkConfig(), fields, "benchmark")
    if not config.algos:
        raise UserError("algos=[] names no algorithm")
    if repeated := [a for a, n in Counter(config.algos).items() if n > 1]:
        raise UserError(f"algos names {repeated[0]} twice")
    seed_list(config.seeds)
    return Command(config, train, algorithms, launcher)


def folder_of(command: Command, suite: Suite) -> Path:
    """The benchmark's folder, as an absolute path: jobs may have another working directory."""
    return (Path(command.config.runs_dir).expanduser() / (command.config.name or suite.name)).resolve()


def cells_of(command: Command, suite: Suite, folder: Path) -> list[Cell]:
    """The cells in the order in which they are trained: all algorithms of one dataset, then the next.

    Raises UserError for settings that `offrl train` would refuse, naming the algorithm. Datasets are not looked at yet.
    """
    config, result = command.config, []
    for entry in suite.entries:
        for algorithm in config.algos:
            values = {
                **({"steps": suite.steps} if suite.steps else {}),
                **suite.settings,
                **entry.settings,
                **command.train,
                **command.algorithms[algorithm],
                **({"steps": config.steps} if config.steps else {}),
                "algo": algorithm,
                "dataset": entry.name,
                "seeds": config.seeds,
                "compare": [],
                "runs_dir": str(folder),
                "name": file_name(f"{algorithm}-{entry.label}"),
                "quiet": config.quiet,
            }
            try:
                composed = compose(values)
            except UserError as error:
                cure = (
                    " (ALGO.NAME=VALUE sets something for one algorithm only)"
                    if any(k.startswith("algo.") for k in command.train)
                    else ""
                )
                raise UserError(f"{algorithm}: {error}{cure}") from None
            label = entry.label
            # scores of several tasks are none of the dataset alone, unless the suite names what they are of
            if composed.dataset.multitask and "dataset.multitask" not in entry.settings:
                label += " (several tasks)"
            result.append(Cell(label, algorithm, str(values["name"]), values, composed))
    if repeated := [run for run, n in Counter(c.run for c in result).items() if n > 1]:
        raise UserError(
            f"two cells would share the run directory {repeated[0]}; give one dataset another label in a suite file"
        )
    return result


# ------------------------------------------------------------------------------------------------------------- the
# folder


def begin(folder: Path, command: Command, suite: Suite, cells: Sequence[Cell]) -> dict[str, Any]:
    """Check that these cells belong into `folder`, and write benchmark.json; returns it.

    A folder holds one suite with one list of seeds. A later command may add algorithms and datasets to it, and updates
    to its cells. Raises UserError for a folder with something else in it, and for a cell that was trained with other
    settings.
    """
    seeds = seed_list(command.config.seeds)
    identities = {c.run: json.loads(json.dumps(runs.identity(c.config), default=str)) for c in cells}
    old = read_record(folder)
    old_cells = {c["run"]: c for c in old["cells"]} if old is not None else {}
    if old is None and folder.is_dir() and any(not p.name.startswith(".") for p in folder.iterdir()):
        raise UserError(f"{folder} is no benchmark's folder and not empty; choose another name= or runs_dir=")
    if old is not None:
        for label, old_value, new_value in (("suite", old["suite"], suite.name), ("seeds", old["seeds"], seeds)):
            if old_value != new_value:
                raise UserError(
                    f"{folder} holds a benchmark with {label} {old_value}, this one has {new_value}; choose another "
                    "name="
                )
    for cell in cells:
        steps = old_cells[cell.run]["steps"] if cell.run in old_cells else 0
        if cell.config.steps < steps:
            raise UserError(
                f"{folder} holds {cell.run} with {steps:,} updates, here it has {cell.config.steps:,}; choose another "
                "name="
            )
    for cell in cells:
        if (folder / cell.run / runs.RECORD).exists():
            # a run's own record has what was found from the data as well
            known = cell.run in old_cells
            identity = old_cells[cell.run]["settings"] if known else runs.read_record(folder / cell.run)["identity"]
            if change := runs.change(identity, identities[cell.run]):
                raise UserError(
                    f"{folder / cell.run} was trained with other settings ({change}); choose another name=, or keep to "
                    "them"
                )
    entries = [
        {
            "dataset": c.dataset,
            "algorithm": c.algorithm,
            "run": c.run,
            "steps": c.config.steps,
            "settings": identities[c.run],
        }
        for c in cells
    ]
    record: dict[str, Any] = {
        "version": VERSION,
        "suite": suite.name,
        "seeds": seeds,
        "steps": max(0 if old is None else old["steps"], *(c.config.steps for c in cells)),
        "cells": [*(c for run, c in old_cells.items() if run not in identities), *entries],
    }
    references, source = _references(suite, record["cells"])
    if references:
        record |= {"references": references, "reference_source": source}
    (folder / CELLS).mkdir(parents=True, exist_ok=True)
    write_text(folder / RECORD, json.dumps(record, indent=1) + "\n")
    return record


class _CellRecord(TypedDict):
    dataset: str
    algorithm: str
    run: str
    steps: int
    settings: dict[str, Any]


class _Record(TypedDict):
    suite: str
    seeds: list[int]
    steps: int
    cells: list[_CellRecord]


def read_record(folder: Path) -> dict[str, Any] | None:
    """benchmark.json, or None where there is none. Raises UserError where it is damaged."""
    path = folder / RECORD
    try:
        record = json.loads(trust.read_text(path))
        if text := misfit(record, _Record, "", complete=True):
            raise ValueError(text)
        if outside := [c["run"] for c in record["cells"] if not plain_name(c["run"])]:
            raise ValueError(f"its run {outside[0]} is not in this folder")
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(
            f"{path} cannot be read ({error}); remove that file, and the same command writes it again"
        ) from None
    return dict(record)


def _references(suite: Suite, cells: Sequence[Mapping[str, str]]) -> tuple[dict[str, dict[str, float]], str]:
    """Published scores of the cells: the suite's own, or those of the registered table; and where they are from."""
    if suite.references:
        return suite.references, suite.reference_source
    from offrl import registry

    references: dict[str, dict[str, float]] = {}
    sources: dict[str, None] = {}
    for lookup in registry.names("published").values():
        for cell in cells:
            if (score := lookup(cell["dataset"], cell["algorithm"])) is not None:
                references.setdefault(cell["dataset"], {})[cell["algorithm"]] = float(score.mean)
                sources[score.source] = None
    return references, "; ".join(sources)


# ----------------------------------------------------------------------------------------------------------------
# states


class _Status(TypedDict):
    status: str
    steps: int
    seconds: float
    error: str
    note: str


def status_path(folder: Path, run: str) -> Path:
    return folder / CELLS / f"{run}.json"


def read_status(folder: Path, run: str) -> dict[str, Any]:
    """A cell's status file; {} where there is none, or a damaged one: such a cell is begun anew, and finds what it had
    trained.
    """
    with contextlib.suppress(OSError, ValueError, RecursionError, UserError):
        status = json.loads(trust.read_text(status_path(folder, run)))
        if not misfit(status, _Status, "") and status.get("status") in ("done", "failed", "running"):
            return dict(status)
    return {}


def write_status(folder: Path, run: str, **values: Any) -> None:
    write_text(status_path(folder, run), json.dumps(values, indent=1) + "\n")


def finished(folder: Path, run: str, steps: int) -> bool:
    """True where a cell is done, for at least `steps` updates, and its run still exists."""
    status = read_status(folder, run)
    files_exist = (folder / run / runs.RECORD).exists() and (folder / run / "policies").is_dir()
    return status.get("status") == "done" and files_exist and int(status.get("steps") or 0) >= steps


@contextlib.contextmanager
def hold(path: Path, patience: float = 0.0) -> Iterator[bool]:
    """True while this process holds the lock file `path`; False where another one does, for `patience` seconds. The
    system drops a lock with its process, however that ends."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with trust.open_to_write(path, "a") as file:
        end = time.monotonic() + patience
        while True:
            try:
                lock(file, wait=False)
                break
            except OSError as error:
                if error.errno == errno.ENOSYS:
                    break
                if time.monotonic() >= end:
                    yield False
                    return
                time.sleep(0.05)
        yield True


@contextlib.contextmanager
def environment(values: Mapping[str, str]) -> Iterator[None]:
    """Within it, environment variables have these values."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def cell_lock(folder: Path, run: str) -> Path:
    return folder / CELLS / f".{run}.lock"


def at_work(folder: Path, run: str) -> bool:
    """True while some process trains this cell."""
    with hold(cell_lock(folder, run)) as free:
        return not free
