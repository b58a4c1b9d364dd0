"""CPQ: "Constraints Penalized Q-Learning for Safe Offline Reinforcement Learning" (Xu et al., 2022, arXiv
2107.09003).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from offrl import rng
from offrl.algorithm import Algorithm, Batch, Loss, Params, TrainState, TransitionSampler, Tree, Update
from offrl.families.behaviour import Autoencoder, AutoencoderSettings
from offrl.families.critics import CostCritic, CostSettings, Critic, Values, WithCritic
from offrl.nn import TanhGaussian
from offrl.nn.autoencoder import divergence
from offrl.registry import register
from offrl.settings.field import defaults, setting

LOG_ALPHA = -5.0, 5.0  # bounds of the logarithm of the weight of costs outside the data


@dataclass
@defaults(cost_limit=10.0, learning_rate=1e-3, actor_learning_rate=1e-4, batch_size=512)
class CPQConfig(AutoencoderSettings, CostSettings):
    """Settings of CPQ; the defaults are OSRL's for DSRL's tasks."""

    name: str = "cpq"
    ood: str = setting(
        "osrl",
        "how the policy's actions outside the data come to cost much: osrl: as OSRL's code, whose term has no gradient "
        "and looks at actions before their tanh; paper: the critics of costs are raised there, without a bound",
        choices=("osrl", "paper"),
    )
    ood_samples: int = setting(10, "actions of the policy at each observation, of which some are outside", low=1)
    ood_quantile: float = setting(
        0.75,
        "the share of these actions that counts as within the data, by the autoencoder",
        low=0.0,
        high=1.0,
        structural=True,
    )
    ood_scale: float = setting(1.5, "costs outside the data are raised to this times the threshold", low=0.0)
    ood_rate: float = setting(1e-4, "step of the logarithm of the weight by which they are raised", low=0.0)


@register("algo", "cpq")
class CPQ(WithCritic, Algorithm[CPQConfig]):
    """Values count only where the critics of costs say that the limit is kept, and actions outside the data are made to
    cost more than it.

    Modules: actor, critic, cost_critic, autoencoder (of the data's actions).
    """

    traits = replace(WithCritic.traits, actions=("continuous",), observations="vector")

    def modules(self) -> dict[str, nn.Module]:
        c, s = self.config, self.spec
        self.critic, self.cost_critic, self.autoencoder = Critic(c, s), CostCritic(c, s), Autoencoder(c, s)
        return {
            "critic": self.critic.network,
            "cost_critic": self.cost_critic.network,
            "autoencoder": self.autoencoder.network,
            "actor": TanhGaussian(s.observation_dim, s.action_dim, c.hidden, activation=c.activation, init=c.init),
        }

    def extra(self, params: dict[str, Params]) -> Tree:
        return {"log_alpha": torch.zeros(())}

    def sampler(self) -> TransitionSampler:
        return TransitionSampler(("costs",), self.config.n_step)

    def safe(self, costs: Params, observations: Tensor, actions: Tensor) -> Tensor:
        """1 [B] where Q_c(s, a) is within the threshold, else 0."""
        return (self.cost_critic.cost(costs, observations, actions) <= self.cost_critic.threshold).float()

    def critic_loss(self, critic: Params, state: TrainState, batch: Batch, key: Tensor, actions: Tensor) -> Loss:
        """E (r + gamma 1[Q_c'(s', a') <= kappa] min_j Q'_j(s', a') - Q_i(s, a))^2, a' of the policy, summed over
        critics i.
        """
        observations = batch["next_observations"]
        safe = self.safe(state.target["cost_critic"], observations, actions)
        value = self.critic.min_q(self.critic.target_critics(state, key), observations, actions).mean
        loss, metrics = self.critic.loss(critic, batch, self.critic.td_target(batch, Values(safe * value)), key)
        return loss, {**metrics, "cost/safe": safe.mean()}

    def outside(self, state: TrainState, observations: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Actions [M, B, A] of the policy, and 1 [M, B] where the autoencoder is surest that the data lack them."""
        mean, log_std = self.apply("actor", state.params["actor"], observations)
        shape = (self.config.ood_samples, *mean.shape)
        actions = mean + log_std.exp() * rng.normal(key, shape)
        actions = actions if self.config.ood == "osrl" else actions.tanh()
        inputs = observations.expand(len(actions), *observations.shape)
        kl = divergence(*self.autoencoder.encode(state.params["autoencoder"], inputs, actions))
        return actions, (kl >= quantile(kl, self.config.ood_quantile)).float()

    def outside_cost(self, costs: Params, observations: Tensor, actions: Tensor, outside: Tensor) -> Tensor:
        """The mean cost [] of actions [M, B, A], where those within the data count as 0."""
        q = self.cost_critic.q(costs, observations, actions)
        return (outside * (self.cost_critic.pessimistic(q) if self.config.ood == "osrl" else q.mean(0))).mean()

    def cost_critic_loss(
        self, costs: Params, state: TrainState, batch: Batch, next_cost: Tensor, actions: Tensor, outside: Tensor
    ) -> Loss:
        """The critics' error, and - alpha (E 1[outside] Q_c(s, a) - kappa'), a of the policy (equation 7)."""
        loss, metrics = self.cost_critic.cost_loss(costs, state, batch, next_cost)
        known = state.target["cost_critic"] if self.config.ood == "osrl" else costs
        cost = self.outside_cost(known, batch["observations"], actions, outside)
        alpha = state.extra["log_alpha"].exp()
        loss = loss - alpha * (cost - self.outside_threshold)
        return loss, {**metrics, "cost/loss": loss, "cost/outside": cost, "cost/alpha": alpha}

    @property
    def outside_threshold(self) -> Tensor | float:
        """kappa': what actions outside the data shall cost."""
        return self.config.ood_scale * self.cost_critic.threshold

    def with_alpha(self, state: TrainState, batch: Batch, actions: Tensor, outside: Tensor) -> TrainState:
        """The state with log alpha + rate alpha (kappa' - cost of actions outside the data): it grows while they look
        cheap.
        """
        log_alpha = state.extra["log_alpha"]
        cost = self.outside_cost(state.target["cost_critic"], batch["observations"], actions, outside)
        step = self.config.ood_rate * log_alpha.exp() * (self.outside_threshold - cost)
        return state.with_extra(log_alpha=(log_alpha + step).clamp(*LOG_ALPHA))

    def actor_loss(self, actor: Params, state: TrainState, batch: Batch, key: Tensor) -> Loss:
        """-E 1[Q_c(s, a) <= kappa] min_i Q_i(s, a), a a reparametrised sample (equation 8)."""
        observations = batch["observations"]
        actions = self.policy.sample(self.apply("actor", actor, observations), key)
        safe = self.safe(state.params["cost_critic"], observations, actions)
        q = self.critic.q(state.params["critic"], observations, actions).amin(0)
        loss = -(safe * q).mean()
        return loss, {"actor/loss": loss, "actor/q": q.mean(), "actor/safe": safe.mean()}

    def update(self, state: TrainState, batch: Batch, key: Tensor, *, phase: int) -> Update:
        keys = rng.split(key, 5)
        state, autoencoder = self.descend(state, "autoencoder", self.autoencoder.loss, batch, keys[0])
        observations = batch["next_observations"]
        actions = self.policy.sample(self.apply("actor", state.params["actor"], observations), keys[1])
        next_cost = self.cost_critic.cost(state.target["cost_critic"], observations, actions)
        state, critic = self.descend(state, "critic", self.critic_loss, batch, keys[2], actions)
        state = self.critic.regularised(state)
        samples = self.outside(state, batch["observations"], keys[3])
        state, costs = self.descend(state, "cost_critic", self.cost_critic_loss, batch, next_cost, *samples)
        state = self.with_alpha(state, batch, *samples)
        state, actor = self.descend(state, "actor", self.actor_loss, batch, keys[4])
        state = self.polyak(self.polyak(state, "critic"), "cost_critic")
        return state, {**autoencoder, **critic, **costs, **actor}


def quantile(values: Tensor, share: float) -> Tensor:
    """As `torch.quantile` of all values, which replicas side by side would take one by one: []."""
    ordered, position = values.flatten().sort().values, share * (values.numel() - 1)
    low = int(position)
    return torch.lerp(ordered[low], ordered[min(low + 1, values.numel() - 1)], position - low)
