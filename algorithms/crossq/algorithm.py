"""CrossQ: "CrossQ: Batch Normalization in Deep Reinforcement Learning for Greater Sample Efficiency and Simplicity"
(Bhatt et al., 2019, arXiv 1902.05605).

In an environment: `offrl finetune algo=crossq env=ID`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from offrl import rng
from offrl.actor import Carry, MemorylessActor
from offrl.algorithm import Adam, Batch, Metrics, Params, TrainState, Tree, Update
from offrl.algorithms.crossq.networks import RenormMLP, RenormTanhGaussian, Statistics
from offrl.errors import UserError
from offrl.families.critics import Critic, Values
from offrl.families.sac import LogWeight, SoftActorCritic, SoftSettings
from offrl.nn import TanhGaussian
from offrl.nn.policies import Dist
from offrl.registry import register
from offrl.settings.field import defaults, setting

BETA1 = 0.5  # Adam's, of actor and critics
# of no effect where there are no targets, and of layers that are normalised in their own way
REFUSED = ("target_critics", "max_target_actions", "layer_norm", "residual", "critic_dropout", "spectral_norm")


@dataclass
@defaults(critic_hidden=[2048, 2048], learning_rate=1e-3)
class CrossQConfig(SoftSettings):
    """Settings of CrossQ; the defaults are the authors'."""

    name: str = "crossq"
    value_head: str = setting("scalar", "critics of one number", choices=("scalar",))
    init: str = setting("lecun", "initial weights: normal, of variance 1 / inputs", choices=("lecun",))
    polyak: float = setting(0.0, "0: there are no targets that could follow", low=0.0, high=0.0)
    lipschitz: float = setting(0.0, "0: the critics have no such penalty", low=0.0, high=0.0, structural=True)


class RenormCritic(Critic):
    """Critics with batch renormalisation."""

    def make_network(self, size: int, inputs: int, outputs: int, norm_first: bool) -> nn.Module:
        c = self.config
        return RenormMLP(size, inputs, c.critic_hidden or c.hidden, outputs, c.activation, c.init)


class RenormActor(MemorylessActor):
    """A policy that acts by its running statistics."""

    def act(self, carry: Carry, observations: Tensor, key: Tensor, *, explore: bool) -> tuple[Tensor, Carry]:
        dist, _ = self.apply("actor", observations, self.state.extra["actor"])
        return self.choose(dist, key, explore), carry


@register("algo", "crossq")
class CrossQ(SoftActorCritic[CrossQConfig]):
    """SAC without target networks: critics with batch renormalisation see (s, a) and (s', a') in one batch, so that
    both are normalised alike. At every third update, after the critics', policy and weight of the entropy learn.
    """

    traits = replace(SoftActorCritic.traits, targets=(), period=3, observations="vector", actions=("continuous",))
    actor_class = RenormActor
    entropy_loss = SoftActorCritic.linear_entropy_loss

    def modules(self) -> dict[str, nn.Module]:
        c, s = self.config, self.spec
        if changed := [name for name in REFUSED if getattr(c, name) != getattr(type(c), name)]:
            names = ", ".join(f"algo.{name}" for name in changed)
            raise UserError(f"crossq has no target critics, and layers of its own: leave {names} as it is")
        self.critic = RenormCritic(c, s)
        actor = RenormTanhGaussian(s.observation_dim, s.action_dim, c.hidden, c.activation, c.init)
        return {"entropy": LogWeight(c.entropy_weight), "actor": actor, "critic": self.critic.network}

    def optimizer(self, name: str) -> Adam:
        adam = super().optimizer(name)
        return adam if name == "entropy" else replace(adam, beta1=BETA1)

    def extra(self, params: dict[str, Params]) -> Tree:
        """The running statistics of actor and critics."""
        actor, critic = cast(RenormTanhGaussian, self.policy).body, cast(RenormMLP, self.critic.network)
        return {"actor": actor.statistics(), "critic": critic.statistics()}

    def q(self, state: TrainState, observations: Tensor, actions: Tensor) -> Tensor:
        """Q of every critic by running statistics: [E, B]."""
        inputs = torch.cat([observations, actions], -1)
        return self.critic.head.mean(self.apply("critic", state.params["critic"], inputs, state.extra["critic"])[0])

    def q_value(self, state: TrainState, observations: Tensor, actions: Tensor) -> Tensor | None:
        return self.q(state, observations, actions).amin(0)

    def draw(self, dist: Dist, key: Tensor) -> tuple[Tensor, Tensor]:
        """Reparametrised actions [B, A] and their log densities [B]."""
        return cast(TanhGaussian, self.policy).sample_with_log_prob(dist, key)

    def critic_loss(  # type: ignore[override]
        self, params: dict[str, Params], state: TrainState, batch: Batch, key: Tensor
    ) -> tuple[Tensor, Metrics, Statistics]:
        """E (r + gamma (1 - terminated) (min_j Q_j(s', a') - alpha log pi(a'|s')) - Q_i(s, a))^2, summed over critics
        i; Q(s', a') is of the same pass as Q(s, a), and constant.
        """
        following = batch["next_observations"]
        dist, _ = self.apply("actor", state.params["actor"], following, state.extra["actor"])
        action, log_p = self.draw(dist, key)
        inputs = torch.cat(
            [torch.cat([batch["observations"], batch["actions"]], -1), torch.cat([following, action], -1)]
        )
        outputs, statistics = self.apply("critic", params["critic"], inputs, state.extra["critic"], True)
        logits, next_logits = outputs.chunk(2, 1)
        bonus = -self.weight(state) * float(self.config.entropy_in_target) * log_p
        value = self.critic.head.mean(next_logits).detach().amin(0) + bonus
        target = self.critic.td_target(batch, Values(value))
        return *self.critic.loss(params["critic"], batch, target, key, logits=logits), statistics

    def actor_loss(  # type: ignore[override]
        self, params: dict[str, Params], state: TrainState, batch: Batch, key: Tensor
    ) -> tuple[Tensor, Metrics, Statistics]:
        """E [alpha log pi(a|s) - min_i Q_i(s, a)], a a reparametrised sample of the policy by the batch's statistics, Q
        by running ones.
        """
        dist, statistics = self.apply("actor", params["actor"], batch["observations"], state.extra["actor"], True)
        action, log_p = self.draw(dist, key)
        q = self.critic.reduce_ensemble(self.q(state, batch["observations"], action), self.config.actor_value)
        loss = (self.weight(state) * log_p - q).mean()
        return loss, {"actor/loss": loss, "actor/q": q.mean(), "actor/entropy": -log_p.mean()}, statistics

    def step(self, state: TrainState, name: str, loss: Callable[..., Any], batch: Batch, key: Tensor) -> Update:
        """A step of a module, whose running statistics take in those of the batch."""
        state, metrics, statistics = self.descend(state, (name,), loss, batch, key, aux=True)
        if self.runtime.reduce_gradients is not None:  # each process has normalised its own part of the batch
            statistics = self.runtime.reduce_gradients(statistics)
        return state.with_extra(**{name: statistics}), metrics

    def update(self, state: TrainState, batch: Batch, key: Tensor, *, phase: int) -> Update:
        actor_key, critic_key = rng.split(key)
        state, critic = self.step(state, "critic", self.critic_loss, batch, critic_key)
        if phase < 2:
            return state, critic
        state, actor = self.step(state, "actor", self.actor_loss, batch, actor_key)
        negative_entropy = -actor.pop("actor/entropy")  # of the policy before its step
        state, entropy = self.descend(state, "entropy", self.entropy_loss, negative_entropy)
        return state, {**critic, **actor, **entropy}
