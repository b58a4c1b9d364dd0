"""Scores as the results store holds them, and those that are missing."""

from __future__ import annotations

from dataclasses import dataclass, fields

from offrl.tasks.provenance import Provenance

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


COLUMNS = tuple(f.name for f in fields(Score))


@dataclass(frozen=True)
class Missing:
    """A final score that was planned and is missing. `seed` None: of the whole grid point."""

    dataset: str
    algorithm: str
    settings: str  # "" where no run shows them
    seed: int | None
    run: str
    reason: str  # "failed: ...", "not started", "diverged ...", "unfinished: step 500 of 1,000", ...
