"""The loss of preferences between segments of trajectories, by the Bradley-Terry model (Christiano et al., arXiv
1706.03741), and its batches.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from offrl import rng
from offrl.algorithm import Algorithm, Batch, Loss, Params, Sampler, TrainState, Traits, Update
from offrl.data.dataset import Dataset
from offrl.data.store import Store
from offrl.errors import UserError
from offrl.nn import MLP
from offrl.settings.field import setting
from offrl.tasks.entries import VECTOR


@dataclass
class PreferenceSettings:
    """Settings of the learning of a preference model."""

    members: int = setting(3, "networks, whose rewards are averaged", low=1)
    hidden: list[int] = setting([256, 256], "layers", low=1)
    updates: int = setting(
        5_000, "at most so many updates of each; they end where the validation error no longer falls", low=1
    )
    learning_rate: float = setting(3e-4, "Adam's", low=0.0)
    batch_size: int = setting(64, "pairs of segments", low=1)
    held_out: float = setting(0.1, "share of the pairs that says which model is best", low=0.0, high=0.9)
    seed: int = setting(0, "of the first member", low=0)


@dataclass(frozen=True)
class LabelledPairs:
    """Labelled pairs of segments of H rows. With images, what the encoder sees is apart from the other inputs."""

    rows: Tensor  # [P, 2, H] int64
    label: Tensor  # [P]
    inputs: Tensor  # [R, W] of all rows: states and actions, or with images actions alone
    states: Tensor  # [R, O] with images; else [R, 0]
    stores: Mapping[str, Store] = field(default_factory=dict)

    def take(self, pairs: Tensor) -> Any:
        """first and second [B, H, W] and label [B] of pairs [B]; with images also observations of all their rows,
        [2 * B * H, ...], those of the first segments before those of the second ones.
        """
        rows = self.rows[pairs]
        batch = {"first": self.inputs[rows[:, 0]], "second": self.inputs[rows[:, 1]], "label": self.label[pairs]}
        if not self.stores:
            return batch
        shown = rows.movedim(1, 0).flatten()
        return {**batch, "observations": observed(self.states[shown], self.stores, shown)}


def observed(states: Tensor, stores: Mapping[str, Store], rows: Tensor) -> dict[str, Tensor]:
    """What an encoder sees of rows [B]: states [B, O], where there are some, and images."""
    vector = {VECTOR: states} if states.shape[-1] else {}
    return {**vector, **{name: store.frames(rows, 1) for name, store in stores.items()}}


class PairSampler:
    """Uniform pairs of segments, with replacement: first and second [B, H, W] and label [B]."""

    def prepare(self, dataset: Any) -> LabelledPairs:
        return dataset

    def __call__(self, source: LabelledPairs, key: Tensor, batch_size: int) -> Batch:
        return source.take(rng.randint(key, (batch_size,), len(source.label)))


class Preferences(Algorithm):
    """P(second better than first) = sigmoid(sum of r over the second - sum of r over the first), r = tanh(f(s, a)), s
    being the encoder's vector where there are images.

    The loss is the cross-entropy to labels from 0 (first) to 1 (second). It acts in no environment, so it is not
    registered.
    """

    Config = PreferenceSettings
    traits = Traits(policy_modules=(), observations="encoded")

    def modules(self) -> dict[str, nn.Module]:
        return {"reward": MLP(self.spec.observation_dim + self.spec.encoded_action_dim, self.config.hidden, 1)}

    def sampler(self) -> Sampler:
        return PairSampler()

    def rewards(self, params: Params, x: Tensor) -> Tensor:
        """[..., W] -> [...] in (-1, 1)."""
        return self.apply("reward", params, x).squeeze(-1).tanh()

    def pair_rewards(self, params: Params, batch: Batch) -> tuple[Tensor, Tensor]:
        """The rewards of the first segments and of the second ones, [B, H] each. With images batch["observations"] is
        the encoder's vector [2 * B * H, Z].
        """
        first, second = batch["first"], batch["second"]
        if self.encoder is not None:
            z = batch["observations"].unflatten(0, (2, *first.shape[:2]))
            first, second = (torch.cat([vectors, x], -1) for vectors, x in zip(z, (first, second), strict=True))
        return self.rewards(params, first), self.rewards(params, second)

    def loss(self, params: Params, state: TrainState | None, batch: Batch) -> Loss:
        first, second = self.pair_rewards(params, batch)
        loss = nn.functional.binary_cross_entropy_with_logits((second - first).sum(-1), batch["label"])
        return loss, {"reward/loss": loss}

    def update(self, state: TrainState, batch: Batch, key: Tensor, *, phase: int) -> Update:
        return self.descend(state, "reward", self.loss, batch)


def check_pairs(dataset: Dataset, pairs: Any, labels: Any, length: int, images: bool = False) -> tuple[Tensor, Tensor]:
    """(first rows int64 [P, 2], labels float32 [P]). images: they are seen, too. Raises UserError, naming the pair, for
    what does not fit.
    """
    starts, targets = np.asarray(pairs), np.asarray(labels, np.float64).reshape(-1)
    name = dataset.spec.name
    if dataset.spec.observation_mean is not None:
        raise UserError(f"{name}: learn preferences before observations are normalised")
    if not dataset.spec.observation_dim and not images:
        raise UserError(f"{name}: preferences are learnt from observations of numbers only")
    if (
        starts.ndim != 2
        or starts.shape[1] != 2
        or starts.dtype.kind not in "iu"
        or len(starts) != len(targets)
        or len(starts) < 2
    ):
        raise UserError(
            f"{name}: pairs must be whole numbers [P, 2] and labels [P], P > 1; here {list(starts.shape)} and "
            f"{list(targets.shape)}"
        )
    bad = np.flatnonzero(~np.isin(targets, (0.0, 0.5, 1.0)))
    if len(bad):
        raise UserError(
            f"{name}: the label of pair {bad[0]} is {targets[bad[0]]}; 1 says that its second segment is better, 0 the "
            "first, 0.5 neither"
        )
    ends = dataset.episode_end.numpy()
    inside = (starts >= 0) & (starts < len(dataset))
    episode_end = ends[np.searchsorted(ends, np.where(inside, starts, 0), side="right")]
    bad = np.flatnonzero(~(inside & (starts + length <= episode_end)).all(1))
    if length < 1 or len(bad):
        pair = int(bad[0]) if len(bad) else 0
        raise UserError(
            f"{name}: pair {pair}, first rows {starts[pair].tolist()}: {length} rows from there do not lie in one "
            "episode"
        )
    return torch.from_numpy(starts.astype(np.int64)), torch.from_numpy(targets.astype(np.float32))
