"""Conservative Q-learning: a soft actor-critic whose critics are pushed down at the policy's actions and up at the data's.

"Conservative Q-Learning for Offline Reinforcement Learning" (Kumar et al., 2020, arXiv 2006.04779), CQL(H), with the details of the
implementation by young-geng that CORL and Cal-QL build on; the first authors' code does not give the paper's scores.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from offrl import rng
from offrl.algorithm import Metrics, TrainState
from offrl.data.dataset import Dataset
from offrl.data.samplers.transitions import Batch
from offrl.errors import UserError
from offrl.families.sac import LogWeight, SoftActorCritic, SoftSettings
from offrl.nn import Categorical, TanhGaussian
from offrl.optim import Params
from offrl.settings.field import setting

LARGEST_MULTIPLIER = 1e6


@dataclass
class SoftMaximumSettings(SoftSettings):
    """Settings of every penalty on the soft maximum of Q over actions."""

    hidden: list[int] = setting([256, 256, 256], "widths of the hidden layers", low=1)
    entropy_in_target: bool = setting(False, "whether the entropy counts in the critics' targets")
    conservative_weight: float = setting(10.0, "weight of the penalty: how far the critics are pushed down outside the data", low=0.0)
    cql_temperature: float = setting(1.0, "temperature of the penalty's logsumexp over actions", low=1e-6)
    actions: int = setting(10, "actions tried for each state: so many uniform ones, the policy's at s, and the policy's at s'", low=1)
    importance: bool = setting(True, "divide by the densities of the tried actions; false: count them alike, with the data's action")
    followed: int = setting(0, "of the tried actions draw so many, by their weight in the penalty, to carry its gradient; 0: all do", low=0)


@dataclass
class ConservativeSettings(SoftMaximumSettings):
    """Settings of CQL and what is built on it; the defaults are those for D4RL's locomotion tasks."""

    actor_learning_rate: float | None = setting(3e-5, "the actor's, where it is another; null: learning_rate", low=0.0)
    init: str = setting(
        "small_head",
        "initial weights: torch (uniform), orthogonal, fixed_bias (as EDAC and ReBRAC), small_head (as CQL)",
        choices=("torch", "orthogonal", "fixed_bias", "small_head"),
    )
    action_gap: float | None = setting(
        None,
        "learn a multiplier of conservative_weight that holds the penalised difference at this gap; null: no multiplier",
        structural=True,
    )
    smallest_difference: float | None = setting(None, "the penalised difference is clipped from below, state by state; null: not")
    largest_difference: float | None = setting(None, "and from above; null: not")
    penalty_share: float = setting(
        1.0, "share of the states of a batch on which the penalty is estimated", low=0.0, high=1.0, structural=True
    )


