"""What a hierarchy in a latent model is made of: goals and their codes, rewards for reaching them, and the time scales
of worker and manager.

Shapes: H imagined steps, S = H / K goals of K steps each; N states they begin at; D recurrent state; F features.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from offrl.algorithms.director.settings import DirectorConfig
from offrl.world_models.recurrent.distributions import class_log_probs, drawn_classes, kl


def manager_log_probs(config: DirectorConfig, logits: Tensor) -> Tensor:
    """[..., G C] -> [..., G, C]: of the manager's codes."""
    return class_log_probs(logits, config.goal_groups, config.goal_classes, config.unimix)


def entropy_shares(log_probs: Tensor) -> Tensor:
    """[..., G, C] -> [..., G]: entropies as shares of the largest."""
    return -(log_probs.exp() * log_probs).sum(-1) / math.log(log_probs.shape[-1])


def proposed(
    apply: Callable[..., Any], config: DirectorConfig, features: Tensor, noise: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The manager's code [..., G C] in states with features [..., F], and the goal [..., D] that it stands for. noise:
    Gumbel's [..., G, C]; None: the likeliest classes.
    """
    code = drawn_classes(manager_log_probs(config, apply("manager", features)), noise)
    return code, apply("goal_decoder", code.to(features.dtype))


def coded(apply: Callable[..., Any], config: DirectorConfig, recurrent: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """The squared errors [..., D] of recurrent states [..., D] that the autoencoder makes of a code, and the KL
    divergence [...] of that from the uniform distribution.
    """
    log_probs = class_log_probs(apply("goal_encoder", recurrent), config.goal_groups, config.goal_classes, 0.0)
    error = (apply("goal_decoder", drawn_classes(log_probs, noise)) - recurrent).square()
    return error, kl(log_probs, torch.full_like(log_probs, -math.log(config.goal_classes)))


def max_cosine(goal: Tensor, state: Tensor) -> Tensor:
    """g . s / max(|g|, |s|)^2, over the last axis: 1 in the goal alone."""
    largest = torch.maximum(goal.square().sum(-1), state.square().sum(-1))
    return (goal * state).sum(-1) / largest.clamp(min=1e-24)


def segments(x: Tensor, steps: int) -> Tensor:
    """[H + 1, N, ...] -> [K + 1, S N, ...]: the time of each goal by itself, the last state of one being the first of
    the next.
    """
    return torch.cat([x[begin : begin + steps + 1] for begin in range(0, len(x) - 1, steps)], 1)


def abstract(rewards: Tensor, alive: Tensor, steps: int, discount: float | Tensor) -> tuple[Tensor, Tensor]:
    """Rewards and `alive` [S + 1, N] of the states in which goals are chosen, of those of all states [H + 1, N]: the
    mean over K steps of rewards times the probability of going on until them, and the discount of one step times that
    of going on through K.
    """
    goes_on = (alive / discount).clamp(max=1.0)
    known = goes_on[:-1].unflatten(0, (-1, steps)).cumprod(1)
    means = (known * rewards[1:].unflatten(0, (-1, steps))).mean(1)
    through = goes_on[1:].unflatten(0, (-1, steps)).prod(1)
    return torch.cat([rewards[:1], means]), discount * torch.cat([goes_on[:1], through])
