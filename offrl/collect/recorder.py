"""Playing episodes and writing down what happens: one environment's recorder, and waves of episodes played side by
side.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np

from offrl.collect.environment import World
from offrl.collect.episodes import EACH_STEP, Episode, Play, first_rows, play_units
from offrl.collect.observation import Observer, visible_to
from offrl.collect.record import Stop
from offrl.errors import UserError, warn
from offrl.evaluation.arrays import finite_rows
from offrl.evaluation.result import Policy
from offrl.interop.policies import reseeded
from offrl.interop.sb3 import Actor
from offrl.tasks.episodes import cost_of, goal_of, mujoco_warnings, observe_reward, set_goal, step


def seed_for(*parts: Any) -> int:
    """31 bits that depend on all of `parts`, so that neighbours share no start state."""
    text = " ".join(map(str, ("offrl collect", *parts)))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "little") & 0x7FFFFFFF


class Recorder(gym.Wrapper):
    """An environment with flat float32 observations and flat actions (choices from 0) that hands each whole episode to
    `keep`.

    A time-out is a truncation, never a termination, and the observation after the last step is the true one. Episodes
    in which MuJoCo became unstable are not kept: it resets silently, and what follows is no transition.
    """

    def __init__(self, world: World, keep: Callable[[Episode], None], unstable: list[str]) -> None:
        super().__init__(world.make())
        self.world, self.keep, self.unstable = world, keep, unstable
        self.observation_space = gym.spaces.Box(-np.inf, np.inf, (world.dim,), np.float32)
        low, high = world.low, world.high
        self.action_space = (
            gym.spaces.Discrete(world.choices) if low is None or high is None else gym.spaces.Box(low, high)
        )
        self.log_prob: float | None = None  # of the action to come, where the policy knows it
        self.mark = 0  # what the episode is to be marked with; training sets it
        self.rows: dict[str, list[Any]] = {}
        self.observer = Observer(world, self.env)
        self.observation: Any = np.zeros(world.dim, np.float32)  # a row: see `Observer.row`
        self.goal: np.ndarray | None = None  # of the running episode, where the environment gives one
        self.data: Any = getattr(self.env.unwrapped, "data", None) if world.mujoco else None

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        try:
            observation, info = self.env.reset(seed=seed, options=options)
        except Exception as error:  # third-party environment
            raise UserError(f"{self.world.env_id} failed on reset: {type(error).__name__}: {error}") from error
        self.goal = goal_of(observation, info, self.observer.flatten)
        self.observation = self.observer.row(observation)
        self.rows = {k: [] for k in ("observations", "actions", "rewards", "costs", "terminations", "truncations")}
        return self.observation.copy(), info

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        world, rows, space = self.world, self.rows, self.env.action_space
        sent: Any
        if world.discrete:
            stored: Any = int(action)
            sent = stored + world.start
        else:
            stored = np.clip(np.asarray(action, np.float32).reshape(-1), world.low, world.high)
            sent = stored.astype(space.dtype).reshape(space.shape)
        for name, part in self.observer.columns(self.observation).items():
            rows.setdefault(name, []).append(part)
        rows["actions"].append(stored)
        if self.data is not None:
            rows.setdefault("infos/qpos", []).append(self.data.qpos.copy())
            rows.setdefault("infos/qvel", []).append(self.data.qvel.copy())
        if self.log_prob is not None:
            rows.setdefault("infos/action_log_probs", []).append(self.log_prob)
        number = len(rows["rewards"])
        try:
            observation, reward, terminated, truncated, info = step(self.env, sent)
            rows["costs"].append(cost_of(info))
        except Exception as error:  # third-party environment
            raise UserError(
                f"{world.env_id} failed at step {number} of an episode: {type(error).__name__}: {error}"
            ) from error
        self.observation = self.observer.row(observation)
        over = bool(truncated) or number + 1 == world.limit
        rows["rewards"].append(reward)
        rows["terminations"].append(bool(terminated))
        rows["truncations"].append(over and not terminated)
        if terminated or over:
            self._end()
        elif not (math.isfinite(float(reward)) and finite_rows(self.observation[None])[0]):
            raise UserError(
                f"{world.env_id} gave a reward or observation that is not finite at step {number} of an episode"
            )
        return self.observation.copy(), float(reward), bool(terminated), over and not terminated, info

    def _end(self) -> None:
        finals = self.observer.columns(self.observation)
        types: dict[str, Any] = {
            "terminations": bool,
            "truncations": bool,
            "actions": np.int64 if self.world.discrete else np.float32,
            **{name: part.dtype for name, part in finals.items()},
        }
        columns = {k: np.asarray(v, types.get(k, np.float32)) for k, v in self.rows.items()}
        if (unknown := np.isnan(columns["costs"])).all():
            del columns["costs"]
        elif unknown.any():
            raise UserError(f"{self.world.env_id} gave info['cost'] in some steps alone: {EACH_STEP}")
        if self.unstable:
            warn(f"the physics of {self.world.env_id} became unstable ({self.unstable[0]}): that episode is left out")
            self.unstable.clear()
            return
        if not (np.isfinite(columns["rewards"]).all() and finite_rows(self.observation[None])[0]):
            raise UserError(
                f"{self.world.env_id} gave a reward or observation that is not finite at the end of an episode"
            )
        self.keep(Episode(columns, finals.pop("observations").copy(), self.mark, finals))


class Stage:
    """The environments that are played side by side, kept between waves. Use as a context manager."""

    def __init__(self, world: World, count: int, noise: float = 0.0) -> None:
        self.world, self.noise = world, noise
        self._warnings = mujoco_warnings()
        self.unstable = self._warnings.__enter__()
        self.ended: list[Episode | None] = [None] * count
        self.envs = [Recorder(world, self._keeper(e), self.unstable) for e in range(count)]

    def _keeper(self, e: int) -> Callable[[Episode], None]:
        def keep(episode: Episode) -> None:
            self.ended[e] = episode

        return keep

    def __enter__(self) -> Stage:
        return self

    def __exit__(self, *_: object) -> None:
        self._warnings.__exit__(None, None, None)
        for env in self.envs:
            env.close()

    def wave(self, policy: Policy, seed: int, explore: bool) -> list[Episode]:
        """One episode in each environment, from start states and with noise that `seed` alone decides."""
        count = len(self.envs)
        policy, rng = reseeded(policy, seed_for(seed, "policy")), np.random.default_rng([seed, 1])
        rows = np.stack([env.reset(seed=seed_for(seed, e))[0] for e, env in enumerate(self.envs)])
        goals = [env.goal for env in self.envs if env.goal is not None]
        self.ended, running = [None] * count, list(range(count))
        for e, env in enumerate(self.envs):
            env.action_space.seed(seed_for(seed, "actions", e))
        carry = set_goal(policy, policy.start(count), np.stack(goals) if len(goals) == count else None)
        log: np.ndarray | None = None
        t = 0
        while running:
            visible = visible_to(policy, rows, bool(self.world.picture))
            if isinstance(policy, Actor):
                actions, log = policy.act(visible, carry if explore else None)
            else:
                actions, carry = policy.step(carry, visible, t, explore=explore)  # type: ignore[call-arg]
            actions, log = (
                self._perturbed(self._checked(actions, running), rng),
                None if self.noise or not explore else log,
            )
            gained, spent = np.zeros(count), np.full(count, np.nan)
            for e in list(running):
                env = self.envs[e]
                env.log_prob = None if log is None else float(log[e])
                rows[e], gained[e], terminated, truncated, info = env.step(actions[e])
                spent[e] = cost_of(info)
                if terminated or truncated:
                    running.remove(e)
                    rows[e] = 0
            carry = observe_reward(policy, carry, gained, None if np.isnan(spent).all() else np.nan_to_num(spent))
            t += 1
        return [episode for episode in self.ended if episode is not None]

    def _checked(self, actions: Any, running: Sequence[int]) -> np.ndarray:
        """Actions of the right form, or UserError."""
        world, actions = self.world, np.asarray(actions)
        expected = (len(self.envs),) if world.discrete else (len(self.envs), len(np.atleast_1d(world.low)))  # type: ignore[arg-type]
        if actions.shape != expected:
            raise UserError(
                f"the policy gave actions of shape {actions.shape}, {world.env_id} takes {expected}: it is for another "
                "environment"
            )
        if not np.isfinite(actions[running]).all():
            raise UserError("the policy gave NaN or infinite actions")
        if world.discrete and not ((actions[running] >= 0) & (actions[running] < world.choices)).all():
            raise UserError(
                f"the policy gave action {actions[running].max()}, {world.env_id} has choices 0..{world.choices - 1}"
            )
        return actions

    def _perturbed(self, actions: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        if not self.noise:
            return actions
        if self.world.discrete:
            other = rng.integers(self.world.choices, size=len(actions))
            return np.where(rng.random(len(actions)) < self.noise, other, actions)
        half = (np.asarray(self.world.high) - np.asarray(self.world.low)) / 2
        return actions + self.noise * half * rng.standard_normal(actions.shape)


def measure(world: World, policy: Policy, explore: bool, episodes: int, seed: int) -> np.ndarray:
    """Undiscounted returns [episodes] of a policy."""
    with Stage(world, min(episodes, 16)) as stage:
        result: list[Episode] = []
        wave = 0
        while len(result) < episodes:
            result += stage.wave(policy, seed_for(seed, "measure", wave), explore)
            wave += 1
            if wave > 10 * episodes:
                raise UserError(f"the physics of {world.env_id} is unstable in every episode")
    return np.array([e.total for e in result[:episodes]])


def record(
    world: World,
    policy: Policy,
    folder: Path,
    *,
    rows: int | None,
    episodes: int | None,
    seed: int,
    explore: bool,
    noise: float,
    parallel: int,
    title: str,
    quiet: bool,
    stop: Stop,
) -> list[Episode]:
    """Whole episodes of a policy: the first `episodes`, or as many as have `rows` rows. What `folder` holds of them is
    not played again.

    Episodes are played in waves of `parallel`, each wave decided by `seed` and its number alone, and taken in order of
    their number, never of their end: short ones are not preferred.
    """
    least = episodes if episodes is not None else math.ceil((rows or 1) / (world.limit or 1000))

    @contextlib.contextmanager
    def waves() -> Iterator[Play]:
        with Stage(world, max(1, min(parallel, least)), noise) as stage:
            yield lambda number: stage.wave(policy, seed_for(seed, "wave", number), explore)

    result = play_units(folder, waves, rows, episodes, title, quiet, stop)
    if not result:
        raise UserError(f"the physics of {world.env_id} is unstable in every episode")
    return result[:episodes] if episodes is not None else first_rows(result, int(rows or 0))
