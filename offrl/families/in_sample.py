"""In-sample learning: the parts that IQL, XQL, f-DVL and ReCOIL, each of which has its own loss of V, share beside
their critics.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from offrl import losses, rng
from offrl.actor import Actor, MemorylessActor, NoisyActor
from offrl.algorithm import Algorithm, Batch, Loss, Metrics, TrainState, Update
from offrl.families.critics import (
    ActorScheduleSettings,
    Critic,
    CriticSettings,
    InSampleConstraint,
    Objective,
    Target,
    Value,
    Values,
    WithCritic,
)
from offrl.nn import Deterministic, make_policy
from offrl.optim import Adam, OptState, Params, global_norm
from offrl.settings.field import defaults, setting


@dataclass
@defaults(init="orthogonal")
class InSampleSettings(ActorScheduleSettings, CriticSettings):
    """Settings of in-sample algorithms with IQL's policy; the defaults are its authors' for D4RL's locomotion tasks."""

    temperature: float = setting(3.0, "multiplies the advantage in the exponent; larger is greedier", low=0.0)
    max_weight: float = setting(100.0, "cap of the exponential weights", low=0.0)
    policy: str = setting(
        "gaussian",
        "gaussian (as published), tanh_gaussian, unit_gaussian (as OGBench), deterministic with squared error "
        "(discrete: categorical)",
        choices=("gaussian", "tanh_gaussian", "unit_gaussian", "deterministic"),
    )
    dropout: float = setting(0.0, "dropout rate of the policy", low=0.0, high=0.99, structural=True)


@dataclass
@defaults(layer_norm_epsilon=1e-6)
class SteepValueSettings(InSampleSettings):
    """Settings of in-sample algorithms whose loss of V is steep; the defaults are XQL's "consistent" ones for D4RL's
    locomotion tasks.
    """

    value_layer_norm: bool = setting(True, "LayerNorm in each hidden layer of V, whatever the critics have")
    value_updates: int = setting(1, "updates of V in each update", low=1)
    random_actions: int = setting(0, "so many uniformly random actions for each state are added to V's batch", low=0)
    action_noise: float = setting(
        0.0,
        "standard deviation of noise (cut at 0.5) on the data's continuous actions in V's batch; 0: none",
        low=0.0,
        structural=True,
    )
    huber_delta: float = setting(
        20.0,
        "scalar value head: the critics' squared errors grow linearly beyond this; 0: never",
        low=0.0,
        structural=True,
    )


ConfigT = TypeVar("ConfigT", bound=SteepValueSettings)


def expectile_loss(
    value: Value, params: Params, batch: Batch, q: Values, expectile: float | Tensor, rows: float | Tensor = 1.0
) -> Loss:
    """E |tau - 1(Q - V < 0)| (Q - V)^2 (IQL, arXiv 2110.06169, equation 5), for values q [B]. rows [B]: weights of the
    batch's rows.
    """
    v = value(params, batch["observations"])
    loss = (rows * losses.expectile_weight(q.mean - v.mean, expectile) * value.objective(v, q)).mean()
    return loss, {"value/loss": loss, "value/v": v.mean.mean()}


# ---- policies by advantage-weighted imitation


class WeightedImitation(WithCritic):
    """What algorithms share that have V, and whose policy imitates the data's actions weighted by exponential
    advantages.
    """

    constraint_class = InSampleConstraint
    value: Value
    apply: Any
    policy: Any

    def weights(self, state: TrainState, batch: Batch, q: Tensor) -> tuple[Tensor, Metrics]:
        """min(exp(temperature (Q - V)), cap) [B], of which a limit of costs lowers Q - V where these are high."""
        advantage = q - self.value(state.params["value"], batch["observations"]).mean
        advantage, costs = self.limited_advantage(
            advantage, state, batch, lambda limit: limit.policy_cost(state, batch["observations"])
        )
        weight = losses.advantage_weight(advantage, self.config.temperature, self.config.max_weight)
        return weight, {"actor/advantage": advantage.mean(), "actor/weight": weight.mean(), **costs}

    def actor_loss(self, actor: Params, state: TrainState, batch: Batch, q: Tensor, key: Tensor) -> Loss:
        """-E min(exp(temperature (Q - V)), cap) log pi(a|s)."""
        weight, metrics = self.weights(state, batch, q)
        dist = self.apply("actor", actor, batch["observations"], key)
        loss = (weight * self.policy.bc_loss(dist, batch["actions"])).mean()
        return loss, {"actor/loss": loss, **metrics}


# ---- steep losses of V (XQL, f-DVL, ReCOIL)


