"""An autoencoder of the data's actions as a part that algorithms have, and actor-critics whose policies keep to the
actions that it draws.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

from offrl import rng
from offrl.algorithm import Algorithm, Batch, DataSpec, Loss, Params, Part, TrainState, Update
from offrl.families.critics import ConstraintSettings, Values, WithCritic
from offrl.nn import call
from offrl.nn.autoencoder import ActionAutoencoder, divergence, encoded
from offrl.settings.field import defaults, setting

LATENT = 0.5  # largest entry of a latent that is decoded


@dataclass
class AutoencoderSettings:
    """Settings of the autoencoder; the defaults are OSRL's."""

    autoencoder_hidden: list[int] = setting([400, 400], "widths of the autoencoder's hidden layers", low=1)
    kl_weight: float = setting(0.5, "weight of the divergence in the autoencoder's loss", low=0.0)


class Autoencoder(Part):
    """A conditional variational autoencoder of the data's actions, the algorithm's module "autoencoder"."""

    config: AutoencoderSettings

    def __init__(self, config: AutoencoderSettings, spec: DataSpec) -> None:
        super().__init__(config, spec)
        self.network = ActionAutoencoder(spec.observation_dim, spec.action_dim, config.autoencoder_hidden)

    def encode(self, params: Params, observations: Tensor, actions: Tensor) -> tuple[Tensor, Tensor]:
        """(mean, log_std) [..., 2 A] of the latent of actions [..., A]."""
        return encoded(call(self.network, params, "encode", observations, actions))

    def decode(self, params: Params, observations: Tensor, latents: Tensor) -> Tensor:
        """Actions before their tanh [..., A] of latents [..., 2 A]; observations [B, O]."""
        observations = observations.expand(*latents.shape[:-1], observations.shape[-1])
        return call(self.network, params, "decode", observations, latents)

    def latents(self, observations: Tensor, key: Tensor, *count: int) -> Tensor:
        """Latents [*count, B, 2 A] of N(0, 1), clipped to 0.5."""
        shape = (*count, len(observations), self.network.latent_dim)
        return rng.normal(key, shape).clamp(-LATENT, LATENT)

    def loss(self, params: Params, state: TrainState, batch: Batch, key: Tensor) -> Loss:
        """E |decode(s, z) - a|^2 + beta KL(z | N(0, 1)), means over dimensions as well."""
        observations, actions = batch["observations"], batch["actions"]
        mean, log_std = self.encode(params, observations, actions)
        z = mean + log_std.exp() * rng.normal(key, tuple(mean.shape))
        kl = divergence(mean, log_std).mean()
        error = (self.decode(params, observations, z).tanh() - actions).square().mean()
        loss = error + self.config.kl_weight * kl
        return loss, {"autoencoder/loss": loss, "autoencoder/kl": kl}


@dataclass
@defaults(cost_limit=10.0, learning_rate=1e-3, batch_size=512)
class BehaviourSettings(AutoencoderSettings, ConstraintSettings):
    """Settings of actor-critics that keep to the autoencoder's actions; the defaults are OSRL's for DSRL's tasks."""

    min_weight: float = setting(
        0.75, "of two critics the smaller value counts so much in targets, the larger the rest", low=0.0, high=1.0
    )
    candidates: int = setting(10, "actions at each next observation, the best of which counts", low=1)


ConfigT = TypeVar("ConfigT", bound=BehaviourSettings)


class NearBehaviour(WithCritic, Algorithm[ConfigT]):
    """What BCQ (arXiv 1812.02900) and BEAR (arXiv 1906.00949) share: the autoencoder, the best of several actions of
    the target policy in targets, and a limit of costs, as in OSRL (arXiv 2306.09303).

    Modules: critic, autoencoder, actor; with a limit cost_critic.
    """

    autoencoder: Autoencoder
    traits = replace(WithCritic.traits, targets=("critic", "actor"), actions=("continuous",), observations="vector")

    @abstractmethod
    def candidates(self, actor: Params, state: TrainState, observations: Tensor, key: Tensor) -> Tensor:
        """Actions [candidates, B, A] of a policy, among which targets choose."""

    def critic_loss(self, critic: Params, state: TrainState, batch: Batch, key: Tensor, actions: Tensor) -> Loss:
        """E (r + gamma max_k [0.75 min_j Q'_j(s', a'_k) + 0.25 max_j Q'_j(s', a'_k)] - Q_i(s, a))^2, summed over
        critics i (BCQ, equation 13). actions: a' [M, B, A].
        """
        q = self.critic.q(self.critic.target_critics(state, key), batch["next_observations"], actions)
        value = torch.lerp(q.amax(0), q.amin(0), self.config.min_weight).amax(0)
        return self.critic.loss(critic, batch, self.critic.td_target(batch, Values(value)), key)

    @abstractmethod
    def actor_loss(self, actor: Params, state: TrainState, batch: Batch, key: Tensor) -> Loss:
        """The policy's loss."""

    def update(self, state: TrainState, batch: Batch, key: Tensor, *, phase: int) -> Update:
        keys, target = rng.split(key, 4), state.target["actor"]
        state, metrics = self.descend(state, "autoencoder", self.autoencoder.loss, batch, keys[0])

        def following(rows: Batch) -> Tensor:
            return self.candidates(target, state, rows["next_observations"], keys[1])

        state, critic = self.descend(state, "critic", self.critic_loss, batch, keys[2], following(batch))
        state = self.critic.regularised(state)
        state, actor = self.descend(state, "actor", self.actor_loss, batch, keys[3])
        state = self.polyak(self.polyak(state, "critic"), "actor")
        state, costs = self.learn_costs(state, batch, following, actor)
        return state, {**metrics, **critic, **actor, **costs}
