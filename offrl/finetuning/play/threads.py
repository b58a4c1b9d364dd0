"""The environments of play in threads of this process: Gymnasium's plain robots, whose physics MuJoCo steps without
Python, and whose observations, rewards and ends are computed for all at once, with the same numbers.

`mujoco.rollout` has threads of its own, but gives no way to keep the solver's warm start of each environment from one
step to the next, without which the numbers are others.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any, NamedTuple

import numpy as np

from offrl.errors import UserError
from offrl.evaluation.steppers import Steps
from offrl.finetuning.play.backends import Beginning, EnvFailed, Sequential
from offrl.finetuning.play.robots import ROBOTS, VERSIONS, Motion
from offrl.settings.evaluation import cores
from offrl.tasks.episodes import mujoco_warnings
from offrl.tasks.task import Task

PLAIN = ("TimeLimit", "OrderEnforcing", "PassiveEnvChecker")  # wrappers that change no number
COMPARED = 32  # steps, with which it is seen that the numbers are the environment's
CURE = "backend=sequential and backend=processes step it"


class Body(NamedTuple):
    """What is read and written of one environment at each step."""

    model: Any
    data: Any
    position: np.ndarray  # views of `data`
    control: np.ndarray
    qpos: np.ndarray
    qvel: np.ndarray
    forces: np.ndarray


class ThreadTexts(threading.local):
    """What MuJoCo warned of in this thread."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.append = self.texts.append


class Threads(Sequential):
    """K environments, stepped by as many threads, the asking one among them, as there are cores, or environments."""

    def __init__(self, task: Task, numbers: Sequence[int], backend: str = "threads") -> None:
        """backend: who asks. Raises UserError where an environment cannot be made, or is none of `ROBOTS` as its id
        makes it.
        """
        name = task.env_id or task.name
        robot, _, version = (task.env_id or "").rpartition("-v")
        if task.env_factory is not None or robot not in ROBOTS or version not in VERSIONS:
            raise UserError(
                f"backend={backend} steps {', '.join(ROBOTS)}, each -v4 or -v5, and {name} is not the id of one: {CURE}"
            )
        super().__init__(task, numbers)
        try:
            import mujoco

            self.move, self.feel = mujoco.mj_step, mujoco.mj_rnePostConstraint
            self.thread_warnings = ThreadTexts()
            self._stack.enter_context(mujoco_warnings(self.thread_warnings))
            env: Any = self.envs[numbers[0]]
            _refuse_changed(env, name, backend)
            self.robot = ROBOTS[robot](env.unwrapped)
            self.frames, self.seconds = env.unwrapped.frame_skip, env.unwrapped.dt
            self.bodies = {k: self._body(env.unwrapped) for k, env in self.envs.items()}
            self.count = min(cores(), len(numbers))
            self.pool = self._stack.enter_context(ThreadPoolExecutor(self.count))
            known = self._agrees(task, numbers[0])
        except (AttributeError, EnvFailed):  # an attribute that another version does not have
            known = False
        except BaseException:
            self.close()
            raise
        if not known:
            self.close()
            raise UserError(f"backend={backend} does not know this version of {name}: {CURE}")

    def step(self, at: Sequence[int], actions: Sequence[Any] | np.ndarray) -> tuple[np.ndarray, Steps]:
        """As `Backend.step`."""
        bodies = [self.bodies[k] for k in at]
        first, count = bodies[0], len(bodies)
        motion = Motion(
            np.asarray(actions),
            np.zeros(count),
            np.zeros((count, len(first.qpos))),
            np.zeros((count, len(first.qvel))),
            np.zeros((count, *first.forces.shape)) if self.robot.feels else np.zeros((count, 0)),
        )
        unstable: dict[int, str] = {}
        edges = np.linspace(0, count, min(self.count, count) + 1).round().astype(int).tolist()
        parts = [range(*ends) for ends in zip(edges[:-1], edges[1:], strict=True)]
        jobs = [self.pool.submit(self._move, at, part, bodies, motion, unstable) for part in parts[1:]]
        try:
            self._move(at, parts[0], bodies, motion, unstable)
        finally:
            wait(jobs)
        for job in jobs:  # the first that failed raises
            job.result()
        return self.answer(motion, unstable)

    def answer(self, motion: Motion, unstable: dict[int, str]) -> tuple[np.ndarray, Steps]:
        """What `step` gives of robots that moved so. unstable: see `Steps`."""
        count = len(motion.qpos)
        healthy = self.robot.healthy(motion)
        ends = np.zeros(count, bool) if healthy is None else self.robot.ends(healthy)
        rewards = np.asarray(self.robot.rewards(motion, healthy), float)
        unknown = np.full(count, np.nan)
        rows = self.robot.observe(motion).astype(self.kind)
        return rows, Steps([], rewards, ends, ends.copy(), unknown, unknown.copy(), dict(sorted(unstable.items())))

    def _body(self, base: Any) -> Body:
        data = base.data
        return Body(base.model, data, self.robot.position(base), data.ctrl, data.qpos, data.qvel, data.cfrc_ext)

    def _move(
        self, at: Sequence[int], part: range, bodies: Sequence[Body], motion: Motion, unstable: dict[int, str]
    ) -> None:
        """One step of the physics of a part of the environments `at`, into the rows of `motion`."""
        texts = self.thread_warnings.texts
        texts.clear()  # of resets
        for i in part:
            body = bodies[i]
            before = float(body.position[0])
            body.control[:] = motion.actions[i]
            try:
                self.move(body.model, body.data, self.frames)
                if self.robot.feels:
                    self.feel(body.model, body.data)
                    motion.forces[i] = body.forces
            except Exception as error:  # MuJoCo ran out of its memory, say
                raise EnvFailed(at[i], f"{type(error).__name__}: {error}") from error
            motion.speeds[i] = (body.position[0] - before) / self.seconds
            motion.qpos[i], motion.qvel[i] = body.qpos, body.qvel
            if texts:
                unstable[i] = texts[0]
                texts.clear()

    def _agrees(self, task: Task, k: int) -> bool:
        """Whether an environment's own steps give the same numbers, as those of another version may not."""
        one = Sequential(task, [k])
        try:
            space = one.envs[k].action_space
            actions = np.random.default_rng(0).uniform(space.low, space.high, (COMPARED, 1, *space.shape))
            beginning = [Beginning(k, 0, None, None, False)]
            one.reset(beginning), self.reset(beginning)
            return all(_bytes(one, k, action) == _bytes(self, k, action) for action in actions.astype(space.dtype))
        finally:
            one.close()


def _bytes(envs: Sequential, k: int, action: np.ndarray) -> list[bytes]:
    rows, steps = envs.step([k], action)
    return [x.tobytes() for x in (rows, steps.rewards, steps.terminated, steps.successes, steps.costs)]


def _refuse_changed(env: Any, name: str, backend: str) -> None:
    """Raises UserError for wrappers that may change a number, and for another environment of the same id."""
    while env is not env.unwrapped:
        if type(env).__name__ not in PLAIN or not type(env).__module__.startswith("gymnasium."):
            raise UserError(f"backend={backend} knows no wrapper {type(env).__name__}, which {name} has: {CURE}")
        env = env.env
    if not type(env).__module__.startswith("gymnasium.envs.mujoco."):
        raise UserError(f"backend={backend} knows {name} as Gymnasium makes it, and this is another: {CURE}")
