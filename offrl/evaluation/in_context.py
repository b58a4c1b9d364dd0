"""Learning in context: policies play several episodes of tasks they have not seen and remember, without an update, what
happened.

All tasks are played side by side, each in an environment of its own that takes the task's number (`task=NUMBER`). What
learns is a `Learner`: a trained policy, or a classical method that the environment brings with it (`learners()`, as the
bandits do).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from offrl.errors import UserError
from offrl.system.csv_text import text_of
from offrl.tasks.environments import action_kind, episode_limit, flattener, make_env, to_space
from offrl.tasks.episodes import ENDLESS, reset_seed
from offrl.tasks.task import Task

if TYPE_CHECKING:
    from offrl.evaluation.policy import TrainedPolicy


class Learner(Protocol):
    """A learner that plays. Row n of everything belongs to task n; rows whose episode is over hold zeros until the next
    one begins.
    """

    def begin(self, tasks: Sequence[int], seed: int) -> Any:
        """Its memory before anything was seen of these tasks."""

    def step(self, memory: Any, observations: np.ndarray, t: int) -> tuple[np.ndarray, Any]:
        """Actions at step t, counted over all episodes: [N, A] in the environment's range, or [N] integers; and the new
        memory.
        """

    def observe_reward(self, memory: Any, rewards: np.ndarray) -> Any:
        """The memory once the actions have earned `rewards` [N]."""

    def new_episode(self, memory: Any, observations: np.ndarray, lengths: np.ndarray) -> Any:
        """The memory where all tasks begin a new episode. observations [N, ...]: the last ones of the old; lengths [N]:
        their steps.
        """


class Trained:
    """A trained policy as a Learner. Its actor says what outlives an episode (`Actor.new_episode`)."""

    def __init__(self, policy: TrainedPolicy, explore: bool) -> None:
        """`explore`: sample actions rather than take the most probable ones."""
        self.policy, self.explore = policy, explore

    def begin(self, tasks: Sequence[int], seed: int) -> Any:
        return self.policy.start(len(tasks))

    def step(self, memory: Any, observations: np.ndarray, t: int) -> tuple[np.ndarray, Any]:
        return self.policy.step(memory, observations, t, self.explore)

    def observe_reward(self, memory: Any, rewards: np.ndarray) -> Any:
        return self.policy.observe_reward(memory, rewards)

    def new_episode(self, memory: Any, observations: np.ndarray, lengths: np.ndarray) -> Any:
        return self.policy.new_episode(memory, observations, lengths)


@dataclass(frozen=True)
class Played:
    """The record of one learner in N tasks. S steps: those of the longest episodes in sequence; 0 where an episode was
    over before.
    """

    tasks: tuple[int, ...]
    rewards: np.ndarray  # [N, S] float64
    regrets: np.ndarray | None  # [N, S] float64; None where the environment does not say them (`info["regret"]`)
    ends: tuple[int, ...]  # of each episode the last of the S steps, exclusive

    def returns(self) -> np.ndarray:
        """[N, episodes]"""
        return np.diff(self.rewards.cumsum(1)[:, np.array(self.ends) - 1], prepend=0.0)

    def curve(self) -> tuple[np.ndarray, np.ndarray, str]:
        """(x [X], values [N, X], what they are): regret so far where it is known, else the reward so far in a single
        episode, else the return of each episode. x counts steps in a single episode, else episodes."""
        single = len(self.ends) == 1
        at = np.arange(self.rewards.shape[1]) if single else np.array(self.ends) - 1
        x = np.arange(1, len(at) + 1)
        if self.regrets is not None:
            return x, self.regrets.cumsum(1)[:, at], "cumulative regret"
        return (x, self.rewards.cumsum(1)[:, at], "reward so far") if single else (x, self.returns(), "return")


def unseen(env: Any, count: int, name: str) -> list[int]:
    """The numbers of `count` tasks that are in no data, by the environment's `held_out`. Raises UserError where it does
    not say.
    """
    held_out = getattr(env.unwrapped, "held_out", None)
    if held_out is None:
        raise UserError(
            f"{name} does not say which tasks are in no data (it has no attribute held_out); name some: tasks=[7,8,9]"
        )
    if count > len(held_out):
        raise UserError(f"{name} has {len(held_out)} tasks that are in no data; tasks={count} asks for more")
    return [held_out[i] for i in range(count)]


@dataclass
class Arena:
    """The environments of some tasks. Use as a context manager."""

    task: Task
    tasks: Sequence[int]
    seed: int = 0
    max_steps: int | None = None
    envs: list[Any] = field(default_factory=list)

    def __enter__(self) -> Arena:
        """Raises UserError where the environment takes no task."""
        try:
            for number in self.tasks:
                self.envs.append(make_env(replace(self.task, env_kwargs={**self.task.env_kwargs, "task": int(number)})))
        except UserError as error:
            self.__exit__()
            raise UserError(
                f"{error}. Learning in context needs an environment that takes its task as an argument, task=NUMBER"
            ) from None
        first = self.envs[0]
        self.flatten, self.shape, self.dtype = flattener(first, self.task.observation_keys)
        self.discrete, self.size = action_kind(first)
        limit = episode_limit(first, self.task, self.max_steps)
        self.limit = ENDLESS if limit is None else limit
        return self

    def __exit__(self, *_: object) -> None:
        for env in self.envs:
            env.close()
        self.envs = []

    def play(self, learner: Learner, episodes: int, progress: Callable[[int, int], None] | None = None) -> Played:
        """Play all tasks, `episodes` each. `progress(steps, at most)` is called after every step."""
        count = len(self.envs)
        memory = learner.begin(self.tasks, self.seed)
        rewards: list[np.ndarray] = []
        regrets: list[np.ndarray] = []
        ends, reports_regret = [], False
        for episode in range(episodes):
            rows = np.zeros((count, *self.shape), self.dtype)
            for n, env in enumerate(self.envs):
                rows[n] = self.flatten(env.reset(seed=reset_seed(self.seed, int(self.tasks[n]), episode))[0])
            running, last, lengths = list(range(count)), rows.copy(), np.zeros(count, np.int64)
            for t in range(self.limit):
                actions, memory = learner.step(memory, rows, len(rewards))
                actions = self._fitting(np.asarray(actions))
                gained, step_regrets = np.zeros(count), np.zeros(count)
                for n in list(running):
                    observation, reward, terminated, truncated, info = self.envs[n].step(actions[n])
                    gained[n], step_regrets[n], lengths[n] = reward, info.get("regret", 0.0), t + 1
                    reports_regret = reports_regret or "regret" in info
                    rows[n] = last[n] = self.flatten(observation)
                    if terminated or truncated:
                        running.remove(n)
                        rows[n] = 0
                memory = learner.observe_reward(memory, gained)
                rewards.append(gained)
                regrets.append(step_regrets)
                if progress is not None:
                    progress(len(rewards), episodes * self.limit)
                if not running:
                    break
            ends.append(len(rewards))
            if episode + 1 < episodes:
                memory = learner.new_episode(memory, last, lengths)
        return Played(
            tuple(int(n) for n in self.tasks),
            np.stack(rewards, 1),
            np.stack(regrets, 1) if reports_regret else None,
            tuple(ends),
        )

    def _fitting(self, actions: np.ndarray) -> Any:
        """Actions as `step` takes them. Raises UserError for those of another environment."""
        count = len(self.envs)
        expected = (count,) if self.discrete else (count, self.size)
        if actions.shape != expected:
            raise UserError(
                f"the policy gave actions of shape {actions.shape}, {self.task.env_id or self.task.name} takes "
                f"{expected}"
            )
        return to_space(self.envs[0].action_space, actions)


def table(played: Mapping[str, Sequence[Played]]) -> str:
    """The curves as CSV: for each learner, each of its policies and each point the means over tasks and their standard
    deviations.
    """
    lines: list[tuple[Any, ...]] = [("learner", "policy", "tasks", "what", "x", "mean", "std_over_tasks")]
    for name, policies in played.items():
        for index, one in enumerate(policies):
            x, values, label = one.curve()
            for i, column in zip(x.tolist(), values.T, strict=True):
                lines.append((name, index, len(one.tasks), label, i, f"{column.mean():.6g}", f"{column.std():.6g}"))
    return text_of(lines)
