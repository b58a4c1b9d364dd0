"""What is earned in imagination."""

from __future__ import annotations

import torch
from torch import Tensor

from offrl.world_models.recurrent.distributions import latent_kind
from offrl.world_models.recurrent.latents import LatentWindows
from offrl.world_models.recurrent.settings import LatentConfig


def penalised(config: LatentConfig, rewards: Tensor, disagreements: list[Tensor], windows: LatentWindows) -> Tensor:
    """Rewards [H + 1, N] less the penalty of disagreements [N] of the heads at each of these states."""
    if config.members == 1:
        return rewards
    unit = latent_kind(config).disagreement(windows.prior).mean().detach() if config.penalty_unit == "mean" else 1.0
    return rewards - config.penalty * torch.stack(disagreements) / unit


def imagined_returns(config: LatentConfig, rewards: Tensor, values: Tensor, alive: Tensor) -> Tensor:
    """`lambda_returns` of imagination, in which no episode is cut."""
    return lambda_returns(rewards, values, alive, torch.ones_like(alive), config.decay)


def lambda_returns(rewards: Tensor, values: Tensor, alive: Tensor, goes_on: Tensor, decay: float | Tensor) -> Tensor:
    """R_t = r_{t+1} + alive_{t+1} ((1 - d_{t+1}) v_{t+1} + d_{t+1} R_{t+1}), R_T = v_T, d = decay times goes_on: T
    numbers of T + 1 states, [T, ...].

    rewards: received on arriving in a state; alive: the discount, 0 at a terminal; goes_on: 0 at an episode's last.
    """
    returns, following = [], values[-1]
    for t in range(len(rewards) - 1, 0, -1):
        share = decay * goes_on[t]
        following = rewards[t] + alive[t] * ((1.0 - share) * values[t] + share * following)
        returns.append(following)
    return torch.stack(returns[::-1])
