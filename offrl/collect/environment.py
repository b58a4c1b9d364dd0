"""The environment that is recorded: checked first, and refused where it cannot be recorded."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from offrl.collect.pictures import check_camera, rendered
from offrl.errors import UserError
from offrl.system import trust
from offrl.tasks.entries import PIXELS, VECTOR, entries
from offrl.tasks.environments import action_kind, flattener, is_image, make_env, time_limit
from offrl.tasks.provenance import provenance
from offrl.tasks.task import Task


@dataclass(frozen=True)
class World:
    """An environment by its id, and what recording needs to know of it."""

    env_id: str
    shape: tuple[int, ...]  # of an observation, before it is made flat
    low: np.ndarray | None  # [A] range of the actions; None: discrete
    high: np.ndarray | None
    choices: int  # discrete actions
    start: int  # number of the first of them
    limit: int | None  # steps of an episode at most
    mujoco: bool
    label: str  # id and versions
    spec: str  # Gymnasium's JSON
    kind: np.dtype  # of an observation, with a field for each stream where there are images; see `flattener`
    keys: tuple[str, ...] = ()  # the entries of Dict observations
    picture: tuple[int, ...] = ()  # height and width of rendered images; (): none
    camera: str = ""

    @property
    def discrete(self) -> bool:
        return self.low is None

    @property
    def dim(self) -> int:
        """Numbers of an observation."""
        return int(np.prod(self.shape, dtype=int))

    @property
    def images(self) -> tuple[str, ...]:
        """The names of the images that are recorded."""
        return tuple(name for name in self.kind.names or () if name != VECTOR) or (PIXELS,) * bool(self.picture)

    def make(self) -> gym.Env:
        """A fresh environment, ended after `limit` steps."""
        return make_env(_task(self.env_id, bool(self.picture), self.camera))


def _task(env_id: str, rendered: bool, camera: str) -> Task:
    arguments = {"render_mode": "rgb_array", **({"camera_name": camera} if camera else {})} if rendered else {}
    return Task(name=env_id, env_id=env_id, env_kwargs=arguments)


def look(env_id: str, max_steps: int | None = None, picture: tuple[int, ...] = (), camera: str = "") -> World:
    """Make the environment once and see. picture: height and width of images that are to be rendered. Raises UserError
    for what cannot be recorded, with a cure.
    """
    if not env_id:
        raise UserError("name the environment: offrl collect env=Hopper-v5 recipe=d4rl")
    trust.typed(env_id)
    task = _task(env_id, bool(picture), camera)
    env = make_env(task)
    try:
        if not isinstance(env, gym.Env):
            raise UserError(f"{env_id} is a {type(env).__name__}, no Gymnasium environment of one agent")
        space, actions = env.observation_space, env.action_space
        composite = isinstance(actions, spaces.Tuple | spaces.Dict)
        if composite or isinstance(space, spaces.Tuple):
            raise UserError(f"{env_id} has {type(actions if composite else space).__name__} spaces, as environments of "
                            "several agents do; only one agent with Box or Discrete actions is recorded")  # fmt: skip
        keys: tuple[str, ...] = ()
        if isinstance(space, spaces.Dict) and any(is_image(part) for _, part in entries(space)):
            keys = tuple("/".join(path) for path, _ in entries(space))
        elif isinstance(space, spaces.Dict):
            raise UserError(
                f"{env_id} has Dict observations ({', '.join(space.spaces)}), which are not recorded: register an id "
                "of your own for gymnasium.wrappers.FlattenObservation(...) of it, and give that id"
            )
        if not isinstance(space, spaces.Box | spaces.Dict):
            raise UserError(
                f"{env_id} has {type(space).__name__} observations; only Box is recorded: wrap it so that it gives "
                "numbers"
            )
        _, shape, kind = flattener(env, keys)
        kind = np.dtype(kind)
        if kind.names:
            shape = kind[VECTOR].shape if VECTOR in kind.names else (0,)
            if picture:
                raise UserError(f"the observations of {env_id} have images already: leave images=true out")
        elif len(shape) > 2:
            raise UserError(f"{env_id} has observations {shape} of {space.dtype}; images are uint8, 0 to 255")
        if picture:
            check_camera(env, camera, env_id)
            env.reset(seed=0)
            rendered(env, picture, env_id)
        discrete, size = action_kind(env)
        low = high = None
        if isinstance(actions, spaces.Box):
            low, high = actions.low.reshape(-1).astype(np.float32), actions.high.reshape(-1).astype(np.float32)
            if not (np.isfinite(low).all() and np.isfinite(high).all()):
                raise UserError(
                    f"{env_id} has actions without bounds ({actions}); wrap it in gymnasium.wrappers.RescaleAction or "
                    "ClipAction"
                )
        limit = time_limit(env)
        if limit is None and max_steps is None:
            raise UserError(f"nothing limits the episodes of {env_id}; set max_steps=1000")
        base: Any = env.unwrapped
        return World(
            env_id, shape, low, high, size if discrete else 0, int(getattr(actions, "start", 0)),
            min(n for n in (limit, max_steps) if n is not None),
            hasattr(base, "data") and hasattr(base.data, "qpos"), provenance(task, env).place, _spec(env), kind, keys,
            picture, camera,
        )  # fmt: skip
    finally:
        env.close()


def _spec(env: gym.Env) -> str:
    """The specification of the environment as JSON; empty where it cannot be one."""
    try:
        return env.spec.to_json() if env.spec is not None else ""
    except (ValueError, TypeError, AttributeError):
        return ""


def spec_fact(world: World) -> dict[str, Any]:
    """The facts about the environment for a dataset's card."""
    return {"env_id": world.env_id, "env_spec": json.loads(world.spec) if world.spec else None, "versions": world.label}
