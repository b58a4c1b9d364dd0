"""Settings that FQL's relatives share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from offrl.data.dataset import DataSpec
from offrl.families.critics import CriticSettings, epsilon_field
from offrl.nn.custom.networks import ActorNetworkSettings
from offrl.nn.flow import Field
from offrl.nn.mlp import ACTIVATIONS
from offrl.settings.field import defaults, setting

PESSIMISM = ("mean", "min", "std")


@dataclass
class FieldSettings(ActorNetworkSettings):
    """Settings of velocity fields; the defaults are FQL's (arXiv 2502.02538) for OGBench."""

    hidden: list[int] = setting([512, 512, 512, 512], "widths of the hidden layers", low=1)
    activation: str = setting(
        "gelu_tanh", "activation of all hidden layers (JAX's GELU is gelu_tanh)", choices=tuple(ACTIVATIONS)
    )
    init: str = setting(
        "xavier",
        "initial weights: xavier (as published), torch (uniform) or orthogonal",
        choices=("xavier", "torch", "orthogonal"),
    )
    layer_norm_epsilon: float = epsilon_field(1e-6)
    actor_layer_norm: bool = setting(False, "LayerNorm after each hidden layer of flows and policies")
    flow_steps: int = setting(10, "Euler steps from noise to an action", low=1, high=1000)


@dataclass
@defaults(hidden=[512, 512, 512, 512], init="xavier", layer_norm=True, layer_norm_epsilon=1e-6)
class FlowSettings(CriticSettings):
    """Settings of algorithms with a flow of actions and critics; the defaults are FQL's (arXiv 2502.02538) for
    OGBench.
    """

    activation: str = setting(
        "gelu_tanh", "activation of all hidden layers (JAX's GELU is gelu_tanh)", choices=tuple(ACTIVATIONS)
    )
    actor_layer_norm: bool = setting(False, "LayerNorm after each hidden layer of flows and policies")
    flow_steps: int = setting(10, "Euler steps from noise to an action", low=1, high=1000)


def pessimism_field(default: str = "mean") -> Any:
    """The setting `pessimism`."""
    return setting(
        default,
        "value of the target critics: their mean, the smallest (min), or mean - rho std (std)",
        choices=PESSIMISM,
    )


def rho_field() -> Any:
    """The setting `rho`."""
    return setting(0.5, "pessimism=std: standard deviations below the mean", low=0.0)


def greedy_field() -> Any:
    """The setting `greedy`, which only acting reads."""
    return setting(
        "sample",
        "acting without exploration, as when scored: sample: an action is drawn, as published; zero: all noise is 0",
        choices=("sample", "zero"),
        acting=True,
    )


def make_field(config: Any, spec: DataSpec, dim: int | None = None, *, timed: bool = True) -> Field:
    """A velocity field of these settings over points of `dim` numbers (None: an action), or with timed=False a map from
    noise.
    """
    norm = {"layer_norm": config.actor_layer_norm, "layer_norm_epsilon": config.layer_norm_epsilon}
    form = {"activation": config.activation, "init": config.init, **norm}
    return Field(spec.observation_dim, dim or spec.action_dim, config.hidden, timed=timed, **form)
