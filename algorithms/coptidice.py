"""COptiDICE: "COptiDICE: Offline Constrained Reinforcement Learning via Stationary Distribution Correction Estimation"
(Lee et al., 2022, arXiv 2204.08957).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from offrl import rng
from offrl.algorithm import Algorithm, Batch, Dataset, Grid, Loss, Params, TrainState, Traits, TransitionSampler, Update
from offrl.data.samplers.transitions import FIRST, FIRST_WEIGHTS
from offrl.families.critics import LimitSettings, even_cost, fit_limit
from offrl.nn import EnsembleMLP, make_policy
from offrl.nn.custom.networks import ActorNetworkSettings
from offrl.registry import register
from offrl.settings.field import defaults, setting

NETWORKS = 2  # of nu and of chi; the smallest value counts


@dataclass
@defaults(cost_limit=10.0)
class COptiDICEConfig(LimitSettings, ActorNetworkSettings):
    """Settings of COptiDICE; the defaults are OSRL's for DSRL's tasks."""

    name: str = "coptidice"
    divergence_weight: float = setting(0.5, "weight of the divergence of the policy's visits from the data's", low=1e-6)
    cost_radius: float = setting(
        0.01,
        "the limit bounds the largest cost that data within this KL divergence of the batch would have; 0: the batch's",
        low=0.0,
        structural=True,
    )
    cost_scale: str = setting(
        "mean",
        "what the limit bounds: mean: the discounted mean cost of a step, as in the paper; sum: OSRL's, which compares "
        "that mean with the threshold of the discounted sum, 1 / (1 - discount) times as much",
        choices=("mean", "sum"),
    )
    data_noise: float = setting(
        0.1, "noise on what the policy imitates, in standard deviations of observations and actions", low=0.0
    )
    learning_rate: float = setting(1e-4, "Adam's learning rate", low=0.0)
    batch_size: int = setting(512, "transitions in a batch", low=1)
    discount: float = setting(0.99, "discount factor of rewards and costs", low=0.0, high=0.9999)
    hidden: list[int] = setting([256, 256], "widths of the hidden layers", low=1)


class Softplus(nn.Module):
    """One learnt number above 0."""

    def __init__(self) -> None:
        super().__init__()
        self.raw = nn.Parameter(torch.ones(()))

    def forward(self) -> Tensor:
        return nn.functional.softplus(self.raw)


@register("algo", "coptidice")
class COptiDICE(Algorithm[COptiDICEConfig]):
    """The visits of the best policy that keeps the limit, as weights of the data's rows, which the policy imitates. No
    action outside the data is evaluated.

    Modules: nu(s), the multipliers of the flow of visits; multiplier, of the cost (lambda); actor; with `cost_radius`
    chi(s) and temperature (tau), which bound the cost from above.
    """

    traits = Traits()

    @classmethod
    def fit_config(cls, config: COptiDICEConfig, dataset: Dataset, grid: Grid = None) -> COptiDICEConfig:
        return fit_limit(config, dataset, grid)

    def modules(self) -> dict[str, nn.Module]:
        c, s = self.config, self.spec
        modules: dict[str, nn.Module] = {
            "nu": EnsembleMLP(NETWORKS, s.observation_dim, c.hidden, 1),
            "multiplier": Softplus(),
            "actor": make_policy("tanh_gaussian", s.observation_dim, s.action_dim, s.num_actions, c.hidden),
        }
        if c.cost_radius:
            modules |= {"chi": EnsembleMLP(NETWORKS, s.observation_dim, c.hidden, 1), "temperature": Softplus()}
        return modules

    def sampler(self) -> TransitionSampler:
        return TransitionSampler(("costs", FIRST))

    def value(self, name: str, params: Params, observations: Tensor) -> Tensor:
        """The smallest value [B] of nu or chi."""
        return self.apply(name, params, observations).amin(0).squeeze(-1)

    def flow(self, name: str, params: Params, batch: Batch) -> tuple[Tensor, Tensor]:
        """((1 - g) v(s_0) [B], s_0 the first states of the rows' episodes, of which each counts as much as another; g
        v(s') - v(s) [B]) of v, nu or chi.
        """
        discount = self.config.discount
        first = (1.0 - discount) * batch[FIRST_WEIGHTS] * self.value(name, params, batch[FIRST])
        following = discount * batch["masks"] * self.value(name, params, batch["next_observations"])
        return first, following - self.value(name, params, batch["observations"])

    def scaled_advantage(self, change: Tensor, state: TrainState, batch: Batch) -> Tensor:
        """(r - lambda c + g nu(s') - nu(s)) / alpha [B]; change: g nu(s') - nu(s)."""
        penalty = self.apply("multiplier", state.params["multiplier"]) * batch["costs"]
        return (batch["rewards"] - penalty + change) / self.config.divergence_weight

    def weights(self, state: TrainState, batch: Batch) -> Tensor:
        """w(s, a) [B], visits of the policy over those of the data: (f')^-1 of the scaled advantage (equation 12)."""
        x = self.scaled_advantage(self.flow("nu", state.params["nu"], batch)[1], state, batch)
        return torch.where(x < 0.0, x.clamp(max=0.0).exp(), x + 1.0)

    def nu_loss(self, nu: Params, state: TrainState, batch: Batch) -> Loss:
        """(1 - g) E nu(s_0) + alpha E f*(e / alpha), e the advantage, f* the conjugate of the soft chi-square f
        (equation 14), which is w e / alpha - f(w) at w = (f')^-1(e / alpha).
        """
        first, change = self.flow("nu", nu, batch)
        x = self.scaled_advantage(change, state, batch)
        conjugate = torch.where(x < 0.0, x.clamp(max=0.0).expm1(), 0.5 * x.square() + x)
        loss = (first + self.config.divergence_weight * conjugate).mean()
        return loss, {"nu/loss": loss, "nu/value": first.mean() / (1.0 - self.config.discount)}

    def chi_loss(self, chi: Params, state: TrainState, batch: Batch, weights: Tensor) -> Loss:
        """E u l, l = (1 - g) chi(s_0) + w (c + g chi(s') - chi(s)), u = softmax(l / tau) B (equation 22): the largest
        mean cost of data within `cost_radius` of the batch is C = E u w c.
        """
        first, change = self.flow("chi", chi, batch)
        bound = first + weights * (batch["costs"] + change)
        log_u = (bound / self.apply("temperature", state.params["temperature"])).log_softmax(0)
        log_u = log_u + torch.tensor(float(len(bound)), device=bound.device).log()
        u = log_u.exp()
        loss = (u * bound).mean()
        return loss, {
            "chi/loss": loss,
            "cost/mean": (u * weights * batch["costs"]).mean(),
            "cost/divergence": (u * log_u - u + 1.0).mean(),
        }

    def temperature_loss(self, temperature: Params, state: TrainState, divergence: Tensor) -> Loss:
        """tau (epsilon - D), D the KL divergence [] of the weights u."""
        tau = self.apply("temperature", temperature)
        return tau * (self.config.cost_radius - divergence), {"cost/temperature": tau}

    def multiplier_loss(self, multiplier: Params, state: TrainState, cost: Tensor) -> Loss:
        """lambda (kappa - C), C [] the bound of the mean cost."""
        c, weight = self.config, self.apply("multiplier", multiplier)
        threshold = even_cost(c.cost_limit, c.cost_horizon, c.discount)
        if c.cost_scale == "mean":
            threshold = threshold * (1.0 - c.discount)
        return weight * (threshold - cost), {"cost/excess": cost / threshold - 1.0, "cost/multiplier": weight}

    def actor_loss(self, actor: Params, state: TrainState, batch: Batch, key: Tensor) -> Loss:
        """-E w log pi(a | s), with noise on s and a."""
        weights, observations = self.weights(state, batch), self.noisy(batch["observations"], key)
        actions = batch["actions"] if self.spec.discrete else self.noisy(batch["actions"], rng.fold_in(key, 1))
        loss = (weights * self.policy.bc_loss(self.apply("actor", actor, observations), actions)).mean()
        return loss, {"actor/loss": loss, "actor/weight": weights.mean()}

    def noisy(self, values: Tensor, key: Tensor) -> Tensor:
        """Values [B, D] with noise of `data_noise` of their standard deviations over the batch."""
        return values + self.config.data_noise * values.std(0, correction=0) * rng.normal(key, tuple(values.shape))

    def update(self, state: TrainState, batch: Batch, key: Tensor, *, phase: int) -> Update:
        weights = self.weights(state, batch)
        metrics = {"cost/mean": (weights * batch["costs"]).mean()}
        if self.config.cost_radius:
            state, metrics = self.descend(state, "chi", self.chi_loss, batch, weights)
            state, temperature = self.descend(state, "temperature", self.temperature_loss, metrics["cost/divergence"])
            metrics |= temperature
        state, nu = self.descend(state, "nu", self.nu_loss, batch)
        state, actor = self.descend(state, "actor", self.actor_loss, batch, key)
        state, multiplier = self.descend(state, "multiplier", self.multiplier_loss, metrics["cost/mean"])
        return state, {**metrics, **nu, **actor, **multiplier}
