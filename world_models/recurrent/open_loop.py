"""What the model expects of states that it does not see."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from offrl import rng
from offrl.algorithm import Batch, Params
from offrl.data.samplers.states import IS_FIRST, PREVIOUS_ACTIONS, steps_of
from offrl.nn.heads import symexp
from offrl.world_models.open_loop import Expected
from offrl.world_models.recurrent.networks import HEAD

if TYPE_CHECKING:
    from offrl.world_models.recurrent.base import RecurrentModel


def open_loop(
    algorithm: RecurrentModel[Any], params: dict[str, Params], batch: Batch, context: int, key: Tensor
) -> Expected:
    """See `offrl.world_models.open_loop.OpenLoopModel`: one future, drawn from the prior step by step."""
    latents, keys = algorithm.latents(params), rng.split(key, len(batch[IS_FIRST]))
    known = steps_of(batch, slice(context))
    first = torch.zeros_like(known[IS_FIRST])
    first[0] = True  # also of windows that begin in the middle of episodes
    windows = latents.observe_windows(known["observations"], known[PREVIOUS_ACTIONS], first, keys[0])
    state, features = steps_of(windows.state, -1), []
    for action, draw in zip(batch[PREVIOUS_ACTIONS][context:], keys[context:], strict=True):
        state, _ = latents.imagine(state, action, draw)
        features.append(state.features)
    future = torch.stack(features)
    rewards = HEAD.mean(latents.apply("reward", future))
    if "decoder" not in algorithm.model:
        return Expected(rewards)
    decoded = latents.apply("decoder", future)
    images, numbers = ({}, decoded) if isinstance(decoded, Tensor) else decoded
    return Expected(rewards, None if numbers is None else symexp(numbers), images)
