"""Implicit Q-learning: "Offline Reinforcement Learning with Implicit Q-Learning" (Kostrikov et al., 2021, arXiv
2110.06169).
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from offrl import losses
from offrl.actor import Actor, MemorylessActor, NoisyActor
from offrl.algorithm import Algorithm, Batch, Loss, Params, TrainState, Update
from offrl.families.critics import (
    ActorScheduleSettings,
    ConstraintSettings,
    Critic,
    RepresentationSettings,
    Value,
    Values,
)
from offrl.families.in_sample import WeightedImitation
from offrl.nn import Deterministic, make_policy
from offrl.registry import register
from offrl.settings.field import defaults, setting


@dataclass
@defaults(init="orthogonal")
class IQLConfig(ActorScheduleSettings, ConstraintSettings, RepresentationSettings):
    """Settings of IQL; the defaults are the authors' for D4RL's locomotion tasks."""

    name: str = "iql"
    expectile: float = setting(
        0.7, "tau: 0.5 values the data's policy, 1.0 the best action in the data", low=0.0, high=1.0
    )
    temperature: float = setting(3.0, "beta: multiplies the advantage in the exponent; larger is greedier", low=0.0)
    max_weight: float = setting(100.0, "cap of the exponential weights", low=0.0)
    policy: str = setting(
        "gaussian",
        "gaussian (as published), tanh_gaussian, unit_gaussian (as OGBench), deterministic with squared error "
        "(discrete: categorical)",
        choices=("gaussian", "tanh_gaussian", "unit_gaussian", "deterministic"),
    )
    dropout: float = setting(0.0, "dropout rate of the policy", low=0.0, high=0.99, structural=True)
    update_order: str = setting(
        "sequential",
        "sequential: V, the policy by the new V and the target critics, the critics (as published); simultaneous: all "
        "from the parameters before the update, the policy by the online critics (as OGBench)",
        choices=("sequential", "simultaneous"),
    )


@register("algo", "iql")
class IQL(WeightedImitation, Algorithm[IQLConfig]):
    """Expectile V, one-step Q, advantage-weighted policy: no action outside the data is ever evaluated."""

    def modules(self) -> dict[str, nn.Module]:
        c, s = self.config, self.latent_spec
        self.value = Value(c, s)
        form = {"activation": c.activation, "dropout": c.dropout, "init": c.init}
        actor = make_policy(c.policy, s.observation_dim, s.action_dim, s.num_actions, c.hidden, **form)
        self.critic = critic = Critic(c, s)
        more = {**self.cost_modules(), **self.encoder_modules()}
        return {"value": self.value.network, "actor": actor, "critic": critic.network, **more}

    def value_loss(self, value: Params, state: TrainState, batch: Batch, q: Values) -> Loss:
        """E |tau - 1(Q - V < 0)| (Q - V)^2 (equation 5)."""
        v = self.value(value, batch["observations"])
        weight = losses.expectile_weight(q.mean - v.mean, self.config.expectile)
        loss = (weight * self.value.objective(v, q)).mean()
        return loss, {"value/loss": loss, "value/v": v.mean.mean()}

    def critic_loss(self, critic: Params, state: TrainState, batch: Batch, key: Tensor) -> Loss:
        """E (r + gamma V(s') - Q(s, a))^2 (equation 6)."""
        next_v = self.value(state.params["value"], batch["next_observations"])
        return self.critic.loss(critic, batch, self.critic.td_target(batch, next_v), key)

    def actor_loss(self, actor: Params, state: TrainState, batch: Batch, q: Tensor, key: Tensor) -> Loss:
        """-E min(exp(beta (Q - V)), cap) log pi(a|s) (equation 7)."""
        weight, metrics = self.weights(state, batch, q)
        dist = self.apply("actor", actor, batch["observations"], key)
        loss = (weight * self.policy.bc_loss(dist, batch["actions"])).mean()
        return loss, {"actor/loss": loss, **metrics}

    def update(self, state: TrainState, batch: Batch, key: Tensor, *, phase: int) -> Update:
        self, state, batch, learnt = self.on_latents(state, batch)
        q = self.critic.min_q(self.critic.target_critics(state, key), batch["observations"], batch["actions"])
        if self.config.update_order == "simultaneous":  # the policy by the online critics
            online = self.critic.min_q(state.params["critic"], batch["observations"], batch["actions"]).mean
            state, metrics = self.simultaneous(
                state,
                self.descend(state, "value", self.value_loss, batch, q),
                self.descend(state, "actor", self.actor_loss, batch, online, key),
                self.descend(state, "critic", self.critic_loss, batch, key),
            )
        else:
            state, value = self.descend(state, "value", self.value_loss, batch, q)
            # with the new V, as the authors' code
            state, actor = self.descend(state, "actor", self.actor_loss, batch, q.mean, key)
            state, critic = self.descend(state, "critic", self.critic_loss, batch, key)
            state, metrics = self.polyak(self.critic.regularised(state), "critic"), {**value, **actor, **critic}
        state, costs = self.learn_costs(state, batch, lambda b: self.weights(state, b, q.mean)[0], metrics)
        return state, {**learnt, **metrics, **costs}

    def actor(self, state: TrainState) -> Actor:
        kind = NoisyActor if isinstance(self.policy, Deterministic) else MemorylessActor
        return self.acting(kind)(self, state)
