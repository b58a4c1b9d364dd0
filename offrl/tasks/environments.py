"""Make a task's Gymnasium environment, flatten what it observes, and check that data and environment fit each other."""

from __future__ import annotations

import contextlib
import ctypes.util
import dataclasses
import functools
import importlib
import importlib.util
import io
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from offrl import registry
from offrl.errors import UserError, first_line, nearest, warn
from offrl.settings.aliases.datasets import environment_hint
from offrl.settings.evaluation import EvalConfig
from offrl.system import trust
from offrl.tasks.custom import custom_environment
from offrl.tasks.entries import OWN_ORDER, PIXELS, VECTOR, entries, entry, in_own_order, joined
from offrl.tasks.task import Task, lookup

if TYPE_CHECKING:
    import gymnasium as gym


Flatten = Callable[[Any], np.ndarray]
CONTINUING = ("PointMaze", "AntMaze")  # of them, those that take `continuing_task`
DISPLAYS = ("DISPLAY", "WAYLAND_DISPLAY")
OWN = "offrl/"  # ids of environments of ours begin so
ROBOTICS = ("PointMaze", "AntMaze", "Adroit", "FrankaKitchen", "Fetch", "HandReach", "HandManipulate")


def resolve_task(task: Task | None, config: EvalConfig, goals: bool = False) -> Task | None:
    """The task to evaluate in under `eval.env`: the dataset's own, none at all, or the same in another environment,
    whose scores are normalised only where the dataset's reference scores hold there too.

    goals: for policies that act towards a goal; see `towards_goals`.
    """
    if config.env == "none":
        return None
    if task is not None and task.parts:
        return _played(task, config.env)
    if config.env == "auto":
        result = task if task is not None and (task.env_id or task.env_factory) else None
        return towards_goals(result) if result is not None and goals else result
    base = task or Task(name=config.env)
    if config.env != base.env_id:
        note = f"environment {config.env} was chosen" + (f" in place of {base.env_id}" if base.env_id else "")
        base = base if base.holds_in(config.env) else base.without_references()  # `check_fit` says so
        base = dataclasses.replace(
            base, env_id=config.env, env_kwargs={}, env_factory=None, max_episode_steps=None, starts=(), note=note
        )
    return towards_goals(base) if goals else base


def _played(task: Task, env_id: str) -> Task | None:
    """Multi-task data's task that plays all tasks (auto), or those of one environment; None where one of them has no
    environment. Raises UserError for an environment that none of them is of.
    """
    environments = [part.task.env_id for part in task.parts]
    numbers = [k for k, name in enumerate(environments) if env_id in ("auto", name)]
    if not numbers:
        known = ", ".join(dict.fromkeys(name or "one without an environment" for name in environments))
        raise UserError(f"the environment {env_id} is of no task that the policy learnt: {known}")
    if not all(environments[k] for k in numbers):
        return None
    return dataclasses.replace(task, starts=tuple({"task": k} for k in numbers))


def towards_goals(task: Task) -> Task:
    """The task for policies that act towards a goal: an episode is of one goal, and counts where it gets there.

    gymnasium-robotics' mazes go on after the goal is reached unless set otherwise, some with another goal. Reference
    scores are returns of such episodes, which these are not.
    """
    arguments = dict(task.env_kwargs)
    if (task.env_id or "").rpartition(":")[2].startswith(CONTINUING):
        arguments |= {"continuing_task": False}
    return dataclasses.replace(task.without_references(), env_kwargs=arguments, scored_by="success")


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """No deprecation notices: v4 environments are used on purpose, because the data and the reference scores belong to
    them.
    """
    import gymnasium as gym

    level = gym.logger.min_level
    gym.logger.min_level = gym.logger.ERROR
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        gym.logger.min_level = level


