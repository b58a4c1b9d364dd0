"""The goals that the manager asks for, as observations, and what the worker makes of them in imagination."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from offrl import rng
from offrl.algorithm import Batch, Params
from offrl.algorithms.director.hierarchy import max_cosine, proposed
from offrl.data.samplers.states import IS_FIRST, steps_of
from offrl.world_models.open_loop import Goals
from offrl.world_models.recurrent.open_loop import decoded, observed

if TYPE_CHECKING:
    from offrl.algorithms.director.algorithm import Director


def goals(algorithm: Director, params: dict[str, Params], batch: Batch, context: int, key: Tensor) -> Goals | None:
    """See `offrl.world_models.open_loop.GoalModel`: the goals of the likeliest codes, and the worker's mean actions.

    A goal is a recurrent state alone; the decoder reads it with the sample that the first prior head has likeliest.
    """
    c, latents = algorithm.config, algorithm.latents(params)
    states = range(context - 1, len(batch[IS_FIRST]) - c.goal_steps, c.goal_steps)
    if not states or "decoder" not in algorithm.model:
        return None
    first, *keys = rng.split(key, 1 + len(states))
    windows, chosen, rollouts = observed(latents, batch, first), [], []
    for step, draws in zip(states, keys, strict=True):
        at = steps_of(windows, step)
        _, goal = proposed(latents.apply, c, at.features, None)
        chosen.append(goal)
        visited = [at.features]
        for draw in rng.split(draws, c.goal_steps):
            dist = latents.apply("actor", torch.cat([at.features, goal], -1))
            at, _ = latents.imagine(at, algorithm.policy.mode(dist), draw)
            visited.append(at.features)
        rollouts.append(torch.stack(visited))
    goal, rollout = torch.stack(chosen), torch.stack(rollouts)
    sample = latents.kind.draw(latents.kind.read(latents.apply("prior", goal))[..., 0, :, :], None)
    nearness = max_cosine(goal.unsqueeze(1), rollout[..., : c.recurrent_width])
    imagined = decoded(latents, rollout[:, 1:])
    return Goals(states, decoded(latents, torch.cat([goal, sample], -1)), imagined, nearness)
