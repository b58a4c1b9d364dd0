"""Where a run's numbers are shown besides its own files: TensorBoard, Weights & Biases.

Curves are means over all replicas and over each grid point, and single replicas where they are few.
"""

from __future__ import annotations

import json
import math
import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from offrl.errors import UserError, first_line, one_line, warn
from offrl.settings.replicas import Replica, by_cell, cell_name
from offrl.system import files, trust

MOST_REPLICAS = 8  # with more than this only means are shown; metrics.jsonl always has every replica
MOST_CELLS = 16  # of a grid: with more points than this no means of single ones
IDS = "loggers.json"  # in a run: what W&B calls it
STEP = "update"  # the axis of W&B's curves: its own steps cannot go back, as a resumed run does

Rows = Mapping[str, Sequence[float | None]]  # name -> one value per replica


@dataclass
class Loggers:
    """Loggers by name, each made when there is something to show, for importing one takes seconds.

    A disk that is full ends the run, as for its other files; a service that does not answer is left out, with a
    warning: metrics.jsonl and scores.csv have all that it would have shown.
    """

    names: list[str]
    run_dir: Path
    replicas: Sequence[Replica]
    purge_step: int  # what TensorBoard has from there on is shown no more
    again: Sequence[dict[str, Any]]  # lines of metrics.jsonl that this takes away too
    settings: Mapping[str, Any]
    open: dict[str, Any] = field(default_factory=dict)

    def show(self, call: Callable[[Any], None]) -> None:
        """Call `call` with each of them. Raises OSError where a file cannot be written."""
        for name in list(self.names):
            self._guarded(name, lambda name=name: call(self.open.get(name) or self._opened(name)))  # type: ignore[misc]

    def close(self) -> None:
        """Finish them. Raises OSError."""
        for name in list(self.open):
            self._guarded(name, self.open.pop(name).close)

    def _opened(self, name: str) -> Any:
        if name == "wandb":
            self.open[name] = WandbLogger(self.run_dir, self.replicas, self.settings)
        else:
            self.open[name] = TensorboardLogger(self.run_dir, self.replicas, self.purge_step)
            for row in self.again:
                self.open[name].scalars(row["step"], {k: v for k, v in row.items() if k != "step"})
        return self.open[name]

    def _guarded(self, name: str, call: Callable[[], Any]) -> None:
        try:
            call()
        except UserError:
            raise
        except Exception as error:
            if name == "tensorboard":
                raise
            self.names.remove(name)
            self.open.pop(name, None)
            warn(f"logger={name} is left out from here on: {type(error).__name__}: {first_line(error)}")