def make_env(task: Task) -> gym.Env:
    """The task's environment, unwrapped from Gymnasium's checker, which observes what the task says. Raises UserError
    for an unknown id or a package that is missing, where only a file names a module to import, or what an argument
    opens (see `offrl.system.trust`), and for numbers that it does not observe."""
    env = _bare(task)
    if not task.observation_numbers:
        return env
    from offrl.tasks.numbers import seen_through

    return seen_through(env, task.observation_numbers, task.env_id or task.name)


def _bare(task: Task) -> gym.Env:
    import gymnasium as gym

    if task.parts:
        from offrl.tasks.multitask import MultiTaskEnv

        return MultiTaskEnv(task)
    if task.env_factory is not None:
        return _made(task.env_factory, f"{task.name}: env_factory")
    if task.env_id is None:
        cure = task.note or "Name one: env=ID (offrl train: eval.env=ID)"
        raise UserError(f"{task.name} has no environment to evaluate in. {cure}")
    if not trust.importable(task.env_id):
        lookup(task.name)  # where a plugin's table names this very environment, it counts as typed
    trust.check_environment(task.env_id, task.env_kwargs)
    arguments: dict[str, Any] = dict(task.env_kwargs)
    if task.max_episode_steps is not None:
        arguments["max_episode_steps"] = task.max_episode_steps
    if (constructor := custom_environment(task.env_id)) is not None:
        limit = arguments.pop("max_episode_steps", None)
        env = _made(functools.partial(constructor, **arguments), f"env={task.env_id}")
        return env if limit is None else gym.wrappers.TimeLimit(env, limit)
    import_mujoco()
    if task.env_id not in gym.registry and task.env_id.startswith(ROBOTICS):
        register_robotics(task.env_id)
    if task.env_id.startswith(OWN):
        registry.names("task")  # imports what makes them known
    try:
        with quiet():
            return gym.make(task.env_id, disable_env_checker=True, **arguments)
    except (gym.error.UnregisteredEnv, gym.error.DeprecatedEnv) as error:
        hint = nearest(task.env_id, gym.registry)
        raise UserError(
            f"unknown environment '{task.env_id}'.{environment_hint(task.env_id) or hint} ({first_line(error)})"
        ) from error
    except (gym.error.DependencyNotInstalled, ModuleNotFoundError) as error:
        raise UserError(
            f"environment '{task.env_id}' needs a package that is not installed: "
            f"{first_line(error)}{_as_file(task.env_id)}"
        ) from error
    except UserError:
        raise
    except Exception as error:  # a wrong keyword, a broken model file: whatever the environment's own code raises
        suffix = f" with {arguments}" if arguments else ""
        if old := environment_hint(task.env_id):
            raise UserError(f"environment '{task.env_id}' could not be made.{old}") from error
        raise UserError(
            f"environment '{task.env_id}' could not be made{suffix}: {type(error).__name__}: {first_line(error)}"
        ) from error


def _made(factory: Callable[[], Any], where: str) -> gym.Env:
    with quiet():
        env = factory()
    if not hasattr(env, "step") or not hasattr(env, "observation_space"):
        raise UserError(f"{where} made a {type(env).__name__}, which is not a Gymnasium environment")
    return env


def _as_file(env_id: str) -> str:
    """How to name a file of the user's, where it stands there and was named as a module that is not on Python's
    path.
    """
    module, _, name = env_id.rpartition(":")
    return f" The file here is named {module}.py:{name}" if module and Path(f"{module}.py").is_file() else ""


def choose_opengl() -> None:
    """Choose how MuJoCo draws where nobody did: EGL, or else OSMesa, on a Linux machine without a screen. To be called
    before MuJoCo is imported.
    """
    if sys.platform.startswith("linux") and not os.environ.get("MUJOCO_GL") and not any(map(os.environ.get, DISPLAYS)):
        for name, library in (("egl", "EGL"), ("osmesa", "OSMesa")):
            if ctypes.util.find_library(library):
                os.environ["MUJOCO_GL"] = name
                return


