"""A run in MLflow: the curves of TensorBoard, and the settings as parameters."""

from __future__ import annotations

import math
import os
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from offrl.runs.loggers.groups import curves, groups_of, keep_id, known_id, plain
from offrl.settings.replicas import Replica

LONGEST = 500  # letters of a parameter that every server takes
AT_ONCE = 100  # entries of a request


class MlflowBoard:
    """One MLflow run, where MLFLOW_TRACKING_URI says, in the experiment $MLFLOW_EXPERIMENT_NAME ("offrl")."""

    def __init__(
        self, run_dir: Path, replicas: Sequence[Replica], purge_step: int, settings: Mapping[str, Any]
    ) -> None:
        """Begin, or go on with the MLflow run of this run directory."""
        import mlflow
        from mlflow.entities import Metric, Param

        self.metric, self.param = Metric, Param
        self.groups = groups_of(replicas)
        self.client = mlflow.MlflowClient()
        self.run_id = known_id(run_dir, "mlflow")
        if self.run_id is None:
            name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or "offrl"
            experiment = self.client.get_experiment_by_name(name)
            place = self.client.create_experiment(name) if experiment is None else experiment.experiment_id
            self.run_id = str(self.client.create_run(place, run_name=run_dir.name).info.run_id)
            keep_id(run_dir, "mlflow", self.run_id)
        else:
            self.client.update_run(self.run_id, status="RUNNING")
        self._parameters(settings)

    def scalars(self, step: int, rows: Mapping[str, Sequence[float | None]]) -> None:
        """Curves of `rows`; see `groups.curves`."""
        self._metrics(step, curves(self.groups, rows))

    def histogram(self, step: int, name: str, values: Any) -> None:
        """MLflow has no histograms: the smallest and the largest of `values`."""
        finite = values[abs(values) < math.inf]
        if finite.size:
            self._metrics(step, {f"{name}/min": float(finite.min()), f"{name}/max": float(finite.max())})

    def hparams(self, step: int, settings: Mapping[str, Any], results: Mapping[str, Sequence[float | None]]) -> None:
        """The last results."""
        self._metrics(step, {f"final/{name}": value for name, value in curves(self.groups, results).items()})

    def close(self) -> None:
        """Mark the MLflow run as finished."""
        self.client.set_terminated(self.run_id)

    def _metrics(self, step: int, values: Mapping[str, float]) -> None:
        now = int(1000 * time.time())
        entries = [self.metric(re.sub(r"[^\w./ -]", "_", name), value, now, step) for name, value in values.items()]
        for at in range(0, len(entries), AT_ONCE):
            self.client.log_batch(self.run_id, metrics=entries[at : at + AT_ONCE])

    def _parameters(self, settings: Mapping[str, Any]) -> None:
        """Those that the MLflow run does not have yet: it takes no other value for one."""
        known = self.client.get_run(self.run_id).data.params
        entries = [self.param(k, str(v)[:LONGEST]) for k, v in plain(settings).items() if k not in known]
        for at in range(0, len(entries), AT_ONCE):
            self.client.log_batch(self.run_id, params=entries[at : at + AT_ONCE])
