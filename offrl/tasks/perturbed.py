"""Environments that are perturbed: numbers of a MuJoCo model, forces on its bodies, its sensors, the delay of actions.

MuJoCo lets two geoms in contact slide by the larger of their two frictions, so that a smaller friction of one of them
changes nothing; `friction` scales all geoms, so that the largest has that value.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

AXES = "xyz"  # of the world
IMPULSE, PERIOD = 5, 100  # an impulse lasts the first IMPULSE steps of each PERIOD
FIELDS = ("body_mass", "body_inertia", "geom_friction", "dof_damping")  # of a model, which parameters change
FORCES, SENSORS = ("force.", "impulse."), ("noise", "dropout", "delay")
NOISE = 1  # beside an episode's seed: the random numbers of its sensors


@dataclass(frozen=True)
class Perturbation:
    """Parameters of an environment (see `nominal_values`) with other values than its own."""

    values: Mapping[str, float] = field(default_factory=dict)
    # with a mass its body's inertia is scaled, and what MuJoCo derives of both is computed anew
    consistent: bool = True
    deviations: np.ndarray | float = 1.0  # [O] of the observations in the data, the unit of `noise`


def nominal_values(env: gym.Env) -> dict[str, float]:
    """The parameters that can be changed in `env`, with its own values.

    gravity (m/s^2, downwards), damping (a factor, of all joints), friction (the largest of all geoms, which are scaled
    together), friction.GEOM, mass.BODY (kg), force.BODY.x|y|z and impulse.BODY.x|y|z (N, along the world's axes; an
    impulse lasts 5 steps of each 100); noise (in standard deviations of the data), dropout (the probability of each
    number of an observation to stay what it was) and delay (steps until an action is applied).
    """
    values: dict[str, float] = {}
    if (model := _model(env)) is not None:
        bodies = [body for i in range(1, model.nbody) if (body := model.body(i)).name]
        geoms = [geom for i in range(model.ngeom) if (geom := model.geom(i)).name]
        values |= {"gravity": -float(model.opt.gravity[2]), "damping": 1.0}
        values |= {"friction": float(model.geom_friction[:, 0].max())}
        values |= {f"friction.{geom.name}": float(geom.friction[0]) for geom in geoms}
        values |= {f"mass.{body.name}": float(body.mass[0]) for body in bodies}
        values |= {f"{force}{body.name}.{x}": 0.0 for force in FORCES for body in bodies for x in AXES}
    space = env.observation_space
    if isinstance(space, spaces.Box) and len(space.shape) == 1:
        values |= {"noise": 0.0, "dropout": 0.0}
    if isinstance(env.action_space, spaces.Box):
        values["delay"] = 0.0
    return values


def hiding_friction(env: gym.Env, name: str) -> float:
    """The value of the parameter `name`, where it is the friction of one geom, up to which it may change nothing: the
    largest friction of the geoms that can touch that one. 0 for other parameters.
    """
    model, (kind, _, part) = _model(env), name.partition(".")
    if model is None or kind != "friction" or not part:
        return 0.0
    geom = model.geom(part)
    touching = (model.geom_contype & geom.conaffinity) | (model.geom_conaffinity & geom.contype)
    neighbours = (touching != 0) & (model.geom_bodyid != geom.bodyid)
    return float(model.geom_friction[neighbours, 0].max(initial=0.0))


@contextlib.contextmanager
def perturbed(envs: Sequence[gym.Env], perturbation: Perturbation | None) -> Iterator[list[gym.Env]]:
    """The environments as `perturbation` has them, from their next reset on; as they were, afterwards."""
    if perturbation is None:
        yield list(envs)
        return
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(_perturbed(env, perturbation)) for env in envs]


@contextlib.contextmanager
def _perturbed(env: gym.Env, perturbation: Perturbation) -> Iterator[gym.Env]:
    if (model := _model(env)) is None:
        yield altered(env, perturbation)
        return
    arrays = [*(getattr(model, name) for name in FIELDS), model.opt.gravity]
    originals = [array.copy() for array in arrays]
    try:
        yield altered(env, perturbation)
    finally:
        for array, original in zip(arrays, originals, strict=True):
            array[:] = original
        _derive(env, perturbation)


def _model(env: gym.Env) -> Any:
    """The MuJoCo model of an environment; None where it has none."""
    model = getattr(env.unwrapped, "model", None)
    return model if type(model).__module__.startswith("mujoco") else None


def _edit(model: Any, perturbation: Perturbation) -> None:
    for name, value in perturbation.values.items():
        kind, _, part = name.partition(".")
        if kind == "mass":
            body = model.body(part)
            if perturbation.consistent:
                body.inertia[:] *= value / body.mass[0]
            body.mass[:] = value
        elif kind == "friction" and part:
            model.geom(part).friction[0] = value
        elif kind == "friction":
            sliding = model.geom_friction[:, 0]
            sliding[:] = value * (sliding / sliding.max())
        elif kind == "damping":
            model.dof_damping[:] *= value
        elif kind == "gravity":
            model.opt.gravity[2] = -value
        elif name not in SENSORS and not name.startswith(FORCES):
            raise ValueError(f"there is no parameter {name}")


def _derive(env: gym.Env, perturbation: Perturbation) -> None:
    """Compute what MuJoCo derives of masses and inertia anew."""
    if perturbation.consistent and any(name.startswith("mass.") for name in perturbation.values):
        import mujoco

        base: Any = env.unwrapped
        mujoco.mj_setConst(base.model, base.data)


def _parts(name: str) -> tuple[str, str, str]:
    """("force", BODY, "x") of force.BODY.x."""
    kind, _, parameter = name.partition(".")
    return kind, *parameter.rpartition(".")[::2]


class Delay(gym.Wrapper):
    """An environment of continuous actions in which an action acts `delay` steps later; until the first does, the
    middle of their range acts.
    """

    def __init__(self, env: gym.Env, delay: int) -> None:
        super().__init__(env)
        self.delay = delay

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        space: Any = self.action_space
        middle = np.where(space.is_bounded(), 0.5 * (space.low + space.high), 0.0).astype(space.dtype)
        self.pending = deque([middle] * self.delay)
        return self.env.reset(seed=seed, options=options)

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        self.pending.append(np.array(action))  # a caller may write over its own
        return self.env.step(self.pending.popleft())


class PerturbedEnv(gym.Wrapper):
    """An environment with forces on its bodies, with sensors that err, and actions that come late.

    The random numbers of sensors follow from the episode's seed alone, whatever the perturbation.
    """

    def __init__(self, env: gym.Env, perturbation: Perturbation) -> None:
        values = perturbation.values
        super().__init__(Delay(env, int(values["delay"])) if values.get("delay") else env)
        self.forces = [(*_parts(name), value) for name, value in values.items() if name.startswith(FORCES)]
        self.noise, self.dropout = values.get("noise", 0.0), values.get("dropout", 0.0)
        self.deviations = perturbation.deviations

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        observation, info = self.env.reset(seed=seed, options=options)
        self.random = np.random.default_rng(None if seed is None else (seed, NOISE))
        self.t, self.shown = 0, None
        return self._sensed(observation), info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        if self.forces:
            self._push()
        self.t += 1
        observation, reward, terminated, truncated, info = self.env.step(action)
        return self._sensed(observation), reward, terminated, truncated, info

    def _push(self) -> None:
        """Set the forces of this step, which MuJoCo keeps until its next reset."""
        base: Any = self.env.unwrapped
        base.data.xfrc_applied[:] = 0.0
        for kind, body, axis, value in self.forces:
            if kind == "force" or self.t % PERIOD < IMPULSE:
                base.data.xfrc_applied[base.model.body(body).id, AXES.index(axis)] += value

    def _sensed(self, observation: Any) -> Any:
        if not self.noise and not self.dropout:
            return observation
        errors, chances = self.random.standard_normal(observation.shape), self.random.random(observation.shape)
        if self.noise:
            observation = (observation + self.noise * self.deviations * errors).astype(observation.dtype)
        if self.shown is not None:
            observation = np.where(chances < self.dropout, self.shown, observation)
        self.shown = observation
        return observation


def altered(env: gym.Env, perturbation: Perturbation) -> gym.Env:
    """The environment as `perturbation` has it from its next reset on, for good: `env` is altered too."""
    if (model := _model(env)) is not None:
        _edit(model, perturbation)
        _derive(env, perturbation)
    return PerturbedEnv(env, perturbation)
