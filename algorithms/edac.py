"""EDAC: "Uncertainty-Based Offline Reinforcement Learning with Diversified Q-Ensemble" (An et al., 2021, arXiv
2110.01548), section 4.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import vjp

from offrl import rng
from offrl.algorithm import Batch, Loss, Params, TrainState
from offrl.errors import UserError
from offrl.families.critics import Critic
from offrl.families.sac import ManyCriticsSettings, SoftActorCritic
from offrl.nn.encoders.own import members
from offrl.registry import register
from offrl.settings.field import setting


@dataclass
class EDACConfig(ManyCriticsSettings):
    """Settings of EDAC; the defaults are the authors' for D4RL's HalfCheetah."""

    name: str = "edac"
    eta: float = setting(1.0, "weight of the agreement of the critics' gradients; 0: SAC-N", low=0.0)
    compared_critics: int = setting(
        0,
        "gradients of a random subset of so many critics are compared in each update, 2 or more; 0: of all. The "
        "penalty keeps its expectation: the authors' first code, which compared a subset, has eta times this / "
        "critics; their later code compares all",
        low=0,
    )


@register("algo", "edac")
class EDAC(SoftActorCritic[EDACConfig]):
    """SAC-N whose critics' gradients with respect to the data's actions are pushed apart (equation 4), so that fewer
    critics do.
    """

    traits = replace(SoftActorCritic.traits, actions=("continuous",))

    def modules(self) -> dict[str, nn.Module]:
        c = self.config
        if c.critics < 2:
            raise UserError(f"algo.critics={c.critics}: EDAC compares critics with each other; use at least 2")
        if c.compared_critics == 1 or c.compared_critics > c.critics:
            raise UserError(
                f"algo.compared_critics={c.compared_critics} must be 0 (all) or between 2 and algo.critics={c.critics}"
            )
        return super().modules()

    def compared(self, critic: Params, key: Tensor) -> Params:
        """The critics whose gradients are compared: all, as in the authors' later code (and CORL), or a random subset,
        as in their first, where they are as many as actions have dimensions."""
        c = self.config
        if c.compared_critics in (0, c.critics):
            return critic
        indices = rng.uniform(key, (c.critics,)).topk(c.compared_critics).indices
        return members(critic, indices)

    def critic_loss(self, critic: Params, state: TrainState, batch: Batch, key: Tensor) -> Loss:
        """SAC-N's loss + eta / (N - 1) E sum_{i != j} <grad_a Q_i(s, a), grad_a Q_j(s, a)>, gradients of length 1
        (equation 4).
        """
        subset = self.compared(critic, rng.fold_in(key, 103))
        logits, gradients = action_gradients(self.critic, subset, batch["observations"], batch["actions"])
        target = self.target(state, state.params["actor"], batch, key)
        # one forward pass for both
        subset_logits = logits if subset is critic and not self.config.critic_dropout else None
        loss, metrics = self.critic.loss(critic, batch, target, key, subset_logits)
        metrics["critic/alignment"] = cosine = alignment(gradients)
        # equation 4 sums over N (N - 1) pairs and divides by N - 1; of a subset's pairs the mean has the same
        # expectation
        return loss + self.config.eta * self.config.critics * cosine, metrics


def action_gradients(critic: Critic, params: Params, observations: Tensor, actions: Tensor) -> tuple[Tensor, Tensor]:
    """Raw outputs [E, B, out_dim] at actions [B, A], and the gradients [E, B, A] of each critic's value with respect to
    them.

    Both come from one forward pass, and both can be differentiated with respect to `params`.
    """
    size = next(reversed(params.values())).shape[0]  # of the head: an encoder of theirs comes first

    def value(inputs: Tensor) -> tuple[Tensor, Tensor]:
        logits = critic(params, torch.cat([observations.expand(size, *observations.shape), inputs], -1))
        return critic.head.mean(logits), logits

    # an action of its own for each critic: the sum of their values then has each critic's gradient apart
    result: Any = vjp(value, actions.expand(size, *actions.shape), has_aux=True)
    values, pullback, logits = result
    return logits, pullback(torch.ones_like(values))[0]


def alignment(gradients: Tensor) -> Tensor:
    """Mean cosine between the gradients [E, B, A] of two critics, over pairs and rows: []."""
    size = gradients.shape[0]
    unit = gradients / (gradients.norm(dim=-1, keepdim=True) + 1e-10)
    pairs = unit.sum(0).square().sum(-1) - unit.square().sum((0, -1))  # over i != j, without making them all
    return pairs.mean() / (size * (size - 1))
