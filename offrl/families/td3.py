"""TD3 on data: a deterministic actor that moves at every second update, and noise on the target action."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from offrl import rng
from offrl.actor import Actor, NoisyActor
from offrl.algorithm import Algorithm, Metrics, TrainState, Traits
from offrl.data.dataset import Dataset
from offrl.data.samplers.transitions import Batch
from offrl.families import critics
from offrl.families.critics import Critic, CriticSettings, Values, fit_value_range
from offrl.nn import Deterministic
from offrl.optim import Adam, Params
from offrl.settings.field import setting


@dataclass
class TD3Settings(CriticSettings):
    """Settings of TD3 and what is built on it."""

    policy_noise: float = setting(0.2, "standard deviation of the target action's noise", low=0.0)
    noise_clip: float = setting(0.5, "largest target noise", low=0.0)


class TD3(Algorithm):
    """TD3 (arXiv 1802.09477). A subclass says what its actor does (`actor_loss`), and what its target adds (`next_penalty`)."""

    traits = Traits(targets=("critic", "actor"), critic_modules=("critic",), period=2, actions=("continuous",))
    critic: Critic

    @classmethod
    def fit_config(cls, config: Any, dataset: Dataset, grid: Mapping[str, Sequence[float]] | None = None) -> Any:
        return fit_value_range(config, dataset, grid)

    def modules(self) -> dict[str, nn.Module]:
        c, s = self.config, self.spec
        self.critic = Critic(c, s)
        return {"critic": self.critic.network, "actor": Deterministic(s.observation_dim, s.action_dim, c.hidden, init=c.init)}

    def optimizer(self, name: str) -> Adam:
        return critics.optimizer(self.config, name)

    def next_penalty(self, batch: Batch, next_action: Tensor) -> Tensor | float:
        """What is subtracted from the next state's value, [B]; nothing unless overridden."""
        return 0.0

    def critic_loss(self, critic: Params, state: TrainState, batch: Batch, key: Tensor) -> tuple[Tensor, Metrics]:
        c = self.config
        (target_action,) = self.apply("actor", state.target["actor"], batch["next_observations"])
        noise = (rng.normal(key, tuple(target_action.shape)) * c.policy_noise).clamp(-c.noise_clip, c.noise_clip)
        next_action = (target_action + noise).clamp(-1.0, 1.0)
        target_critics = self.critic.target_critics(state, rng.fold_in(key, 100))
        next_q, next_logits = self.critic.min_q(target_critics, batch["next_observations"], next_action)
        target = self.critic.td_target(batch, Values(next_q - self.next_penalty(batch, next_action), next_logits))
        return self.critic.loss(critic, batch, target, key)

    @abstractmethod
    def actor_loss(self, actor: Params, state: TrainState, batch: Batch) -> tuple[Tensor, Metrics]:
        """The loss of the deterministic actor."""

    def improve(self, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        """What moves at every second update besides the targets: the actor."""
        return self.descend(state, "actor", self.actor_loss, batch)

    def update(self, state: TrainState, batch: Batch, key: Tensor, *, phase: int) -> tuple[TrainState, Metrics]:
        state, metrics = self.descend(state, "critic", self.critic_loss, batch, key)
        state = self.critic.regularised(state)
        if phase == 1:
            state, actor = self.improve(state, batch)
            for name in self.traits.targets:
                state = self.polyak(state, name, self.config.polyak)
            metrics = {**metrics, **actor}
        return state, metrics

    def actor(self, state: TrainState) -> Actor:
        return NoisyActor(self, state)

    def q_value(self, state: TrainState, observations: Tensor, actions: Tensor) -> Tensor:
        return self.critic.q(state.params["critic"], observations, actions).amin(0)
