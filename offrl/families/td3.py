"""TD3 on data: a deterministic actor that moves at every second update, and noise on the target action."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import TypeVar

from torch import Tensor, nn

from offrl import rng
from offrl.actor import NoisyActor
from offrl.algorithm import Algorithm, Batch, Loss, Metrics, Params, TrainState, Traits, Update
from offrl.families.critics import Critic, CriticSettings, Values, WithCritic
from offrl.nn import Deterministic
from offrl.nn.encoders.own import members
from offrl.settings.field import setting


@dataclass
class TD3Settings(CriticSettings):
    """Settings of TD3 and what is built on it."""

    policy_noise: float = setting(0.2, "standard deviation of the target action's noise", low=0.0)
    noise_clip: float = setting(0.5, "largest target noise", low=0.0)


ConfigT = TypeVar("ConfigT", bound=TD3Settings)


class TD3(WithCritic, Algorithm[ConfigT]):
    """TD3 (arXiv 1802.09477); a subclass has the loss of its actor. Modules: critic, actor."""

    traits = Traits(
        targets=("critic", "actor"),
        critic_modules=("critic",),
        period=2,
        actions=("continuous",),
        observations="encoded",
    )
    critic: Critic
    actor_class = NoisyActor

    def modules(self) -> dict[str, nn.Module]:
        c, s = self.config, self.latent_spec
        self.critic = Critic(c, s)
        actor = Deterministic(s.observation_dim, s.action_dim, c.hidden, activation=c.activation, init=c.init)
        return {"critic": self.critic.network, "actor": actor, **self.cost_modules(), **self.encoder_modules()}

    def next_action(self, state: TrainState, batch: Batch, key: Tensor) -> Tensor:
        """a' [B, A]: the target actor's action at s' with clipped noise (target policy smoothing)."""
        c = self.config
        (action,) = self.apply("actor", state.target["actor"], batch["next_observations"])
        noise = (rng.normal(key, tuple(action.shape)) * c.policy_noise).clamp(-c.noise_clip, c.noise_clip)
        return (action + noise).clamp(-1.0, 1.0)

    def next_q(self, state: TrainState, batch: Batch, next_action: Tensor, key: Tensor) -> Values:
        """min_j Q'_j(s', a') of the target critics (clipped double Q-learning)."""
        return self.critic.min_q(
            self.critic.target_critics(state, rng.fold_in(key, 100)), batch["next_observations"], next_action
        )

    def critic_loss(self, critic: Params, state: TrainState, batch: Batch, key: Tensor) -> Loss:
        """E (r + gamma min_j Q'_j(s', a') - Q_i(s, a))^2, summed over critics i."""
        next_q = self.next_q(state, batch, self.next_action(state, batch, key), key)
        return self.critic.loss(critic, batch, self.critic.td_target(batch, next_q), key)

    @abstractmethod
    def actor_loss(self, actor: Params, state: TrainState, batch: Batch) -> Loss:
        """The loss of the deterministic actor."""

    def update(self, state: TrainState, batch: Batch, key: Tensor, *, phase: int) -> Update:
        self, state, batch, learnt = self.on_latents(state, batch)
        state, critic = self.descend(state, "critic", self.critic_loss, batch, key)
        actor: Metrics = {}
        state = self.critic.regularised(state)
        if phase == 1:
            state, actor = self.descend(state, "actor", self.actor_loss, batch)
        state, costs = self.learn_costs(state, batch, lambda b: self.next_action(state, b, key), actor)
        return state if phase == 0 else self.move_targets(state), {**learnt, **critic, **actor, **costs}

    def move_targets(self, state: TrainState) -> TrainState:
        """The state with its target critics and its target actor a step further."""
        return self.polyak(self.polyak(state, "critic"), "actor", self.config.polyak)

    def first_q(self, state: TrainState, observations: Tensor, actions: Tensor) -> Tensor:
        """Q_1 [B] of the first online critic, by `Critic.actor_q`; the others are not evaluated."""
        first_critic = members(state.params["critic"], slice(1))
        return self.critic.actor_q(first_critic, observations, actions)[0]
