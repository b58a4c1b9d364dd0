"""Reading what runs and benchmarks wrote, however badly they ended: used by `offrl.runs.results.collect`."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from offrl.errors import UserError, one_line
from offrl.runs.parse import Damage, finite, further, header, json_of, lines_backwards, whole_rows, yaml_or_error
from offrl.runs.paths import ended_early
from offrl.runs.record import CONFIG, RECORD, SCORES, complete
from offrl.runs.run import SavedRun
from offrl.runs.score import COLUMNS, RESULTS, Missing, Score
from offrl.settings.dataset import DatasetConfig
from offrl.settings.diff import Variant, digest, flatten
from offrl.settings.field import marked, plain_name
from offrl.settings.replicas import Replica, cell_name

BENCHMARK, CELLS, PARTS, METRICS = "benchmark.json", "cells", "parts", "metrics.jsonl"
TAIL = 1 << 20  # bytes of metrics.jsonl that are read for its last line
# what a user may ask for that changes a score
GIVEN = ("algo.", "dataset.", "eval.env", "eval.max_steps", "precision", "experiment")


class Reader:
    """Collects from path after path. The lists hold what was found, duplicates too; see `offrl.runs.score.Results`.

    stride: of the evaluations of a replica only each `stride`-th is read, the last one and the final one.
    """

    def __init__(self, stride: int = 1) -> None:
        self.stride = stride
        self.scores: list[Score] = []
        self.runs: list[SavedRun] = []
        self.variants: list[Variant] = []
        self.missing: list[Missing] = []
        self.problems: list[str] = []
        # results documents and tables of others, for `exchange.merge`; whether a person named it
        self.files: list[tuple[Path, bool]] = []
        self.references: dict[tuple[str, str], float] = {}
        self.reference_source = ""
        self._seen: set[Path] = set()
        self._digests: dict[str, str] = {}

    def read(self, path: Path) -> bool:
        """Read a file or folder; False where it holds nothing that offrl writes. What was read before is not read
        again.
        """
        try:
            return self._read(path)
        except OSError as error:
            self.problems.append(f"{path} cannot be read ({error.strerror}): left out")
            return True

    def _new(self, path: Path) -> bool:
        """Whether a path was not met before; now it was."""
        real_path = path.resolve()
        new = real_path not in self._seen
        self._seen.add(real_path)
        return new

    def _read(self, path: Path) -> bool:
        if not path.is_file() and not path.is_dir():
            return False
        if not self._new(path):
            return True
        if path.is_file():
            return self._table(path) or self._of_others(path)
        if (path / BENCHMARK).is_file() and self._benchmark(path):
            return True
        if (path / RECORD).exists():
            self.run(path, "")
            return True
        if header(path / SCORES).startswith("step,seed,"):
            self.problems.append(f"{path} has {SCORES} but no {RECORD}, so its algorithm is not known: left out")
            return True
        from offrl.runs.exchange.files import stated_in

        stated = [(file, False) for file in stated_in(path) if self._new(file)]
        self.files += stated
        return self._children(path, "") or bool(stated) or ((path / RESULTS).exists() and self.read(path / RESULTS))

    def _children(self, path: Path, suite: str) -> bool:
        """Read all folders in a folder; whether there was anything in them."""
        result = False
        for folder in sorted(p for p in path.iterdir() if p.is_dir() and not p.name.startswith(".")):
            if suite and (folder / RECORD).exists():
                if self._new(folder):
                    self.run(folder, suite)
                result = True
            else:
                result = self.read(folder) or result
        return result

    # ---- benchmarks

    def _benchmark(self, path: Path) -> bool:
        """Read benchmark.json, its cells and their runs; False, and a problem, where it is damaged."""
        try:
            plan = json_of(path / BENCHMARK)
            suite, seeds = str(plan["suite"]), [int(s) for s in plan["seeds"]]
            cells = [(one_line(str(c["dataset"])), one_line(str(c["algorithm"])), str(c["run"])) for c in plan["cells"]]
            if outside := [name for _, _, name in cells if not plain_name(name)]:
                raise ValueError(f"its run {outside[0]} is not in this folder")
        except (OSError, UserError, *Damage) as error:
            self.problems.append(f"{path / BENCHMARK} cannot be read ({_words(error)}): its runs are read without it")
            return False
        references = _mapping(plan.get("references"))
        self.reference_source = self.reference_source or str(plan.get("reference_source") or "")
        for dataset, algorithm, name in cells:
            folder, status = path / name, self._status(path / CELLS / f"{name}.json")
            message = " ".join(str(status.get("error") or "").split())
            reason = f"failed: {message or 'no reason was written down'}" if status.get("status") == "failed" else ""
            run, state = None, ""
            if not (folder / RECORD).exists():
                state = "begun, but nothing was saved" if folder.exists() or status else "not started"
            elif self._new(folder):
                run = self.run(folder, suite, reason)
                state = "" if run is not None else f"its {RECORD} cannot be read"
            if state:
                self.missing.append(Missing(dataset, algorithm, "", None, str(folder), reason or state))
            if run is not None and not run.grid:
                settings = next(
                    (v.settings for v in reversed(self.variants) if v.key[:2] == (run.dataset, run.algorithm)), ""
                )
                for seed in seeds:
                    if seed not in run.seeds:
                        self.missing.append(
                            Missing(run.dataset, run.algorithm, settings, seed, str(folder), reason or "not trained")
                        )
                if reason and not any(m.run == str(folder) for m in self.missing):
                    self.problems.append(f"{folder}: {reason}; its scores are complete all the same")
            names = (run.dataset, run.algorithm) if run is not None else (dataset, algorithm)
            value = _mapping(references.get(dataset)).get(algorithm)
            if isinstance(value, (int, float)) and not isinstance(value, bool):
                self.references[names] = float(value)
        self._new(path / PARTS)  # what cells needed first is no result
        self._children(path, suite)
        return True

    def _status(self, path: Path) -> dict[str, Any]:
        """A cell's status; {} where there is none or it was half-written."""
        try:
            status = json_of(path) if path.is_file() else {}
        except (OSError, ValueError, RecursionError, UserError) as error:
            self.problems.append(f"{path} cannot be read ({_words(error)}): the cell is judged by its run")
            return {}
        return _mapping(status)

    # ---- runs

    def run(self, path: Path, suite: str, reason: str = "") -> SavedRun | None:
        """Read a run directory. reason: why scores are missing, where a benchmark knows."""
        try:
            run = SavedRun(path)
            flat = self._settings(run)
            label, dataset = str(run.algorithm), str(run.dataset)
        except UserError as error:
            self.problems.append(f"{error}: left out")
            return None
        except Damage as error:
            self.problems.append(f"{path / RECORD} is not what offrl writes ({_words(error)}): left out")
            return None
        config = self._config(path)
        for name, default in (("env", "auto"), ("max_steps", None)):  # identity leaves it out, but it decides the score
            if (value := _mapping(config.get("eval")).get(name, default)) != default:
                flat[f"eval.{name}"] = value
        user_values = {
            k: v for k, v in flatten(config.get("given") or {}).items() if k.startswith(GIVEN) and k not in _PLACES
        }
        settings = {}
        for replica in run.replicas:
            if replica.cell not in settings:
                values = {f"algo.{field}": value for field, value in replica.values}
                point_settings = {**flat, **values}
                content = json.dumps(point_settings, default=str)
                if content not in self._digests:
                    self._digests[content] = digest(point_settings)
                settings[replica.cell] = self._digests[content]
                self.variants.append(
                    Variant(dataset, label, settings[replica.cell], point_settings, {**user_values, **values})
                )
        steps = planned(path, config)
        rows = self._rows(path / SCORES, run)
        at, dead = self._progress(path / METRICS, run)
        last = max((step for step, _, _ in rows), default=0)
        end = last if steps is not None and last >= steps else None  # of a run that finished
        for (step, seed, cell), row in rows.items():
            final = step == end and (seed, cell) not in dead
            names: dict[str, Any] = {
                "suite": suite,
                "dataset": dataset,
                "algorithm": label,
                "cell": cell,
                "run": str(path),
            }
            self.scores.append(Score(**names, **row, settings=settings[cell], seed=seed, step=step, final=final))
        for replica in run.replicas:
            where = (replica.seed, replica.cell)
            if (end, *where) in rows and where not in dead:
                continue
            cause = (
                f"diverged: a loss was not finite before step {dead[where]:,}"
                if where in dead
                else reason or _why(run, steps, at, bool(rows))
            )
            self.missing.append(Missing(dataset, label, settings[replica.cell], replica.seed, str(path), cause))
        self.runs.append(run)
        return run

    @staticmethod
    def _settings(run: SavedRun) -> dict[str, Any]:
        """The settings that decide a run's parameters, flat, without seeds and grid, and the data by their fingerprint,
        not their path.
        """
        identity = {k: v for k, v in run.record["identity"].items() if k != "seeds"}
        return {**_flat(json.dumps(identity)), "data.fingerprint": str(run.record["data"]["fingerprint"])[:12]}

    def _config(self, path: Path) -> dict[str, Any]:
        """config.yaml; {} and a problem where it cannot be read."""
        config = yaml_or_error(path / CONFIG)
        if isinstance(config, dict) and isinstance(config.get("steps"), int):
            return config
        reason = _words(config) if isinstance(config, Exception) else "it is cut short"
        self.problems.append(
            f"{path / CONFIG} cannot be read ({reason}): whether the run finished is not known, so its scores are not "
            "counted"
        )
        return _mapping(config)

    def _rows(self, path: Path, run: SavedRun) -> dict[tuple[int, int, str], dict[str, Any]]:
        """(step, seed, grid point) -> the complete rows of a scores.csv."""
        known = {(r.seed, r.cell) for r in run.replicas}
        rows: dict[tuple[int, int, str], dict[str, Any]] = {}

        def add(row: dict[str, Any]) -> None:
            cell = cell_name(tuple((field, float(row[field])) for field in run.grid)) if run.grid else ""
            step, seed = int(row["step"]), int(row["seed"])
            if (seed, cell) not in known:
                raise ValueError
            rows[step, seed, cell] = {
                "episodes": int(row["episodes"]),
                "raw": finite(row["return_mean"]),
                "normalised": finite(row["score"]) if row["score"] else None,
                "success": finite(row["success"]) if row["success"] else None,
                **further(row),
            }

        self._each_row(path, ("seed", *run.grid), add)
        return rows

    def _each_row(self, path: Path, trace: Sequence[str], add: Callable[[dict[str, Any]], None]) -> None:
        """Call `add` with the rows of a table; those that it refuses are counted, and left out. trace: see
        `whole_rows`."""
        bad = 0
        for row in whole_rows(path, self.problems.append, trace, self.stride):
            try:
                add(row)
            except Damage:
                bad += 1
        if bad:
            self.problems.append(f"{path}: {bad} line{'s' if bad > 1 else ''} cannot be read: left out")

    def _progress(self, path: Path, run: SavedRun) -> tuple[int, dict[tuple[int, str], int]]:
        """(the last step in metrics.jsonl, {(seed, cell): step at which it was found to have diverged})."""
        last = next(lines_backwards(path, TAIL), None)
        if last is None:
            return 0, {}
        dead = _dead(last, run.replicas)
        if dead:
            for line in lines_backwards(path, None):
                dead |= {where: step for where, step in _dead(line, run.replicas).items() if where in dead}
        return int(last["step"]), dead

    # ---- tables

    def _of_others(self, path: Path) -> bool:
        """Note a file of results that a person named; False where its name or header is none of those."""
        from offrl.runs.exchange.files import SUFFIXES, is_table

        if path.suffix not in SUFFIXES and not is_table(path):
            return False
        self.files.append((path, True))
        return True

    def _table(self, path: Path) -> bool:
        """Read a results.csv; False where the file is something else."""
        if path.suffix != ".csv" or header(path).split(",")[: len(COLUMNS)] != list(COLUMNS):
            return False

        def add(row: dict[str, Any]) -> None:
            if row["final"] not in ("true", "false"):
                raise ValueError
            values = {
                **{k: row[k] for k in ("suite", "dataset", "algorithm", "settings", "cell", "run")},
                **further(row),
                **{k: int(row[k]) for k in ("seed", "step", "episodes")},
                **{k: finite(row[k]) if row[k] else None for k in ("normalised", "success")},
            }
            self.scores.append(Score(**values, raw=finite(row["raw"]), final=row["final"] == "true"))

        self._each_row(path, ("dataset", "algorithm", "settings", "seed", "cell", "run"), add)
        return True


