"""BCQ-Lagrangian: BCQ ("Off-Policy Deep Reinforcement Learning without Exploration", Fujimoto et al., 2019, arXiv
1812.02900) with a limit of costs, as a baseline of DSRL's (arXiv 2306.09303).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from offrl import rng
from offrl.algorithm import Actor, Algorithm, Batch, Carry, Loss, Params, TrainState, Update
from offrl.families.critics import ConstraintSettings, Critic, Values, WithCritic
from offrl.families.generative.settings import greedy_field
from offrl.nn import MLP
from offrl.nn.autoencoder import ActionAutoencoder, autoencoder_loss
from offrl.registry import register
from offrl.settings.field import defaults, setting

LATENT = 0.5  # largest entry of a latent that is decoded


@dataclass
@defaults(cost_limit=10.0, learning_rate=1e-3, batch_size=512)
class BCQLagConfig(ConstraintSettings):
    """Settings of BCQ-Lagrangian; the defaults are OSRL's for DSRL's tasks."""

    name: str = "bcq_lag"
    perturbation: float = setting(0.05, "largest change of a decoded action", low=0.0)
    min_weight: float = setting(
        0.75, "of two critics the smaller value counts so much in targets, the larger the rest", low=0.0, high=1.0
    )
    candidates: int = setting(10, "actions at each next observation, the best of which counts", low=1)
    autoencoder_hidden: list[int] = setting([400, 400], "widths of the autoencoder's hidden layers", low=1)
    kl_weight: float = setting(0.5, "weight of the divergence in the autoencoder's loss", low=0.0)
    greedy: str = greedy_field()


class PerturbedActor(Actor):
    """Draws an action of the autoencoder at every step, and perturbs it."""

    algorithm: BCQLag

    def act(self, carry: Carry, observations: Tensor, key: Tensor, *, explore: bool) -> tuple[Tensor, Carry]:
        z = self.algorithm.noise(observations, key)
        if not explore and self.algorithm.config.greedy == "zero":
            z = torch.zeros_like(z)
        return self.algorithm.perturbed(self.state.params["actor"], self.state, observations, z), carry


@register("algo", "bcq_lag")
class BCQLag(WithCritic, Algorithm[BCQLagConfig]):
    """An autoencoder draws actions as the data hold them, the policy perturbs them a little, and a multiplier weighs
    what they cost. Without `cost_limit` it is BCQ.

    Modules: autoencoder, critic, actor (the perturbation); with a limit cost_critic.
    """

    traits = replace(
        WithCritic.traits, actions=("continuous",), observations="vector", policy_modules=("actor", "autoencoder")
    )
    actor_class = PerturbedActor

    def modules(self) -> dict[str, nn.Module]:
        c, s = self.config, self.spec
        self.critic = Critic(c, s)
        return {
            "critic": self.critic.network,
            "autoencoder": ActionAutoencoder(s.observation_dim, s.action_dim, c.autoencoder_hidden),
            "actor": MLP(s.observation_dim + s.action_dim, c.hidden, s.action_dim, activation="tanh", init=c.init),
            **self.cost_modules(),
        }

    def noise(self, observations: Tensor, key: Tensor, *count: int) -> Tensor:
        """Latents [*count, B, 2 A] of N(0, 1), clipped to 0.5."""
        return rng.normal(key, (*count, len(observations), 2 * self.spec.action_dim)).clamp(-LATENT, LATENT)

    def perturbed(self, actor: Params, state: TrainState, observations: Tensor, z: Tensor) -> Tensor:
        """clip(a + Phi tanh(xi(s, a))), a decoded of the latents z [..., B, 2 A]: [..., B, A]."""
        observations = observations.expand(*z.shape[:-1], observations.shape[-1])
        a = self.apply("autoencoder", state.params["autoencoder"], "decode", observations, z)
        change = self.apply("actor", actor, torch.cat([observations, a], -1)).tanh()
        return (a + self.config.perturbation * change).clamp(-1.0, 1.0)

    def autoencoder_loss(self, autoencoder: Params, state: TrainState, batch: Batch, key: Tensor) -> Loss:
        """E |decode(s, z) - a|^2 + beta KL(z | N(0, 1)), means over dimensions as well."""
        apply = partial(self.apply, "autoencoder", autoencoder)
        return autoencoder_loss(apply, batch["observations"], batch["actions"], key, self.config.kl_weight)

    def critic_loss(self, critic: Params, state: TrainState, batch: Batch, key: Tensor, actions: Tensor) -> Loss:
        """E (r + gamma max_k [0.75 min_j Q'_j(s', a'_k) + 0.25 max_j Q'_j(s', a'_k)] - Q_i(s, a))^2, summed over
        critics i (BCQ, equation 13). actions: a' [M, B, A].
        """
        q = self.critic.q(self.critic.target_critics(state, key), batch["next_observations"], actions)
        value = torch.lerp(q.amax(0), q.amin(0), self.config.min_weight).amax(0)
        return self.critic.loss(critic, batch, self.critic.td_target(batch, Values(value)), key)

    def actor_loss(self, actor: Params, state: TrainState, batch: Batch, key: Tensor) -> Loss:
        """-E min_i Q_i(s, a), a drawn and perturbed (BCQ, equation 14), and the costs of a."""
        observations = batch["observations"]
        actions = self.perturbed(actor, state, observations, self.noise(observations, key))
        q = self.critic.q(state.params["critic"], observations, actions).amin(0)
        metrics = {"actor/loss": -q.mean(), "actor/q": q.mean()}
        return self.limited(-q.mean(), metrics, state, observations, actions, q.detach().abs().mean())

    def update(self, state: TrainState, batch: Batch, key: Tensor, *, phase: int) -> Update:
        keys = rng.split(key, 4)
        state, metrics = self.descend(state, "autoencoder", self.autoencoder_loss, batch, keys[0])

        def following(rows: Batch) -> Tensor:
            observations = rows["next_observations"]
            z = self.noise(observations, keys[1], self.config.candidates)
            return self.perturbed(state.params["actor"], state, observations, z)

        state, critic = self.descend(state, "critic", self.critic_loss, batch, keys[2], following(batch))
        state = self.critic.regularised(state)
        state, actor = self.descend(state, "actor", self.actor_loss, batch, keys[3])
        state, costs = self.learn_costs(self.polyak(state, "critic"), batch, following, actor)
        return state, {**metrics, **critic, **actor, **costs}
