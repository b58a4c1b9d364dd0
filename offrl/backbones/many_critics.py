"""Soft actor-critics whose many critics are the pessimism: SAC-N, and the agreement of their gradients, which EDAC keeps small."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.func import vjp

from offrl.backbones.soft import SoftActorCritic, SoftSettings
from offrl.optim import Params
from offrl.settings import setting


@dataclass
class ManyCriticsSettings(SoftSettings):
    """Settings of SAC-N and EDAC; the defaults are the authors'."""

    hidden: list[int] = setting([256, 256, 256], "widths of the hidden layers", low=1)
    critics: int = setting(10, "how many critics; targets take the smallest of their values", low=1)
    init: str = setting(
        "fixed_bias",
        "initial weights: fixed_bias (as published), torch (uniform), orthogonal, small_head",
        choices=("fixed_bias", "torch", "orthogonal", "small_head"),
    )


class ManyCritics(SoftActorCritic):
    """SAC with N critics, and their gradients with respect to the action."""

    def action_gradients(self, critic: Params, observations: Tensor, actions: Tensor) -> tuple[Tensor, Tensor]:
        """Raw outputs [E, B, out_dim] at actions [B, A], and the gradients [E, B, A] of each critic's value with respect to them.

        Both come from one forward pass, and both can be differentiated with respect to `critic`.
        """
        size = next(iter(critic.values())).shape[0]

        def value(own: Tensor) -> tuple[Tensor, Tensor]:
            inputs = torch.cat([observations.expand(size, *observations.shape), own], -1)
            logits = self.apply("critic", critic, inputs)
            return self.head.mean(logits), logits

        # an action of its own for each critic: the sum of their values then has each critic's gradient apart
        found: Any = vjp(value, actions.expand(size, *actions.shape), has_aux=True)
        values, pull, logits = found
        return logits, pull(torch.ones_like(values))[0]

    @staticmethod
    def alignment(gradients: Tensor) -> Tensor:
        """Mean cosine between the gradients [E, B, A] of two critics, over pairs and rows: []."""
        size = gradients.shape[0]
        unit = gradients / (gradients.norm(dim=-1, keepdim=True) + 1e-10)
        pairs = unit.sum(0).square().sum(-1) - unit.square().sum((0, -1))  # over i != j, without making them all
        return pairs.mean() / (size * (size - 1))
