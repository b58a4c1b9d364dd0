"""V(s) as a part that an algorithm has, and the values that critics and V give."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from offrl.algorithm import DataSpec, Params, Part
from offrl.families.critics.settings import CriticSettings, make_value_head
from offrl.nn import MLP, Bootstrap, call


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
