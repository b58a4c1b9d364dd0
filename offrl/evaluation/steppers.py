"""Gymnasium's plain MuJoCo locomotion environments stepped many at once: its numbers, bit for bit, without its overhead.

Resets, models and every weight and range are the environments' own; what is done here is `step` alone: the physics of one environment after
the other, then observations, rewards and endings of all of them in a few array operations. `fast_stepper` compares both ways on random
actions and wild states each time it is asked, and refuses where a single bit differs: a new version of Gymnasium or MuJoCo, a subclass,
a wrapper or a patched method leads back to `env.step`, never to other numbers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from offrl.evaluation.robots import ROBOTS, Robot, RobotState
from offrl.tasks.episodes import mujoco_warnings, success_of

if TYPE_CHECKING:
    import gymnasium as gym

TRANSPARENT = {  # wrappers whose `step` only counts and checks
    "gymnasium.wrappers.common:TimeLimit",
    "gymnasium.wrappers.common:OrderEnforcing",
    "gymnasium.wrappers.common:PassiveEnvChecker",
}
CHECK_STEPS, CHECK_STATES = 24, 16


@dataclass
class Steps:
    """The answers of K environments to one action each."""

    observations: np.ndarray  # [K, ...] after flattening
    rewards: np.ndarray  # [K] float64
    over: np.ndarray  # [K] bool: terminated or truncated
    successes: np.ndarray | None  # [K] float64 in [0, 1], NaN where nothing was said; None: nobody said anything
    unstable: dict[int, str]  # index -> what MuJoCo said about physics that blew up; that environment was silently reset


class StepFailed(Exception):
    """The step of environment `index` raised `__cause__`."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.index = index


class _Body:
    """One environment's model and data, and views of what is read and written at each step."""

    __slots__ = ("contact", "ctrl", "data", "model", "position", "qpos", "qvel", "views")

    def __init__(self, base: Any, kind: Robot, views: list[Any]) -> None:
        self.model, self.data = base.model, base.data
        self.ctrl, self.qpos, self.qvel = base.data.ctrl, base.data.qpos, base.data.qvel
        self.position, self.contact, self.views = kind.position(base), base.data.cfrc_ext, views


class PlainStepper:
    """`env.step`, one environment after the other."""

    def __init__(self, flatten: Callable[[Any], np.ndarray]) -> None:
        self._flatten = flatten

    def handle(self, env: gym.Env) -> Any:
        """The handle that `step` takes for this environment."""
        return env

    def step(self, handles: Sequence[Any], actions: np.ndarray, t: int, warnings: list[str]) -> Steps:
        """Step t of each environment with its row of `actions`. `warnings`: see `mujoco_warnings`; emptied here.

        Raises StepFailed where an environment raises.
        """
        observations: list[np.ndarray] = []
        rewards, over, successes = np.zeros(len(handles)), np.zeros(len(handles), bool), np.full(len(handles), np.nan)
        unstable: dict[int, str] = {}
        reports_success = False
        for k, env in enumerate(handles):
            try:
                observation, reward, terminated, truncated, info = env.step(actions[k])
                observations.append(self._flatten(observation))
                rewards[k], over[k] = np.asarray(reward, float).item(), bool(terminated or truncated)
            except Exception as error:  # a third-party environment
                raise StepFailed(k) from error
            success = success_of(info)
            if success is not None:
                successes[k], reports_success = success, True
            if warnings:
                unstable[k] = warnings[0]
                warnings.clear()
        return Steps(np.stack(observations), rewards, over, successes if reports_success else None, unstable)


class FastStepper:
    """The same for environments of `ROBOTS`. Leaves every environment's physics exactly as its own `step` would."""

    def __init__(self, env: gym.Env, flatten: Callable[[Any], np.ndarray]) -> None:
        """Raises TypeError or AttributeError for an environment that it does not know."""
        import mujoco

        self._mj_step, self._forces = mujoco.mj_step, mujoco.mj_rnePostConstraint
        self._flatten = flatten
        self._kind, self._frames, self._dt, self._limit, views = _read(env)
        self._shape = self._signature(env)
        self._viewed = bool(views)

    def _signature(self, env: gym.Env) -> Any:
        kind, frames, dt, limit, views = _read(env)
        base: Any = env.unwrapped
        return type(base), kind.values, frames, dt, limit, [type(v) for v in views], base.model.nq

    def handle(self, env: gym.Env) -> Any:
        """The handle that `step` takes for this environment; None where it is not like the one that this stepper was made for."""
        with contextlib.suppress(TypeError, AttributeError, ValueError):
            if self._signature(env) == self._shape:
                return _Body(env.unwrapped, self._kind, _read(env)[4])
        return None

    def step(self, handles: Sequence[Any], actions: np.ndarray, t: int, warnings: list[str]) -> Steps:
        """Step as `PlainStepper.step` does. All environments are at their step t."""
        count, first = len(handles), handles[0]
        before, after = np.empty(count), np.empty(count)
        qpos, qvel = np.empty((count, len(first.qpos))), np.empty((count, len(first.qvel)))
        contact = np.empty((count, *first.contact.shape)) if self._kind.contact else None
        unstable: dict[int, str] = {}
        mj_step, forces, frames = self._mj_step, self._forces, self._frames
        for k, body in enumerate(handles):
            before[k] = body.position[0]
            body.ctrl[:] = actions[k]
            try:
                mj_step(body.model, body.data, nstep=frames)
                forces(body.model, body.data)
            except Exception as error:  # MuJoCo ran out of its memory
                raise StepFailed(k) from error
            after[k], qpos[k], qvel[k] = body.position[0], body.qpos, body.qvel
            if contact is not None:
                contact[k] = body.contact
            if warnings:
                unstable[k] = warnings[0]
                warnings.clear()
        state = RobotState(actions, qpos, qvel, contact, (after - before) / self._dt)
        observations = self._kind.observe(state)
        healthy = self._kind.healthy(state, observations)
        rewards = np.asarray(self._kind.reward(state, healthy), np.float64)
        over = self._kind.over(healthy, count)
        if self._limit is not None and t + 1 >= self._limit:
            over = np.ones(count, bool)
        if self._viewed:
            observations = np.stack([self._seen(body, row) for body, row in zip(handles, observations, strict=True)])
        return Steps(observations, rewards, over, None, unstable)

    def _seen(self, body: _Body, observation: np.ndarray) -> np.ndarray:
        for view in body.views:
            observation = view.observation(observation)
        return self._flatten(observation)


