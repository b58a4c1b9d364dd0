"""Q-learning Decision Transformer (Yamagata et al., 2022, arXiv 2209.03993): DT on returns to go that values have mended."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from offrl import rng
from offrl.algorithm import Metrics, TrainState
from offrl.data.dataset import Dataset
from offrl.data.samplers.sequences import RETURNS, VALID, drawn_episodes
from offrl.data.samplers.transitions import Batch, Sampler
from offrl.errors import UserError
from offrl.families.return_conditioned import round_digits
from offrl.families.sequence import SequenceAlgorithm, SequenceSettings
from offrl.families.teacher import Valued, ValuedSettings, v_of_policy
from offrl.optim import Params
from offrl.pretrained import Pretrained
from offrl.registry import register
from offrl.settings.field import setting

if TYPE_CHECKING:
    from offrl.settings.train import TrainConfig


@dataclass
class QDTConfig(ValuedSettings, SequenceSettings):
    """Settings of QDT."""

    name: str = "qdt"
    samples: int = setting(10, "actions of the values' policy whose mean Q is the value of a state", low=1)
    conservative_weight: float = setting(5.0, "of the CQL that is trained where values= names no run", low=0.0, shared=True)
    discount: float = setting(0.99, "the same CQL's discount factor", low=0.0, high=1.0, shared=True)
    value_hidden: list[int] = setting([256, 256], "widths of the same CQL's hidden layers", low=1)
    value_batch_size: int = setting(256, "transitions in a batch of the same CQL", low=1)


def relabel(rewards: np.ndarray, values: np.ndarray, start: np.ndarray, end: np.ndarray) -> np.ndarray:
    """R_t = r_t + max(R_{t+1}, V(s_{t+1})) inside each episode, from its end backwards (section 4); float64 [R].

    values [R]: V of each row's own observation. What may follow an episode's last row counts nothing.
    """
    out = rewards.astype(np.float64)
    order = np.argsort(start - end, kind="stable")  # longest first, so that the episodes still running are a prefix
    last, lengths = end[order] - 1, (end - start)[order]
    for back in range(1, int(lengths[0])):
        rows = last[lengths > back] - back
        out[rows] += np.maximum(out[rows + 1], values[rows + 1])
    return out


@register("algo", "qdt")
class QDT(Valued, SequenceAlgorithm):
    """DT that learns from returns which a good policy could have earned from where the data went, by CQL's values.

    Each return is mended by itself, so those of an episode need not add up. Within a window they do, as when acting: the last one is the
    mended one, an earlier one the rewards until there and that. Where a window ends is drawn anew in each update.

    CQL bounds values from below, so a return is only ever raised to what is likely to be had. Asking for a return works as in DT, with
    the largest mended return from a first step as the default.
    """

    Config = QDTConfig
    suitable = "cql, or another actor-critic"
    teacher = "cql"
    values_ratio = 5  # 500,000 updates of CQL, then 100,000

    @classmethod
    def teacher_settings(cls, config: Any) -> dict[str, Any]:
        c = config
        return {
            "conservative_weight": c.conservative_weight, "discount": c.discount, "hidden": list(c.value_hidden),
            "batch_size": c.value_batch_size,
        }  # fmt: skip

    @classmethod
    def adopt(cls, config: TrainConfig, dataset: Dataset, pretrained: Mapping[str, Any]) -> TrainConfig:
        """The largest mended return from a first step, where no target return is given."""
        c = config.algo
        if c.target_return is None:
            first = dataset.episode_start[drawn_episodes(dataset)].cpu()
            best = float(mended(pretrained["values"], dataset, c.samples)[first].max())
            config = dataclasses.replace(config, algo=dataclasses.replace(c, target_return=round_digits(best)))
        return config

    def sampler(self) -> Sampler:
        return dataclasses.replace(super().sampler(), made=self.judge)  # type: ignore[type-var]

    def actor_loss(self, actor: Params, state: TrainState, batch: Batch, key: Tensor) -> tuple[Tensor, Metrics]:
        cut, key = rng.split(key)
        return super().actor_loss(actor, state, self.shortened(batch, cut), key)

    def shortened(self, batch: Batch, key: Tensor) -> Batch:
        """Windows that end after a random number of their steps, with returns that follow from the mended one of their last step."""
        valid = batch[VALID]
        place, many = valid.cumsum(-1) - 1, valid.sum(-1)
        last = rng.randint(key, tuple(many.shape), many).unsqueeze(-1)
        rewards = torch.where(valid & (place < last), self.recorded(batch["rewards"]), 0.0)
        mended = torch.where(valid & (place == last), batch[RETURNS], 0.0).sum(-1, keepdim=True)
        valid = valid & (place <= last)
        returns = rewards.flip(-1).cumsum(-1).flip(-1) + mended
        return {**batch, VALID: valid, RETURNS: torch.where(valid, returns, 0.0)}

    def judge(self, dataset: Dataset) -> dict[str, Tensor]:
        """The mended returns to go of every row."""
        return {RETURNS: mended(self.pretrained["values"], dataset, self.config.samples)}


def mended(run: Pretrained, dataset: Dataset, samples: int) -> Tensor:
    """`relabel`ed returns to go of every row, [R] float32, in the units of the recorded rewards."""
    spec = dataset.spec
    if spec.reward_shift:
        raise UserError(
            "qdt compares values with returns as recorded, and dataset.reward_shift adds to one but not the other: leave it at 0"
        )
    observations = dataset.columns["observations"].cpu().reshape(len(dataset), -1).float()
    values = v_of_policy(run, observations, samples).double().numpy()
    rewards = dataset.columns["rewards"].cpu().double().numpy()
    found = relabel(rewards, values, dataset.episode_start.cpu().numpy(), dataset.episode_end.cpu().numpy())
    return torch.from_numpy((found / (spec.reward_scale or 1.0)).astype(np.float32))
