"""Settings of critics and V, and V(s) as a part that an algorithm has: what every algorithm that learns Q may be given,
the value head that its settings name, and the values that critics and V give.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from offrl.algorithm import DataSpec, Grid, Params, Part
from offrl.errors import UserError
from offrl.nn import BINNED, HEADS, MLP, Bootstrap, NetworkSettings, ValueHead, call, make_head
from offrl.nn.mlp import ACTIVATIONS
from offrl.settings.field import setting


def epsilon_field(default: float = 1e-5) -> Any:
    """The setting `layer_norm_epsilon`, at the value of the framework in which an algorithm's authors write."""
    return setting(
        default, "added to the variance in LayerNorm (torch's is 1e-5, flax's 1e-6)", low=1e-12, structural=True
    )


@dataclass
class CriticSettings(NetworkSettings):
    """Settings of every algorithm that learns Q; an algorithm's own defaults are in its file."""

    learning_rate: float = setting(3e-4, "Adam's learning rate", low=0.0)
    actor_learning_rate: float | None = setting(None, "the actor's, where it is another; null: learning_rate", low=0.0)
    batch_size: int = setting(256, "transitions in a batch", low=1)
    discount: float = setting(0.99, "discount factor", low=0.0, high=1.0)
    polyak: float = setting(
        0.005, "share of the online parameters that enters the targets whenever they move", low=0.0, high=1.0
    )
    hidden: list[int] = setting([256, 256], "widths of the hidden layers", low=1)
    critic_hidden: list[int] = setting([], "widths of the critics' hidden layers (and of V's); []: hidden", low=1)
    init: str = setting(
        "torch",
        "initial weights: torch (uniform), orthogonal, fixed_bias (as EDAC and ReBRAC), small_head (as CQL), xavier "
        "(as OGBench)",
        choices=("torch", "orthogonal", "fixed_bias", "small_head", "xavier"),
    )
    activation: str = setting(
        "relu",
        "activation of the hidden layers, of the policy too where it is a plain network",
        choices=tuple(ACTIVATIONS),
    )
    n_step: int = setting(
        1,
        "targets sum the rewards of so many steps of the data before they bootstrap; fewer where an episode ends",
        low=1,
    )
    critics: int = setting(2, "how many critics; targets take the smallest of their values", low=1)
    target_critics: int = setting(0, "a random subset of so many critics for each target, as in REDQ; 0: all", low=0)
    layer_norm: bool = setting(False, "LayerNorm after each hidden layer of the critics (and of V)")
    layer_norm_epsilon: float = epsilon_field()
    residual: bool = setting(False, "hidden layers of equal width add their input, in the critics (and in V)")
    critic_dropout: float = setting(
        0.0, "dropout rate of the critics while they learn", low=0.0, high=0.99, structural=True
    )
    spectral_norm: float = setting(
        0.0, "largest singular value of each layer of the critics; 0: any", low=0.0, structural=True
    )
    lipschitz: float = setting(
        0.0,
        "weight of the critics' squared change when observations move by lipschitz_radius; 0: off",
        low=0.0,
        structural=True,
    )
    lipschitz_radius: float = setting(
        0.1, "largest move of each observation (normalised), in the direction of steepest change", low=0.0
    )
    value_head: str = setting(
        "scalar",
        "how values are represented: one number, a distribution over value_bins, value_quantiles, mean and deviation",
        choices=HEADS,
    )
    value_bins: int = setting(101, "bins of hl_gauss, two_hot and c51", low=2)
    value_quantiles: int = setting(32, "quantiles of value_head=quantile", low=2)
    value_range: list[float] = setting(
        [], "smallest and largest value of the bins; []: found from the data's discounted returns"
    )
    value_sigma: float = setting(
        0.75, "hl_gauss: standard deviation of a target in widths of a bin", low=1e-3, structural=True
    )


