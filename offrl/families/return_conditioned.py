"""Return-conditioned policies: the target return, the return-to-go, and policies of one observation and it."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from offrl.algorithm import Actor, Adam, Algorithm, Carry, Dataset, DataSpec, Grid, Sampler
from offrl.data.samplers.sequences import SequenceSampler, drawn_episodes
from offrl.nn import make_policy
from offrl.settings.field import setting


@dataclass
class TargetReturnSettings:
    """Settings of return-conditioned policies.

    targets_ahead: a target is of the rest of the episode, discounted and the same at every step; no episode's return is
    compared with it."""

    targets_ahead: ClassVar[bool] = False

    target_return: float | None = setting(
        None,
        "what the policy is asked to earn in an episode, in the units of the recorded rewards; null: the best return "
        "in the data",
        acting=True,
    )
    return_scale: float | None = setting(
        None,
        "returns are divided by this before a network sees them; null: the largest absolute return in the data",
        low=1e-9,
    )

    @property
    def scale(self) -> float:
        """`return_scale`, as given or found from the data."""
        assert self.return_scale is not None
        return self.return_scale


def fit_target_return(config: Any, dataset: Dataset) -> Any:
    """`config` with the data's best return as the target and its largest absolute one as the scale, where these are not
    given.

    Returns, as in `SequenceSampler`, are in the units of the recorded rewards.
    """
    returns = dataset.raw_returns[drawn_episodes(dataset).cpu()]
    best, magnitude = float(returns.max()), float(returns.abs().max())
    if config.target_return is None:
        config = dataclasses.replace(config, target_return=round_digits(best))
    if config.return_scale is None:
        config = dataclasses.replace(config, return_scale=round_digits(magnitude) or 1.0)
    return config


def recorded(rewards: Tensor, spec: DataSpec) -> Tensor:
    """Rewards in training units as they were recorded."""
    return (rewards - spec.reward_shift) / (spec.reward_scale or 1.0)


def round_digits(value: float, digits: int = 5) -> float:
    """A number with `digits` significant digits: the same on machines that add up in another order, for it is part of a
    run's identity.
    """
    return 0.0 if value == 0.0 else round(value, digits - 1 - math.floor(math.log10(abs(value))))


@dataclass
class OutcomeSettings(TargetReturnSettings):
    """Settings of return-conditioned policies without a memory."""

    learning_rate: float = setting(1e-3, "AdamW's learning rate", low=0.0)
    weight_decay: float = setting(0.0, "AdamW's decay of all parameters", low=0.0, structural=True)
    batch_size: int = setting(256, "time steps in a batch", low=1)
    hidden: list[int] = setting([1024, 1024], "widths of the hidden layers", low=1)
    dropout: float = setting(0.0, "dropout rate of the hidden layers", low=0.0, high=0.99, structural=True)
    condition: str = setting(
        "to_go",
        "to_go: the return that is left, less with every reward; average: the return to go divided by the steps that "
        "are left until `max_length`, and when acting a constant",
        choices=("average", "to_go"),
    )
    max_length: int | None = setting(
        None, "condition=average: steps of the longest episode; null: of those in the data", low=1
    )
    policy: str = setting(
        "gaussian",
        "gaussian, tanh_gaussian: negative log-likelihood; deterministic: squared error (discrete actions: always "
        "categorical)",
        choices=("deterministic", "gaussian", "tanh_gaussian"),
    )


class OutcomeActor(Actor):
    """Policy that acts for a target return. A carry is the return-to-go, [E] in the units of the recorded rewards."""

    algorithm: OutcomeConditioned

    def start(self, episodes: int) -> Carry:
        return torch.full((episodes,), float(self.algorithm.config.target_return))

    def act(self, carry: Carry, observations: Tensor, key: Tensor, *, explore: bool) -> tuple[Tensor, Carry]:
        share = carry.to(observations.device) / self.algorithm.config.scale
        dist = self.apply("actor", self.algorithm.inputs(observations, share))
        return self.choose(dist, key, explore), carry

    def observe_reward(self, carry: Carry, rewards: Tensor) -> Carry:
        # an average stays the target, as in the authors' evaluation: the rewards earned are not subtracted
        return carry if self.algorithm.config.condition == "average" else carry - recorded(rewards, self.algorithm.spec)


ConfigT = TypeVar("ConfigT", bound=OutcomeSettings)


class OutcomeConditioned(Algorithm[ConfigT]):
    """A policy pi(a | s, w) without a memory, which acts with the target return for its outcome w. A subclass has its
    loss and its update.

    Batches are steps with the return that followed them. Episodes of which the data lack the end have no return, and
    are not learnt from."""

    actor_class = OutcomeActor

    @classmethod
    def fit_config(cls, config: ConfigT, dataset: Dataset, grid: Grid = None) -> ConfigT:
        config = fit_target_return(config, dataset)
        if config.max_length is None:
            config = dataclasses.replace(
                config, max_length=int(dataset.episode_lengths()[drawn_episodes(dataset)].max())
            )
        return config

    @property
    def outcome_dim(self) -> int:
        """The width of an outcome w."""
        return 1

    def modules(self) -> dict[str, nn.Module]:
        c, s = self.config, self.spec
        inputs = s.observation_dim + self.outcome_dim
        return {"actor": make_policy(c.policy, inputs, s.action_dim, s.num_actions, c.hidden, dropout=c.dropout)}

    def sampler(self) -> Sampler:
        return SequenceSampler(1)

    def optimizer(self, name: str) -> Adam:
        return Adam(self.config.learning_rate, weight_decay=self.config.weight_decay)

    def inputs(self, observations: Tensor, outcome: Tensor) -> Tensor:
        """The network's input [B, O + 1] of observations [B, *O] and w [B]."""
        return torch.cat([observations.flatten(1), outcome.unsqueeze(-1)], -1)

    def outcome(self, returns: Tensor, timesteps: Tensor) -> Tensor:
        """w [B] of returns to go [B] at these time steps of their episodes: a share of `return_scale`.

        An average reward is multiplied by the length of the longest episode, so that both kinds are the same at an
        episode's start."""
        share, longest = returns / self.config.scale, self.config.max_length
        if self.config.condition != "average":
            return share
        assert longest is not None  # `fit_config` has found it
        return share * longest / (longest - timesteps).clamp(min=1)
