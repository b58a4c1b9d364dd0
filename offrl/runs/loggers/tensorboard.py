"""A run in TensorBoard: metrics and scores over updates, the spread of returns, and a row in the HPARAMS table."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from offrl.runs.loggers.groups import curves, groups_of, mean, plain
from offrl.settings.replicas import Replica, by_cell, cell_name
from offrl.system.files import discard


class Board:
    """TensorBoard files under tensorboard/ of a run. Importing TensorBoard takes a second, so one is made when there is
    something to show.

    All methods raise OSError when a file cannot be written.
    """

    def __init__(
        self, run_dir: Path, replicas: Sequence[Replica], purge_step: int, settings: Mapping[str, Any] | None = None
    ) -> None:
        """Open the event files; those of `purge_step` and later, from before the run was continued, are shown no
        more.
        """
        from torch.utils.tensorboard import SummaryWriter

        self.folder = folder = run_dir / "tensorboard"
        self.cells = by_cell(replicas)
        self.writer = SummaryWriter(str(folder), purge_step=purge_step)
        self.groups = groups_of(replicas)

    def scalars(self, step: int, rows: Mapping[str, Sequence[float | None]]) -> None:
        """`<name>/mean` over the replicas that have a value; `<replica>/<name>` and `cell/<cell>/<name>`, its mean,
        where they are few.
        """
        for name, value in curves(self.groups, rows).items():
            self.writer.add_scalar(name, value, step)
        self.writer.flush()

    def histogram(self, step: int, name: str, values: Any) -> None:
        """The spread of `values`, an array of numbers; those that are not finite are left out."""
        finite = values[abs(values) < math.inf]
        if finite.size:
            self.writer.add_histogram(name, finite, step)
            self.writer.flush()

    def hparams(self, step: int, settings: Mapping[str, Any], results: Mapping[str, Sequence[float | None]]) -> None:
        """A row of the HPARAMS table for each grid point: `settings`, its own values, and the means of `results` over
        seeds.
        """
        from torch.utils.tensorboard import SummaryWriter
        from torch.utils.tensorboard.summary import hparams

        for old in (self.folder / "hparams").glob("*"):  # a run that went on writes it anew
            discard(old, r"events\.out\.tfevents\..*")
        for values, where in self.cells.items():
            metrics = {
                f"final/{k}": v for k, row in results.items() if (v := mean([row[i] for i in where])) is not None
            }
            shown = plain({**settings, **dict(values)})
            with SummaryWriter(str(self.folder / "hparams" / (cell_name(values) or "run"))) as writer:
                for summary in hparams(shown, metrics):
                    writer.file_writer.add_summary(summary)
                for name, value in metrics.items():
                    writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Finish the files."""
        self.writer.close()