def import_mujoco() -> None:
    """Import MuJoCo, where it is installed, even if the rendering back end that MUJOCO_GL names is not there: scores
    need no pictures.
    """
    if "mujoco" in sys.modules or importlib.util.find_spec("mujoco") is None:
        return
    backend = os.environ.get("MUJOCO_GL")
    try:
        importlib.import_module("mujoco")
    except Exception as error:  # mujoco raises whatever its OpenGL libraries do
        if not backend:
            raise UserError(f"the package mujoco cannot be imported: {first_line(error)}; install it again") from error
        warn(
            f"no MuJoCo rendering back end ({first_line(error)}): video is skipped; training and scores do not need it"
        )
        os.environ["MUJOCO_GL"] = "disable"
        importlib.import_module("mujoco")


def register_robotics(env_id: str) -> None:
    """Make gymnasium-robotics' ids known. Raises UserError, naming `env_id`, when the package is not installed."""
    import gymnasium as gym

    if importlib.util.find_spec("gymnasium_robotics") is None:
        raise UserError(f"environment '{env_id}' is in the package gymnasium-robotics: pip install 'offrl[robotics]'")
    with quiet(), contextlib.redirect_stderr(io.StringIO()):  # it prints notices about its other environments
        gym.register_envs(importlib.import_module("gymnasium_robotics"))


def has_physics(env: Any) -> bool:
    """True where the environment exposes MuJoCo's model and data."""
    base = env.unwrapped
    return [type(getattr(base, name, None)).__name__ for name in ("model", "data")] == ["MjModel", "MjData"]


def time_limit(env: gym.Env) -> int | None:
    """The environment's own limit on the steps of an episode, if it has one."""
    if env.spec is None:
        return getattr(env, "limit_of_tasks", None)  # several tasks have no spec, and limits of their own
    return getattr(env.spec, "max_episode_steps", None)


def episode_limit(env: gym.Env, task: Task, max_steps: int | None) -> int | None:
    """The most steps of an episode that settings, task and environment allow; None where nothing limits it."""
    return min((n for n in (max_steps, task.max_episode_steps, time_limit(env)) if n is not None), default=None)


def to_space(space: Any, actions: np.ndarray) -> np.ndarray:
    """Actions [E, A] in the range of a Box, or choices [E] of a Discrete space that are counted from 0, as `step` takes
    them."""
    if hasattr(space, "n"):
        return actions.astype(np.int64) + int(space.start)
    clipped = np.clip(actions, space.low.reshape(-1), space.high.reshape(-1))
    return clipped.astype(space.dtype).reshape(len(actions), *space.shape)


def flattener(env: gym.Env, keys: Sequence[str] = ()) -> tuple[Flatten, tuple[int, ...], Any]:
    """(function, shape, dtype): from an observation of `env` to one array of that shape.

    Texts are kept. Box observations keep their shape, as float32. Dict observations are joined in the order that
    `offrl.tasks.entries.joined` finds for `keys`. Where there are images (uint8 Boxes of two or three dimensions) the
    type has a field for each, and "vector" for all numbers. Raises UserError where that is open, for a key that is
    missing, and for what is no numbers.
    """
    from gymnasium import spaces

    space = env.observation_space
    if isinstance(space, spaces.Text):
        return str, (), object  # type: ignore[return-value]
    if isinstance(space, spaces.Box):
        _refuse_other_order(env, keys)
        if is_image(space):
            return streamed([], {PIXELS: ((), image_shape(space))})
        return np.asarray, tuple(space.shape), np.float32
    if isinstance(space, spaces.Dict):
        parts = entries(space, joined(space, keys))
        images = {"/".join(path): (path, image_shape(part)) for path, part in parts if is_image(part)}
        parts = [(path, part) for path, part in parts if not is_image(part)]
        for path, part in parts:
            if not part.is_np_flattenable:
                raise UserError(
                    f"the environment's observation has the entry {'/'.join(path)} of kind {type(part).__name__}, "
                    "which cannot be made into numbers: name the others, dataset.observation_keys=[...]"
                )

        def flatten(observation: Any) -> np.ndarray:
            return np.concatenate(
                [np.asarray(spaces.flatten(part, entry(observation, path))).ravel() for path, part in parts]
            )

        width = sum(spaces.flatdim(part) for _, part in parts)
        if images:
            return streamed([flatten] * bool(parts), images, width)
        return flatten, (width,), np.float32
    if not space.is_np_flattenable:
        raise UserError(
            f"observations of kind {type(space).__name__} cannot be made into one array: wrap the environment so that "
            "it gives numbers (gymnasium.wrappers.TransformObservation)"
        )
    return (lambda observation: np.asarray(spaces.flatten(space, observation))), (spaces.flatdim(space),), np.float32


