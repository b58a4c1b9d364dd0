"""The episodes that the replicas played while they learnt, a line each in episodes.csv: exploration noise included."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from offrl.finetuning.play.snapshots import TASK
from offrl.finetuning.play.turns import Ended
from offrl.runs.log import LineFile, cell_text, csv_step
from offrl.settings.replicas import Replica
from offrl.system import csv_text

FILE = "episodes.csv"
STARTS = ("task", "data")  # where an episode began


class EpisodeLog:
    """Writes episodes.csv. An episode's line is there before a checkpoint that comes after its end, so that a run that
    goes on from one drops the lines of later steps and writes them again, the same.
    """

    def __init__(self, run_dir: Path, replicas: Sequence[Replica], last_step: int) -> None:
        """last_step: of the lines that stay. Raises UserError where the file cannot be written."""
        self.replicas = replicas
        fields = [field for field, _ in replicas[0].values]
        header = ("step", "seed", *fields, "return", "length", "success", "start")
        self.lines = LineFile(run_dir / FILE, csv_step, last_step, csv_text.text_of([header]))

    def add(self, step: int, episodes: Sequence[Ended]) -> None:
        """Episodes that ended with environment step `step` of their replicas. Raises UserError."""
        rows: list[list[Any]] = []
        for one in episodes:
            replica, start = self.replicas[one.replica], STARTS[one.start != TASK]
            values = (value for _, value in replica.values)
            rows.append([step, replica.seed, *values, one.total, one.length, one.success, start])
        self.lines.write(csv_text.text_of([[*map(cell_text, row)] for row in rows]))


def read(run_dir: Path) -> list[dict[str, Any]]:
    """The lines of episodes.csv, numbers as numbers (success: None where the environment said nothing); none where
    there is no such file, as in runs of older versions.
    """
    path = run_dir / FILE
    rows: list[dict[str, Any]] = list(csv_text.read(path)) if path.exists() else []
    for row in rows:
        row |= {name: float(value) if value else None for name, value in row.items() if name != "start"}
    return rows
