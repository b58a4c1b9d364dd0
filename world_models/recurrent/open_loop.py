"""What the model expects of states that it does not see."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from offrl import rng
from offrl.algorithm import Batch, Params
from offrl.data.samplers.states import IS_FIRST, PREVIOUS_ACTIONS, steps_of
from offrl.nn.heads import symexp
from offrl.world_models.open_loop import Decoded, Expected
from offrl.world_models.recurrent.latents import Latents, LatentState
from offrl.world_models.recurrent.networks import HEAD

if TYPE_CHECKING:
    from offrl.world_models.recurrent.base import RecurrentModel


def open_loop(
    algorithm: RecurrentModel[Any], params: dict[str, Params], batch: Batch, context: int, key: Tensor
) -> Expected:
    """See `offrl.world_models.open_loop.OpenLoopModel`: one future, drawn from the prior step by step."""
    latents, keys = algorithm.latents(params), rng.split(key, len(batch[IS_FIRST]))
    state, features = steps_of(observed(latents, steps_of(batch, slice(context)), keys[0]), -1), []
    for action, draw in zip(batch[PREVIOUS_ACTIONS][context:], keys[context:], strict=True):
        state, _ = latents.imagine(state, action, draw)
        features.append(state.features)
    future = torch.stack(features)
    rewards = HEAD.mean(latents.apply("reward", future))
    return Expected(rewards, *decoded(latents, future)) if "decoder" in algorithm.model else Expected(rewards)


def observed(latents: Latents, batch: Batch, key: Tensor) -> LatentState:
    """The states [K, B] of windows [K, B, ...], which also begin in the middle of episodes."""
    first = torch.zeros_like(batch[IS_FIRST])
    first[0] = True
    return latents.observe_windows(batch["observations"], batch[PREVIOUS_ACTIONS], first, key).state


def latent_states(algorithm: RecurrentModel[Any], params: dict[str, Params], batch: Batch, key: Tensor) -> Tensor:
    """See `offrl.world_models.open_loop.ProbedModel`: what is remembered, and a sample."""
    return observed(algorithm.latents(params), batch, key).features


def decoded(latents: Latents, features: Tensor) -> Decoded:
    """The observations that a model with a decoder makes of features [..., F]."""
    result = latents.apply("decoder", features)
    images, numbers = ({}, result) if isinstance(result, Tensor) else result
    return Decoded(None if numbers is None else symexp(numbers), images)
