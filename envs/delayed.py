"""A plant that answers late: actions act some steps after they were chosen."""

from __future__ import annotations

from typing import TYPE_CHECKING

import gymnasium as gym
import numpy as np

from offrl.envs.drawn import LIMIT, WORLDS, DrawnEnvironment
from offrl.envs.generated import raw_data, register_generated, side_by_side
from offrl.tasks.perturbed import Delay
from offrl.tasks.task import Task

if TYPE_CHECKING:
    from offrl.data.raw import RawData

DELAY = 3  # steps
EPISODES = 400  # of the data
NOISE = (0.0, 0.1, 0.2, 0.4)  # share of the steps of an episode of the data in which a push takes the place of control


def pendulum(delay: int = DELAY, render_mode: str | None = None) -> Delay:
    """The pendulum of `offrl.envs.drawn`, by its states, with delayed torques."""
    return Delay(DrawnEnvironment("pendulum", "state", render_mode), delay)


gym.register(
    "offrl/DelayedPendulum-v0", entry_point="offrl.envs.delayed:pendulum", max_episode_steps=LIMIT, order_enforce=False
)
TASK = Task(
    name="delayed-pendulum",
    env_id="offrl.envs.delayed:offrl/DelayedPendulum-v0",
    env_kwargs={"delay": DELAY},
    max_episode_steps=LIMIT,
    ref_min=-1225.5,
    ref_max=-170.8,
    ref_label="offrl",
    observation_dim=3,
    action_dim=1,
    note=f"an action acts {DELAY} steps later; 0 is uniform actions, 100 the controller that made the data, which "
    "looks ahead, without pushes",
)


def generate(episodes: int = EPISODES, seed: int = 0) -> RawData:
    """Episodes of a controller that looks ahead to the state in which its torque will act, and in place of which a
    uniform torque acts in some steps, in some episodes (see `NOISE`) more often than in others.

    Pushes that are held, as in the drawn pendulum's data, teach a policy that sees its last actions to repeat them.
    """
    world, draw, parts = WORLDS["pendulum"], np.random.Generator(np.random.PCG64(seed)), []
    states, share = world.start(draw, episodes), draw.choice(NOISE, (episodes, 1))
    waiting = [np.zeros((episodes, 1))] * DELAY
    for _ in range(LIMIT):
        ahead, observations = states, world.observe(states)
        for action in waiting:
            ahead = world.move(ahead, action)[0]
        pushed, push = draw.random((episodes, 1)) < share, draw.uniform(-1.0, 1.0, (episodes, 1))
        actions = np.where(pushed, push, world.control(world.observe(ahead))).astype(np.float32)
        waiting = [*waiting, actions.astype(np.float64)]
        states, rewards = world.move(states, waiting.pop(0))
        after = world.observe(states)
        parts.append({"observations": observations, "actions": actions, "rewards": rewards, "next_observations": after})
    columns = side_by_side(parts)
    return raw_data(columns, TASK, seed, action_low=np.float32(-1.0), action_high=np.float32(1.0))


register_generated(TASK, generate)
