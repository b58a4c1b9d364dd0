"""The task of a dataset: the environment that scores a policy, and the reference scores that normalise its return."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

import numpy as np

from offrl import registry
from offrl.errors import UserError, warn
from offrl.settings.kinds import misfit
from offrl.system import trust
from offrl.tasks.custom import place_of


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
    # ids of other environments in which they hold: they belong to data and environment together
    ref_envs: tuple[str, ...] = ()
    # Dict observations: which entries, in this order, make the flat one; see tasks.entries
    observation_keys: tuple[str, ...] = ()
    # of an environment that observes a row of numbers: the positions of those that policies see; (): all
    observation_numbers: tuple[int, ...] = ()
    action_start: int | None = (
        None  # the number of the environment's first choice, where not 0: data and networks count from 0
    )
    observation_dim: int | None = None  # of the flat observation, to check data against
    action_dim: int | None = None
    url: str | None = None  # where the dataset is downloaded from
    # its bytes and SHA-256, where known: another one is refused
    file: tuple[int, str] | None = field(default=None, compare=False)
    # options of `reset`, taken in turn by the episodes: tasks within the task, such as goals
    starts: tuple[dict[str, Any], ...] = ()
    scored_by: str = (
        "return"  # what a score is made of: the return, or "success": 100 times the share of episodes that succeed
    )
    note: str = ""  # how the environment differs from the one the data or the reference scores come from
    # the tasks of multi-task data, by their numbers, each scored in an environment of its own; `starts` names those
    # that are played
    parts: tuple[TaskPart, ...] = ()

    def __post_init__(self) -> None:
        """An environment that code outside offrl names (a user's, a plugin's) is one that a person named; offrl itself
        reads files.
        """
        if sys._getframe(2).f_globals.get("__name__", "offrl").partition(".")[0] not in ("offrl", "dataclasses"):
            trust.typed(self.env_id, self.env_kwargs)

    def normalise(self, returns: Any) -> Any:
        """100 (G - ref_min) / (ref_max - ref_min) (D4RL, arXiv 2004.07219, section 4); None when the task has no
        reference scores.
        """
        if self.ref_min is None or self.ref_max is None:
            return None
        return 100.0 * (returns - self.ref_min) / (self.ref_max - self.ref_min)

    def holds_in(self, env_id: str) -> bool:
        """True where the reference scores, if there are any, are those of the environment `env_id` as its id alone
        makes it.
        """
        name = env_id.rpartition(":")[2]
        return name in self.ref_envs or (name == (self.env_id or "").rpartition(":")[2] and not self.env_kwargs)

    def without_references(self) -> Task:
        """The same task, whose scores are returns as they are."""
        return replace(self, ref_min=None, ref_max=None, ref_label="", ref_envs=())

    def score(self, returns: Any, successes: Any) -> Any:
        """Scores of episodes with these undiscounted returns and successes (None: unknown); None where there is no way
        to score them. Of multi-task data [N, E], episode e in the task that `starts` names for it.
        """
        if self.parts:
            scores = [self.part_of(e).task.normalise(returns[:, e]) for e in range(returns.shape[1])]
            return None if any(score is None for score in scores) else np.stack(scores, 1)
        if self.scored_by == "success":
            return None if successes is None else 100.0 * successes
        return self.normalise(returns)

    def part_of(self, episode: int) -> TaskPart:
        """The task of multi-task data that an episode of an evaluation is of."""
        return self.parts[self.starts[episode % len(self.starts)]["task"]]

    def to_json(self) -> dict[str, Any]:
        """A plain dictionary for a JSON file, less `env_factory`, a function, and `file`, for downloads."""
        plain = asdict(replace(self, env_factory=None, parts=()))
        del plain["file"], plain["parts"]
        if not self.observation_numbers:  # older files do not say it
            del plain["observation_numbers"]
        parts = [{**asdict(replace(part, task=Task(""))), "task": part.task.to_json()} for part in self.parts]
        return {**plain, "parts": parts} if parts else plain


@dataclass(frozen=True)
class TaskPart:
    """A task of multi-task data, in which numbers of smaller observations and actions stand first."""

    task: Task
    observation_dim: int
    action_low: tuple[float, ...]  # the range that its actions [A] were scaled from
    action_high: tuple[float, ...]


def listed_parts(parts: tuple[TaskPart, ...], most: int = 5) -> str:
    """The numbers of tasks, and their names, in words."""
    names = [f"{number} is {part.task.name}" for number, part in enumerate(parts[:most])]
    return ", ".join(names) + (f", ... {len(parts) - 1}" if len(parts) > most else "")


def lookup(name: str) -> Task | None:
    """The task of a dataset's exact name, from the registered tables, or None."""
    for table in registry.names("task").values():
        task = table(name)
        if task is not None:
            if table.__module__.partition(".")[0] != "offrl":
                trust.typed(task.env_id, task.env_kwargs)
            return task
    return None