class SoftMaximum(SoftActorCritic):
    """The soft maximum of Q(s, .): logsumexp over tried actions, each divided by its density (equation 4 and appendix F of the paper), or
    for discrete actions the exact one over all. What is made of it, `penalty`, joins the critics' loss."""

    def tried(self, state: TrainState, batch: Batch, key: Tensor) -> tuple[Tensor, Tensor]:
        """Actions [3 n, B, A] for each state of the batch and their log densities [3 n, B]: uniform ones, the policy's at s, and at s'."""
        n, actor = self.config.actions, state.params["actor"]
        uniform, here, there = rng.split(key, 3)
        shape = (n, *batch["actions"].shape)
        drawn = rng.uniform(uniform, shape, -1.0, 1.0)
        density = torch.full(shape[:2], -shape[-1] * math.log(2.0), device=drawn.device)
        now, log_now = self.sample(actor, batch["observations"], here, n)
        later, log_later = self.sample(actor, batch["next_observations"], there, n)
        return torch.cat([drawn, now, later]), torch.cat([density, log_now, log_later])

    def calibrate(self, values: Tensor, batch: Batch) -> tuple[Tensor, Metrics]:
        """What the penalty takes for the values [E, 3 n, B] of tried actions; as they are unless overridden."""
        return values, {}

    def soft_maximum(self, critic: Params, state: TrainState, batch: Batch, key: Tensor) -> tuple[Tensor, Tensor, Metrics]:
        """Of Q(s, .) the soft maximum, and Q at the data's action, both [E, B].

        The temperature divides what the densities have been subtracted from, as in the implementation followed.
        """
        observations, temperature = batch["observations"], self.config.cql_temperature
        if self.spec.discrete:
            every = self.critic.head.mean(self.critic.logits_of_all(critic, observations))  # [E, B, K]
            index = batch["actions"].view(1, -1, 1).expand(every.shape[0], -1, 1)
            level = temperature * (every / temperature).logsumexp(-1)
            return level, every.gather(2, index).squeeze(2), {"cql/q_uniform": every.mean()}
        n = self.config.actions
        taken = self.critic.q(critic, observations, batch["actions"])
        actions, log_density = self.tried(state, batch, key)
        constant = {k: v.detach() for k, v in critic.items()} if self.config.followed else critic
        raw = self.critic.q(constant, observations, actions)  # [E, 3 n, B]
        metrics = {"cql/q_uniform": raw[:, :n].mean(), "cql/q_policy": raw[:, n : 2 * n].mean()}
        values, more = self.calibrate(raw, batch)
        free = values == raw  # where a change of Q changes what the penalty takes for it
        if self.config.importance:
            scores = (values - log_density) / temperature
        else:
            own = taken.detach() if self.config.followed else taken
            actions, free = torch.cat([actions, batch["actions"].unsqueeze(0)]), torch.cat([free, free.new_ones(own.shape).unsqueeze(1)], 1)
            scores = torch.cat([values, own.unsqueeze(1)], 1) / temperature
        level = temperature * self.joint(scores)
        if self.config.followed:
            level = level + self.follow(critic, observations, actions, scores, free, rng.fold_in(key, 3))
        return level, taken, {**metrics, **more}

    def joint(self, scores: Tensor) -> Tensor:
        """What the scores [E, M, B] of tried actions come to: their logsumexp, [E, B]."""
        return scores.logsumexp(1)

    def follow(self, critic: Params, observations: Tensor, actions: Tensor, scores: Tensor, free: Tensor, key: Tensor) -> Tensor:
        """Zeros [E, B] whose gradient is in expectation that of the logsumexp of scores [E, M, B] over actions [M, B, A].

        That gradient is the mean of Q's over actions drawn from the softmax of the scores, so it is enough to differentiate the few that
        are drawn. free [E, M, B]: whether Q has a gradient there.
        """
        many, (size, _, rows) = self.config.followed, scores.shape
        drawn = rng.categorical(key, scores.detach().transpose(1, 2).expand(many, size, rows, -1))  # [many, E, B]
        index = drawn.transpose(0, 1)  # [E, many, B]
        picked = actions.expand(size, *actions.shape).gather(1, index.unsqueeze(-1).expand(-1, -1, -1, actions.shape[-1]))
        inputs = torch.cat([observations.expand(size, many, *observations.shape), picked], -1)
        q = self.critic.head.mean(self.critic(critic, inputs.flatten(1, 2))).reshape(size, many, rows)
        return ((q - q.detach()) * free.gather(1, index)).mean(1)

    @abstractmethod
    def penalty(self, critic: Params, state: TrainState, batch: Batch, key: Tensor) -> tuple[Tensor, Metrics]:
        """The penalty, summed over critics, with its weight."""

    def critic_loss(self, critic: Params, state: TrainState, batch: Batch, key: Tensor) -> tuple[Tensor, Metrics]:
        loss, metrics = super().critic_loss(critic, state, batch, key)
        penalty, more = self.penalty(critic, state, batch, rng.fold_in(key, 102))
        return loss + penalty, {**metrics, **more}


