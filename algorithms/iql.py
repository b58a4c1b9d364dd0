"""Implicit Q-learning: "Offline Reinforcement Learning with Implicit Q-Learning" (Kostrikov et al., 2021, arXiv 2110.06169)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from offrl import losses
from offrl.algorithm import Algorithm, Metrics, TrainState
from offrl.data.samplers import Batch
from offrl.nn import MLP, EnsembleMLP, make_head, make_policy
from offrl.optim import Adam, Params
from offrl.registry import register
from offrl.settings import setting


@dataclass
class IQLConfig:
    """Settings of IQL; the defaults are the authors' for D4RL's locomotion tasks."""

    name: str = "iql"
    learning_rate: float = setting(3e-4, "Adam's learning rate for all networks", low=0.0)
    batch_size: int = setting(256, "transitions in a batch", low=1)
    discount: float = setting(0.99, "discount factor", low=0.0, high=1.0)
    polyak: float = setting(0.005, "share of the online critics that enters the targets at each update", low=0.0, high=1.0)
    expectile: float = setting(0.7, "0.5 values the data's policy, 1.0 the best action in the data", low=0.0, high=1.0)
    temperature: float = setting(3.0, "multiplies the advantage in the exponent; larger is greedier", low=0.0)
    largest_weight: float = setting(100.0, "cap of the exponential weights", low=0.0)
    hidden: list[int] = setting([256, 256], "widths of the hidden layers", low=1)
    policy: str = setting(
        "gaussian",
        "gaussian (as published), tanh_gaussian, or deterministic with squared error (discrete actions: always categorical)",
        choices=("gaussian", "tanh_gaussian", "deterministic"),
    )
    dropout: float = setting(0.0, "dropout rate of the policy", low=0.0, high=0.99)
    actor_schedule: str = setting("cosine", "the actor's learning rate over decay_steps", choices=("cosine", "constant"))
    decay_steps: int = setting(1_000_000, "length of the schedule in updates, as published whatever the run's length", low=1)
    init: str = setting("orthogonal", "initial weights: orthogonal (as published) or torch (uniform)", choices=("orthogonal", "torch"))
    value_head: str = setting("scalar", "how values are represented", choices=("scalar",))


@register("algo", "iql")
class IQL(Algorithm):
    """Expectile regression of V on Q, Q on V of the next state, and a policy by advantage-weighted imitation: no action outside the
    data is ever evaluated."""

    Config = IQLConfig
    targets = ("critic",)
    valuing = ("critic",)

    def build(self) -> dict[str, nn.Module]:
        c, s = self.config, self.spec
        self.head = make_head(c.value_head)
        width = s.observation_dim + self.encoded_action_dim
        return {
            "value": MLP(s.observation_dim, c.hidden, 1, init=c.init),
            "actor": make_policy(c.policy, s.observation_dim, s.action_dim, s.num_actions, c.hidden, dropout=c.dropout, init=c.init),
            "critic": EnsembleMLP(2, width, c.hidden, self.head.out_dim, init=c.init),
        }

    def optimizer(self, name: str) -> Adam:
        c = self.config
        if name == "actor" and c.actor_schedule != "constant":
            return Adam(learning_rate=c.learning_rate, schedule=c.actor_schedule, decay_steps=c.decay_steps)
        return Adam(learning_rate=c.learning_rate)

    def q(self, critic: Params, batch: Batch) -> Tensor:
        """Raw outputs of both critics at the data's actions: [2, B, out_dim]."""
        return self.apply("critic", critic, torch.cat([batch["observations"], self.encode(batch["actions"])], -1))

    def value_of(self, state: TrainState, observations: Tensor, actions: Tensor) -> Tensor:
        batch = {"observations": observations, "actions": actions}
        return self.head.mean(self.q(state.params["critic"], batch)).amin(0)

    def v(self, value: Params, observations: Tensor) -> Tensor:
        """State values [B]."""
        return self.apply("value", value, observations).squeeze(-1)

    def target_q(self, state: TrainState, batch: Batch) -> Tensor:
        """The smaller target critic at the data's actions: [B]."""
        return self.head.mean(self.q(state.target["critic"], batch)).amin(0)

    def value_loss(self, value: Params, state: TrainState, batch: Batch, q: Tensor) -> tuple[Tensor, Metrics]:
        v = self.v(value, batch["observations"])
        loss = losses.expectile(q - v, self.config.expectile).mean()
        return loss, {"value/loss": loss, "value/v": v.mean()}

    def actor_loss(self, actor: Params, state: TrainState, batch: Batch, q: Tensor, key: Tensor) -> tuple[Tensor, Metrics]:
        advantage = q - self.v(state.params["value"], batch["observations"])
        weight = losses.advantage_weight(advantage, self.config.temperature, self.config.largest_weight)
        dist = self.apply("actor", actor, batch["observations"], key)
        loss = (weight * self.policy.bc_loss(dist, batch["actions"])).mean()
        return loss, {"actor/loss": loss, "actor/advantage": advantage.mean(), "actor/weight": weight.mean()}

    def critic_loss(self, critic: Params, state: TrainState, batch: Batch) -> tuple[Tensor, Metrics]:
        next_v = self.v(state.params["value"], batch["next_observations"])
        y = losses.td_target(batch["rewards"], batch["masks"], self.config.discount, next_v)
        q = self.q(critic, batch)
        loss = self.head.loss(q, y).mean(-1).sum()
        value = self.head.mean(q)
        return loss, {"critic/loss": loss, "critic/q": value.mean(), "critic/td_error": (value - y).abs().mean()}

    def update(self, state: TrainState, batch: Batch, key: Tensor, *, phase: int) -> tuple[TrainState, Metrics]:
        q = self.target_q(state, batch)
        state, value = self.descend(state, "value", self.value_loss, batch, q)
        state, actor = self.descend(state, "actor", self.actor_loss, batch, q, key)  # with the new V, as the authors' code
        state, critic = self.descend(state, "critic", self.critic_loss, batch)
        return self.polyak(state, "critic", self.config.polyak), {**value, **actor, **critic}
