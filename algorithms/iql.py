"""Implicit Q-learning: "Offline Reinforcement Learning with Implicit Q-Learning" (Kostrikov et al., 2021, arXiv
2110.06169).
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from offrl import losses
from offrl.algorithm import Actor, Algorithm, Batch, Loss, Params, TrainState, Update
from offrl.families import in_sample
from offrl.families.critics import Critic, Value, Values, WithCritic
from offrl.families.in_sample import InSampleSettings
from offrl.registry import register
from offrl.settings.field import setting


@dataclass
class IQLConfig(InSampleSettings):
    """Settings of IQL; the defaults are the authors' for D4RL's locomotion tasks."""

    name: str = "iql"
    expectile: float = setting(
        0.7, "tau: 0.5 values the data's policy, 1.0 the best action in the data", low=0.0, high=1.0
    )
    update_order: str = setting(
        "sequential",
        "sequential: V, the policy by the new V and the target critics, the critics (as published); simultaneous: all "
        "from the parameters before the update, the policy by the online critics (as OGBench)",
        choices=("sequential", "simultaneous"),
    )


@register("algo", "iql")
class IQL(WithCritic, Algorithm[IQLConfig]):
    """Expectile V, one-step Q, advantage-weighted policy: no action outside the data is ever evaluated."""

    def modules(self) -> dict[str, nn.Module]:
        self.value = Value(self.config, self.spec)
        actor = in_sample.make_actor(self.config, self.spec)
        self.critic = Critic(self.config, self.spec)
        return {"value": self.value.network, "actor": actor, "critic": self.critic.network}

    def value_loss(self, value: Params, state: TrainState, batch: Batch, q: Values) -> Loss:
        """E |tau - 1(Q - V < 0)| (Q - V)^2 (equation 5)."""
        v = self.value(value, batch["observations"])
        weight = losses.expectile_weight(q.mean - v.mean, self.config.expectile)
        loss = (weight * self.value.objective(v, q)).mean()
        return loss, {"value/loss": loss, "value/v": v.mean.mean()}

    def critic_loss(self, critic: Params, state: TrainState, batch: Batch, key: Tensor) -> Loss:
        """E (r + gamma V(s') - Q(s, a))^2 (equation 6)."""
        next_v = self.value(state.params["value"], batch["next_observations"])
        return self.critic.loss(critic, batch, self.critic.td_target(batch, next_v), key)

    def actor_loss(self, actor: Params, state: TrainState, batch: Batch, q: Tensor, key: Tensor) -> Loss:
        """-E min(exp(beta (Q - V)), cap) log pi(a|s) (equation 7)."""
        advantage = q - self.value(state.params["value"], batch["observations"]).mean
        weight = losses.advantage_weight(advantage, self.config.temperature, self.config.max_weight)
        dist = self.apply("actor", actor, batch["observations"], key)
        loss = (weight * self.policy.bc_loss(dist, batch["actions"])).mean()
        return loss, {"actor/loss": loss, "actor/advantage": advantage.mean(), "actor/weight": weight.mean()}

    def update(self, state: TrainState, batch: Batch, key: Tensor, *, phase: int) -> Update:
        q = self.critic.min_q(self.critic.target_critics(state, key), batch["observations"], batch["actions"])
        if self.config.update_order == "simultaneous":  # the policy by the online critics
            online = self.critic.min_q(state.params["critic"], batch["observations"], batch["actions"]).mean
            return self.simultaneous(
                state,
                self.descend(state, "value", self.value_loss, batch, q),
                self.descend(state, "actor", self.actor_loss, batch, online, key),
                self.descend(state, "critic", self.critic_loss, batch, key),
            )
        state, value = self.descend(state, "value", self.value_loss, batch, q)
        # with the new V, as the authors' code
        state, actor = self.descend(state, "actor", self.actor_loss, batch, q.mean, key)
        state, critic = self.descend(state, "critic", self.critic_loss, batch, key)
        state = self.critic.regularised(state)
        return self.polyak(state, "critic"), {**value, **actor, **critic}

    def actor(self, state: TrainState) -> Actor:
        return in_sample.actor_of(self, state)
