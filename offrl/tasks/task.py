"""The task of a dataset: the environment that scores a policy, and the reference scores that normalise its return."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from offrl import registry


@dataclass(frozen=True)
class Task:
    """An environment and what its scores mean. A number without these labels cannot be compared."""

    name: str  # the dataset's or task's name, e.g. "hopper-medium-v2"
    env_id: str | None = None  # Gymnasium id; None: nothing to evaluate in
    env_kwargs: dict[str, Any] = field(default_factory=dict)
    env_factory: Callable[[], Any] | None = None  # used instead of env_id when given
    max_episode_steps: int | None = None  # None: the environment's own limit
    ref_min: float | None = None  # undiscounted return that scores 0
    ref_max: float | None = None  # undiscounted return that scores 100
    ref_label: str = ""  # whose reference scores, e.g. "D4RL"
    observation_keys: tuple[str, ...] = ()  # Dict observations: which entries, in this order, make the flat observation
    observation_dim: int | None = None  # of the flat observation, to check data against
    action_dim: int | None = None
    url: str | None = None  # where the dataset is downloaded from
    starts: tuple[dict[str, Any], ...] = ()  # options of `reset`, taken in turn by the episodes: tasks within the task, such as goals
    scored_by: str = "return"  # what a score is made of: the return, or "success": 100 times the share of episodes that succeed
    note: str = ""  # how the environment differs from the one the data or the reference scores come from

    def normalise(self, returns: Any) -> Any:
        """100 (G - ref_min) / (ref_max - ref_min) (D4RL, arXiv 2004.07219, section 4); None when the task has no reference scores."""
        if self.ref_min is None or self.ref_max is None:
            return None
        return 100.0 * (returns - self.ref_min) / (self.ref_max - self.ref_min)

    def score(self, returns: Any, successes: Any) -> Any:
        """Scores of episodes with these undiscounted returns and successes (None: unknown); None where there is no way to score them."""
        if self.scored_by == "success":
            return None if successes is None else 100.0 * successes
        return self.normalise(returns)


def lookup(name: str) -> Task | None:
    """The task of a dataset's exact name, from the registered tables, or None."""
    for table in registry.names("task").values():
        task = table(name)
        if task is not None:
            return task
    return None


def with_factory(task: Task | None, factory: Callable[[], Any], name: str) -> Task:
    """`task` scored in the environment that `factory` makes; for data without a task a new one called `name`."""
    if task is None:
        return Task(name=name, env_factory=factory)
    keys = task.observation_keys
    separate = keys if "achieved_goal" in keys and "desired_goal" not in keys else ()  # goals stay separate, as the data have them
    return replace(task, env_id=None, env_kwargs={}, env_factory=factory, max_episode_steps=None, observation_keys=separate)
