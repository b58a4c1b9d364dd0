"""TD3+BC: "A Minimalist Approach to Offline Reinforcement Learning" (Fujimoto and Gu, 2021, arXiv 2106.06860)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from offrl import losses, rng
from offrl.algorithm import Algorithm, Metrics, TrainState
from offrl.data.samplers import Batch
from offrl.nn import Deterministic, EnsembleMLP, make_head
from offrl.optim import Params
from offrl.registry import register
from offrl.settings import setting


@dataclass
class TD3BCConfig:
    """Settings of TD3+BC; the defaults are the paper's."""

    name: str = "td3_bc"
    learning_rate: float = setting(3e-4, "Adam's learning rate for actor and critics", low=0.0)
    batch_size: int = setting(256, "transitions in a batch", low=1)
    discount: float = setting(0.99, "discount factor", low=0.0, high=1.0)
    polyak: float = setting(0.005, "share of the online parameters that enters the targets, at each actor update", low=0.0, high=1.0)
    alpha: float = setting(2.5, "weight of the normalised value against imitation; larger is greedier", low=0.0)
    policy_noise: float = setting(0.2, "standard deviation of the target action's noise", low=0.0)
    noise_clip: float = setting(0.5, "largest target noise", low=0.0)
    hidden: list[int] = setting([256, 256], "widths of the hidden layers", low=1)
    init: str = setting("torch", "initial weights: torch (uniform) or orthogonal", choices=("torch", "orthogonal"))
    value_head: str = setting("scalar", "how critics represent a value", choices=("scalar",))


@register("algo", "td3_bc")
class TD3BC(Algorithm):
    """TD3 whose actor also imitates the data; actor and targets move at every second update."""

    Config = TD3BCConfig
    targets = ("critic", "actor")
    valuing = ("critic",)
    period = 2
    discrete = False

    def build(self) -> dict[str, nn.Module]:
        c, s = self.config, self.spec
        self.head = make_head(c.value_head)
        return {
            "critic": EnsembleMLP(2, s.observation_dim + s.action_dim, c.hidden, self.head.out_dim, init=c.init),
            "actor": Deterministic(s.observation_dim, s.action_dim, c.hidden, init=c.init),
        }

    def q(self, critic: Params, observations: Tensor, actions: Tensor) -> Tensor:
        """Raw outputs of both critics: [2, B, out_dim]."""
        return self.apply("critic", critic, torch.cat([observations, actions], -1))

    def value_of(self, state: TrainState, observations: Tensor, actions: Tensor) -> Tensor:
        return self.head.mean(self.q(state.params["critic"], observations, actions)).amin(0)

    def critic_loss(self, critic: Params, state: TrainState, batch: Batch, key: Tensor) -> tuple[Tensor, Metrics]:
        c = self.config
        (target_action,) = self.apply("actor", state.target["actor"], batch["next_observations"])
        noise = (rng.normal(key, tuple(target_action.shape)) * c.policy_noise).clamp(-c.noise_clip, c.noise_clip)
        next_action = (target_action + noise).clamp(-1.0, 1.0)
        next_q = self.head.mean(self.q(state.target["critic"], batch["next_observations"], next_action)).amin(0)  # [B]
        y = losses.td_target(batch["rewards"], batch["masks"], c.discount, next_q)
        q = self.q(critic, batch["observations"], batch["actions"])
        loss = self.head.loss(q, y).mean(-1).sum()
        value = self.head.mean(q)
        return loss, {"critic/loss": loss, "critic/q": value.mean(), "critic/td_error": (value - y).abs().mean()}

    def actor_loss(self, actor: Params, state: TrainState, batch: Batch) -> tuple[Tensor, Metrics]:
        (action,) = self.apply("actor", actor, batch["observations"])
        first = {k: v[:1] for k, v in state.params["critic"].items()}  # the other critic is not asked
        q = self.head.mean(self.q(first, batch["observations"], action)[0])  # [B]
        scale = self.config.alpha / q.detach().abs().mean()
        imitation = (action - batch["actions"]).square().mean()
        loss = imitation - scale * q.mean()
        return loss, {"actor/loss": loss, "actor/bc": imitation, "actor/q": q.mean()}

    def update(self, state: TrainState, batch: Batch, key: Tensor, *, phase: int) -> tuple[TrainState, Metrics]:
        state, metrics = self.descend(state, "critic", self.critic_loss, batch, key)
        if phase == 1:
            state, actor = self.descend(state, "actor", self.actor_loss, batch)
            for name in self.targets:
                state = self.polyak(state, name, self.config.polyak)
            metrics = {**metrics, **actor}
        return state, metrics

    def act(self, state: TrainState, carry: Any, obs: Tensor, key: Tensor, *, explore: bool) -> tuple[Tensor, Any]:
        (action,) = self.apply("actor", state.params["actor"], obs)
        if explore:  # TD3's exploration noise
            action = (action + 0.1 * rng.normal(key, tuple(action.shape))).clamp(-1.0, 1.0)
        return action, carry
