"""Known terminations as functions of a transition: one for each environment whose rule shows in what it observes.

Every function takes observations [..., O], actions [..., A] (discrete ones [..., 1] or [...]) and next_observations
[..., O], all in the environment's own units (un-normalised observations, actions in the environment's range), and
returns a bool tensor [...]. They are plain tensor code without branches on values: they run under `vmap`,
`torch.compile(fullgraph=True)` and CUDA graphs, on any device, in float32 or float64. A time limit is no termination.
`register("termination", NAME)` of `offrl.registry` adds one; under an environment's id (or a data set's name) `find`
takes it for that environment, before any rule of this file.

A model can predict what no environment shows. For robots and poles an observation that is not finite ends the episode;
and HalfCheetah and Walker2d, which test nothing of the sort, have the bound of 100 of model-based RL's published code
(MBPO, arXiv 1906.08253; MOPO, arXiv 2005.13239), which their real states do not reach.

What an observation does not show: Hopper's velocities are clipped to 10 in it, and the environment also ends beyond
100. And an environment decides in float64: within float32's rounding of a bound, data cannot say which side it was.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from offrl.world_models.known.environments import find, known

__all__ = ["Termination", "find"]  # and the functions, by name through the registry

Termination = Callable[[Tensor, Tensor, Tensor], Tensor]
LIMIT = 100.0  # beyond it a state is no robot's
POLE_LIMIT = 12 * 2 * math.pi / 360  # CartPole: 12 degrees


_known = partial(known, "termination")


def _finite(values: Tensor) -> Tensor:
    return torch.isfinite(values).all(-1)


def _inside(values: Tensor) -> Tensor:
    """True where all of the last axis lie within the limit; NaN does not."""
    return (values.abs() < LIMIT).all(-1)


@_known("never")
def never(observations: Tensor, actions: Tensor, next_observations: Tensor) -> Tensor:
    """No episode ends but by its time limit."""
    return torch.zeros_like(next_observations[..., 0], dtype=torch.bool)


for _name in ("swimmer", "reacher", "pusher", "humanoid_standup", "pendulum", "maze2d", "door", "hammer", "relocate"):
    _known(_name)(never)


@_known("halfcheetah")
def halfcheetah(observations: Tensor, actions: Tensor, next_observations: Tensor) -> Tensor:
    """A number of 100 or more, which the environment, that never ends, does not reach. Entry 1, the body's angle, is
    left out if finite: it counts whole turns, so a cheetah that rolls gets there."""
    angle = next_observations[..., 1]
    return ~(_inside(next_observations[..., :1]) & torch.isfinite(angle) & _inside(next_observations[..., 2:]))


@_known("hopper")
def hopper(observations: Tensor, actions: Tensor, next_observations: Tensor) -> Tensor:
    """Fallen: height (0) at most 0.7, angle (1) not within 0.2, or anything but the height at 100 or beyond."""
    height, angle = next_observations[..., 0], next_observations[..., 1]
    return ~(torch.isfinite(height) & (height > 0.7) & (angle.abs() < 0.2) & _inside(next_observations[..., 1:]))


@_known("walker2d")
def walker2d(observations: Tensor, actions: Tensor, next_observations: Tensor) -> Tensor:
    """Fallen: height (0) not between 0.8 and 2, or angle (1) not within 1; or a number of 100 or more."""
    height, angle = next_observations[..., 0], next_observations[..., 1]
    return ~((height > 0.8) & (height < 2.0) & (angle.abs() < 1.0) & _inside(next_observations))


@_known("ant")
def ant(observations: Tensor, actions: Tensor, next_observations: Tensor) -> Tensor:
    """Height (0) below 0.2 or above 1, or a number that is not finite."""
    height = next_observations[..., 0]
    return ~((height >= 0.2) & (height <= 1.0) & _finite(next_observations))


@_known("humanoid")
def humanoid(observations: Tensor, actions: Tensor, next_observations: Tensor) -> Tensor:
    """Height (0) not between 1 and 2 (v3 to v5; v2 goes on at 1 and 2 exactly), or a number that is not finite."""
    height = next_observations[..., 0]
    return ~((height > 1.0) & (height < 2.0) & _finite(next_observations))


@_known("inverted_pendulum")
def inverted_pendulum(observations: Tensor, actions: Tensor, next_observations: Tensor) -> Tensor:
    """The pole's angle (1) beyond 0.2, or a number that is not finite."""
    return ~((next_observations[..., 1].abs() <= 0.2) & _finite(next_observations))


@_known("inverted_double_pendulum")
def inverted_double_pendulum(observations: Tensor, actions: Tensor, next_observations: Tensor) -> Tensor:
    """The tip at a height of 1 or less: two links of 0.6, whose angles' sines are entries 1 and 2 and cosines 3 and 4.

    The environment reads the tip from the last stage of MuJoCo's Runge-Kutta step, not from the state it observes:
    within about 0.001 of the bound the two can differ.
    """
    sine, sine2, cosine, cosine2 = (next_observations[..., i] for i in (1, 2, 3, 4))
    height = 0.6 * cosine + 0.6 * (cosine * cosine2 - sine * sine2)
    return ~((height > 1.0) & _finite(next_observations))


@_known("cartpole")
def cartpole(observations: Tensor, actions: Tensor, next_observations: Tensor) -> Tensor:
    """The cart (0) beyond 2.4, the pole's angle (2) beyond 12 degrees, or a number that is not finite."""
    cart, pole = next_observations[..., 0], next_observations[..., 2]
    return ~((cart.abs() <= 2.4) & (pole.abs() <= POLE_LIMIT) & _finite(next_observations))


@_known("mountain_car")
def mountain_car(observations: Tensor, actions: Tensor, next_observations: Tensor) -> Tensor:
    """At the flag: position (0) 0.5 or more, velocity (1) not negative."""
    return (next_observations[..., 0] >= 0.5) & (next_observations[..., 1] >= 0.0)


@_known("mountain_car_continuous")
def mountain_car_continuous(observations: Tensor, actions: Tensor, next_observations: Tensor) -> Tensor:
    """At the flag: position (0) 0.45 or more, velocity (1) not negative."""
    return (next_observations[..., 0] >= 0.45) & (next_observations[..., 1] >= 0.0)


@_known("acrobot")
def acrobot(observations: Tensor, actions: Tensor, next_observations: Tensor) -> Tensor:
    """The tip above the line: -cos(a) - cos(a + b) > 1, of entries cos a, sin a, cos b, sin b."""
    cosine, sine, cosine2, sine2 = (next_observations[..., i] for i in range(4))
    return -cosine - (cosine * cosine2 - sine * sine2) > 1.0


@_known("pen")
def pen(observations: Tensor, actions: Tensor, next_observations: Tensor) -> Tensor:
    """D4RL's pen is dropped: its height (26) below 0.075. gymnasium-robotics' own AdroitHandPen lets it go on."""
    return next_observations[..., 26] < 0.075


@_known("random_friction_hopper")
def random_friction_hopper(observations: Tensor, actions: Tensor, next_observations: Tensor) -> Tensor:
    """NeoRL-2's hopper: entry 0 is its position and the last one the floor's friction; between them, the hopper."""
    return hopper(observations[..., 1:], actions, next_observations[..., 1:])


@_known("rocket_recovery")
def rocket_recovery(observations: Tensor, actions: Tensor, next_observations: Tensor) -> Tensor:
    """NeoRL-2's rocket is down: height (1) within 0.05 of the ground."""
    return next_observations[..., 1].abs() <= 0.05
