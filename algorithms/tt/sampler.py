"""Windows of episodes as tokens: the bins of every dimension, and the values that are predicted."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from offrl.algorithm import Batch, Dataset, DataSpec
from offrl.algorithms.tt import discretizer
from offrl.algorithms.tt.discretizer import Bins, encode
from offrl.data.samplers.sequences import VALID, Sequences, SequenceSampler, drawn_rows
from offrl.data.samplers.tables import Unpacked
from offrl.data.transforms.columns import returns_to_go

FITTED = 4_000_000  # rows whose observations and actions decide where bins lie
BLOCK = 65_536  # rows that become tokens at once


@dataclass(frozen=True)
class TokenSource:
    """The data as tokens, and the bins of these."""

    windows: Sequences
    bins: Bins


@dataclass(frozen=True)
class TokenSampler(SequenceSampler):
    """Windows as tokens [B, K D] int64 and whether these count in the loss, bool. After a terminal come stop tokens;
    where an episode is cut off, by a time-out or the end of the data, the steps after it are not known and do not
    count."""

    spec: DataSpec = dataclasses.field(kw_only=True)
    bins: int = dataclasses.field(kw_only=True)
    method: str = "quantile"
    meaning: str = "middle"
    discount: float = 0.99
    terminal_reward: float | None = None

    def prepare(self, dataset: Dataset) -> TokenSource:  # type: ignore[override]
        """The source of windows of tokens. Raises UserError where no episode may be drawn."""
        device = dataset.device
        rows, last, weighted = drawn_rows(dataset)
        rewards, values = self.targets(dataset)
        rewards, values = rewards[rows], values[rows]
        bins = self.fit(dataset, rows, rewards, values)
        kind = torch.uint8 if self.bins < 256 else torch.int16
        table = torch.empty(len(rows), len(bins.values), dtype=kind, device=device)
        for block in torch.arange(len(rows), device=device).split(BLOCK):
            numbers = torch.cat([*self.columns(dataset, rows[block]), rewards[block, None], values[block, None]], -1)
            table[block] = encode(numbers, bins.edges.to(device)).to(kind)
        ends = dataset.columns["terminations"][rows[last]]
        tokens = Unpacked({"tokens": (table, None), "ends": (ends, None)}, layout=None)
        windows = Sequences(len(rows), last, tokens, weighted)
        return TokenSource(windows, Bins(*(x.to(device) for x in bins)))

    def targets(self, dataset: Dataset) -> tuple[Tensor, Tensor]:
        """Rewards and values of all rows, [R] float32: a value is the discounted sum of the rewards after the step's
        own.
        """
        rewards, ends = dataset.columns["rewards"].double(), dataset.columns["terminations"]
        if self.terminal_reward is not None:
            rewards = torch.where(ends, self.terminal_reward, rewards)
        start, end = dataset.episode_start.cpu().numpy(), dataset.episode_end.cpu().numpy()
        returns = returns_to_go(rewards.cpu().numpy(), ends.cpu().numpy(), start, end, self.discount)
        values = np.append(returns[1:], 0.0)
        values[end - 1] = 0.0
        return rewards.float(), torch.from_numpy(values.astype(np.float32)).to(rewards.device)

    def columns(self, dataset: Dataset, rows: Tensor) -> list[Tensor]:
        """Observations [R, O] and actions [R, A] of these rows."""
        return [dataset.columns[name][rows].reshape(len(rows), -1).float() for name in ("observations", "actions")]

    def fit(self, dataset: Dataset, rows: Tensor, rewards: Tensor, values: Tensor) -> Bins:
        """The bins of all dimensions, on the CPU."""
        sample = rows[
            torch.linspace(0, len(rows) - 1, min(len(rows), FITTED), dtype=torch.float64, device=rows.device).long()
        ]
        observations, actions = (x.cpu().numpy() for x in self.columns(dataset, sample))
        bins = [self.bins_of(column) for column in observations.T]
        if self.spec.discrete:
            bins.append(discretizer.choices(self.spec.num_actions, self.bins, actions[:, 0].astype(np.int64)))
        else:
            bins += [self.bins_of(column) for column in actions.T]
        singletons = () if self.terminal_reward is None else (self.terminal_reward,)
        return discretizer.stack(
            [*bins, self.bins_of(rewards.cpu().numpy(), singletons), self.bins_of(values.cpu().numpy(), singletons)]
        )

    def bins_of(self, column: np.ndarray, singletons: Sequence[float] = ()) -> Bins:
        """The bins of one dimension."""
        return discretizer.fit(column, self.bins, self.method, self.meaning, singletons)

    def __call__(self, source: TokenSource, key: Tensor, batch_size: int) -> Batch:  # type: ignore[override]
        batch = super().__call__(source.windows, key, batch_size)
        valid = batch[VALID].unsqueeze(-1)
        tokens = torch.where(valid, batch["tokens"].long(), self.bins)
        mask = (valid | batch["ends"][:, :1].unsqueeze(-1)).expand_as(tokens)
        return {"tokens": tokens.flatten(1), "counted": mask.flatten(1)}
