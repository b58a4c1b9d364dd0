"""Implicit flow Q-learning: IDQL (Hansen-Estruch et al., 2023, arXiv 2304.10573) with a flow in place of its diffusion
model, as in "Flow Q-Learning" (Park et al., 2025, arXiv 2502.02538)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from offrl import rng
from offrl.algorithm import Algorithm, Batch, Loss, Params, TrainState, Traits, Update
from offrl.families import in_sample
from offrl.families.critics import Critic, Value, Values, WithCritic
from offrl.families.generative.best_of_n import BestFlowActor, candidates_field
from offrl.families.generative.settings import FlowSettings, greedy_field, make_field, pessimism_field, rho_field
from offrl.nn import flow
from offrl.registry import register
from offrl.settings.field import setting


@dataclass
class IFQLConfig(FlowSettings):
    """Settings of IFQL; the defaults are those of FQL's authors for OGBench."""

    name: str = "ifql"
    expectile: float = setting(
        0.9, "tau: 0.5 values the data's policy, 1.0 the best action in the data", low=0.0, high=1.0
    )
    candidates: int = candidates_field(32)
    pessimism: str = pessimism_field("min")
    rho: float = rho_field()
    greedy: str = greedy_field()


@register("algo", "ifql")
class IFQL(WithCritic, Algorithm[IFQLConfig]):
    """IQL's V and Q, which see the data's actions alone, beside a flow that clones all that the data do; the best of N
    of its actions is played.

    All losses of an update read the parameters of before it, as in the authors' code, where they are one loss; so does
    the target critic, which follows the critics of before the update. Modules: value, critic, and actor, the flow.
    """

    traits = Traits(
        observations="encoded",
        targets=("critic",),
        policy_modules=("actor", "critic"),
        critic_modules=("critic",),
        actions=("continuous",),
    )
    actor_class = BestFlowActor

    def modules(self) -> dict[str, nn.Module]:
        c, s = self.config, self.spec
        self.value, self.critic = Value(c, s), Critic(c, s)
        return {"value": self.value.network, "critic": self.critic.network, "actor": make_field(c, s)}

    def target_q(self, state: TrainState, batch: Batch, key: Tensor) -> Values:
        """Q'(s, a) [B] of the target critics at the data's actions: their smallest, or as `pessimism` says."""
        logits = self.critic.logits(self.critic.target_critics(state, key), batch["observations"], batch["actions"])
        return self.critic.aggregate(logits, self.config.pessimism, self.config.rho)

    def value_loss(self, value: Params, state: TrainState, batch: Batch, key: Tensor) -> Loss:
        """E |tau - 1(Q' - V < 0)| (Q' - V)^2 (arXiv 2110.06169, equation 5)."""
        return in_sample.expectile_loss(
            self.value, value, batch, self.target_q(state, batch, key), self.config.expectile
        )

    def critic_loss(self, critic: Params, state: TrainState, batch: Batch, key: Tensor) -> Loss:
        """sum_i E (r + gamma V(s') - Q_i(s, a))^2 (arXiv 2110.06169, equation 6)."""
        next_v = self.value(state.params["value"], batch["next_observations"])
        return self.critic.loss(critic, batch, self.critic.td_target(batch, next_v), key)

    def actor_loss(self, actor: Params, state: TrainState, batch: Batch, key: Tensor) -> Loss:
        """E |v(s, x_t, t) - (a - z)|^2 / A, x_t = (1 - t) z + t a: cloning, whatever the actions are worth."""
        observations = batch["observations"]
        loss = flow.matching(lambda x, t: self.apply("actor", actor, observations, x, t), batch["actions"], key).mean()
        return loss, {"actor/loss": loss}

    def update(self, state: TrainState, batch: Batch, key: Tensor, *, phase: int) -> Update:
        value_key, critic_key, actor_key = rng.split(key, 3)
        return self.simultaneous(
            state,
            self.descend(state, "value", self.value_loss, batch, value_key),
            self.descend(state, "critic", self.critic_loss, batch, critic_key),
            self.descend(state, "actor", self.actor_loss, batch, actor_key),
        )
