"""`TrainedPolicy.predict`: actions as Stable-Baselines3 asks for them, whose memory the caller keeps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from offrl.errors import UserError
from offrl.evaluation.observations import as_array, desired_goal

if TYPE_CHECKING:
    from offrl.evaluation.policy import TrainedPolicy


class PredictState(NamedTuple):
    """What `predict` hands back for its next call."""

    carry: Any
    t: int  # steps of the episode so far
    rows: int


def numbered(policy: TrainedPolicy, actions: np.ndarray) -> np.ndarray:
    """Actions of `step` as the environment takes them: its own number of each choice, which `step` counts from 0."""
    start = policy.algorithm.spec.first_choice
    return actions + start if start else actions


def predict(
    policy: TrainedPolicy, observation: Any, memory: PredictState | None, episode_start: Any, deterministic: bool, draw: int
) -> tuple[Any, PredictState | None]:
    """See `TrainedPolicy.predict`. draw: a number of its own for each call of a policy without a memory, which its noise follows from."""
    name = policy.algorithm.config.name
    if policy.algorithm.traits.text:
        raise UserError(f"a policy of {name} answers texts: policy.act(text), and policy.reset() before another episode")
    if policy.uses_rewards:
        raise UserError(f"a policy of {name} must know what its last action earned: policy.act(observation, reward=...) takes it")
    array, batched = as_array(observation, policy.algorithm.spec)
    batch = array if batched else array[None]
    starts = np.broadcast_to(np.asarray(False if episode_start is None else episode_start, bool).reshape(-1), len(batch))
    some = bool(starts.any() and not starts.all())
    if memory is not None and some and (not policy.actor.resets or policy.goal_conditioned):
        raise UserError(f"a policy of {name} remembers its episodes, and episode_start begins some of them anew: predict each by itself")
    if memory is not None and not isinstance(memory, PredictState):
        raise UserError("state= is what the last predict returned, or None where episodes begin")
    if memory is not None and memory.rows != len(batch):
        raise UserError(f"state= is of {memory.rows} episodes, and there are {len(batch)} observations")
    if memory is not None and some:
        memory = memory._replace(carry=policy.actor.begin_anew(memory.carry, torch.from_numpy(starts.copy())))
    elif memory is None or starts.any():
        memory = PredictState(policy.start(len(batch)), 0, len(batch))
        if policy.goal_conditioned:
            goal = desired_goal(observation)
            goals = None if goal is None else np.asarray(goal, np.float32)
            memory = memory._replace(carry=policy.set_goal(memory.carry, goals if goals is None or batched else goals[None]))
    remembers = memory.carry is not None
    actions, carry = policy.step(memory.carry, batch, memory.t if remembers else draw, not deterministic)
    actions = numbered(policy, actions)
    return actions if batched else actions[0], PredictState(carry, memory.t + 1, len(batch)) if remembers else None
