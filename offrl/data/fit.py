"""The spaces of a dataset compared with those of the environment that a policy trained on it is to act in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from offrl.data.dataset import DataSpec
from offrl.errors import UserError, warn
from offrl.tasks.environments import action_kind, flattener, make_env
from offrl.tasks.task import Task, warn_of_references

if TYPE_CHECKING:
    import gymnasium as gym

CURE = "Give the environment the data come from (eval.env=ID), or train without one (eval.env=none)."


def check_fit(spec: DataSpec, task: Task, env: gym.Env | None = None) -> None:
    """Raises UserError when the data's observations or actions disagree with the environment's. Warns when its action range is narrower,
    and where the data's reference scores are not those of that environment, so that scores are returns as they are."""
    import gymnasium as gym

    probe = make_env(task) if env is None else env
    texts = [isinstance(space, gym.spaces.Text) for space in (probe.observation_space, probe.action_space)]
    if spec.text or any(texts):
        if env is None:
            probe.close()
        _check_texts(spec, task, texts)
        return
    try:
        shape = flattener(probe, task.observation_keys)[1]
        discrete, size = action_kind(probe)
        bounds = None if discrete else (probe.action_space.low.ravel(), probe.action_space.high.ravel())  # type: ignore[attr-defined]
    finally:
        if env is None:
            probe.close()
    label, cure = task.env_id or "the environment", CURE
    note = f" {task.note}." if task.note else ""
    if tuple(spec.observation_shape) != shape:
        raise UserError(
            f"dataset {spec.name} has observations of shape {_shape(spec.observation_shape)}, {label} of {_shape(shape)}.{note} {cure}"
        )
    if discrete != spec.discrete:
        kinds = ("continuous", "discrete")
        raise UserError(f"dataset {spec.name} has {kinds[spec.discrete]} actions, {label} {kinds[discrete]} ones.{note} {cure}")
    count = spec.num_actions if discrete else spec.action_dim
    if count > size or (count != size and not discrete):  # data need not contain every choice
        word = "choices of action" if discrete else "action dimensions"
        raise UserError(f"dataset {spec.name} has {count} {word}, {label} has {size}.{note} {cure}")
    if bounds is not None and spec.action_low and spec.action_high:
        slack = 1e-3 * (np.asarray(spec.action_high) - np.asarray(spec.action_low))
        if np.any(np.asarray(spec.action_low) < bounds[0] - slack) or np.any(np.asarray(spec.action_high) > bounds[1] + slack):
            warn(f"the actions of dataset {spec.name} reach beyond the range of {label}: evaluation clips them")
    if spec.task is not None and spec.task.ref_min is not None and task.ref_min is None and task.scored_by == "return":
        warn_of_references(spec.task, label.rpartition(":")[2])


def _check_texts(spec: DataSpec, task: Task, texts: Sequence[bool]) -> None:
    """`check_fit` where there are texts. texts: whether the environment's observations and its actions are."""
    label = task.env_id or "the environment"
    kinds = "texts" if all(texts) else "texts and numbers" if any(texts) else "numbers"
    if not (spec.text and all(texts)):
        raise UserError(f"dataset {spec.name} holds {'texts' if spec.text else 'numbers'}, {label} {kinds}. {CURE}")


def _shape(shape: Sequence[int]) -> str:
    return "(" + ", ".join(map(str, shape)) + ("," if len(shape) == 1 else "") + ")"
