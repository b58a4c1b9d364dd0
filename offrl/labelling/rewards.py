"""Rewards as numbers that a language model gives: for every row, for segments of rows, or for whole episodes."""

from __future__ import annotations

import numpy as np

from offrl.data.dataset import Dataset
from offrl.data.transforms.reward_labels import episode_columns
from offrl.errors import UserError
from offrl.labelling import parse
from offrl.labelling.cache import Answers, Counts, Labeller, ask
from offrl.labelling.prompts import Renderer, check_labelable

PROMPT = """\
Task: {task}

Below is a segment of recorded behaviour, as its state at some of its steps and the action taken there.

{segment}

How good is this behaviour for the task, from {low:g} (worst) to {high:g} (best)? Answer with one number."""


def stretches(dataset: Dataset, length: int) -> list[tuple[int, int]]:
    """Bounds of the segments of `length` rows that tile each episode, the last one of it shorter perhaps; 0: of whole
    episodes.
    """
    bounds = zip(dataset.episode_start.tolist(), dataset.episode_end.tolist(), strict=True)
    return [
        (a, min(a + (length or end - start), end))
        for start, end in bounds
        for a in range(start, end, length or end - start)
    ]


def label_by_score(
    dataset: Dataset,
    labeller: Labeller,
    task: str,
    *,
    render: Renderer | None = None,
    answers: Answers | None = None,
    length: int = 0,
    low: float = 0.0,
    high: float = 10.0,
    missing: str = "refuse",
    quiet: bool = False,
    limit: int | None = None,
) -> tuple[np.ndarray, Counts]:
    """(rewards float32 [R], counts): the number that each segment of `length` rows gets is the reward of its last row,
    others have 0.

    length 1: every row gets its own; 0: one for a whole episode. An answer without a number from `low` to `high` is
    unreadable. missing: "refuse" raises UserError where there is one; "recorded" leaves its rows their recorded
    rewards, "zero" gives them none.
    """
    check_labelable(dataset)
    if not low < high:
        raise UserError(f"low={low:g} must be below high={high:g}")
    render = render or Renderer(dataset.spec)
    parts = stretches(dataset, length)
    if limit is not None and len(parts) > 50 * limit:  # before the text of millions of rows is written
        raise UserError(
            f"{len(parts):,} stretches are to be rated, more than max_prompts={limit:,}: take a larger length="
        )
    prompts = [
        PROMPT.format(task=task, segment=render(episode_columns(dataset, a, b)), low=low, high=high) for a, b in parts
    ]
    replies, counts = ask(labeller, prompts, answers, title="rating behaviour", quiet=quiet, limit=limit)
    rewards = np.zeros(len(dataset), np.float32)
    recorded = dataset.columns["rewards"].numpy()
    values = counts.read(prompts, replies, lambda answer: parse.number(answer, low, high))
    for value, (a, b) in zip(values, parts, strict=True):
        if value is not None:
            rewards[b - 1] = value
        elif missing == "recorded":
            rewards[a:b] = recorded[a:b]
    refuse(dataset, counts, missing, f"a number from {low:g} to {high:g}")
    return rewards, counts


def refuse(dataset: Dataset, counts: Counts, missing: str, what: str) -> None:
    """Raises UserError where answers could not be read and nothing is said about what to do."""
    if counts.unparsable and missing == "refuse":
        raise UserError(
            f"{dataset.spec.name}: {counts.unparsable:,} of the answers do not hold {what}; the first of them: "
            f"'{counts.example}'. "
            "missing=recorded or missing=zero goes on without them (the other answers are kept), or ask another model"
        )
