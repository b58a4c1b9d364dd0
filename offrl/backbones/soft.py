"""Soft actor-critic on data: a stochastic policy, a learnt weight of its entropy, any number of critics."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from offrl import rng
from offrl.algorithm import Metrics, TrainState
from offrl.backbones.critics import CriticAlgorithm, CriticSettings, Target
from offrl.data.samplers import Batch
from offrl.nn import Categorical, TanhGaussian
from offrl.optim import Adam, Params
from offrl.settings import setting


@dataclass
class SoftSettings(CriticSettings):
    """Settings of soft actor-critics."""

    entropy_learning_rate: float | None = setting(None, "Adam's rate for the weight of the entropy; null: the actor's", low=0.0)
    entropy_weight: float = setting(1.0, "weight of the entropy (SAC's alpha) at the start", low=1e-8)
    target_entropy: float | None = setting(
        None, "entropy, in nats, that its learnt weight holds the policy at; null: minus the action dimensions (discrete: 0.1 log K)"
    )
    entropy_in_target: bool = setting(True, "whether the entropy counts in the critics' targets")


class LogWeight(nn.Module):
    """One learnt number: the logarithm of a positive weight."""

    def __init__(self, weight: float) -> None:
        super().__init__()
        self.log = nn.Parameter(torch.tensor(weight).log())

    def forward(self) -> Tensor:
        """The weight, []."""
        return self.log.exp()


class SoftActorCritic(CriticAlgorithm):
    """SAC (arXiv 1812.05905) with the smallest of E critics. Modules: actor, critic, entropy (the learnt weight).

    With discrete actions the policy is categorical and expectations over it are exact (arXiv 1910.07207). Subclasses add to
    `critic_loss`.
    """

    def build(self) -> dict[str, nn.Module]:
        c = self.config
        return {"entropy": LogWeight(c.entropy_weight), "actor": self.make_actor(), "critic": self.make_critic()}

    def make_actor(self) -> nn.Module:
        """The policy network."""
        c, s = self.config, self.spec
        if s.discrete:
            return Categorical(s.observation_dim, s.num_actions, c.hidden, init=c.init)
        return TanhGaussian(s.observation_dim, s.action_dim, c.hidden, init=c.init)

    def optimizer(self, name: str) -> Adam:
        c = self.config
        if name == "entropy" and c.entropy_learning_rate is not None:
            return Adam(learning_rate=c.entropy_learning_rate)
        return super().optimizer("actor" if name == "entropy" else name)

    @property
    def wanted_entropy(self) -> float:
        """The entropy that the policy is held at: `target_entropy`, or -A; for K discrete actions a tenth of log K."""
        if self.config.target_entropy is not None:
            return self.config.target_entropy
        s = self.spec
        return 0.1 * float(torch.tensor(float(s.num_actions)).log()) if s.discrete else -float(s.action_dim)

    def sample(self, actor: Params, observations: Tensor, key: Tensor, many: int | None = None) -> tuple[Tensor, Tensor]:
        """Reparametrised actions [B, A] and their log densities [B]; with `many` [many, B, A] and [many, B]."""
        dist = self.apply("actor", actor, observations)
        return cast(TanhGaussian, self.policy).sample_with_log_prob(dist, key, many)

    def expectation(self, actor: Params, critic: Params, observations: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Discrete actions: E_a[min_k Q_k(s, a) - weight log pi(a|s)] and the entropy, both [B] and exact."""
        (log_p,) = self.apply("actor", actor, observations)  # [B, K]
        p = log_p.exp()
        q = self.head.mean(self.q_each(critic, observations)).amin(0)  # [B, K]
        return (p * (q - weight * log_p)).sum(-1), -(p * log_p).sum(-1)

    def entropy_loss(self, entropy: Params, state: TrainState, negative_entropy: Tensor) -> tuple[Tensor, Metrics]:
        """-log alpha * (log pi + target entropy), the usual form; negative_entropy [B]: log densities, or minus the entropies."""
        weight = self.apply("entropy", entropy)
        loss = -(weight.log() * (negative_entropy + self.wanted_entropy)).mean()
        return loss, {"entropy/weight": weight, "entropy/policy": -negative_entropy.mean()}

    def weight(self, state: TrainState) -> Tensor:
        """The weight of the entropy, []."""
        return self.apply("entropy", state.params["entropy"])

    def actor_loss(self, actor: Params, state: TrainState, batch: Batch, key: Tensor) -> tuple[Tensor, Metrics]:
        weight, critic, observations = self.weight(state), state.params["critic"], batch["observations"]
        if self.spec.discrete:
            soft, entropy = self.expectation(actor, critic, observations, weight)
            loss = -soft.mean()
            return loss, {"actor/loss": loss, "actor/q": (soft - weight * entropy).mean()}
        action, log_p = self.sample(actor, observations, key)
        q = self.values(critic, observations, action).amin(0)
        loss = (weight * log_p - q).mean()
        return loss, {"actor/loss": loss, "actor/q": q.mean()}

    def target(self, state: TrainState, actor: Params, batch: Batch, key: Tensor) -> Target:
        """r + discount * (1 - terminated) * (min_k Q'_k(s', a') - alpha log pi(a'|s')), a' from the policy."""
        weight = self.weight(state) * float(self.config.entropy_in_target)
        observations, voters = batch["next_observations"], self.voters(state, rng.fold_in(key, 100))
        if self.spec.discrete:
            value, _ = self.expectation(actor, voters, observations, weight)
            return self.td_target(batch, value, self.mixture(actor, voters, observations) if self.head.distributional else None)
        action, log_p = self.sample(actor, observations, key)
        value, logits = self.smallest(self.q(voters, observations, action))
        return self.td_target(batch, value - weight * log_p, logits)

    def mixture(self, actor: Params, critic: Params, observations: Tensor) -> Tensor:
        """Discrete actions: log probabilities [B, K bins] of the policy's mixture of the next values' distributions."""
        (log_p,) = self.apply("actor", actor, observations)
        each = self.q_each(critic, observations).log_softmax(-1)  # [E, B, actions, bins]
        least = self.head.mean(each).argmin(0)[None, ..., None].expand(1, *each.shape[1:])
        return (each.gather(0, least).squeeze(0) + log_p.unsqueeze(-1)).logsumexp(-2)

    def critic_loss(self, critic: Params, state: TrainState, batch: Batch, key: Tensor) -> tuple[Tensor, Metrics]:
        return self.td_loss(critic, batch, self.target(state, state.params["actor"], batch, key), key)

    def update(self, state: TrainState, batch: Batch, key: Tensor, *, phase: int) -> tuple[TrainState, Metrics]:
        now, after = rng.split(key)
        if self.spec.discrete:
            (log_p,) = self.apply("actor", state.params["actor"], batch["observations"])
            log_density = (log_p.exp() * log_p).sum(-1)
        else:
            _, log_density = self.sample(state.params["actor"], batch["observations"], now)
        state, entropy = self.descend(state, "entropy", self.entropy_loss, log_density)
        state, actor = self.descend(state, "actor", self.actor_loss, batch, now)
        state, critic = self.train_critic(state, self.critic_loss, batch, after)
        return self.polyak(state, "critic", self.config.polyak), {**entropy, **actor, **critic}
