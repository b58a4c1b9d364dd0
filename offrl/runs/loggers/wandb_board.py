"""A run in Weights & Biases: the curves of TensorBoard over the number of the update."""

from __future__ import annotations

import math
import os
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from offrl.runs.loggers.groups import curves, groups_of, keep_id, known_id, plain
from offrl.settings.replicas import Replica

STEP = "update"  # the axis of all curves: W&B's own steps cannot go back, as a resumed run does


class WandbBoard:
    """One W&B run, in the project $WANDB_PROJECT ("offrl"). W&B's own variables hold (WANDB_MODE=offline, WANDB_DIR).

    Its files are not in the run: there are links among them, which lead out of it.
    """

    def __init__(
        self, run_dir: Path, replicas: Sequence[Replica], purge_step: int, settings: Mapping[str, Any]
    ) -> None:
        """Begin, or go on with the W&B run of this run directory."""
        import wandb

        identity = known_id(run_dir, "wandb") or secrets.token_hex(4)
        project = os.environ.get("WANDB_PROJECT") or "offrl"
        self.histogram_of = wandb.Histogram
        self.groups = groups_of(replicas)
        self.run = wandb.init(
            project=project, id=identity, resume="allow", name=run_dir.name, config=plain(settings), tags=["offrl"]
        )
        keep_id(run_dir, "wandb", identity)
        self.run.define_metric(STEP, hidden=True)
        self.run.define_metric("*", step_metric=STEP)

    def scalars(self, step: int, rows: Mapping[str, Sequence[float | None]]) -> None:
        """Curves of `rows`; see `groups.curves`."""
        self.run.log({STEP: step, **curves(self.groups, rows)})

    def histogram(self, step: int, name: str, values: Any) -> None:
        """The spread of `values`, an array of numbers; those that are not finite are left out."""
        finite = values[abs(values) < math.inf]
        if finite.size:
            self.run.log({STEP: step, name: self.histogram_of(finite)})

    def hparams(self, step: int, settings: Mapping[str, Any], results: Mapping[str, Sequence[float | None]]) -> None:
        """The last results as W&B's summary, and what the settings became."""
        self.run.config.update(plain(settings), allow_val_change=True)
        self.run.summary.update({f"final/{name}": value for name, value in curves(self.groups, results).items()})

    def close(self) -> None:
        """Finish the W&B run, which waits until it is sent."""
        self.run.finish()
