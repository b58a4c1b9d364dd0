"""The results store: scores of many runs as one tidy table, what is missing from it, and what may be averaged.

    results = collect(["runs/d4rl-gym", "runs/iql-hopper-medium-v2-0c350f"])
    write(results, "runs/d4rl-gym")              # results.csv, and results.parquet where pyarrow is installed
    for cell in results.cells(): ...             # one dataset, one algorithm with its settings: final scores by seed,
    what is missing for group in groups(results)[0]: ...         # matrices for offrl.statistics.aggregate, of datasets
    whose scores mean the same

The headline is always the last evaluation of a run that reached its `steps`; a best evaluation is for showing beside it
only.
"""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offrl.errors import UserError
from offrl.runs.comparable import Group, group, groups, reference, settings_matrix, unlike
from offrl.runs.exchange.merge import add
from offrl.runs.paths import check_exists
from offrl.runs.reader import Reader
from offrl.runs.score import COLUMNS, RESULTS, Missing, Score
from offrl.settings.diff import Variant, labels
from offrl.statistics.intervals import mean_interval

if TYPE_CHECKING:
    from offrl.runs.run import SavedRun

__all__ = [
    "COLUMNS",
    "RESULTS",
    "Cell",
    "Group",
    "Missing",
    "Results",
    "Score",
    "collect",
    "group",
    "groups",
    "reference",
    "settings_matrix",
    "write",
]


@dataclass(frozen=True)
class Cell:
    """One algorithm with its settings on one dataset, over seeds."""

    suite: str
    dataset: str
    label: str  # the algorithm as tables call it: `iql`, or `iql (temperature=5)` where there are several
    algorithm: str
    settings: str
    scores: tuple[Score, ...]  # final ones, by seed; empty where no seed has finished
    history: tuple[Score, ...]  # all of them, final ones too, by step and seed
    missing: tuple[Missing, ...]

    @property
    def normalised(self) -> bool:
        """True where `value` of the scores is a normalised score rather than a return."""
        rows = self.scores or self.history
        return bool(rows) and all(s.normalised is not None for s in rows)

    def interval(self, scale: str = "") -> tuple[float, float, float]:
        """(mean, low, high) of the final scores, by Student's t; NaN without any. scale: "raw", "normalised" or
        "success"; "": the value.
        """
        values = [getattr(s, scale or ("normalised" if self.normalised else "raw")) for s in self.scores]
        return mean_interval([math.nan if v is None else v for v in values])

    def latest(self) -> tuple[Score, ...]:
        """The scores of the last step that every seed was scored at (final or not), by seed; for cells that have not
        finished.
        """
        steps = self._complete_steps()
        return tuple(s for s in self.history if s.step == max(steps)) if steps else ()

    def best(self) -> tuple[int, float] | None:
        """(step, mean over seeds) of the best evaluation. It was chosen with the environment: for showing beside the
        last, labelled so.
        """
        scale = "normalised" if self.normalised else "raw"
        seeds = {s.seed for s in self.scores} or {s.seed for s in self.history}
        values: dict[int, list[float]] = defaultdict(list)
        for s in self.history:
            if s.seed in seeds:
                values[s.step].append(getattr(s, scale))
        means = {step: math.fsum(values[step]) / len(seeds) for step in self._complete_steps(seeds, scale)}
        return max(means.items(), key=lambda item: (item[1], item[0])) if means else None

    def _complete_steps(self, seeds: set[int] | None = None, scale: str = "raw") -> list[int]:
        """Steps at which each of these seeds (all by default) has a score of that kind."""
        expected = seeds or {s.seed for s in self.history}
        at: dict[int, set[int]] = defaultdict(set)
        for s in self.history:
            if getattr(s, scale) is not None:
                at[s.step].add(s.seed)
        return [step for step, present in at.items() if expected <= present]


