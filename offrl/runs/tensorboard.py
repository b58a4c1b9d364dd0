"""A run in TensorBoard: metrics and scores over updates, the spread of returns, and a row in the HPARAMS table."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from offrl.errors import one_line
from offrl.settings.replicas import Replica, by_cell, cell_name
from offrl.system.files import discard

MOST_REPLICAS = 8  # with more than this only means are shown; metrics.jsonl always has every replica
MOST_CELLS = 16  # of a grid: with more points than this no means of single ones


class Board:
    """TensorBoard files under `folder`. Importing TensorBoard takes a second, so one is made when there is something to show.

    All methods raise OSError when a file cannot be written.
    """

    def __init__(self, folder: Path, replicas: Sequence[Replica], purge_step: int) -> None:
        """Open the event files; those of `purge_step` and later, from before the run was continued, are shown no more."""
        from torch.utils.tensorboard import SummaryWriter

        self.folder = folder
        self.cells = by_cell(replicas)
        self.writer = SummaryWriter(str(folder), purge_step=purge_step)
        self.groups = {"": list(range(len(replicas)))}
        if 1 < len(self.cells) <= MOST_CELLS:
            self.groups |= {f"cell/{cell_name(values)}/": where for values, where in self.cells.items()}
        if 1 < len(replicas) <= MOST_REPLICAS:
            self.groups |= {f"{replica.name}/": [i] for i, replica in enumerate(replicas)}

    def scalars(self, step: int, rows: Mapping[str, Sequence[float | None]]) -> None:
        """`<name>/mean` over the replicas that have a value; `<replica>/<name>` and `cell/<cell>/<name>`, its mean, where they are few."""
        for name, row in rows.items():
            for label, where in self.groups.items():
                value = _mean([row[i] for i in where])
                if value is not None:
                    self.writer.add_scalar(f"{label}{name}" if label else f"{name}/mean", value, step)
        self.writer.flush()

    def histogram(self, step: int, name: str, values: Any) -> None:
        """The spread of `values`, an array of numbers; those that are not finite are left out."""
        finite = values[abs(values) < math.inf]
        if finite.size:
            self.writer.add_histogram(name, finite, step)
            self.writer.flush()

    def hparams(self, step: int, settings: Mapping[str, Any], results: Mapping[str, Sequence[float | None]]) -> None:
        """A row of the HPARAMS table for each grid point: `settings`, its own values, and the means of `results` over seeds."""
        from torch.utils.tensorboard import SummaryWriter
        from torch.utils.tensorboard.summary import hparams

        for old in (self.folder / "hparams").glob("*"):  # a run that went on writes it anew
            discard(old, r"events\.out\.tfevents\..*")
        for values, where in self.cells.items():
            plain = {**settings, **dict(values)}
            metrics = {f"final/{k}": v for k, row in results.items() if (v := _mean([row[i] for i in where])) is not None}
            shown = {k: v if isinstance(v, (bool, int, float, str)) else "null" if v is None else str(v) for k, v in plain.items()}
            shown = {k: one_line(v) if isinstance(v, str) else v for k, v in shown.items()}
            with SummaryWriter(str(self.folder / "hparams" / (cell_name(values) or "run"))) as writer:
                for summary in hparams(shown, metrics):
                    writer.file_writer.add_summary(summary)
                for name, value in metrics.items():
                    writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Finish the files."""
        self.writer.close()


def _mean(values: Sequence[float | None]) -> float | None:
    finite = [v for v in values if v is not None and math.isfinite(v)]
    return sum(finite) / len(finite) if finite else None