def recorded_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of an environment as a file records them, less the way in which it was drawn there: scores need no
    window.
    """
    return {k: v for k, v in arguments.items() if k != "render_mode"}


def task_from_json(data: Mapping[str, Any], where: str = "the file") -> Task:
    """A task from what `DataSpec.to_json` makes of one. Keys it does not know are ignored. Raises UserError for values
    of other types.

    where: the file, for that message.
    """
    if not isinstance(data, Mapping):
        raise UserError(f"{where} is damaged: its task is {str(data)[:40]!r}")
    values = {f.name: data[f.name] for f in fields(Task) if f.name in data and f.name not in ("env_factory", "parts")}
    for key in ("observation_keys", "observation_numbers", "starts", "ref_envs"):
        values[key] = tuple(values[key]) if isinstance(values.get(key), list | tuple) else values.get(key) or ()
    wrong = misfit(values, Task, "") or ("" if "name" in values else "name is missing")
    wrong = wrong or next(
        (f"{k} is not finite" for k in ("ref_min", "ref_max") if not math.isfinite(values.get(k) or 0.0)), ""
    )
    sizes = ("max_episode_steps", "observation_dim", "action_dim")
    wrong = wrong or next((f"{k} is below 1" for k in sizes if (values.get(k) or 1) < 1), "")
    if wrong:
        raise UserError(f"{where} is damaged: its task is none that offrl writes: {wrong}")
    values |= {"env_kwargs": recorded_arguments(values.get("env_kwargs") or {})}
    return Task(**values, parts=_parts_from_json(data.get("parts") or [], where))


def _parts_from_json(parts: Any, where: str) -> tuple[TaskPart, ...]:
    """The tasks of multi-task data. Raises UserError for entries of other types or sizes."""
    failure = f"{where} is damaged: its task is none that offrl writes: "
    if not isinstance(parts, list):
        raise UserError(f"{failure}parts is no list")
    tasks = []
    for entry in parts:
        if not isinstance(entry, Mapping) or set(entry) < {f.name for f in fields(TaskPart)}:
            raise UserError(f"{failure}a part lacks an entry")
        task, width, low, high = (entry[f.name] for f in fields(TaskPart))
        values = {"observation_dim": width, "action_low": low, "action_high": high}
        wrong = misfit(values, TaskPart, "") or ("" if isinstance(task, Mapping) else "a part is no task")
        if not wrong and (width < 1 or not 1 <= len(low) == len(high) or task.get("parts")):
            wrong = "a part has no observations, no actions, or parts of its own"
        if wrong:
            raise UserError(f"{failure}{wrong}")
        tasks.append(TaskPart(task_from_json(task, where), width, tuple(low), tuple(high)))
    return tuple(tasks)


def warn_of_references(task: Task, env_name: str) -> None:
    """Warn that scores in the environment `env_name` are not normalised by the task's reference scores, which are not
    its own.
    """
    reference_env = (task.env_id or "another environment").rpartition(":")[2]
    whose = f"{task.ref_label or 'the reference'} returns that score 0 and 100 for {task.name}"
    warn(f"the {whose} are those of {reference_env}, not of {env_name}: returns are not normalised")


def with_factory(task: Task | None, factory: Callable[[], Any], name: str) -> Task:
    """`task` scored in the environment that `factory` makes; for data without a task a new one called `name`. Reference
    scores stay only where that environment, by its `spec.id`, is one for which they hold."""
    if task is not None and task.parts:
        raise UserError(f"{name} is of {len(task.parts)} tasks, each scored in its own environment: leave out env")
    note = ""
    if place_of(factory) is None:
        label = getattr(factory, "__qualname__", type(factory).__name__)
        note = (
            f"It was scored in what {label} made, of a notebook or inside a function, which no file names: give it "
            "again (env=...)"
        )
    if task is None:
        return Task(name=name, env_factory=factory, note=note)
    if task.ref_min is not None:
        env = factory()
        spec_id = getattr(getattr(env, "spec", None), "id", None)
        if hasattr(env, "close"):
            env.close()
        if spec_id is None or not task.holds_in(spec_id):
            warn_of_references(task, spec_id or f"the environment of {getattr(factory, '__qualname__', 'a function')}")
            task = task.without_references()
    return replace(task, env_id=None, env_kwargs={}, env_factory=factory, max_episode_steps=None, note=note)
