"""Policies that are fitted to all data at once, before the first update: no batches, no gradient steps."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from offrl import rng
from offrl.algorithm import Algorithm, Batch, ConfigT, Dataset, Params, Sampler, TrainState, Traits, Update
from offrl.data.samplers.transitions import episode_of
from offrl.optim import Adam
from offrl.settings.field import setting


@dataclass
class FittedSettings:
    """Settings that such policies share."""

    rows: int = setting(100_000, "most rows that the policy is fitted to", low=10)
    test_share: float = setting(
        0.1, "share of the episodes that are kept apart to measure the fit", low=0.01, high=0.5, shared=True
    )


@dataclass(frozen=True)
class FittedRows:
    """No batches: the observations of all rows and the columns of `derived_columns`, on the CPU, and which rows are
    kept apart.
    """

    test_share: float
    derived_columns: Any = None  # Dataset -> {name: [R, ...]}

    def prepare(self, dataset: Dataset) -> dict[str, Tensor]:
        rows = torch.arange(len(dataset))
        # whole episodes, spread evenly; of a single one rows
        part = episode_of(dataset, rows.to(dataset.device)).cpu() if dataset.num_episodes > 1 else rows
        test = ((part + 1) * self.test_share).floor() > (part * self.test_share).floor()
        test = test if bool(test.any()) else part == part[-1]
        derived = self.derived_columns(dataset) if self.derived_columns else {}
        return {"observations": dataset.flat("observations").float().cpu(), "test": test, **derived}

    def __call__(self, source: Any, key: Tensor, batch_size: int) -> Batch:
        return {}


class FittedPolicy(Algorithm[ConfigT]):
    """A policy that `fit` makes, and measures of it that `extra` holds."""

    traits = Traits(vectorized=False, cuda_graph=False, compiles=False)

    def sampler(self) -> Sampler:
        return FittedRows(self.config.test_share)

    @property
    def every(self) -> int:
        return 2**31  # once, before the first update

    @abstractmethod
    def fit(self, state: TrainState, source: Any, key: Tensor) -> Update:
        """The state with the fitted policy (`with_policy`), and the measures. key: on the CPU."""

    def refresh(self, state: TrainState, source: Any, key: Tensor, *, step: int) -> Update:
        """The fit."""
        state, measures = self.fit(state, source, key.cpu())
        return state.with_extra(**{name: x.to(state.step.device) for name, x in measures.items()}), measures

    def with_policy(self, state: TrainState, params: Params) -> TrainState:
        """The state with these parameters of the policy's `net`."""
        actor = {f"net.{name}": p.to(state.step.device) for name, p in params.items()}
        return state._replace(params={**state.params, "actor": actor})

    def optimizer(self, name: str) -> Adam:
        return Adam(0.0)  # takes no step

    def drawn(self, allowed: Tensor, key: Tensor) -> Tensor:
        """At most `rows` of the rows that are allowed, ascending. allowed: bool [R]."""
        rows = torch.nonzero(allowed).squeeze(-1)
        if len(rows) <= self.config.rows:
            return rows
        return rows[rng.uniform(key, (len(rows),)).argsort(stable=True)[: self.config.rows]].sort().values

    def update(self, state: TrainState, batch: Batch, key: Tensor, *, phase: int) -> Update:
        return state, {}

    def finished(self, state: TrainState) -> Tensor:
        return torch.ones_like(state.step, dtype=torch.bool)
