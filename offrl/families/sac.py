"""Soft actor-critic on data: a stochastic policy, a learnt weight of its entropy, any number of critics."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar, cast

import torch
from torch import Tensor, nn

from offrl import rng
from offrl.algorithm import Adam, Algorithm, Batch, Loss, Params, TrainState, Update, merged
from offrl.errors import UserError
from offrl.families.critics import ConstraintSettings, Critic, CriticSettings, RiskSettings, Target, Values, WithCritic
from offrl.nn import Categorical, TanhGaussian
from offrl.settings.field import defaults, setting


@dataclass
class SoftSettings(CriticSettings):
    """Settings of soft actor-critics."""

    entropy_learning_rate: float | None = setting(
        None, "Adam's rate for the weight of the entropy; null: the actor's", low=0.0
    )
    entropy_weight: float = setting(1.0, "weight of the entropy (SAC's alpha) at the start", low=1e-8)
    max_entropy_weight: float | None = setting(
        None, "the entropy's weight counts as at most this; null: as it is", low=0.0
    )
    target_entropy: float | None = setting(
        None,
        "entropy, in nats, that its learnt weight holds the policy at; null: minus the action dimensions (discrete: "
        "0.1 log K)",
    )
    target_entropy_scale: float = setting(
        1.0, "multiplies what target_entropy is where it is null (RLPD: 0.5)", low=0.0
    )
    entropy_in_target: bool = setting(True, "whether the entropy counts in the critics' targets")
    max_target_actions: int = setting(
        1, "targets take the best of so many actions of the policy, not one (CQL on AntMaze: 10)", low=1
    )
    actor_value: str = setting(
        "min",
        "what the actor maximises: the smallest of the critics' values, or their mean (REDQ, RLPD)",
        choices=("min", "mean"),
    )


@dataclass
class SplitSettings:
    """Settings of soft actor-critics whose critics may learn more often than the policy."""

    utd_split: int = setting(
        1,
        "critics make so many updates, one on each part of a batch, before the policy and the entropy's weight make "
        "one; batch_size is the whole batch",
        low=1,
    )


ConfigT = TypeVar("ConfigT", bound=SoftSettings)


class LogWeight(nn.Module):
    """One learnt number: the logarithm of a positive weight."""

    def __init__(self, weight: float) -> None:
        super().__init__()
        self.log = nn.Parameter(torch.tensor(weight).log())

    def forward(self) -> Tensor:
        """The weight, []."""
        return self.log.exp()


class SoftActorCritic(WithCritic, Algorithm[ConfigT]):
    """SAC (arXiv 1812.05905) with the smallest of E critics. Modules: actor, critic, entropy (the learnt weight).

    With discrete actions the policy is categorical and expectations over it are exact (arXiv 1910.07207).
    """

    critic: Critic
    actor_form: ClassVar[dict[str, Any]] = {}  # further arguments of `TanhGaussian`
    norm_first: ClassVar[bool] = False  # the critics' LayerNorm stands before the activation
    critic_class: ClassVar[type[Critic]] = Critic

    def modules(self) -> dict[str, nn.Module]:
        entropy, actor = LogWeight(self.config.entropy_weight), self.make_actor()
        self.critic = self.critic_class(self.config, self.spec, norm_first=self.norm_first)
        return {"entropy": entropy, "actor": actor, "critic": self.critic.network, **self.cost_modules()}

    def make_actor(self) -> nn.Module:
        """The policy network."""
        c, s = self.config, self.spec
        form: dict[str, Any] = {"activation": c.activation, "init": c.init}
        if s.discrete:
            return Categorical(s.observation_dim, s.num_actions, c.hidden, **form)
        return TanhGaussian(s.observation_dim, s.action_dim, c.hidden, **form, **self.actor_form)

    def optimizer(self, name: str) -> Adam:
        if name != "entropy":
            return super().optimizer(name)
        c = self.config
        rates = c.entropy_learning_rate, c.actor_learning_rate, c.learning_rate
        return Adam(next(rate for rate in rates if rate is not None))

    @property
    def target_entropy(self) -> float:
        """The entropy that the policy is held at: `target_entropy`, or -A; for K discrete actions a tenth of log K.

        arXiv 1910.07207 holds discrete policies near log K, for exploration; learnt from data alone that is a policy of
        mostly random actions, and its value. A tenth is 99% for the better of two actions, and the weight still
        answers.
        """
        if self.config.target_entropy is not None:
            return self.config.target_entropy
        s = self.spec
        default = 0.1 * math.log(s.num_actions) if s.discrete else -float(s.action_dim)
        return self.config.target_entropy_scale * default

    def sample(
        self, actor: Params, observations: Tensor, key: Tensor, count: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """Reparametrised actions [B, A] and their log densities [B]; with `count` [count, B, A] and [count, B]."""
        dist = self.apply("actor", actor, observations)
        return cast(TanhGaussian, self.policy).sample_with_log_prob(dist, key, count)

    def probabilities(self, actor: Params, observations: Tensor) -> tuple[Tensor, Tensor]:
        """Discrete actions: the policy's log probabilities [B, K] and its entropy [B]."""
        (log_p,) = self.apply("actor", actor, observations)
        return log_p, -(log_p.exp() * log_p).sum(-1)

    def negative_entropy(self, actor: Params, observations: Tensor, key: Tensor) -> Tensor:
        """log pi [B] of an action of the policy; discrete: its exact expectation."""
        return (
            -self.probabilities(actor, observations)[1]
            if self.spec.discrete
            else self.sample(actor, observations, key)[1]
        )

    def entropy_loss(self, entropy: Params, state: TrainState, negative_entropy: Tensor) -> Loss:
        """-log alpha * (log pi + target entropy), the usual form; negative_entropy [B]: log densities, or minus the
        entropies.
        """
        weight = self.apply("entropy", entropy)
        # not weight.log(): where the entropy stays above its target the weight falls for good, and in the end to 0
        loss = -(entropy["log"] * (negative_entropy + self.target_entropy)).mean()
        return loss, {"entropy/weight": weight, "entropy/policy": -negative_entropy.mean()}

    def linear_entropy_loss(
        self, entropy: Params, state: TrainState, negative_entropy: Tensor, target: float | Tensor | None = None
    ) -> Loss:
        """alpha (entropy of the policy - target entropy), the form of jaxrl and its descendants; negative_entropy: log
        densities [B], or their mean. target: in place of `target_entropy`.
        """
        weight, mean = self.apply("entropy", entropy), -negative_entropy.mean()
        loss = weight * (mean - (self.target_entropy if target is None else target))
        return loss, {"entropy/weight": weight, "entropy/policy": mean}

    def weight(self, state: TrainState) -> Tensor:
        """The weight of the entropy, [], at most `max_entropy_weight`."""
        weight, limit = self.apply("entropy", state.params["entropy"]), self.config.max_entropy_weight
        return weight if limit is None else weight.clamp(max=limit)

    def actor_loss(self, actor: Params, state: TrainState, batch: Batch, key: Tensor) -> Loss:
        """E [alpha log pi(a|s) - min_i Q_i(s, a)], a a reparametrised sample of the policy."""
        weight, critic, observations = self.weight(state), state.params["critic"], batch["observations"]
        if self.spec.discrete:
            log_p, entropy = self.probabilities(actor, observations)
            q, _ = self.critic.expected_q(critic, observations, log_p, self.config.actor_value, at_risk=True)
            policy, loss = log_p, -(q + weight * entropy).mean()
        else:
            policy, log_p = self.sample(actor, observations, key)
            q = self.critic.reduce_ensemble(self.critic.actor_q(critic, observations, policy), self.config.actor_value)
            loss = (weight * log_p - q).mean()
        metrics = {"actor/loss": loss, "actor/q": q.mean()}
        return self.limited(loss, metrics, state, observations, policy, q.detach().abs().mean())

    def next_policy(self, state: TrainState, batch: Batch, key: Tensor) -> Tensor:
        """Actions [B, A] of the policy at the next observations; discrete: its log probabilities [B, K]."""
        actor, observations = state.params["actor"], batch["next_observations"]
        return (
            self.probabilities(actor, observations) if self.spec.discrete else self.sample(actor, observations, key)
        )[0]

    def target(self, state: TrainState, actor: Params, batch: Batch, key: Tensor) -> Target:
        """r + discount * (1 - terminated) * (min_k Q'_k(s', a') - alpha log pi(a'|s')), a' from the policy, or the best
        of several.
        """
        if self.config.max_target_actions > 1:
            return self.best_target(state, actor, batch, key, self.config.max_target_actions)
        weight = self.weight(state) * float(self.config.entropy_in_target)
        observations = batch["next_observations"]
        target_critics = self.critic.target_critics(state, rng.fold_in(key, 100))
        if self.spec.discrete:
            log_p, entropy = self.probabilities(actor, observations)
            value, mixture = self.critic.expected_q(target_critics, observations, log_p)
            return self.critic.td_target(batch, Values(value + weight * entropy, mixture))
        action, log_p = self.sample(actor, observations, key)
        value, logits = self.critic.min_q(target_critics, observations, action)
        return self.critic.td_target(batch, Values(value - weight * log_p, logits))

    def best_target(self, state: TrainState, actor: Params, batch: Batch, key: Tensor, count: int) -> Target:
        """The target with, for V(s'), the best of `count` actions of the policy by the smallest of the critics
        (discrete: of all).
        """
        observations = batch["next_observations"]
        target_critics = self.critic.target_critics(state, rng.fold_in(key, 100))
        if self.spec.discrete:
            logits = self.critic.logits_of_all(target_critics, observations).transpose(1, 2)  # [E, K, B, out_dim]
            log_p = self.apply("actor", actor, observations)[0].T
        else:
            action, log_p = self.sample(actor, observations, key, count)
            logits = self.critic.logits(target_critics, observations, action)  # [E, M, B, out_dim]
        values = self.critic.head.mean(logits)
        best = values.amin(0).argmax(0, keepdim=True)  # [1, B]
        value = values.amin(0).gather(0, best).squeeze(0)
        value = value - self.weight(state) * float(self.config.entropy_in_target) * log_p.gather(0, best).squeeze(0)
        if not self.critic.head.distributional:
            return self.critic.td_target(batch, Values(value))
        width = logits.shape[-1]
        # [E, B, out_dim]
        best_logits = logits.gather(1, best.view(1, 1, -1, 1).expand(logits.shape[0], 1, -1, width)).squeeze(1)
        return self.critic.td_target(batch, Values(value, self.critic.smallest(best_logits).logits))

    def critic_loss(self, critic: Params, state: TrainState, batch: Batch, key: Tensor) -> Loss:
        """E (r + gamma (min_j Q'_j(s', a') - alpha log pi(a'|s')) - Q_i(s, a))^2, summed over critics i."""
        return self.critic.loss(critic, batch, self.target(state, state.params["actor"], batch, key), key)

    def update(self, state: TrainState, batch: Batch, key: Tensor, *, phase: int) -> Update:
        actor_key, critic_key = rng.split(key)
        negative_entropy = self.negative_entropy(state.params["actor"], batch["observations"], actor_key)
        state, entropy = self.descend(state, "entropy", self.entropy_loss, negative_entropy)
        state, actor = self.descend(state, "actor", self.actor_loss, batch, actor_key)
        state, critic = self.descend(state, "critic", self.critic_loss, batch, critic_key)
        state = self.polyak(self.critic.regularised(state), "critic")
        state, costs = self.learn_costs(state, batch, lambda b: self.next_policy(state, b, critic_key), actor)
        return state, {**entropy, **actor, **critic, **costs}

    # ---- batches of several parts (RLPD, WSRL)

    def batch_parts(self, batch: Batch) -> list[Batch]:
        """The `utd_split` parts of a batch: row i is in part i modulo their number, so that each has its share of the
        data's rows, which come first in a batch of data and play. Raises UserError where that cannot be."""
        rows, count = len(batch["rewards"]), cast(SplitSettings, self.config).utd_split
        if count == 1:
            return [batch]
        if rows % count:
            raise UserError(f"algo.batch_size={rows} must be a multiple of algo.utd_split={count}")
        if self.encoder is not None:
            raise UserError("algo.utd_split must be 1 with an encoder, which has read the batch before it is cut")
        return [{name: column[i::count] for name, column in batch.items()} for i in range(count)]

    def critic_steps(self, state: TrainState, parts: list[Batch], key: Tensor) -> Update:
        """A step of the critics on each part in turn, after each of which the targets move; metrics are means over
        them."""
        each = []
        for i, part in enumerate(parts):
            state, metrics = self.descend(state, "critic", self.critic_loss, part, rng.fold_in(key, i))
            state = self.polyak(self.critic.regularised(state), "critic")
            each.append(metrics)
        return state, {name: torch.stack([metrics[name] for metrics in each]).mean(0) for name in each[0]}

    def policy_step(self, state: TrainState, batch: Batch, key: Tensor, negative_entropy: Tensor) -> Update:
        """A step of the policy on a batch and one of the entropy's weight, both from the state before them."""
        entropy, entropy_metrics = self.descend(state, "entropy", self.entropy_loss, negative_entropy)
        actor, metrics = self.descend(state, "actor", self.actor_loss, batch, key)
        return merged(state, entropy, actor), {**entropy_metrics, **metrics}


@dataclass
@defaults(hidden=[256, 256, 256], critics=10, init="fixed_bias")
class ManyCriticsSettings(SoftSettings, ConstraintSettings, RiskSettings):
    """Settings of SAC-N and EDAC; the defaults are the authors'."""