class TensorboardLogger:
    """TensorBoard files under tensorboard/ of a run: metrics and scores over updates, the spread of returns, and a row
    in the HPARAMS table. All methods raise OSError when a file cannot be written.
    """

    def __init__(self, run_dir: Path, replicas: Sequence[Replica], purge_step: int) -> None:
        """Open the event files; those of `purge_step` and later, from before the run was continued, are shown no
        more.
        """
        from torch.utils.tensorboard import SummaryWriter

        self.folder = folder = run_dir / "tensorboard"
        self.cells, self.groups = by_cell(replicas), _groups(replicas)
        self.writer = SummaryWriter(str(folder), purge_step=purge_step)

    def scalars(self, step: int, rows: Rows) -> None:
        """`<name>/mean` over the replicas that have a value; `<replica>/<name>` and `cell/<cell>/<name>`, its mean,
        where they are few.
        """
        for name, value in _curves(self.groups, rows).items():
            self.writer.add_scalar(name, value, step)
        self.writer.flush()

    def histogram(self, step: int, name: str, values: Any) -> None:
        """The spread of `values`, an array of numbers; those that are not finite are left out."""
        finite = values[abs(values) < math.inf]
        if finite.size:
            self.writer.add_histogram(name, finite, step)
            self.writer.flush()

    def hparams(self, step: int, settings: Mapping[str, Any], results: Rows) -> None:
        """A row of the HPARAMS table for each grid point: `settings`, its own values, and the means of `results` over
        seeds.
        """
        from torch.utils.tensorboard import SummaryWriter
        from torch.utils.tensorboard.summary import hparams

        for old in (self.folder / "hparams").glob("*"):  # a run that went on writes it anew
            files.discard(old, r"events\.out\.tfevents\..*")
        for values, indices in self.cells.items():
            metrics = {
                f"final/{k}": v for k, row in results.items() if (v := _mean([row[i] for i in indices])) is not None
            }
            with SummaryWriter(str(self.folder / "hparams" / (cell_name(values) or "run"))) as writer:
                for summary in hparams(_plain({**settings, **dict(values)}), metrics):
                    writer.file_writer.add_summary(summary)
                for name, value in metrics.items():
                    writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Finish the files."""
        self.writer.close()


class WandbLogger:
    """One W&B run, in the project $WANDB_PROJECT ("offrl"). W&B's own variables hold (WANDB_MODE=offline, WANDB_DIR).

    Its files are not in the run: there are links among them, which lead out of it.
    """

    def __init__(self, run_dir: Path, replicas: Sequence[Replica], settings: Mapping[str, Any]) -> None:
        """Begin, or go on with the W&B run of this run directory."""
        import wandb

        try:
            identity = json.loads(trust.read_text(run_dir / IDS))["wandb"]
        except (OSError, ValueError, KeyError, TypeError, UserError):
            identity = None
        identity = identity if isinstance(identity, str) and identity.isalnum() else secrets.token_hex(4)
        project = os.environ.get("WANDB_PROJECT") or "offrl"
        self.histogram_of, self.groups = wandb.Histogram, _groups(replicas)
        self.run = wandb.init(
            project=project, id=identity, resume="allow", name=run_dir.name, config=_plain(settings), tags=["offrl"]
        )
        files.write_text(run_dir / IDS, json.dumps({"wandb": identity}) + "\n")
        self.run.define_metric(STEP, hidden=True)
        self.run.define_metric("*", step_metric=STEP)

    def scalars(self, step: int, rows: Rows) -> None:
        """Curves of `rows`, called as in TensorBoard."""
        self.run.log({STEP: step, **_curves(self.groups, rows)})

    def histogram(self, step: int, name: str, values: Any) -> None:
        """The spread of `values`, an array of numbers; those that are not finite are left out."""
        finite = values[abs(values) < math.inf]
        if finite.size:
            self.run.log({STEP: step, name: self.histogram_of(finite)})

    def hparams(self, step: int, settings: Mapping[str, Any], results: Rows) -> None:
        """The last results as W&B's summary, and what the settings became."""
        self.run.config.update(_plain(settings), allow_val_change=True)
        self.run.summary.update({f"final/{name}": value for name, value in _curves(self.groups, results).items()})

    def close(self) -> None:
        """Finish the W&B run, which waits until it is sent."""
        self.run.finish()


def _groups(replicas: Sequence[Replica]) -> dict[str, list[int]]:
    """{prefix of a curve's name: the replicas whose mean it shows}; "" for all."""
    cells, groups = by_cell(replicas), {"": list(range(len(replicas)))}
    if 1 < len(cells) <= MOST_CELLS:
        groups |= {f"cell/{cell_name(values)}/": indices for values, indices in cells.items()}
    if 1 < len(replicas) <= MOST_REPLICAS:
        groups |= {f"{replica.name}/": [i] for i, replica in enumerate(replicas)}
    return groups


def _curves(groups: Mapping[str, list[int]], rows: Rows) -> dict[str, float]:
    """{name of a curve: value}; those without a value are left out."""
    values = {}
    for name, row in rows.items():
        for label, indices in groups.items():
            value = _mean([row[i] for i in indices])
            if value is not None:
                values[f"{label}{name}" if label else f"{name}/mean"] = value
    return values


def _mean(values: Sequence[float | None]) -> float | None:
    """Of the finite ones; None where there are none."""
    finite = [v for v in values if v is not None and math.isfinite(v)]
    return sum(finite) / len(finite) if finite else None


def _plain(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings as numbers and texts."""
    return {
        k: v if isinstance(v, (bool, int, float)) else "null" if v is None else one_line(str(v))
        for k, v in settings.items()
    }