class Conservative(SoftMaximum):
    """The critics' loss gains conservative_weight * (soft maximum over actions of Q(s, .) - Q(s, a)), for each critic.

    All losses of an update are those of the state before it. Modules: those of `SoftActorCritic`, and with `action_gap` "lagrange".
    """

    @classmethod
    def fit_config(cls, config: Any, dataset: Dataset, grid: Mapping[str, Sequence[float]] | None = None) -> Any:
        """Raises UserError for settings with which the penalty would be a constant."""
        low, high = ((grid or {}).get(name, [getattr(config, name)]) for name in ("smallest_difference", "largest_difference"))
        if None not in (*low, *high) and max(low) >= min(high):
            raise UserError(
                f"algo.smallest_difference={max(low):g} must be below algo.largest_difference={min(high):g}: nothing lies between them"
            )
        if config.penalty_share <= 0.0:
            raise UserError("algo.penalty_share=0 leaves no state to estimate the penalty on; algo.conservative_weight=0 goes without it")
        return super().fit_config(config, dataset, grid)

    def modules(self) -> dict[str, nn.Module]:
        modules = super().modules()
        return modules if self.config.action_gap is None else {**modules, "lagrange": LogWeight(math.e)}

    def make_actor(self) -> nn.Module:
        c, s = self.config, self.spec
        if s.discrete:
            return Categorical(s.observation_dim, s.num_actions, c.hidden, init=c.init)
        return TanhGaussian(s.observation_dim, s.action_dim, c.hidden, init=c.init, log_std_min=-20.0, log_std_max=2.0, scaled=True)

    def multiplier(self, lagrange: Params) -> Tensor:
        """The learnt multiplier, []."""
        return self.apply("lagrange", lagrange).clamp(max=LARGEST_MULTIPLIER)

    def penalty(self, critic: Params, state: TrainState, batch: Batch, key: Tensor) -> tuple[Tensor, Metrics]:
        """The penalty, summed over critics, with its weight."""
        c = self.config
        many = len(batch["rewards"])
        rows = max(1, round(c.penalty_share * many))
        if rows < many:  # evenly from the whole: online, the data's rows come first and the played ones after them
            some = torch.arange(rows, device=batch["rewards"].device) * many // rows
            batch = {k: v[some] for k, v in batch.items()}
        level, taken, metrics = self.soft_maximum(critic, state, batch, key)
        difference = level - taken  # [E, B]
        if c.smallest_difference is not None:
            difference = difference.clamp(min=c.smallest_difference)
        if c.largest_difference is not None:
            difference = difference.clamp(max=c.largest_difference)
        each = difference.mean(-1)
        metrics = {**metrics, "cql/difference": each.mean(), "cql/q_data": taken.mean()}
        if c.action_gap is not None:
            loss = self.multiplier(state.params["lagrange"]) * c.conservative_weight * (each - c.action_gap).sum()
        else:
            loss = c.conservative_weight * each.sum()
        return loss, {**metrics, "cql/penalty": loss}

    def lagrange_loss(self, lagrange: Params, state: TrainState, difference: Tensor) -> tuple[Tensor, Metrics]:
        """Raises the multiplier while the mean over critics of the difference, [], is above the gap (equation 30 of the paper)."""
        multiplier = self.multiplier(lagrange)
        loss = -multiplier * self.config.conservative_weight * (difference - self.config.action_gap)
        return loss, {"cql/multiplier": multiplier}

    def update(self, state: TrainState, batch: Batch, key: Tensor, *, phase: int) -> tuple[TrainState, Metrics]:
        now, after = rng.split(key)
        if self.spec.discrete:
            (log_p,) = self.apply("actor", state.params["actor"], batch["observations"])
            log_density = (log_p.exp() * log_p).sum(-1)
        else:
            _, log_density = self.sample(state.params["actor"], batch["observations"], now)
        moved = {  # each from the state before the update
            "entropy": self.descend(state, "entropy", self.entropy_loss, log_density),
            "actor": self.descend(state, "actor", self.actor_loss, batch, now),
            "critic": self.descend(state, "critic", self.critic_loss, batch, after),
        }
        moved["critic"] = self.critic.regularised(moved["critic"][0]), moved["critic"][1]
        if self.config.action_gap is not None:
            difference = moved["critic"][1]["cql/difference"]
            moved["lagrange"] = self.descend(state, "lagrange", self.lagrange_loss, difference)
        state = state._replace(
            params={name: moved[name][0].params[name] for name in state.params},
            opt={name: moved[name][0].opt[name] for name in state.opt},
            extra=moved["critic"][0].extra,
        )
        return self.polyak(state, "critic", self.config.polyak), {k: v for _, metrics in moved.values() for k, v in metrics.items()}