_PLACES = {f"dataset.{name}" for name in marked(DatasetConfig, "place")}


@functools.lru_cache(1024)
def _flat(identity: str) -> dict[str, Any]:
    """The settings of an identity, given as JSON, only to be read: thousands of runs differ in their seeds alone."""
    values = {k: v for k, v in complete(json.loads(identity)).items() if k not in ("seeds", "grid", "paired")}
    return {k: v for k, v in flatten(values).items() if k not in _PLACES}


def planned(path: Path, config: dict[str, Any]) -> int | None:
    """The updates of a run with these settings: those asked for, or at which its stopping rule ended it; None: it does
    not say.
    """
    steps = config.get("steps")
    return min(steps, ended_early(path, config) or steps) if isinstance(steps, int) else None


def _why(run: SavedRun, steps: int | None, at: int, scored: bool) -> str:
    """The reason why a replica has no final score."""
    if steps is None:
        return f"{CONFIG} cannot be read, so whether the run finished is not known"
    if at < steps:
        return f"unfinished: step {at:,} of {steps:,}"
    spec = run.record.get("spec")
    if not scored and (run.record.get("env") == "none" or not (isinstance(spec, dict) and spec.get("task"))):
        return "trained, but there is no environment to score it in"
    return f"no score at the last step, {max(at, steps):,}"


def _mapping(value: Any) -> dict[str, Any]:
    """A dictionary; {} in place of anything else."""
    return value if isinstance(value, dict) else {}


def _words(error: BaseException) -> str:
    """An error in one line."""
    if isinstance(error, KeyError):
        return f"it lacks {error}"
    return " ".join(str(getattr(error, "strerror", None) or error).split()) or type(error).__name__


def _dead(line: dict[str, Any], replicas: list[Replica]) -> dict[tuple[int, str], int]:
    """{(seed, cell): step} of replicas whose every metric is null: they diverged, and were frozen."""
    columns = [v for k, v in line.items() if k != "step" and isinstance(v, list) and len(v) == len(replicas)]
    if not columns:
        return {}
    return {
        (r.seed, r.cell): int(line["step"])
        for i, r in enumerate(replicas)
        if all(column[i] is None for column in columns)
    }