@dataclass(frozen=True)
class Results:
    """The results of `collect`."""

    scores: list[Score]  # every evaluation; of runs that are the same, one
    runs: list[SavedRun] = field(default_factory=list)  # the run directories, the duplicates too
    # what a reader must know: damage, duplicates, unlike versions; one line each
    problems: list[str] = field(default_factory=list)
    missing: list[Missing] = field(default_factory=list)
    labels: dict[tuple[str, str, str], str] = field(default_factory=dict)  # (dataset, algorithm, settings) -> label
    # (dataset, algorithm) -> a benchmark's own reference score
    references: dict[tuple[str, str], float] = field(default_factory=dict)
    reference_source: str = ""
    # what files of others state (`offrl.runs.exchange`), duplicates too
    documents: list[dict[str, Any]] = field(default_factory=list)
    every: int = 1  # of the evaluations of a seed only each `every`-th is here, the last one and the final one
    # (dataset, algorithm, settings) -> all of them
    settings: dict[tuple[str, str, str], Mapping[str, Any]] = field(default_factory=dict)

    def label(self, row: Score | Missing) -> str:
        """The algorithm as tables call it: by its settings too where two runs of one name differ in them."""
        return self.labels.get((row.dataset, row.algorithm, row.settings), row.algorithm)

    @property
    def final(self) -> list[Score]:
        """The headline scores."""
        return [s for s in self.scores if s.final]

    @property
    def datasets(self) -> list[str]:
        """In the order in which they were found, those without scores too."""
        return list(dict.fromkeys([*(s.dataset for s in self.scores), *(m.dataset for m in self.missing)]))

    def cells(self) -> list[Cell]:
        """One for each dataset and labelled algorithm, in the order found; those of which nothing was scored too."""
        return list(self._cells)

    @functools.cached_property
    def _cells(self) -> list[Cell]:
        rows: dict[tuple[str, str], list[Score]] = defaultdict(list)
        missing: dict[tuple[str, str], list[Missing]] = defaultdict(list)
        for s in self.scores:
            rows[s.dataset, self.label(s)].append(s)
        for m in self.missing:
            missing[m.dataset, self.label(m)].append(m)
        cells = []
        for dataset, label in dict.fromkeys((*rows, *missing)):
            history, unscored = rows[dataset, label], missing[dataset, label]
            one = history[0] if history else unscored[0]
            cells.append(
                Cell(
                    suite=history[0].suite if history else "",
                    dataset=dataset,
                    label=label,
                    algorithm=one.algorithm,
                    settings=one.settings,
                    scores=tuple(sorted((s for s in history if s.final), key=lambda s: s.seed)),
                    history=tuple(sorted(history, key=lambda s: (s.step, s.seed))),
                    missing=tuple(unscored),
                )
            )
        order = {d: i for i, d in enumerate(self.datasets)}
        return sorted(cells, key=lambda c: order[c.dataset])


def collect(paths: Sequence[str | Path], stride: int = 1) -> Results:
    """Read run directories, benchmark directories, folders above them, results.csv files, and results of others (.json,
    .jsonl, .csv).

    A folder is searched; its results.csv is read only where no runs lie in or below it. What is damaged or half-written
    is named in `Results.problems` and left out. Runs that agree in data, settings and seed are counted once and named.
    stride: see `Results`. Raises UserError for a path that does not exist, and where no run, benchmark or table is
    found.
    """
    reader = Reader(stride)
    for source in paths:
        path = Path(source)
        check_exists(path)
        if not reader.read(path):
            raise UserError(
                f"{path} holds no run (run.json), no benchmark (benchmark.json) and no {RESULTS}; give a folder that "
                "offrl wrote, a results.json, or a .csv with the columns algorithm, dataset, seed, step, return"
            )
    if not paths:
        raise UserError("nothing to read: give run directories, benchmark directories or files of results")
    documents = add(reader) if reader.files else []
    scores, duplicates = _without_duplicates(reader.scores)
    known = {v.key: v for v in reader.variants}
    variants = [*reader.variants, *(Variant(*key) for key in dict.fromkeys(s.key for s in scores) if key not in known)]
    finished = {(*s.key, s.seed) for s in scores if s.final}
    missing = [m for m in dict.fromkeys(reader.missing) if (m.dataset, m.algorithm, m.settings, m.seed) not in finished]
    flat = {v.key: v.flat for v in variants}
    results = Results(
        scores,
        reader.runs,
        [],
        missing,
        labels(variants),
        reader.references,
        reader.reference_source,
        documents,
        stride,
        flat,
    )
    results.problems.extend(dict.fromkeys([*reader.problems, *duplicates, *unlike(results)]))
    return results


