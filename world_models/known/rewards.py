"""Rewards that are an exact function of a transition as it is observed: one for each environment where that is so.

Functions are called and registered as those of `offrl.world_models.known.terminations` (kind "reward"): raw units in,
and out come the environment's own rewards [...], in the observations' dtype, before any scale or shift of the data's
(`DataSpec.reward_scale`). Not here is what an observation does not hold: the distance that HalfCheetah, Hopper,
Walker2d, Ant, Humanoid and Swimmer are paid for, as their position is not observed; the goals of D4RL's mazes;
InvertedDoublePendulum, which is paid for a tip one Runge-Kutta stage older than what it shows.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from offrl.world_models.known import environments as known
from offrl.world_models.known import terminations

Reward = Callable[[Tensor, Tensor, Tensor], Tensor]


_known = partial(known.known, "reward")


def _ended(
    function: terminations.Termination, observations: Tensor, actions: Tensor, next_observations: Tensor
) -> Tensor:
    return function(observations, actions, next_observations).to(next_observations.dtype)


def _length(vector: Tensor) -> Tensor:
    return torch.linalg.vector_norm(vector, dim=-1)


@_known("pendulum")
def pendulum(observations: Tensor, actions: Tensor, next_observations: Tensor) -> Tensor:
    """-(angle^2 + 0.1 speed^2 + 0.001 torque^2) before the step; observation: cosine, sine, speed; the torque is cut to
    +-2.
    """
    angle = torch.atan2(observations[..., 1], observations[..., 0])
    torque = actions[..., 0].clamp(-2.0, 2.0)
    return -(angle**2 + 0.1 * observations[..., 2] ** 2 + 0.001 * torque**2)


@_known("cartpole")
@_known("inverted_pendulum_v4")
def one(observations: Tensor, actions: Tensor, next_observations: Tensor) -> Tensor:
    """1 for each step, the last one too: CartPole, and InvertedPendulum up to v4."""
    return torch.ones_like(next_observations[..., 0])


@_known("inverted_pendulum")
def inverted_pendulum(observations: Tensor, actions: Tensor, next_observations: Tensor) -> Tensor:
    """InvertedPendulum-v5: 1 for each step that does not end the episode."""
    return 1.0 - _ended(terminations.inverted_pendulum, observations, actions, next_observations)


@_known("mountain_car")
def mountain_car(observations: Tensor, actions: Tensor, next_observations: Tensor) -> Tensor:
    """-1 for each step."""
    return -torch.ones_like(next_observations[..., 0])


@_known("mountain_car_continuous")
def mountain_car_continuous(observations: Tensor, actions: Tensor, next_observations: Tensor) -> Tensor:
    """100 at the flag, less 0.1 action^2."""
    return (
        100.0 * _ended(terminations.mountain_car_continuous, observations, actions, next_observations)
        - 0.1 * actions[..., 0] ** 2
    )


@_known("acrobot")
def acrobot(observations: Tensor, actions: Tensor, next_observations: Tensor) -> Tensor:
    """-1 for each step that does not end the episode."""
    return _ended(terminations.acrobot, observations, actions, next_observations) - 1.0


@_known("reacher_v4")
def reacher_v4(observations: Tensor, actions: Tensor, next_observations: Tensor) -> Tensor:
    """Reacher up to v4: minus the finger's distance from the target (entries 8 to 10) before the step, minus
    |action|^2.
    """
    return -_length(observations[..., 8:11]) - (actions**2).sum(-1)


@_known("reacher")
def reacher(observations: Tensor, actions: Tensor, next_observations: Tensor) -> Tensor:
    """Reacher-v5: minus the finger's distance from the target (entries 8, 9) after the step, minus |action|^2."""
    return -_length(next_observations[..., 8:10]) - (actions**2).sum(-1)


def _push(state: Tensor, actions: Tensor) -> Tensor:
    finger, thing, goal = state[..., 14:17], state[..., 17:20], state[..., 20:23]
    return -_length(thing - goal) - 0.5 * _length(thing - finger) - 0.1 * (actions**2).sum(-1)


@_known("pusher_v4")
def pusher_v4(observations: Tensor, actions: Tensor, next_observations: Tensor) -> Tensor:
    """Pusher up to v4: minus the object's distance from the goal, half its distance from the finger, 0.1 |action|^2;
    before the step.
    """
    return _push(observations, actions)


@_known("pusher")
def pusher(observations: Tensor, actions: Tensor, next_observations: Tensor) -> Tensor:
    """Pusher-v5: as `pusher_v4`, after the step."""
    return _push(next_observations, actions)


@_known("pen")
def pen(observations: Tensor, actions: Tensor, next_observations: Tensor) -> Tensor:
    """D4RL's pen: its direction's likeness to the wanted one (entries 33 to 38), less its distance from the place (39
    to 41), with 10 and 50 for being near both, less 5 when it is dropped (26)."""
    has, target = next_observations[..., 33:36], next_observations[..., 36:39]
    likeness = (has * target).sum(-1) / (_length(has) * _length(target))
    distance = _length(next_observations[..., 39:42])
    near = distance < 0.075
    bonus = 10.0 * (near & (likeness > 0.9)) + 50.0 * (near & (likeness > 0.95))
    return likeness - distance + bonus - 5.0 * _ended(terminations.pen, observations, actions, next_observations)
