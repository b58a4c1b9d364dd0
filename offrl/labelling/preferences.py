"""A reward from a language model's preferences between segments (RL from AI feedback: Klissarov et al., arXiv
2310.00166).
"""

from __future__ import annotations

import numpy as np

from offrl.data.dataset import Dataset
from offrl.data.transforms.reward_labels import episode_columns
from offrl.errors import UserError, warn
from offrl.labelling import parse
from offrl.labelling.cache import Answers, Counts, Labeller, ask
from offrl.labelling.prompts import Renderer, check_labelable
from offrl.relabel.preferences import PreferenceModel, PreferenceSettings, segment_pairs

SHAKY = 0.6  # agreement of the two orders below which the preferences are hardly worth learning from
PROMPT = """\
Task: {task}

Below are two segments of recorded behaviour, each as its state at some of its steps and the action taken there.

Segment 1:
{first}

Segment 2:
{second}

Which segment is better behaviour for the task? Answer with one word: 1, 2 or tie."""


def compare(
    dataset: Dataset,
    pairs: np.ndarray,
    length: int,
    labeller: Labeller,
    task: str,
    render: Renderer,
    answers: Answers | None = None,
    *,
    swap: bool = True,
    quiet: bool = False,
    limit: int | None = None,
) -> tuple[np.ndarray, Counts]:
    """(labels float64 [P], counts) for pairs of first rows [P, 2] of segments of `length` rows: 1 the second is better,
    0 the first, 0.5 neither, NaN where an answer could not be read.

    swap: each pair is asked about in both orders, and a preference that changes with the order counts as a tie. Raises
    UserError."""
    texts = {start: render(episode_columns(dataset, start, start + length)) for start in np.unique(pairs).tolist()}
    orders = [pairs, pairs[:, ::-1]] if swap else [pairs]
    prompts = [PROMPT.format(task=task, first=texts[a], second=texts[b]) for order in orders for a, b in order.tolist()]
    replies, counts = ask(labeller, prompts, answers, title="comparing segments", quiet=quiet, limit=limit)
    labels = np.array([np.nan if x is None else x for x in counts.read(prompts, replies, parse.choice)])
    counts.pairs = len(pairs)
    if not swap:
        return labels, counts
    first, second = labels[: len(pairs)], 1.0 - labels[len(pairs) :]
    read = ~(np.isnan(first) | np.isnan(second))
    counts.swapped, counts.agreed = int(read.sum()), int((first == second).sum())
    return np.where(read, np.where(first == second, first, 0.5), np.nan), counts


def label_preferences(
    dataset: Dataset,
    labeller: Labeller,
    task: str,
    *,
    render: Renderer | None = None,
    answers: Answers | None = None,
    pairs: int = 500,
    length: int = 25,
    swap: bool = True,
    seed: int = 0,
    fit: PreferenceSettings | None = None,
    device: str = "cpu",
    quiet: bool = False,
    limit: int | None = None,
) -> tuple[PreferenceModel, Counts]:
    """A reward learnt from what `labeller` prefers, of `pairs` random pairs of segments, and what became of the
    questions.

    task: what is to be achieved, in words. Pairs with an answer that cannot be read are left out. Raises UserError
    where fewer than two are left, or all of them are ties.
    """
    check_labelable(dataset)
    chosen = segment_pairs(dataset, pairs, length, seed)
    render = render or Renderer(dataset.spec)
    labels, counts = compare(
        dataset, chosen, length, labeller, task, render, answers, swap=swap, quiet=quiet, limit=limit
    )
    usable = ~np.isnan(labels)
    if usable.sum() < 2 or not (labels[usable] != 0.5).any():
        seen = f"; the first that could not be read: '{counts.example}'" if counts.example else ""
        raise UserError(
            f"{dataset.spec.name}: {int(usable.sum()):,} of {pairs:,} pairs of segments have answers that can be read, "
            "and none of them "
            f"prefers one segment{seen}. Describe task and numbers better (task=, names=), show more (steps=, "
            "digits=), or change models"
        )
    if swap and counts.agreed < SHAKY * counts.swapped:
        warn(
            f"only {counts.agreed:,} of {counts.swapped:,} preferences stay the same when the segments change places; "
            "the others count as "
            "ties: the model hardly looks at what it is shown"
        )
    model = PreferenceModel.fit(dataset, chosen[usable], labels[usable], length, fit, device=device, quiet=quiet)
    return model, counts
