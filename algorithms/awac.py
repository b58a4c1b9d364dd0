"""AWAC: "Accelerating Online Reinforcement Learning with Offline Datasets" (Nair et al., 2020, arXiv 2006.09359)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from offrl import losses, rng
from offrl.algorithm import Algorithm, Batch, Loss, Params, TrainState, Update
from offrl.families.critics import ConstraintSettings, Critic, Values, WithCritic
from offrl.nn import Categorical, Gaussian
from offrl.registry import register
from offrl.settings.field import defaults, setting


@dataclass
@defaults(hidden=[256, 256, 256])
class AWACConfig(ConstraintSettings):
    """Settings of AWAC; the defaults are CORL's for D4RL's locomotion tasks."""

    name: str = "awac"
    temperature: float = setting(
        3.0,
        "multiplies the advantage in the exponent; larger is greedier. It is 1 / lambda of the paper, which divides by "
        "it",
        low=0.0,
    )
    max_weight: float = setting(100.0, "cap of the exponential weights", low=0.0)


@register("algo", "awac")
class AWAC(WithCritic, Algorithm[AWACConfig]):
    """SAC's critics without entropy, and a policy that imitates the data's actions weighted by exp(temperature *
    advantage).

    The value that an advantage is relative to is that of one action of the policy, or with discrete actions its exact
    mean.
    """

    def modules(self) -> dict[str, nn.Module]:
        c, s = self.config, self.spec
        form: dict[str, Any] = {"activation": c.activation, "init": c.init}
        if s.discrete:
            actor: nn.Module = Categorical(s.observation_dim, s.num_actions, c.hidden, **form)
        else:
            actor = Gaussian(s.observation_dim, s.action_dim, c.hidden, bounded=False, log_std_min=-20.0, **form)
        self.critic = Critic(c, s)
        return {"actor": actor, "critic": self.critic.network, **self.cost_modules()}

    def policy_value(self, state: TrainState, critic: Params, observations: Tensor, key: Tensor) -> Values:
        """V(s) of the policy by the smallest of these critics, [B]."""
        policy = self.own_policy(state, observations, key)
        if not self.spec.discrete:
            return self.critic.min_q(critic, observations, policy)
        return self.critic.expected_q(critic, observations, policy)

    def own_policy(self, state: TrainState, observations: Tensor, key: Tensor) -> Tensor:
        """Actions [B, A] of the policy; discrete: its log probabilities [B, K]."""
        dist = self.apply("actor", state.params["actor"], observations)
        return dist[0] if self.spec.discrete else self.policy.sample(dist, key)

    def critic_loss(self, critic: Params, state: TrainState, batch: Batch, key: Tensor) -> Loss:
        target_critics = self.critic.target_critics(state, rng.fold_in(key, 100))
        next_value = self.policy_value(state, target_critics, batch["next_observations"], key)
        return self.critic.loss(critic, batch, self.critic.td_target(batch, next_value), key)

    def actor_loss(self, actor: Params, state: TrainState, batch: Batch, key: Tensor) -> Loss:
        observations, critic = batch["observations"], state.params["critic"]
        baseline = self.policy_value(state, critic, observations, key).mean
        advantage = self.critic.q(critic, observations, batch["actions"]).amin(0) - baseline
        advantage, costs = self.limited_advantage(
            advantage,
            state,
            batch,
            lambda limit: limit.cost(
                state.params["cost_critic"], observations, self.own_policy(state, observations, key)
            ),
        )
        weight = losses.advantage_weight(advantage, self.config.temperature, self.config.max_weight)
        dist = self.apply("actor", actor, observations)
        loss = (weight * self.policy.bc_loss(dist, batch["actions"])).mean()
        metrics = {"actor/loss": loss, "actor/advantage": advantage.mean(), "actor/weight": weight.mean()}
        return loss, {**metrics, **costs}

    def update(self, state: TrainState, batch: Batch, key: Tensor, *, phase: int) -> Update:
        critic_key, actor_key = rng.split(key)
        state, critic = self.descend(state, "critic", self.critic_loss, batch, critic_key)
        state = self.critic.regularised(state)
        # with the new critics: algorithm 1
        state, actor = self.descend(state, "actor", self.actor_loss, batch, actor_key)
        state = self.polyak(state, "critic")
        state, costs = self.learn_costs(
            state, batch, lambda b: self.own_policy(state, b["next_observations"], critic_key), actor
        )
        return state, {**critic, **actor, **costs}