def fast_stepper(env: gym.Env, more: Callable[[], gym.Env], flatten: Callable[[Any], np.ndarray]) -> FastStepper | None:
    """A stepper for environments like `env`, or None where `env.step` must be used: an environment that is not known here, or one
    whose numbers differ in any bit. `more` makes another such environment and keeps it: two are needed for the comparison, 20 ms in all.
    """
    try:
        stepper = FastStepper(env, flatten)
        envs = [more(), more()]
        handles = [stepper.handle(other) for other in envs]
        if None in handles:
            return None
        return stepper if _agrees(stepper, envs, handles, env, flatten) else None
    except (TypeError, AttributeError, ValueError, StepFailed):  # an attribute or method that this version of Gymnasium does not have
        return None


def _agrees(
    stepper: FastStepper, envs: Sequence[gym.Env], handles: list[Any], plain: gym.Env, flatten: Callable[[Any], np.ndarray]
) -> bool:
    """True where `stepper` on both `envs` gives the bits that `plain.step` gives for each of them in turn: from two starts on, past the end
    of an episode, and from states far outside the healthy ones."""
    rng = np.random.default_rng(0)
    space: Any = plain.action_space
    total = CHECK_STEPS + CHECK_STATES
    low, high = np.maximum(space.low, -1e3), np.minimum(space.high, 1e3)
    actions = rng.uniform(low, high, (total, len(envs), *space.shape)).astype(space.dtype)
    base: Any = plain.unwrapped
    size = base.model.nq + base.model.nv
    # near the start but for one number, each in turn and to both sides, so that every limit is passed without passing the others
    jumps = rng.normal(scale=0.01, size=(CHECK_STATES * len(envs), size))
    far = np.where(
        np.arange(size) < base.model.nq, rng.uniform(2.0, 3.0, len(jumps))[:, None], rng.uniform(100.0, 200.0, len(jumps))[:, None]
    )
    for i, jump in enumerate(jumps):
        jump[i // 2 % size] = far[i, i // 2 % size] * (-1) ** i
    jumps = jumps.reshape(CHECK_STATES, len(envs), size)

    def place(env: Any, t: int, k: int) -> None:
        if t >= CHECK_STEPS:
            jump = jumps[t - CHECK_STEPS, k]
            inner = env.unwrapped
            inner.set_state(inner.init_qpos + jump[: inner.model.nq], inner.init_qvel + jump[inner.model.nq :])

    with mujoco_warnings() as warnings:
        for k, env in enumerate(envs):
            env.reset(seed=k)
        fast = []
        for t in range(total):
            for k, env in enumerate(envs):
                place(env, t, k)
            fast.append(stepper.step(handles, actions[t], t, warnings))
        for k in range(len(envs)):
            plain.reset(seed=k)
            for t, steps in enumerate(fast):
                place(plain, t, k)
                observation, reward, terminated, truncated, info = plain.step(actions[t, k])
                row = flatten(observation)
                seen = np.asarray(steps.observations[k])
                if row.dtype != seen.dtype or row.tobytes() != seen.tobytes() or success_of(info) is not None:
                    return False
                if np.float64(reward).tobytes() != steps.rewards[k].tobytes() or bool(terminated or truncated) != steps.over[k]:
                    return False
                if bool(warnings) != (k in steps.unstable):
                    return False
                warnings.clear()
            for name in ("qpos", "qvel", "qacc_warmstart", "cfrc_ext", "xpos"):
                if getattr(base.data, name).tobytes() != getattr(handles[k].data, name).tobytes():
                    return False
    return True


def _read(env: gym.Env) -> tuple[Robot, int, float, int | None, list[Any]]:
    """(arithmetic, physics steps of a step, seconds of a step, limit on steps, observation wrappers from the inside out).

    Raises TypeError or AttributeError for what is not known.
    """
    import gymnasium as gym

    views: list[Any] = []
    limits: list[int] = []
    while isinstance(env, gym.Wrapper):
        name = f"{type(env).__module__}:{type(env).__qualname__}"
        if getattr(type(env), "pure_observation", False) and type(env).step is gym.ObservationWrapper.step:
            views.insert(0, env)
        elif name not in TRANSPARENT:
            raise TypeError(f"{name} may do anything")
        elif name.endswith(":TimeLimit"):
            limits.append(int(cast(Any, env)._max_episode_steps))
        env = env.env
    base: Any = env
    name = f"{type(base).__module__}:{type(base).__qualname__}"
    if name not in ROBOTS or base.render_mode == "human" or base.data.qpos.size != base.model.nq:
        raise TypeError(f"{name} is not known")
    kind, version = ROBOTS[name]
    return kind(base, version), int(base.frame_skip), float(base.dt), min(limits, default=None), views
