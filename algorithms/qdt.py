"""Q-learning Decision Transformer (Yamagata et al., 2022, arXiv 2209.03993): DT on returns to go that values have
relabelled.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from offrl import rng
from offrl.algorithm import Batch, Dataset, Loss, Params, Sampler, TrainConfig, TrainState
from offrl.data.samplers.sequences import RETURNS, STEPS, VALID, drawn_episodes
from offrl.errors import UserError
from offrl.families.return_conditioned import TargetReturnSettings, recorded, round_digits
from offrl.families.sequence import SequenceModel, SequenceSettings, TargetReturnActor, masked_mean
from offrl.families.teacher import TeacherSettings, check_critics, observation_rows, v_of_policy, values_requirement
from offrl.pretrained import Pretrained, Requirement
from offrl.registry import register
from offrl.settings.field import setting


@dataclass
class QDTConfig(TeacherSettings, TargetReturnSettings, SequenceSettings):
    """Settings of QDT."""

    name: str = "qdt"
    samples: int = setting(10, "actions of the values' policy whose mean Q is the value of a state", low=1)
    conservative_weight: float = setting(
        5.0, "of the CQL that is trained where values= names no run", low=0.0, shared=True
    )
    discount: float = setting(0.99, "the same CQL's discount factor", low=0.0, high=1.0, shared=True)
    value_hidden: list[int] = setting([256, 256], "widths of the same CQL's hidden layers", low=1)
    value_batch_size: int = setting(256, "transitions in a batch of the same CQL", low=1)


def relabel(rewards: np.ndarray, values: np.ndarray, start: np.ndarray, end: np.ndarray) -> np.ndarray:
    """R_t = r_t + max(R_{t+1}, V(s_{t+1})) inside each episode, from its end backwards (section 4); float64 [R].

    values [R]: V of each row's own observation. An episode's last row bootstraps from nothing.
    """
    out = rewards.astype(np.float64)
    order = np.argsort(start - end, kind="stable")  # longest first, so that the episodes still running are a prefix
    ends, lengths = end[order] - 1, (end - start)[order]
    for offset in range(1, int(lengths[0])):
        rows = ends[lengths > offset] - offset
        out[rows] += np.maximum(out[rows + 1], values[rows + 1])
    return out


@register("algo", "qdt")
class QDT(SequenceModel[QDTConfig]):
    """DT that learns from returns which a good policy could have earned from where the data went, by CQL's values.

    Each return is relabelled by itself, so those of an episode need not add up. Within a window they do, as when
    acting: the last one is the relabelled one, an earlier one the rewards until that step and that. The last step of a
    window is drawn anew in each update.

    CQL bounds values from below, so a return is only ever raised to a likely one. Target returns work as in DT, with
    the largest relabelled return from a first step as the default.
    """

    actor_class = TargetReturnActor

    @classmethod
    def requires(cls, config: TrainConfig, dataset: Dataset) -> dict[str, Requirement]:
        c = config.algo
        settings = {
            "conservative_weight": c.conservative_weight, "discount": c.discount, "hidden": list(c.value_hidden),
            "batch_size": c.value_batch_size,
        }  # fmt: skip
        # 500,000 updates of CQL, then 100,000
        return values_requirement(config, "cql", settings, check_values, ratio=5)

    @classmethod
    def adopt(cls, config: TrainConfig, dataset: Dataset, pretrained: Mapping[str, Any]) -> TrainConfig:
        """The largest relabelled return from a first step, where no target return is given."""
        c = config.algo
        if c.target_return is None:
            first = dataset.episode_start[drawn_episodes(dataset)].cpu()
            best = float(relabelled_returns(pretrained["values"], dataset, c.samples)[first].max())
            config = dataclasses.replace(config, algo=dataclasses.replace(c, target_return=round_digits(best)))
        return config

    def sampler(self) -> Sampler:
        return dataclasses.replace(super().sampler(), derived_columns=self.relabelled)  # type: ignore[type-var]

    def relabelled(self, dataset: Dataset) -> dict[str, Tensor]:
        """The relabelled returns to go of every row."""
        return {RETURNS: relabelled_returns(self.pretrained["values"], dataset, self.config.samples)}

    def actor_loss(self, actor: Params, state: TrainState, batch: Batch, key: Tensor) -> Loss:
        """E |a_t - pi(R_1, s_1, a_1, ..., R_t, s_t)|^2, or -log pi(a_t | ...), DT's loss on the returns of `relabel`
        (section 4).
        """
        cut_key, key = rng.split(key)
        batch = self.shortened(batch, cut_key)
        dist = self.apply("actor", actor, self.tokens(batch), batch[STEPS], batch[VALID], key)
        loss = masked_mean(self.policy.bc_loss(dist, batch["actions"]), batch[VALID])
        return loss, {"actor/loss": loss}

    def shortened(self, batch: Batch, key: Tensor) -> Batch:
        """Windows that end after a random number of their steps, with returns that follow from the relabelled one of
        their last step.
        """
        valid = batch[VALID]
        position, lengths = valid.cumsum(-1) - 1, valid.sum(-1)
        last = rng.randint(key, tuple(lengths.shape), lengths).unsqueeze(-1)
        rewards = torch.where(valid & (position < last), recorded(batch["rewards"], self.spec), 0.0)
        final = torch.where(valid & (position == last), batch[RETURNS], 0.0).sum(-1, keepdim=True)
        valid = valid & (position <= last)
        returns = rewards.flip(-1).cumsum(-1).flip(-1) + final
        return {**batch, VALID: valid, RETURNS: torch.where(valid, returns, 0.0)}


def check_values(run: Pretrained) -> None:
    """Raise UserError for a run without Q."""
    check_critics(run, "cql, or another actor-critic")


def relabelled_returns(run: Pretrained, dataset: Dataset, samples: int) -> Tensor:
    """`relabel`ed returns to go of every row, [R] float32, in the units of the recorded rewards."""
    spec = dataset.spec
    if spec.reward_shift:
        raise UserError(
            "qdt compares values with returns as recorded, and dataset.reward_shift adds to one but not the other: "
            "leave it at 0"
        )
    values = v_of_policy(run, observation_rows(dataset), samples).double().numpy()
    rewards = dataset.columns["rewards"].cpu().double().numpy()
    returns = relabel(rewards, values, dataset.episode_start.cpu().numpy(), dataset.episode_end.cpu().numpy())
    return torch.from_numpy((returns / (spec.reward_scale or 1.0)).astype(np.float32))
