"""A pendulum and a point mass that are seen in pictures of 32 x 32 pixels, which NumPy draws: for learning from images
on a CPU, without OpenGL.

Each is an environment of pictures, one of the states that they show, and the point mass one of both (several streams):
the same seed and actions lead through the same states. A picture shows no velocity: two (`dataset.frames=2`) do. All
can be drawn from observed states, so data of states are data of pictures as well (`scripts/bench/drawn.py`). What they
do and how they look: `drawn_worlds.py`."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from offrl.envs.drawn_worlds import SIDE, WORLDS
from offrl.envs.generated import BaseEnvironment, Info, raw_data, side_by_side
from offrl.registry import register
from offrl.tasks.task import Task

if TYPE_CHECKING:
    from offrl.data.raw import RawData

LIMIT = 100  # steps
ROWS = 100_000  # of the data
NOISE = (0.0, 0.3, 0.6, 0.9)  # share of an episode of the data in which a push is held in place of control
HELD = 8  # steps for which either goes on, on average


class DrawnEnvironment(BaseEnvironment):
    """One of `WORLDS`. `info["state"]`: the observation of its state; `info["success"]`: whether the goal is reached;
    a reset's `info["goal"]`: the observation there.

    observes: pixels, state, or both: a Dict of pixels and of the velocity, as state.
    """

    metadata: Info = {"render_modes": ["rgb_array"], "render_fps": 15}  # noqa: RUF012  # Gymnasium declares it so

    def __init__(self, world: str, observes: str = "pixels", render_mode: str | None = None) -> None:
        self.world, self.observes, self.render_mode = WORLDS[world], observes, render_mode
        size, actions = self.world.dims
        state, pixels = partial(spaces.Box, -np.inf, np.inf), spaces.Box(0, 255, (SIDE, SIDE, 3), np.uint8)
        spaces_by_name: dict[str, spaces.Space] = {
            "pixels": pixels,
            "state": state((size,)),
            "both": spaces.Dict({"pixels": pixels, "state": state((actions,))}),  # a velocity for each action
        }
        self.observation_space = spaces_by_name[observes]
        self.action_space = spaces.Box(-1.0, 1.0, (actions,), np.float32)
        self.states = self.world.start(np.random.default_rng(0), 1)

    def begin(self, options: Info) -> tuple[Any, Info]:
        self.states = self.world.start(self.np_random, 1)
        observation, info = self._observe()
        return observation, info | {"goal": self._shown(self.world.observe(self.world.goals(self.states)))}

    def step(self, action: np.ndarray) -> tuple[Any, float, bool, bool, Info]:
        self.states, rewards = self.world.move(self.states, np.asarray(action, np.float64)[None])
        observation, info = self._observe()
        return observation, float(rewards[0]), False, False, info

    def render(self) -> np.ndarray | None:
        """The picture, [256, 256, 3] uint8."""
        if self.render_mode is None:
            return None
        return self.world.pictures(self.world.observe(self.states))[0].repeat(8, 0).repeat(8, 1)

    def _observe(self) -> tuple[Any, Info]:
        states = self.world.observe(self.states)
        return self._shown(states), {"state": states[0], "success": bool(self.world.reached(self.states)[0])}

    def _shown(self, states: np.ndarray) -> Any:
        """What is observed of states [1, O]."""
        if self.observes == "state":
            return states[0]
        pixels = self.world.pictures(states)[0]
        return pixels if self.observes == "pixels" else {"pixels": pixels, "state": states[0, self.world.velocity]}


IDS = {
    "drawn-pendulum": ("offrl/DrawnPendulum-v0", "pendulum", "pixels"),
    "drawn-pendulum-state": ("offrl/DrawnPendulumState-v0", "pendulum", "state"),
    "drawn-pendulum-distractor": ("offrl/DrawnPendulumDistractor-v0", "pendulum-distractor", "pixels"),
    "drawn-pendulum-distractor-state": ("offrl/DrawnPendulumDistractorState-v0", "pendulum-distractor", "state"),
    "drawn-point-mass": ("offrl/DrawnPointMass-v0", "point-mass", "pixels"),
    "drawn-point-mass-state": ("offrl/DrawnPointMassState-v0", "point-mass", "state"),
    "drawn-point-mass-dict": ("offrl/DrawnPointMassDict-v0", "point-mass", "both"),
}
TASKS: dict[str, Task] = {}
for _name, (_id, _world, _observes) in IDS.items():
    _kwargs = {"world": _world, "observes": _observes}
    gym.register(_id, entry_point="offrl.envs.drawn:DrawnEnvironment", kwargs=_kwargs, max_episode_steps=LIMIT)
    TASKS[_name] = Task(
        name=_name,
        env_id=f"offrl.envs.drawn:{_id}",
        max_episode_steps=LIMIT,
        ref_min=WORLDS[_world].references[0],
        ref_max=WORLDS[_world].references[1],
        ref_label="offrl",
        observation_dim=WORLDS[_world].dims[0] if _observes == "state" else None,
        action_dim=WORLDS[_world].dims[1],
        note="0 is uniform actions, 100 the controller that made the data, without pushes",
    )


def generate(world: str, seed: int, rows: int) -> RawData:
    """Whole episodes of at least `rows` rows of states: of a controller in place of which a push, uniform in [-1, 1],
    is held for a while, in some episodes (see `NOISE`) more often than in others."""
    dynamics, draw, parts = WORLDS[world], np.random.Generator(np.random.PCG64(seed)), []
    episodes = -(-rows // LIMIT)
    states, size = dynamics.start(draw, episodes), (episodes, dynamics.dims[1])
    noise, pushed, push = draw.choice(NOISE, (episodes, 1)), np.zeros((episodes, 1), bool), np.zeros(size)
    for t in range(LIMIT):
        anew = (draw.random((episodes, 1)) < 1.0 / HELD) | (t == 0)
        pushed = np.where(anew, draw.random((episodes, 1)) < noise, pushed)
        push = np.where(anew, draw.uniform(-1.0, 1.0, size), push)
        observations = dynamics.observe(states)
        actions = np.where(pushed, push, dynamics.control(observations)).astype(np.float32)
        states, rewards = dynamics.move(states, actions.astype(np.float64))
        parts.append(
            {
                "observations": observations,
                "actions": actions,
                "rewards": rewards,
                "next_observations": dynamics.observe(states),
            }
        )
    return raw_data(
        side_by_side(parts),
        TASKS[f"drawn-{world}-state"],
        seed,
        action_low=np.float32(-1.0),
        action_high=np.float32(1.0),
    )


@register("task", "drawn")
def task(name: str) -> Task | None:
    """The task of that name."""
    return TASKS.get(name)


for _world in WORLDS:
    register("dataset", f"drawn-{_world}-state")(lambda config, world=_world: generate(world, 0, ROWS))
