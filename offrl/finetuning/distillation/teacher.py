"""The teachers of students that learn in an environment: the frozen policies of a run, which say what they would do in
each state that a student comes to (DAgger, arXiv 1011.0686), from observations of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces

from offrl import rng
from offrl.data.dataset import DataSpec
from offrl.data.fit import check_fit, seen_besides
from offrl.data.samplers.transitions import Batch
from offrl.errors import UserError, nearest
from offrl.evaluation.policy import TrainedPolicy
from offrl.families.teacher import check_imitable
from offrl.finetuning.learner import ACTING
from offrl.finetuning.play.turns import TEACHER_ACTIONS, Turn
from offrl.tasks.entries import entries, joined
from offrl.tasks.environments import flattener, is_image, make_env
from offrl.tasks.task import Task

FOLDER = "teacher"  # of a run directory
LABELLING = ACTING - 1  # keys of labels, for teachers whose greedy actions are drawn
SETTING = "student.observation_keys"


@dataclass(frozen=True)
class Teacher:
    """A frozen policy for each replica, and what it and its student see of an observation of play."""

    policies: Sequence[TrainedPolicy]  # [N]
    task: Task  # in which is played: its observations hold all that teachers or students see
    spec: DataSpec  # of what is played
    known: np.ndarray  # [O] int64: the numbers of an observation of play that teachers see, in their order
    shown: np.ndarray  # [S] int64: those that students see

    def turn(self, turn: Turn, t: int) -> Turn:
        """What came of environment step t as students see it, with the teachers' actions."""
        before, after = turn.observations[:, self.shown], turn.next_observations[:, self.shown]
        actions = self.actions(turn.observations, t)
        return replace(turn, observations=before, next_observations=after, teacher_actions=actions)

    @torch.no_grad()
    def actions(self, observations: np.ndarray, t: int) -> np.ndarray:
        """The teachers' greedy actions [K, A] in [-1, 1], or [K] choices, for observations [K, *O] of play, replica
        after replica, at environment step t.
        """
        chosen = []
        for policy, rows in zip(self.policies, np.split(observations[:, self.known], len(self.policies)), strict=True):
            actor = policy.actor
            key = rng.fold_in(rng.fold_in(actor.state.key, LABELLING), t)
            x = policy.normalised(rows).to(policy.device)
            chosen.append(actor.act(None, x, key, explore=False)[0].cpu())
        actions = torch.cat(chosen)
        return (actions if self.spec.discrete else actions.clamp(-1.0, 1.0)).numpy()

    def save(self, run_dir: Path) -> None:
        """Keep the policies, so that the run can go on without the one that they are from."""
        for policy, path in zip(self.policies, paths(run_dir, [p.seed for p in self.policies]), strict=True):
            if not path.exists():
                policy.save(path)


def targets(batch: Batch) -> Batch:
    """A batch whose actions, which are imitated, are the teachers' in place of those that were played."""
    return batch | {"actions": batch[TEACHER_ACTIONS]}


def paths(run_dir: Path, seeds: Sequence[int]) -> list[Path]:
    """The files of the policies that taught a run's replicas of these seeds."""
    return [run_dir / FOLDER / f"seed_{seed}.safetensors" for seed in seeds]


def teach(policies: Sequence[TrainedPolicy], task: Task, keys: Sequence[str], run: str) -> tuple[Teacher, Task]:
    """(what teaches, the task as its students see it) of the policies of `run`, in a task as they see it themselves.

    keys: `student.observation_keys`. Raises UserError for policies that cannot teach, or that do not fit the
    environment, and for keys that it does not have.
    """
    policy = policies[0]
    spec, name = policy.spec, policy.algorithm.config.name
    check_imitable(name, policy.algorithm.traits)
    if more := seen_besides(spec) or ("images" if len(spec.observation_shape) != 1 else ""):
        raise UserError(f"{run}: {name} sees {more}, and a teacher of mode=distill sees single rows of numbers")
    if policy.start(1) is not None:
        raise UserError(
            f"{run}: a policy of {name} remembers its episode, and a teacher judges states that it did not come to by "
            "itself: take a policy without a memory, such as iql, td3_bc or sac_n"
        )
    check_fit(spec, task)
    env = make_env(replace(task, observation_numbers=()))
    try:
        if isinstance(env.observation_space, spaces.Dict):
            return _of_entries(policies, task, keys, env.observation_space)
        return _of_numbers(policies, task, keys, env)
    finally:
        env.close()


def _of_entries(
    policies: Sequence[TrainedPolicy], task: Task, keys: Sequence[str], space: spaces.Dict
) -> tuple[Teacher, Task]:
    """`teach` where observations have entries with names."""
    native = joined(space, task.observation_keys)
    chosen = tuple(dict.fromkeys(keys)) or native
    parts = {
        key: [part for _, part in entries(space, (key,), f"{SETTING}: the environment's observations")]
        for key in dict.fromkeys((*native, *chosen))
    }
    if image := next((key for key in chosen if any(map(is_image, parts[key]))), None):
        raise UserError(f"{SETTING}: '{image}' is an image, and students see numbers: leave it out")
    if odd := next((key for key in chosen if not all(part.is_np_flattenable for part in parts[key])), None):
        raise UserError(f"{SETTING}: '{odd}' cannot be made into numbers: leave it out")
    widths = [sum(map(spaces.flatdim, part)) for part in parts.values()]
    numbers = dict(zip(parts, np.split(np.arange(sum(widths)), np.cumsum(widths)[:-1]), strict=True))
    known, shown = (np.concatenate([numbers[key] for key in names]) for names in (native, chosen))
    played = replace(task, observation_keys=tuple(parts))
    return _made(policies, played, known, shown, sum(widths)), replace(task, observation_keys=chosen)


def _of_numbers(
    policies: Sequence[TrainedPolicy], task: Task, keys: Sequence[str], env: gym.Env
) -> tuple[Teacher, Task]:
    """`teach` where observations are a row of numbers."""
    (width,) = flattener(env, task.observation_keys)[1]
    known = task.observation_numbers or tuple(range(width))
    columns = [column.name for column in policies[0].spec.observation_columns]
    names = dict(zip(columns, known, strict=False)) | {str(i): i for i in range(width)}
    shown = tuple(dict.fromkeys(i for key in keys for i in _positions(key, names, width))) or known
    played = replace(task, observation_numbers=())
    teacher = _made(policies, played, np.array(known), np.array(shown), width)
    return teacher, replace(task, observation_numbers=() if shown == tuple(range(width)) else shown)


def _positions(key: str, names: dict[str, int], width: int) -> list[int]:
    """The numbers that `key` means: one, by its position or its column's name, or those of a range such as 0:8."""
    first, colon, last = key.partition(":")
    ends = [names.get(first or "0"), names.get(last, width if last in ("", str(width)) else None)]
    if key in names:
        return [names[key]]
    if colon and None not in ends and (positions := list(range(*ends))):  # type: ignore[arg-type]
        return positions
    raise UserError(
        f"{SETTING}: there is no number '{key}' among the {width} of an observation; write positions from 0 to "
        f"{width - 1}, ranges such as 0:{width - 1 or 1}, or names of the data's columns.{nearest(key, names)}"
    )


def _made(policies: Sequence[TrainedPolicy], task: Task, known: np.ndarray, shown: np.ndarray, width: int) -> Teacher:
    spec = replace(
        policies[0].spec,
        observation_shape=(width,),
        observation_mean=None,
        observation_std=None,
        observation_columns=(),
        task=task,
    )
    return Teacher(policies, task, spec, known, shown)
