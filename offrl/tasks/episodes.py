"""Playing episodes, whatever for: their seeds, goals and successes, rewards and goals for the policy, warnings of the
physics.
"""

from __future__ import annotations

import contextlib
import hashlib
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from offrl.errors import UserError, warn
from offrl.tasks.task import Task

if TYPE_CHECKING:
    import gymnasium as gym

ENDLESS = 10_000  # steps after which an episode is cut when neither the environment, the task nor the settings limit it


def reset_seed(seed: int, policy_seed: int, episode: int) -> int:
    """The environment seed, 31 bits, of one episode: a hash, so that neighbouring seeds share no start state."""
    text = f"offrl evaluation {seed} {policy_seed} {episode}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=4).digest(), "little") & 0x7FFFFFFF


def observe_reward(policy: Any, carry: Any, rewards: np.ndarray, costs: np.ndarray | None = None) -> Any:
    """The carry after the rewards [E] and, where they are known, the costs [E] of the last actions, in the
    environment's units. Policies that use none have no `observe_reward(carry, rewards)` and `observe_cost(carry,
    costs)`."""
    for name, amounts in (("observe_reward", rewards), ("observe_cost", costs)):
        method = getattr(policy, name, None)
        if method is not None and amounts is not None:
            carry = method(carry, amounts)
    return carry


def set_goal(policy: Any, carry: Any, goals: np.ndarray | None) -> Any:
    """The carry of episodes that just began with the goals [E, G] raw, or None where there are none. Policies that are
    not goal-conditioned have no `set_goal(carry, goals)`. Raises UserError for one that is where there are no goals."""
    method = getattr(policy, "set_goal", None)
    return carry if method is None else method(carry, goals)


def goal_of(observation: Any, info: Any, read: Callable[[Any], np.ndarray] | None = None) -> np.ndarray | None:
    """The goal of the episode that `env.reset` just began, [G]: OGBench's info["goal"], or the entry desired_goal of
    the observation.

    A goal of several entries (the kitchen's) is joined in sorted order, as data's are. read: takes goals that are
    observations with images.
    """
    for source, key in ((info, "goal"), (observation, "desired_goal")):
        if isinstance(source, Mapping) and key in source:
            try:
                return np.concatenate(_leaves(source[key])) if read is None else read(source[key])
            except (TypeError, ValueError):  # in words, say: nothing that a policy could take
                return None
    return None


def check_goals(env: gym.Env, task: Task, algorithm: str) -> None:
    """Raise UserError where an episode of `env` begins without a goal, towards which policies of `algorithm` act."""
    if goal_of(*env.reset(seed=0, options=dict(task.starts[0]) if task.starts else None)) is None:
        raise UserError(
            f"{algorithm} acts towards goals, and {task.env_id or task.name} gives none, as info['goal'] or the "
            "observation's entry desired_goal: take an environment that does (eval.env=ID), or train without one "
            "(eval.env=none); iql is one that learns from rewards"
        )


def _leaves(value: Any) -> list[np.ndarray]:
    """[width] each."""
    if isinstance(value, Mapping):
        return [leaf for key in sorted(value) for leaf in _leaves(value[key])]
    return [np.asarray(value, np.float32).ravel()]


def success_of(info: dict[str, Any]) -> float | None:
    """The success in [0, 1] that an environment reports, under the keys that Gymnasium's use; None where it reports
    none.
    """
    for key in ("success", "is_success"):
        if key in info:
            values = np.asarray(info[key]).reshape(-1)
            return float(values[0]) if len(values) and values.dtype.kind in "biuf" else None
    if "episode_task_completions" in info:  # gymnasium-robotics' kitchen
        done, remaining = len(info["episode_task_completions"]), len(info.get("tasks_to_complete", ()))
        return done / max(1, done + remaining)
    return None


def step(env: Any, action: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
    """`env.step` in Gymnasium's form, whose info has what the step cost as "cost": safety-gymnasium's own environments
    give six values, of which the third is the cost."""
    result = env.step(action)
    if len(result) != 6:
        return result
    observation, reward, cost, terminated, truncated, info = result
    return observation, reward, terminated, truncated, {**info, "cost": cost}


def cost_of(info: Any) -> float:
    """The cost of the step that an environment reports as info["cost"]; NaN where it reports none. Raises ValueError
    for one that is not finite or below 0."""
    if not isinstance(info, Mapping) or "cost" not in info:
        return np.nan
    cost = np.asarray(info["cost"], float).item()
    if not 0.0 <= cost < np.inf:
        raise ValueError(f"info['cost'] is {cost}; a cost is a number of 0 or more")
    return cost


@contextlib.contextmanager
def mujoco_warnings(into: Any = None) -> Iterator[list[str]]:
    """Collect MuJoCo's warnings of unstable physics, after which it silently resets, in a list; else they would go to a
    MUJOCO_LOG.TXT in the current folder. Whoever steps an environment looks at the list and empties it.

    into: what to append them to, where it is no new list.
    """
    messages: Any = [] if into is None else into
    mujoco: Any = sys.modules.get("mujoco")  # absent: none of the environments uses it
    if mujoco is None:
        yield messages
        return
    previous = mujoco.get_mju_user_warning()
    mujoco.set_mju_user_warning(lambda text: messages.append(text) if "unstable" in text else warn(f"MuJoCo: {text}"))
    try:
        yield messages
    finally:
        mujoco.set_mju_user_warning(previous)
