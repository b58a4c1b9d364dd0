"""BCQ-Lagrangian: BCQ ("Off-Policy Deep Reinforcement Learning without Exploration", Fujimoto et al., 2019, arXiv
1812.02900) with a limit of costs, as a baseline of DSRL's (arXiv 2306.09303).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from offrl.algorithm import Actor, Batch, Carry, Loss, Params, TrainState
from offrl.families.behaviour import Autoencoder, BehaviourSettings, NearBehaviour
from offrl.families.critics import Critic
from offrl.families.generative.settings import greedy_field
from offrl.nn import MLP
from offrl.registry import register
from offrl.settings.field import setting


@dataclass
class BCQLagConfig(BehaviourSettings):
    """Settings of BCQ-Lagrangian; the defaults are OSRL's for DSRL's tasks."""

    name: str = "bcq_lag"
    perturbation: float = setting(0.05, "largest change of a decoded action", low=0.0)
    greedy: str = greedy_field()


class PerturbedActor(Actor):
    """Draws an action of the autoencoder at every step, and perturbs it."""

    algorithm: BCQLag

    def act(self, carry: Carry, observations: Tensor, key: Tensor, *, explore: bool) -> tuple[Tensor, Carry]:
        z = self.algorithm.autoencoder.latents(observations, key)
        if not explore and self.algorithm.config.greedy == "zero":
            z = torch.zeros_like(z)
        return self.algorithm.perturbed(self.state.params["actor"], self.state, observations, z), carry


@register("algo", "bcq_lag")
class BCQLag(NearBehaviour[BCQLagConfig]):
    """An autoencoder draws actions as the data hold them, the policy perturbs them a little, and a multiplier weighs
    what they cost. Without `cost_limit` it is BCQ.

    Modules: autoencoder, critic, actor (the perturbation); with a limit cost_critic.
    """

    traits = replace(NearBehaviour.traits, policy_modules=("actor", "autoencoder"))
    actor_class = PerturbedActor

    def modules(self) -> dict[str, nn.Module]:
        c, s = self.config, self.spec
        self.critic, self.autoencoder = Critic(c, s), Autoencoder(c, s)
        return {
            "critic": self.critic.network,
            "autoencoder": self.autoencoder.network,
            "actor": MLP(s.observation_dim + s.action_dim, c.hidden, s.action_dim, activation="tanh", init=c.init),
            **self.cost_modules(),
        }

    def perturbed(self, actor: Params, state: TrainState, observations: Tensor, z: Tensor) -> Tensor:
        """clip(a + Phi tanh(xi(s, a))), a decoded of the latents z [..., B, 2 A]: [..., B, A]."""
        a = self.autoencoder.decode(state.params["autoencoder"], observations, z).tanh()
        observations = observations.expand(*a.shape[:-1], observations.shape[-1])
        change = self.apply("actor", actor, torch.cat([observations, a], -1)).tanh()
        return (a + self.config.perturbation * change).clamp(-1.0, 1.0)

    def candidates(self, actor: Params, state: TrainState, observations: Tensor, key: Tensor) -> Tensor:
        z = self.autoencoder.latents(observations, key, self.config.candidates)
        return self.perturbed(actor, state, observations, z)

    def actor_loss(self, actor: Params, state: TrainState, batch: Batch, key: Tensor) -> Loss:
        """-E min_i Q_i(s, a), a drawn and perturbed (BCQ, equation 14), and the costs of a."""
        observations = batch["observations"]
        actions = self.perturbed(actor, state, observations, self.autoencoder.latents(observations, key))
        q = self.critic.q(state.params["critic"], observations, actions).amin(0)
        metrics = {"actor/loss": -q.mean(), "actor/q": q.mean()}
        return self.limited(-q.mean(), metrics, state, observations, actions, q.detach().abs().mean())
