"""TD3 on data: a deterministic actor that moves at every second update, and noise on the target action."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, replace

from torch import Tensor, nn

from offrl import rng
from offrl.actor import Actor, NoisyActor
from offrl.algorithm import Metrics, TrainState
from offrl.data.samplers.transitions import Batch
from offrl.families.critics import CriticAlgorithm, CriticSettings
from offrl.nn import Deterministic
from offrl.optim import Params
from offrl.settings.field import setting


@dataclass
class TD3Settings(CriticSettings):
    """Settings of TD3 and what is built on it."""

    policy_noise: float = setting(0.2, "standard deviation of the target action's noise", low=0.0)
    noise_clip: float = setting(0.5, "largest target noise", low=0.0)


class TD3(CriticAlgorithm):
    """TD3 (arXiv 1802.09477). A subclass says what its actor does (`actor_loss`), and what its target adds (`next_penalty`)."""

    traits = replace(CriticAlgorithm.traits, targets=("critic", "actor"), period=2, actions=("continuous",))

    def modules(self) -> dict[str, nn.Module]:
        c, s = self.config, self.spec
        return {"critic": self.make_critic(), "actor": Deterministic(s.observation_dim, s.action_dim, c.hidden, init=c.init)}

    def next_penalty(self, batch: Batch, next_action: Tensor) -> Tensor | float:
        """What is subtracted from the next state's value, [B]; nothing unless overridden."""
        return 0.0

    def critic_loss(self, critic: Params, state: TrainState, batch: Batch, key: Tensor) -> tuple[Tensor, Metrics]:
        c = self.config
        (target_action,) = self.apply("actor", state.target["actor"], batch["next_observations"])
        noise = (rng.normal(key, tuple(target_action.shape)) * c.policy_noise).clamp(-c.noise_clip, c.noise_clip)
        next_action = (target_action + noise).clamp(-1.0, 1.0)
        voters = self.voters(state, rng.fold_in(key, 100))
        next_q, next_logits = self.smallest(self.q(voters, batch["next_observations"], next_action))
        target = self.td_target(batch, next_q - self.next_penalty(batch, next_action), next_logits)
        return self.td_loss(critic, batch, target, key)

    @abstractmethod
    def actor_loss(self, actor: Params, state: TrainState, batch: Batch) -> tuple[Tensor, Metrics]:
        """The loss of the deterministic actor."""

    def improve(self, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        """What moves at every second update besides the targets: the actor."""
        return self.descend(state, "actor", self.actor_loss, batch)

    def update(self, state: TrainState, batch: Batch, key: Tensor, *, phase: int) -> tuple[TrainState, Metrics]:
        state, metrics = self.train_critic(state, self.critic_loss, batch, key)
        if phase == 1:
            state, actor = self.improve(state, batch)
            for name in self.traits.targets:
                state = self.polyak(state, name, self.config.polyak)
            metrics = {**metrics, **actor}
        return state, metrics

    def actor(self, state: TrainState) -> Actor:
        return NoisyActor(self, state)
