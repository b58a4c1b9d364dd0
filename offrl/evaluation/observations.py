"""One observation or a batch of them, as a user has it from an environment, as the array that a policy takes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from offrl.data.dataset import DataSpec
from offrl.data.raw import join_observations
from offrl.errors import UserError
from offrl.evaluation.streams import as_streams
from offrl.tasks.entries import OWN_ORDER, entries
from offrl.tasks.task import listed_parts


def as_array(observation: Any, spec: DataSpec) -> tuple[np.ndarray, bool]:
    """(float32 [B, *O], or rows [B] with a field for each stream; whether it is a batch and not one) of an array, or
    of the dictionary that an environment with Dict observations gives.

    Of a dictionary the entries are joined as the data's were (see `offrl.tasks.entries`). Raises UserError for an entry
    that is missing, where nobody said in which order flat data have them, for another shape, NaN and infinity.
    """
    if spec.streams:
        return as_streams(observation, spec)
    shape = tuple(spec.observation_shape)
    if isinstance(observation, Mapping):
        array = _joined(observation, spec)
        shown = (
            f"the observation's entries {', '.join(_keys(observation, spec))} have {array.shape[-1]} numbers together"
        )
    else:
        array = np.asarray(observation, np.float32)
        shown = f"the observation has shape {array.shape}"
    batched = array.ndim == len(shape) + 1
    if array.shape[batched:] != shape:
        meaning = (
            f" (a state's number, one-hot: numpy.eye({shape[0]})[number])"
            if array.ndim == 0 and len(shape) == 1
            else ""
        )
        if spec.task is not None and spec.task.observation_numbers:
            chosen = ", ".join(map(str, spec.task.observation_numbers))
            meaning = f", the numbers {chosen} of what {spec.task.env_id or spec.task.name} observes,"
        raise UserError(f"{shown}; this policy takes {shape}{meaning} or a batch of those")
    if not np.isfinite(array).all():
        raise UserError("the observation holds NaN or infinity")
    parts = spec.task.parts if spec.task is not None else ()
    if parts and (unknown := sorted(set(array[..., -1].ravel().tolist()) - {*range(len(parts))})):
        raise UserError(
            f"the observation's last number is its task's, and there is no task {unknown[0]:g}: {listed_parts(parts)}"
        )
    return array if batched else array[None], batched


def as_texts(texts: Any, name: str) -> np.ndarray:
    """[E] objects: one text, or those of a list, for a policy of the algorithm `name`. Raises UserError for anything
    else.
    """
    array = [texts] if isinstance(texts, str) else list(texts)
    if not all(isinstance(text, str) for text in array):
        raise UserError(f"this policy of {name} takes a text, or a list of texts")
    return np.array([*array, None], object)[:-1]


def goals_of(goal: Any, spec: DataSpec) -> np.ndarray:
    """A goal, or a batch of them, as an array; where goals are observations with images, of the policy's type. Raises
    UserError for other images.
    """
    if not spec.streams or spec.goal_dim:
        return np.asarray(goal, np.float32)
    rows, batched = as_streams(goal, spec, "the goal's")
    return rows if batched else rows[0]


def desired_goal(observation: Any) -> Any:
    """The goal that a dictionary of an environment names; None where it names none."""
    return observation.get("desired_goal") if isinstance(observation, Mapping) else None


def _keys(observation: Mapping[str, Any], spec: DataSpec) -> tuple[str, ...]:
    task, names = spec.task, tuple(sorted(observation, key=str))
    if task is not None and task.observation_keys and task.observation_keys != OWN_ORDER:
        return task.observation_keys
    # else: compared with the environment's order
    if len(names) > 1 and (task is None or not task.env_id or task.observation_keys):
        raise UserError(
            f"this policy's data were flat, so that the order of a dictionary's entries ({', '.join(names)}) is not "
            "known: give it an array like the data's, or train it with dataset.observation_keys=[...], which names "
            "them in that order"
        )
    return names


def _joined(observation: Mapping[str, Any], spec: DataSpec) -> np.ndarray:
    """[O] of one observation, [B, O] of a batch, whose entries all have B rows."""
    keys = _keys(observation, spec)
    single = join_observations(_rows(observation), keys, "act")[0]
    leaves = [np.asarray(leaf) for _, leaf in entries(observation, keys)]
    lengths = {len(leaf) if leaf.ndim > 1 else 0 for leaf in leaves}
    batched = len(lengths) == 1 and len(single) == min(lengths) * spec.observation_dim
    return join_observations(observation, keys, "act") if batched else single


def _rows(values: Any) -> Any:
    """The entries with a first axis of one row."""
    return (
        {key: _rows(value) for key, value in values.items()}
        if isinstance(values, Mapping)
        else np.asarray(values)[None]
    )
