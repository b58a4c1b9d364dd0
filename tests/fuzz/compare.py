"""A loaded dataset against the oracle's episodes."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from tests.fuzz.oracle.verdict import Truth

SLACK = 2e-4  # of the action range: what lies a rounding error outside is clipped


def difference(dataset: Any, truths: list[Truth]) -> str:
    """The first thing in which the dataset differs, or an empty text."""
    starts, ends = dataset.episode_start.tolist(), dataset.episode_end.tolist()
    lengths, due = [b - a for a, b in zip(starts, ends, strict=True)], [len(t.rewards) for t in truths]
    if lengths != due:
        return f"episodes of {lengths[:12]} rows, not {due[:12]}"
    columns = {name: column.cpu().numpy() for name, column in dataset.columns.items()}
    words = {"text": tuple(dataset.strings)} if dataset.spec.text else {}
    if bool(words) != isinstance(truths[0].observations, list):
        return "texts and numbers are taken for each other"
    for number, (start, truth) in enumerate(zip(starts, truths, strict=True)):
        rows = slice(start, start + len(truth.rewards))
        part = {name: column[rows] for name, column in columns.items()}
        problem = _of_texts(part, truth, words["text"]) if words else _of_numbers(part, truth, dataset.spec)
        problem = problem or _common(part, truth)
        if not problem and truth.complete is not None and bool(dataset.complete[number]) != truth.complete:
            problem = f"complete is {bool(dataset.complete[number])}"
        if not problem and not _streams(dataset, truth, rows):
            problem = "other images"
        if problem:
            return f"episode {number}: {problem}"
    return ""


def _streams(dataset: Any, truth: Truth, rows: slice) -> bool:
    if set(dataset.stores) != set(truth.streams):
        return False
    numbers = torch.arange(rows.start, rows.stop)
    for name, due in truth.streams.items():
        after = np.concatenate([due[1:], truth.last.get(name, due[-1])[None]])
        for following, images in enumerate((due, after)):
            if not np.array_equal(dataset.stores[name].frames(numbers, 1, bool(following)).numpy(), images):
                return False
    return True


def _common(part: dict[str, Any], truth: Truth) -> str:
    if not np.array_equal(part["rewards"], np.array(truth.rewards, np.float32)):
        return "other rewards"
    last = np.arange(len(truth.rewards)) == len(truth.rewards) - 1
    if part["terminations"].tolist() != (last & truth.terminated).tolist():
        return f"terminations, where the end is {'one' if truth.terminated else 'none'}"
    if part["truncations"].tolist() != (last & (not truth.terminated)).tolist():
        return f"truncations, where the end is {'none' if truth.terminated else 'one'}"
    known = [
        bool(k) if value is ... else value is not None
        for k, value in zip(part["successor_known"], truth.successors, strict=True)
    ]
    return (
        ""
        if part["successor_known"].tolist() == known
        else f"successors known: {part['successor_known'].tolist()[-3:]}, not {known[-3:]}"
    )


def _of_numbers(part: dict[str, Any], truth: Truth, spec: Any) -> str:
    if part["observations"].shape != truth.observations.shape or not np.array_equal(
        part["observations"], truth.observations
    ):
        return "other observations"
    for value, due, known in zip(part["next_observations"], truth.successors, part["successor_known"], strict=True):
        if due is not None and due is not ... and known and not np.array_equal(value, due):
            return "other successors"
    if spec.discrete != (truth.actions.dtype.kind == "i"):
        return f"actions are {'discrete' if spec.discrete else 'continuous'}"
    if spec.discrete:
        return "" if np.array_equal(part["actions"], truth.actions) else "other actions"
    low, high = np.array(spec.action_low, np.float64), np.array(spec.action_high, np.float64)
    if part["actions"].shape != truth.actions.shape:
        return "actions of another shape"
    units = part["actions"].astype(np.float64) * (high - low) / 2 + (high + low) / 2
    far = np.abs(units - truth.actions) > SLACK * (high - low) + 1e-6 * np.abs(truth.actions)
    return "other actions" if far.any() else ""


def _of_texts(part: dict[str, Any], truth: Truth, words: tuple[str, ...]) -> str:
    for name, due in (("observations", truth.observations), ("actions", truth.actions)):
        if [words[k] for k in part[name].tolist()] != list(due):
            return f"other {name}"
    for k, due, known in zip(
        part["next_observations"].tolist(), truth.successors, part["successor_known"].tolist(), strict=True
    ):
        if due is not None and due is not ... and known and words[k] != due:
            return "other successors"
    return ""
