"""`stop=fqe-plateau`: end a run when its policies' values, estimated without the environment, have stopped rising."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from offrl import registry
from offrl.data.dataset import Dataset
from offrl.errors import UserError
from offrl.ope.config import FQEConfig
from offrl.registry import register
from offrl.runs.log import LineFile, json_step
from offrl.settings.replicas import Replica
from offrl.system.trust import refuse_sparse

if TYPE_CHECKING:
    from offrl.settings.train import TrainConfig

FILE = "fqe.jsonl"  # {"step": 10000, "value": [one for each replica]}


@register("stop", "fqe-plateau")
class Plateau:
    """Fitted Q evaluation of the current policies at each evaluation, and the rule that ends the run.

    Each estimate starts from the same first weights and draws the same batches, so that it depends on the policies
    alone: a resumed run finds the same ones. The rule looks at the file only.
    """

    def __init__(
        self,
        config: TrainConfig,
        dataset: Dataset,
        run_dir: Path,
        replicas: Sequence[Replica],
        resume_step: int | None,
        device: torch.device | str = "cpu",
    ) -> None:
        """device: of the estimates. Raises UserError for settings under which there is nothing to look at."""
        if config.eval.every == 0:
            raise UserError(
                "stop=fqe-plateau looks at the policies at each evaluation, and eval.every=0 has none before the end"
            )
        if dataset.mapped:
            raise UserError(
                "stop=fqe-plateau needs the data in memory, and they are memory-mapped; raise dataset.memory_limit_gb"
            )
        if hasattr(config.algo, "action_steps"):
            algorithm = registry.get("algo", config.algo.name)(config.algo, dataset.spec)
            if (count := algorithm.actor(algorithm.init(0)).action_steps) > 1:
                raise UserError(
                    f"stop=fqe-plateau values a policy by its action in each state, and {config.algo.name} plays "
                    f"{count} at a time: leave it out, or set algo.action_steps=1"
                )
        self.reason = f"no new best value in {config.stop_patience} evaluations"
        self.patience, self.dataset, self.device = config.stop_patience, dataset, str(device)
        self.names = [replica.name for replica in replicas]
        discount = min(float(getattr(config.algo, "discount", 0.99)), 0.999)
        # an estimate grows to its value over 1 / (polyak (1 - discount)) updates: five times that
        polyak = min(1.0, 5.0 / (config.stop_updates * (1.0 - discount)))
        # compiling for a GPU would take longer than such a short fit
        mode = "cudagraph" if torch.device(device).type == "cuda" else "auto"
        self.settings = FQEConfig(discount=discount, updates=config.stop_updates, seeds=1, polyak=polyak, compile=mode)
        self.file = LineFile(run_dir / FILE, json_step, -1 if resume_step is None else resume_step)
        self.rows = [json.loads(line) for line in self.file.path.read_text(encoding="utf-8").splitlines()]

    def look(self, step: int, policies: Sequence[Any], alive: Tensor) -> str:
        """Estimate the values of the policies as they are at `step`, and write them down; words about them for the
        log.
        """
        from offrl.ope import estimate

        estimates = estimate(self.dataset, dict(zip(self.names, policies, strict=True)), self.settings, self.device)
        values = [
            float(v) if ok and math.isfinite(v) else None for v, ok in zip(estimates.value, alive.tolist(), strict=True)
        ]
        self.rows.append({"step": step, "value": values})
        self.file.write(json.dumps(self.rows[-1]) + "\n")
        known = [v for v in values if v is not None]
        return f"step {step:,}: estimated value {sum(known) / len(known):.4g}" if known else ""

    @property
    def end(self) -> int | None:
        """The step at which every replica had gone `patience` looks without a new best; None before that."""
        return _end(self.rows, self.patience)

    def close(self) -> None:
        """Close the file."""
        self.file.sync()
        self.file.file.close()

    @staticmethod
    def ended(run_dir: Path, config: Mapping[str, Any]) -> int | None:
        """The step at which a run with these settings ended before its `steps`; None where it did not, or its file
        cannot be read.
        """
        try:
            refuse_sparse(run_dir / FILE)
            rows = [json.loads(line) for line in (run_dir / FILE).read_text(encoding="utf-8").splitlines()]
            return _end(rows, int(config["stop_patience"]))
        except (OSError, ValueError, TypeError, KeyError, IndexError, RecursionError, UserError):
            return None


def _end(rows: Sequence[dict[str, Any]], patience: int) -> int | None:
    """The first step at which every replica had gone `patience` looks without a new best."""

    def flat(values: Sequence[float | None]) -> bool:
        numbers = [-math.inf if v is None else v for v in values]
        return max(numbers[-patience:]) <= max(numbers[:-patience])

    for last in range(patience, len(rows)):
        if all(flat([row["value"][i] for row in rows[: last + 1]]) for i in range(len(rows[0]["value"]))):
            return int(rows[last]["step"])
    return None
