"""Scores as the results store holds them: of a seed, of a cell of a table, of many runs, and those that are missing."""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from offrl.statistics.intervals import mean_interval
from offrl.tasks.provenance import Provenance

if TYPE_CHECKING:
    from offrl.runs.run import SavedRun

RESULTS = "results.csv"


@dataclass(frozen=True)
class Score:
    """One seed at one evaluation. Its fields are the columns of results.csv, in this order."""

    suite: str  # the benchmark's; "" for a run by itself
    dataset: str
    env_id: str  # this and the next three as in scores.csv: see `offrl.tasks.provenance.Provenance`
    packages: str
    reference: str
    scored_by: str
    algorithm: str  # the run's label, which says nothing of its settings: see `Results.label`
    # 8 hex digits: hash of the settings that decide the result, without seeds; a grid point has that of a run like it
    settings: str
    seed: int
    step: int
    episodes: int
    raw: float  # mean undiscounted return
    normalised: float | None  # 0 to 100 is the range of the reference scores
    success: float | None  # share of episodes, 0 to 1
    cell: str  # of a grid, in words: `temperature=3,expectile=0.7`; "" without
    run: str  # the run directory
    final: bool  # of the last evaluation of a run that reached its `steps`, by a seed that did not diverge
    # mean undiscounted cost of an episode, that by DSRL's normalisation with the limit, and the share of episodes that
    # keep it; None where the environment gives no costs, or there is no limit
    cost: float | None = None
    cost_normalized: float | None = None
    safe: float | None = None

    @property
    def provenance(self) -> Provenance:
        """The machine, versions and settings of the measurement."""
        return Provenance(self.env_id, self.packages, self.reference, self.scored_by)

    @property
    def key(self) -> tuple[str, str, str]:
        """(dataset, algorithm, settings)."""
        return self.dataset, self.algorithm, self.settings

    @property
    def value(self) -> float:
        """The normalised score where there is one, else the return."""
        return self.raw if self.normalised is None else self.normalised


COSTS = ("cost", "cost_normalized", "safe")  # columns of tables with costs alone
BY_TASK = ("score_by_task",)  # of those of multi-task data alone
COLUMNS = tuple(f.name for f in fields(Score) if f.name not in COSTS)


@dataclass(frozen=True)
class Missing:
    """A final score that was planned and is missing. `seed` None: of the whole grid point."""

    dataset: str
    algorithm: str
    settings: str  # "" where no run shows them
    seed: int | None
    run: str
    reason: str  # "failed: ...", "not started", "diverged ...", "unfinished: step 500 of 1,000", ...


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
        """(mean, low, high) of the final scores, by Student's t; NaN without any. scale: "raw", "normalised",
        "success" or "cost"; "": the value.
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