class SteepValue(WeightedImitation, Algorithm[ConfigT]):
    """XQL and its relatives, each of which has its own loss of V: critics by Huber's loss, a policy by weighted
    imitation. Modules: value, actor, critic.
    """

    def modules(self) -> dict[str, nn.Module]:
        c, s = self.config, self.spec
        self.value = Value(c, s, layer_norm=c.value_layer_norm, norm_first=True)  # as the authors' code
        actor = make_policy(
            c.policy,
            s.observation_dim,
            s.action_dim,
            s.num_actions,
            c.hidden,
            activation=c.activation,
            dropout=c.dropout,
            init=c.init,
        )
        self.critic = critic = Critic(c, s)
        return {"value": self.value.network, "actor": actor, "critic": critic.network, **self.cost_modules()}

    @abstractmethod
    def value_loss(self, value: Params, state: TrainState, batch: Batch, q: Tensor) -> Loss:
        """The loss of V against Q [B] of the target critics at the batch's actions."""

    def critic_loss(self, critic: Params, state: TrainState, batch: Batch, key: Tensor) -> Loss:
        """E h(r + gamma V(s') - Q(s, a)), h Huber's loss (XQL, arXiv 2301.02328, equation 12)."""
        target = self.critic.td_target(batch, self.value(state.params["value"], batch["next_observations"]))
        return self.critic.loss(critic, batch, target, key, objective=huber_objective(self.config, self.critic))

    def update(self, state: TrainState, batch: Batch, key: Tensor, *, phase: int) -> Update:
        target_critics = self.critic.target_critics(state, key)
        value: Metrics = {}
        q = self.critic.min_q(target_critics, batch["observations"], batch["actions"]).mean
        for i in range(self.config.value_updates):
            inputs = value_batch(self.config, self.critic, target_critics, batch, q, rng.fold_in(key, 200 + i))
            opt_state = state.opt["value"]
            state, value = self.descend(state, "value", self.value_loss, *inputs)
            value["value/gradient"] = gradient_norm(opt_state, state.opt["value"], self.optimizer("value"))
        state, actor = self.descend(state, "actor", self.actor_loss, batch, q, key)
        state, critic = self.descend(state, "critic", self.critic_loss, batch, key)
        state = self.polyak(self.critic.regularised(state), "critic")
        state, costs = self.learn_costs(state, batch, lambda b: self.weights(state, b, q)[0], actor)
        return state, {**value, **actor, **critic, **costs}

    def actor(self, state: TrainState) -> Actor:
        return (NoisyActor if isinstance(self.policy, Deterministic) else MemorylessActor)(self, state)


def value_batch(
    config: SteepValueSettings, critic: Critic, params: Params, batch: Batch, q: Tensor, key: Tensor
) -> tuple[Batch, Tensor]:
    """Observations and Q [B'] for V's loss: at the data's actions, with noise where `action_noise` is above 0, and then
    at random ones.

    params: of the critics that gave q [B] at the data's actions.
    """
    observations, actions = batch["observations"], batch["actions"]
    keys = rng.split(key)
    if config.action_noise and not critic.spec.discrete:
        noise = (config.action_noise * rng.normal(keys[0], tuple(actions.shape))).clamp(-0.5, 0.5)
        actions = (actions + noise).clamp(-1.0, 1.0)
        q = critic.min_q(params, observations, actions).mean
    if config.random_actions:
        observations = observations.repeat(config.random_actions, *[1] * (observations.ndim - 1))
        shape = (observations.shape[0], *actions.shape[1:])
        if critic.spec.discrete:
            actions = rng.randint(keys[1], shape, critic.spec.num_actions)
        else:
            actions = rng.uniform(keys[1], shape, -1.0, 1.0)
        q = torch.cat([q, critic.min_q(params, observations, actions).mean])
        observations = torch.cat([batch["observations"], observations])
    return {**batch, "observations": observations}, q


def huber_objective(config: SteepValueSettings, critic: Critic) -> Objective | None:
    """The critics' squared errors, which grow linearly beyond `huber_delta`; None: the value head's own loss, where it
    is no scalar.
    """
    if config.value_head != "scalar":
        return None

    def objective(logits: Tensor, target: Target) -> Tensor:
        error = critic.head.mean(logits) - target.value
        return losses.huber(error, config.huber_delta) if config.huber_delta else 0.5 * error.square()

    return objective


def value_metrics(rows: Tensor, q: Tensor, v: Tensor) -> Metrics:
    """Metrics of a steep loss of V, [B] each: beside its mean, to show spikes, a row's largest loss and V's largest
    distance from Q.
    """
    gap = (q - v).detach().abs()
    return {"value/loss": rows.mean(), "value/v": v.mean(), "value/largest": rows.amax(), "value/gap": gap.amax()}


def gradient_norm(previous: OptState, current: OptState, adam: Adam) -> Tensor:
    """Norm [] of the gradient that Adam was given between two of its states: its first moment keeps it."""
    old_mu, new_mu = cast(Params, previous["mu"]), cast(Params, current["mu"])
    return global_norm({k: (new_mu[k] - adam.beta1 * old_mu[k]) / (1.0 - adam.beta1) for k in new_mu})