def is_image(space: Any) -> bool:
    """Whether a space is of images: uint8 Boxes [H, W] or [H, W, C]."""
    return getattr(space, "dtype", None) == np.uint8 and len(space.shape or ()) in (2, 3)


def image_shape(space: Any) -> tuple[int, ...]:
    """[H, W, C]."""
    return (*space.shape, 1)[:3]


def streamed(
    flatten: Sequence[Flatten], images: Mapping[str, tuple[tuple[str, ...], tuple[int, ...]]], width: int = 0
) -> tuple[Flatten, tuple[int, ...], np.dtype]:
    """`flattener` of a vector of `width` numbers, where there is one, and of images by name: where they stand in an
    observation, and their shapes.
    """
    vector = [(VECTOR, np.float32, (width,))] * len(flatten)
    kind = np.dtype([*vector, *((name, np.uint8, shape) for name, (_, shape) in images.items())])

    def row(observation: Any) -> np.ndarray:
        out = np.zeros((), kind)
        for function in flatten:
            out[VECTOR] = function(observation)
        for name, (path, shape) in images.items():
            image = np.asarray(entry(observation, path))
            if image.dtype != np.uint8 or image.shape not in (shape, shape[:2]):
                raise UserError(
                    f"the environment gave {name} as {image.dtype} of shape {list(image.shape)}, and its space says "
                    f"uint8 {list(shape)}"
                )
            out[name] = image.reshape(shape)
        return out

    return row, (), kind


def _refuse_other_order(env: gym.Env, keys: Sequence[str]) -> None:
    """Raises UserError where the data are made of the entries `keys` of a Dict, and FlattenObservation joined the
    environment's in another order."""
    from gymnasium import Wrapper, spaces
    from gymnasium.wrappers import FlattenObservation

    while isinstance(env, Wrapper):
        inner = env.env.observation_space
        if isinstance(env, FlattenObservation) and isinstance(inner, spaces.Dict) and keys and tuple(keys) != OWN_ORDER:
            flat = in_own_order(inner)
            names = ["/".join(map(str, path)) for path, _ in entries(inner, keys, "the environment's observations")]
            if names != flat:
                raise UserError(
                    f"the data are made of {','.join(names)}, and the environment's FlattenObservation joins "
                    f"{','.join(flat)}: give the environment without that wrapper"
                )
        env = env.env


def action_kind(env: gym.Env) -> tuple[bool, int]:
    """(discrete, size): the number of choices of a Discrete space, or the flat dimension of a Box; (False, 1) for
    texts.
    """
    from gymnasium import spaces

    space = env.action_space
    if isinstance(space, spaces.Discrete):
        return True, int(space.n)
    if isinstance(space, spaces.Box):
        return False, int(np.prod(space.shape, dtype=int))
    if isinstance(space, spaces.Text):
        return False, 1
    raise UserError(
        f"actions of kind {type(space).__name__} are not supported, only Box and Discrete are: wrap the environment so "
        "that it takes such, of several choices the number of their combination (gymnasium.wrappers.TransformAction)"
    )
