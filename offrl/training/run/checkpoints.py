"""Checkpoints of replicas that learn: their states, those to go back to where they diverge, and the sums of metrics in
between.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from offrl.algorithm import Metrics, TrainState
from offrl.settings.replicas import Replica
from offrl.system import files
from offrl.training.workers import Engine


@dataclass(frozen=True)
class Saved:
    """A checkpoint that was read."""

    step: int
    state: TrainState
    good: TrainState  # what `LocalEngine.settle` remembered
    sums: Metrics  # since then
    alive: Tensor  # [N] bool
    tensors: dict[str, Tensor]  # all of the file
    meta: dict[str, Any]
    where: str  # for messages


class Checkpoints:
    """The checkpoints of a run directory, written and read."""

    def __init__(self, run_dir: Path, keep: int, algorithm: str, replicas: Sequence[Replica]) -> None:
        """keep: how many of the newest stay, all of them with 0. algorithm: its name."""
        self.run_dir, self.keep = run_dir, keep
        self.identity = {"algorithm": algorithm, "seeds": [r.seed for r in replicas]}

    def save(
        self, step: int, engine: Engine, alive: Tensor, settled: bool, tree: Mapping[str, Any], meta: Mapping[str, Any]
    ) -> None:
        """Write what `engine` holds, after replicas that are not `alive` went back to what it remembered, and `tree`
        and `meta` besides.

        settled: no update was made since `LocalEngine.settle`. Raises UserError where it cannot be written.
        """
        engine.freeze(alive)
        parts = {
            "state": engine.state(),
            "good": {} if settled else engine.good(),
            "alive": alive,
            "sums": {} if settled else engine.sums(),
            **tree,
        }
        files.save(self.run_dir, step, files.flatten(parts), {**meta, **self.identity}, self.keep)

    def load(self, template: TrainState) -> Saved | None:
        """The newest checkpoint that can be read, as states like `template`; None where there is none. Raises
        UserError.
        """
        newest = files.load_latest(self.run_dir)
        if newest is None:
            return None
        tensors, meta = newest
        where = f"checkpoint of step {meta['step']:,} in {self.run_dir}"
        state = good = files.unflatten({"state": template}, tensors, where)["state"]
        if any(name.startswith("good/") for name in tensors):
            good = files.unflatten({"good": template._replace(buffers={})}, tensors, where)["good"]
        return Saved(meta["step"], state, good, part(tensors, "sums"), tensors["alive"], tensors, meta, where)


def part(tensors: Mapping[str, Tensor], name: str) -> dict[str, Tensor]:
    """The tensors of a checkpoint below `name`, by the rest of their names."""
    return {k.removeprefix(f"{name}/"): v for k, v in tensors.items() if k.startswith(f"{name}/")}
