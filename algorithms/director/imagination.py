"""Rollouts of manager and worker in the latent model."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from offrl import rng
from offrl.algorithm import Params
from offrl.algorithms.director.hierarchy import coded, proposed
from offrl.world_models.recurrent.latents import LatentWindows
from offrl.world_models.recurrent.networks import HEAD
from offrl.world_models.recurrent.returns import penalised

if TYPE_CHECKING:
    from offrl.algorithms.director.algorithm import Director


class GoalRollout(NamedTuple):
    """H steps from N states on, of S goals; all but `features` and `alive` are constants."""

    features: Tensor  # [H + 1, N, F], with the gradient of the worker's actions
    goals: Tensor  # [S, N, D]
    codes: Tensor  # [S, N, G C]
    rewards: Tensor  # [H + 1, N]: the task's, on arriving
    surprise: Tensor  # [H + 1, N]: the error of the goal autoencoder, on arriving
    alive: Tensor  # [H + 1, N]: the probability that the episode goes on, times the discount


def goal_rollout(algorithm: Director, params: dict[str, Params], windows: LatentWindows, key: Tensor) -> GoalRollout:
    """H steps of manager and worker from all states of windows, by these parameters; the gradient goes through the
    worker's actions, which do not see it in what they are chosen by.
    """
    c, latents = algorithm.config, algorithm.latents(params)
    at = pytree.tree_map(lambda x: x.flatten(0, 1).detach(), windows.state)
    visited, goals, codes, disagreements = [at.features], [], [], [torch.zeros_like(at.sample[:, 0])]
    shape = (c.goal_groups, c.goal_classes)
    *step_keys, last = rng.split(key, c.horizon + 1)
    for step, step_key in enumerate(step_keys):
        known, (pick, draw, move) = visited[-1].detach(), rng.split(step_key, 3)
        if step % c.goal_steps == 0:
            code, goal = proposed(latents.apply, c, known, rng.gumbel(pick, (len(known), *shape)))
            codes.append(code.detach())
            goals.append(goal.detach())
        dist = latents.apply("actor", torch.cat([known, goals[-1]], -1))
        at, disagreement = latents.imagine(at, algorithm.policy.unbounded(dist, draw), move)  # type: ignore[operator]
        visited.append(at.features)
        disagreements.append(disagreement.detach())
    features = torch.stack(visited)
    known = features.detach()
    rewards = penalised(c, HEAD.mean(latents.apply("reward", known)), disagreements, windows)
    recurrent = known[..., : c.recurrent_width]
    error, _ = coded(latents.apply, c, recurrent, rng.gumbel(last, (*recurrent.shape[:-1], *shape)))
    alive = latents.apply("continuation", features).squeeze(-1).float().sigmoid()
    return GoalRollout(
        features, torch.stack(goals), torch.stack(codes), rewards.detach(), error.mean(-1).detach(), alive
    )
