"""Learning inside the data: V from Q at the data's actions, Q from V of the next state, a policy by advantage-weighted imitation.

IQL, XQL and f-DVL are this with different losses of V (`value_objective`).
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

from torch import Tensor, nn

from offrl import losses
from offrl.actor import Actor, NoisyActor
from offrl.algorithm import Metrics, TrainState
from offrl.data.samplers.transitions import Batch
from offrl.families.critics import CriticAlgorithm, CriticSettings
from offrl.nn import Bootstrap, Deterministic, make_policy
from offrl.optim import Adam, Params
from offrl.settings.field import setting


@dataclass
class InSampleSettings(CriticSettings):
    """Settings of IQL and its relatives; the defaults are the authors' for D4RL's locomotion tasks."""

    init: str = setting(
        "orthogonal",
        "initial weights: orthogonal (as published), torch (uniform), fixed_bias, small_head",
        choices=("orthogonal", "torch", "fixed_bias", "small_head"),
    )
    temperature: float = setting(3.0, "multiplies the advantage in the exponent; larger is greedier", low=0.0)
    largest_weight: float = setting(100.0, "cap of the exponential weights", low=0.0)
    policy: str = setting(
        "gaussian",
        "gaussian (as published), tanh_gaussian, or deterministic with squared error (discrete actions: always categorical)",
        choices=("gaussian", "tanh_gaussian", "deterministic"),
    )
    dropout: float = setting(0.0, "dropout rate of the policy", low=0.0, high=0.99, structural=True)
    actor_schedule: str = setting("cosine", "the actor's learning rate over decay_steps", choices=("cosine", "constant"))
    decay_steps: int = setting(1_000_000, "length of the schedule in updates, as published whatever the run's length", low=1)


class InSampleQ(CriticAlgorithm):
    """No action outside the data is ever evaluated. A subclass gives the loss of V."""

    def modules(self) -> dict[str, nn.Module]:
        c, s = self.config, self.spec
        return {
            "value": self.make_value(),
            "actor": make_policy(c.policy, s.observation_dim, s.action_dim, s.num_actions, c.hidden, dropout=c.dropout, init=c.init),
            "critic": self.make_critic(),
        }

    def optimizer(self, name: str) -> Adam:
        c, adam = self.config, super().optimizer(name)
        if name == "actor" and c.actor_schedule != "constant":
            return Adam(learning_rate=adam.learning_rate, schedule=c.actor_schedule, decay_steps=c.decay_steps)
        return adam

    def v(self, value: Params, observations: Tensor) -> Tensor:
        """State values [B]."""
        return self.head.mean(self.apply("value", value, observations))

    def target_q(self, state: TrainState, batch: Batch, key: Tensor) -> tuple[Tensor, Tensor | None]:
        """The smallest target critic at the data's actions [B], and its outputs where the head wants them."""
        return self.smallest(self.q(self.voters(state, key), batch["observations"], batch["actions"]))

    @abstractmethod
    def value_objective(self, logits: Tensor, q: Tensor, bootstrap: Bootstrap | None) -> Tensor:
        """The loss of V's outputs [B, out_dim] against Q [B]: one number per row, [B]."""

    def value_loss(
        self, value: Params, state: TrainState, batch: Batch, q: Tensor, q_logits: Tensor | None = None
    ) -> tuple[Tensor, Metrics]:
        logits = self.apply("value", value, batch["observations"])
        bootstrap = None if q_logits is None else Bootstrap(q_logits, q.new_ones(q.shape))
        loss = self.value_objective(logits, q, bootstrap).mean()
        return loss, {"value/loss": loss, "value/v": self.head.mean(logits).mean()}

    def train_value(self, state: TrainState, batch: Batch, q: Tensor, q_logits: Tensor | None, key: Tensor) -> tuple[TrainState, Metrics]:
        """V's part of an update; q [B] of the target critics at the data's actions."""
        return self.descend(state, "value", self.value_loss, batch, q, q_logits)

    def actor_loss(self, actor: Params, state: TrainState, batch: Batch, q: Tensor, key: Tensor) -> tuple[Tensor, Metrics]:
        advantage = q - self.v(state.params["value"], batch["observations"])
        weight = losses.advantage_weight(advantage, self.config.temperature, self.config.largest_weight)
        dist = self.apply("actor", actor, batch["observations"], key)
        loss = (weight * self.policy.bc_loss(dist, batch["actions"])).mean()
        return loss, {"actor/loss": loss, "actor/advantage": advantage.mean(), "actor/weight": weight.mean()}

    def critic_loss(self, critic: Params, state: TrainState, batch: Batch, key: Tensor) -> tuple[Tensor, Metrics]:
        logits = self.apply("value", state.params["value"], batch["next_observations"])
        target = self.td_target(batch, self.head.mean(logits), logits if self.head.distributional else None)
        return self.td_loss(critic, batch, target, key)

    def actor(self, state: TrainState) -> Actor:
        return NoisyActor(self, state) if isinstance(self.policy, Deterministic) else super().actor(state)

    def update(self, state: TrainState, batch: Batch, key: Tensor, *, phase: int) -> tuple[TrainState, Metrics]:
        q, q_logits = self.target_q(state, batch, key)
        state, value = self.train_value(state, batch, q, q_logits, key)
        state, actor = self.descend(state, "actor", self.actor_loss, batch, q, key)  # with the new V, as the authors' code
        state, critic = self.train_critic(state, self.critic_loss, batch, key)
        return self.polyak(state, "critic", self.config.polyak), {**value, **actor, **critic}