def _without_duplicates(scores: list[Score]) -> tuple[list[Score], list[str]]:
    """(the scores of one run for each dataset, algorithm, settings and seed: the one that got furthest, lines that name
    the others).
    """
    by_seed: dict[tuple[Any, ...], dict[str, list[Score]]] = defaultdict(lambda: defaultdict(list))
    for s in scores:
        key = (*s.key, s.seed)
        by_seed[key][s.run].append(s)
    dropped: dict[tuple[str, str, str, str], list[tuple[int, bool]]] = defaultdict(list)
    duplicates: set[tuple[Any, ...]] = set()
    for (dataset, algorithm, settings, seed), by_run in by_seed.items():
        counted, *repeats = sorted(
            by_run, key=lambda run: (-any(s.final for s in by_run[run]), -max(s.step for s in by_run[run]))
        )
        raw_scores = {s.step: s.raw for s in by_run[counted]}
        for other in repeats:
            dropped[dataset, algorithm, counted, other].append(
                (seed, any(raw_scores.get(s.step, s.raw) != s.raw for s in by_run[other]))
            )
            duplicates.add((dataset, algorithm, settings, seed, other))
    lines = []
    for (dataset, algorithm, counted, other), copies in dropped.items():
        seeds = f"seed{'s' if len(copies) > 1 else ''} {', '.join(str(seed) for seed, _ in copies)}"
        unlike = (
            "; their scores at the same steps differ, so one was trained or scored otherwise"
            if any(u for _, u in copies)
            else ""
        )
        lines.append(
            f"{counted} and {other} are the same: {algorithm} on {dataset}, same settings, {seeds}; counted once, from "
            f"{counted}{unlike}"
        )
    return [s for s in scores if (*s.key, s.seed, s.run) not in duplicates], lines


# ---------------------------------------------------------------------------------------------------------------- files


def write(results: Results, path: str | Path) -> list[Path]:
    """Write the scores to a .csv file, or to results.csv in a folder, and beside it .parquet where pyarrow is
    installed; atomically.

    Returns the files. Raises UserError where they cannot be written.
    """
    from offrl.runs.log import write_error
    from offrl.system.csv_text import text_of
    from offrl.system.files import replacing, write_text

    target = Path(path) if Path(path).suffix == ".csv" else Path(path) / RESULTS
    columns = [[getattr(s, name) for s in results.scores] for name in COLUMNS]
    # JSON's words for yes and no
    texts = [["true" if v else "false" for v in c] if c and isinstance(c[0], bool) else c for c in columns]
    write_text(target, text_of([COLUMNS, *zip(*texts, strict=True)]))
    try:
        import pyarrow as pa
        import pyarrow.parquet as parquet
    except ImportError:
        if target.name == RESULTS:  # an older table beside the new one would mislead
            target.with_suffix(".parquet").unlink(missing_ok=True)
        return [target]
    kinds = {
        "int": pa.int64(),
        "float": pa.float64(),
        "float | None": pa.float64(),
        "bool": pa.bool_(),
        "str": pa.string(),
    }
    schema = pa.schema([(f.name, kinds[str(f.type)]) for f in fields(Score)])
    table = pa.table(dict(zip(COLUMNS, columns, strict=True)), schema=schema)
    beside = target.with_suffix(".parquet")
    try:
        with replacing(beside) as file:
            parquet.write_table(table, file)
    except OSError as error:
        raise write_error(error, beside) from None
    return [target, beside]