@dataclass
class RiskSettings:
    """Setting of algorithms whose actor maximises the critics' values."""

    risk: float = setting(
        1.0,
        "the actor maximises the mean of the worst share of returns that is so large (CVaR), 1: the mean; needs a "
        "value_head with a distribution of returns: quantile, gaussian, c51",
        above=0.0,
        high=1.0,
    )


DISTRIBUTIONS = ("quantile", "gaussian", "c51")  # heads that learn the distribution of returns, not of a target


def check_risk(config: Any, grid: Grid) -> None:
    """Raise UserError for a `risk` below 1 with a value head that knows no distribution of returns."""
    levels = (grid or {}).get("risk", [getattr(config, "risk", 1.0)])
    if config.value_head not in DISTRIBUTIONS and any(level != 1.0 for level in levels):
        raise UserError(
            f"algo.risk needs the distribution of returns, and algo.value_head={config.value_head} learns none: take "
            f"algo.value_head={' or '.join(DISTRIBUTIONS)}"
        )


@dataclass
class ActorScheduleSettings:
    """Settings of the learning rate of an actor that `WithCritic` trains."""

    actor_schedule: str = setting(
        "cosine", "the actor's learning rate over decay_steps", choices=("cosine", "constant")
    )
    decay_steps: int = setting(
        1_000_000, "length of the schedule in updates, as published whatever the run's length", low=1
    )


def make_value_head(config: CriticSettings) -> ValueHead:
    """The value head of these settings. Raises UserError where the range of its bins is missing or empty."""
    if config.value_head not in BINNED:
        return make_head(config.value_head, quantiles=config.value_quantiles)
    limits = config.value_range
    if len(limits) != 2 or not -math.inf < limits[0] < limits[1] < math.inf:
        raise UserError(
            f"algo.value_range={limits} must be [smallest,largest] for algo.value_head={config.value_head}, sums of "
            "discounted rewards such as [-100,0]; without it `offrl train` finds the range from the data, where there "
            "are some"
        )
    return make_head(config.value_head, config.value_bins, limits[0], limits[1], config.value_sigma)


class Values(NamedTuple):
    """Values, and the network's outputs that they were read from."""

    mean: Tensor  # [B], or [E, B] of E critics
    logits: Tensor | None = None  # [..., out_dim]; None where the head does not bootstrap from a distribution


class Target(NamedTuple):
    """The regression target of critics."""

    value: Tensor  # [B]
    bootstrap: Bootstrap | None = None  # from the next value, for a head that uses its distribution


Objective = Callable[[Tensor, Target], Tensor]  # outputs [E, B, out_dim] and their target -> loss of each, [E, B]


class Value(Part):
    """V(s) with the critics' head and options, the algorithm's module "value"."""

    config: CriticSettings

    def __init__(
        self, config: CriticSettings, spec: DataSpec, *, layer_norm: bool = False, norm_first: bool = False
    ) -> None:
        """layer_norm: with LayerNorm even where the critics have none; norm_first: before the activation. Raises
        UserError.
        """
        super().__init__(config, spec)
        self.head = make_value_head(config)
        self.network = MLP(
            spec.observation_dim,
            config.critic_hidden or config.hidden,
            self.head.out_dim,
            activation=config.activation,
            layer_norm=config.layer_norm or layer_norm,
            layer_norm_epsilon=config.layer_norm_epsilon,
            norm_first=norm_first,
            residual=config.residual,
            init=config.init,
        )

    def __call__(self, params: Params, observations: Tensor) -> Values:
        """V [B] and the outputs [B, out_dim]."""
        logits = call(self.network, params, observations)
        return Values(self.head.mean(logits), logits)

    def objective(self, v: Values, target: Values) -> Tensor:
        """The head's loss of V against the values [B] of critics: [B]."""
        assert v.logits is not None
        bootstrap = None if target.logits is None else Bootstrap(target.logits, torch.ones_like(target.mean))
        return self.head.loss(v.logits, target.mean, bootstrap)
