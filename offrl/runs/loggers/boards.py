"""The loggers of one run together."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from offrl.errors import UserError, first_line, warn
from offrl.settings.replicas import Replica

LOGGERS = {
    "tensorboard": "offrl.runs.loggers.tensorboard:Board",
    "wandb": "offrl.runs.loggers.wandb_board:WandbBoard",
    "mlflow": "offrl.runs.loggers.mlflow_board:MlflowBoard",
}


class Boards:
    """Loggers by name, each made when there is something to show, for importing one takes seconds.

    A disk that is full ends the run, as for its other files; a service that does not answer is left out, with a
    warning: metrics.jsonl and scores.csv have all that it would have shown.
    """

    def __init__(
        self,
        names: Sequence[str],
        run_dir: Path,
        replicas: Sequence[Replica],
        purge_step: int,
        again: Sequence[dict[str, Any]],
        settings: Mapping[str, Any],
    ) -> None:
        """purge_step: what TensorBoard has from there on is shown no more. again: lines of metrics.jsonl that this
        takes away too.
        """
        self.names, self.run_dir, self.replicas, self.settings = list(names), run_dir, replicas, settings
        self.purge_step, self.again = purge_step, again
        self.open: dict[str, Any] = {}

    def show(self, what: Callable[[Any], None]) -> None:
        """Call `what` with each of them. Raises OSError where a file cannot be written."""
        for name in list(self.names):
            self._guarded(name, lambda name=name: what(self.open[name] if name in self.open else self._opened(name)))  # type: ignore[misc]

    def close(self) -> None:
        """Finish them. Raises OSError."""
        for name in list(self.open):
            self._guarded(name, self.open.pop(name).close)

    def _opened(self, name: str) -> Any:
        module, kind = LOGGERS[name].split(":")
        board = getattr(importlib.import_module(module), kind)(
            self.run_dir, self.replicas, self.purge_step, self.settings
        )
        self.open[name] = board
        for row in self.again if name == "tensorboard" else ():
            board.scalars(row["step"], {k: v for k, v in row.items() if k != "step"})
        return board

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
