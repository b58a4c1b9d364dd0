"""Rollouts of the policy in the latent model, and their returns."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from offrl import losses, rng
from offrl.algorithm import Params, TrainState
from offrl.world_models.recurrent.latents import LatentWindows
from offrl.world_models.recurrent.networks import HEAD
from offrl.world_models.recurrent.objectives import action_log_prob
from offrl.world_models.recurrent.returns import imagined_returns, penalised

if TYPE_CHECKING:
    from offrl.algorithms.rssm.algorithm import RSSM


class LatentRollout(NamedTuple):
    """A rollout of the policy in the model, from N states on; constants, but where the policy learns through
    the model.
    """

    features: Tensor  # [H + 1, N, F]
    actions: Tensor  # [H, N, A], not clipped
    values: Tensor  # [H + 1, N]: the critic's
    returns: Tensor  # [H, N]
    weights: Tensor  # [H, N]: probability that the episode has not ended, discounted
    low: Tensor  # [], with `high` the running 5th and 95th percentiles of returns
    high: Tensor


def latent_rollout(
    algorithm: RSSM, state: TrainState, windows: LatentWindows, key: Tensor, actor: Params | None = None
) -> LatentRollout:
    """H steps of the policy from all states of windows, by the parameters before this update; rewards less the
    penalty. actor: parameters of the policy, to which the returns' gradient goes through the model; None: to none.
    """
    c, params = algorithm.config, state.params
    latents = algorithm.latents(params if actor is None else {**params, "actor": actor})
    with torch.no_grad() if actor is None else contextlib.nullcontext():
        at = pytree.tree_map(lambda x: x.flatten(0, 1).detach(), windows.state)
        visited, actions, disagreements = [at.features], [], [torch.zeros_like(at.sample[:, 0])]
        for step_key in rng.split(key, c.horizon):
            draw, move = rng.split(step_key)
            dist = latents.apply("actor", visited[-1])
            actions.append(algorithm.policy.unbounded(dist, draw))  # type: ignore[operator]
            at, disagreement = latents.imagine(at, actions[-1], move)
            visited.append(at.features)
            disagreements.append(disagreement)
        features = torch.stack(visited)
        rewards = HEAD.mean(latents.apply("reward", features))
        rewards = penalised(c, rewards, disagreements, windows)
        if c.objective == "information":
            played = torch.stack(actions)
            surprise = algorithm.policy.log_prob(latents.apply("actor", features[:-1]), played)
            gain = action_log_prob(latents, features, played.clamp(-1.0, 1.0)) - surprise
            rewards = torch.cat([rewards[:1], rewards[1:] + c.empowerment_weight * gain])
        alive = latents.apply("continuation", features).squeeze(-1).float().sigmoid()
        values = HEAD.mean(latents.apply("critic", features))
        returns = imagined_returns(c, rewards, values, alive)
        low, high = (
            torch.lerp(state.extra[name], losses.percentile(returns.detach(), share), 0.01)
            for name, share in (("low", 0.05), ("high", 0.95))
        )
        return LatentRollout(features, torch.stack(actions), values, returns, alive.detach().cumprod(0)[:-1], low, high)
