"""Stopping rules: early ends of a run, decided without an environment. `stop=NAME` takes one from the registry."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from offrl.data.dataset import Dataset
from offrl.evaluation.policy import TrainedPolicy
from offrl.settings.replicas import Replica
from offrl.settings.train import TrainConfig


class StoppingRule(Protocol):
    """A rule of `register("stop", NAME)`, which looks at the policies at each evaluation and writes to the run
    directory.
    """

    reason: str  # why a run ends, in words

    def __init__(
        self,
        config: TrainConfig,
        dataset: Dataset,
        run_dir: Path,
        replicas: Sequence[Replica],
        resume_step: int | None,
        device: torch.device | str = "cpu",
    ) -> None:
        """resume_step: the step of the checkpoint that the run goes on from; None for a new run. Raises UserError for
        settings under which there is nothing to look at."""

    def look(self, step: int, policies: Sequence[TrainedPolicy], alive: Tensor) -> str:
        """Judge the policies as they are at `step`; returns a line for the log. alive [N]: of the replicas that did not
        diverge.
        """

    @property
    def end(self) -> int | None:
        """The step at which the run is to end; None before that."""

    def close(self) -> None:
        """Close the files."""

    @staticmethod
    def ended(run_dir: Path, config: Mapping[str, Any]) -> int | None:
        """The step at which a run with these settings ended early; None where it did not, or its files cannot be
        read.
        """
