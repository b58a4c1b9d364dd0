"""Rewards by a language model: as numbers that it gives, learnt from its preferences between segments (RL from AI
feedback: Klissarov et al., arXiv 2310.00166), and as a bonus for reaching what it proposes to reach ("Words as
Beacons", Ruiz-Gonzalez et al., arXiv 2410.08632).

There a model lists subgoals for the start of an episode, and reaching the next one of them earns alpha (here `bonus`)
besides the environment's reward. The data are fixed, so that the bonus goes to the steps of each episode that reached
one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from offrl.data.dataset import Dataset
from offrl.data.transforms.reward_labels import episode_columns
from offrl.errors import UserError, warn
from offrl.labelling import parse
from offrl.labelling.cache import Answers, Counts, Labeller, ask
from offrl.labelling.prompts import Renderer, check_labelable
from offrl.relabel.preferences import PreferenceModel, PreferenceSettings, segment_pairs
from offrl.settings.encoder import EncoderConfig
from offrl.system.user_code import guarded

SCORE_PROMPT = """\
Task: {task}

Below is a segment of recorded behaviour, as its state at some of its steps and the action taken there.

{segment}

How good is this behaviour for the task, from {low:g} (worst) to {high:g} (best)? Answer with one number."""


def stretches(dataset: Dataset, length: int) -> list[tuple[int, int]]:
    """Bounds of the segments of `length` rows that tile each episode, the last one of it shorter perhaps; 0: of whole
    episodes.
    """
    return [
        (a, min(a + (length or end - start), end))
        for start, end in dataset.spans()
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
    on_missing: str = "refuse",
    quiet: bool = False,
    limit: int | None = None,
) -> tuple[np.ndarray, Counts]:
    """(rewards float32 [R], counts): the number that each segment of `length` rows gets is the reward of its last row,
    others have 0.

    length 1: every row gets its own; 0: one for a whole episode. An answer without a number from `low` to `high` is
    unreadable. on_missing: "refuse" raises UserError where there is one; "recorded" leaves its rows their recorded
    rewards, "zero" gives them none.
    """
    check_labelable(dataset, render is not None and render.pictures is not None)
    if not low < high:
        raise UserError(f"low={low:g} must be below high={high:g}")
    render = render or Renderer(dataset.spec)
    parts = stretches(dataset, length)
    if limit is not None and len(parts) > 50 * limit:  # before the text of millions of rows is written
        raise UserError(
            f"{len(parts):,} stretches are to be rated, more than max_prompts={limit:,}: take a larger length="
        )
    prompts = [
        SCORE_PROMPT.format(task=task, segment=render(episode_columns(dataset, a, b)), low=low, high=high)
        for a, b in parts
    ]
    replies, counts = ask(labeller, prompts, answers, title="rating behaviour", quiet=quiet, limit=limit)
    rewards = np.zeros(len(dataset), np.float32)
    recorded = dataset.columns["rewards"].numpy()
    values = counts.read(prompts, replies, lambda answer: parse.number(answer, low, high))
    for value, (a, b) in zip(values, parts, strict=True):
        if value is not None:
            rewards[b - 1] = value
        elif on_missing == "recorded":
            rewards[a:b] = recorded[a:b]
    refuse(dataset, counts, on_missing, f"a number from {low:g} to {high:g}")
    return rewards, counts


def refuse(dataset: Dataset, counts: Counts, on_missing: str, content: str) -> None:
    """Raises UserError where answers could not be read and nothing is said about what to do."""
    if counts.unparsable and on_missing == "refuse":
        raise UserError(
            f"{dataset.spec.name}: {counts.unparsable:,} of the answers do not hold {content}; the first of them: "
            f"'{counts.example}'. on_missing=recorded or on_missing=zero goes on without them (the other answers are "
            "kept), or ask another model"
        )


SHAKY = 0.6  # agreement of the two orders below which the preferences are hardly worth learning from
PAIR_PROMPT = """\
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
    both_orders: bool = True,
    quiet: bool = False,
    limit: int | None = None,
) -> tuple[np.ndarray, Counts]:
    """(labels float64 [P], counts) for pairs of first rows [P, 2] of segments of `length` rows: 1 the second is better,
    0 the first, 0.5 neither, NaN where an answer could not be read.

    both_orders: each pair is asked about in both orders, and a preference that changes with the order counts as a tie.
    Raises UserError."""
    texts = {start: render(episode_columns(dataset, start, start + length)) for start in np.unique(pairs).tolist()}
    orders = [pairs, pairs[:, ::-1]] if both_orders else [pairs]
    prompts = [
        PAIR_PROMPT.format(task=task, first=texts[a], second=texts[b]) for order in orders for a, b in order.tolist()
    ]
    replies, counts = ask(labeller, prompts, answers, title="comparing segments", quiet=quiet, limit=limit)
    labels = np.array([np.nan if x is None else x for x in counts.read(prompts, replies, parse.choice)])
    counts.pairs = len(pairs)
    if not both_orders:
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
    both_orders: bool = True,
    seed: int = 0,
    fit: PreferenceSettings | None = None,
    encoder: EncoderConfig | None = None,
    device: str = "cpu",
    quiet: bool = False,
    limit: int | None = None,
) -> tuple[PreferenceModel, Counts]:
    """A reward learnt from what `labeller` prefers, of `pairs` random pairs of segments, and what became of the
    questions.

    task: what is to be achieved, in words. encoder: of images, by which the reward tells rows apart, too. Pairs with an
    answer that cannot be read are left out. Raises UserError where fewer than two are left, or all of them are ties.
    """
    check_labelable(dataset, encoder is not None)
    chosen = segment_pairs(dataset, pairs, length, seed)
    render = render or Renderer(dataset.spec)
    labels, counts = compare(
        dataset, chosen, length, labeller, task, render, answers, both_orders=both_orders, quiet=quiet, limit=limit
    )
    usable = ~np.isnan(labels)
    if usable.sum() < 2 or not (labels[usable] != 0.5).any():
        sample = f"; the first that could not be read: '{counts.example}'" if counts.example else ""
        raise UserError(
            f"{dataset.spec.name}: {int(usable.sum()):,} of {pairs:,} pairs of segments have answers that can be read, "
            f"and none of them prefers one segment{sample}. Describe task and numbers better (task=, names=), show "
            "more (steps=, digits=), or change models"
        )
    if both_orders and counts.agreed < SHAKY * counts.swapped:
        warn(
            f"only {counts.agreed:,} of {counts.swapped:,} preferences stay the same when the segments change places; "
            "the others count as ties: the model hardly looks at what it is shown"
        )
    model = PreferenceModel.fit(
        dataset, chosen[usable], labels[usable], length, fit, encoder=encoder, device=device, quiet=quiet
    )
    return model, counts


Reached = Callable[[dict[str, np.ndarray], str], Any]
SUBGOAL_PROMPT = """\
Task: {task}

The state at the start:
{state}

Which intermediate subgoals should be reached, in which order, so that the task is done? Name at most {most}, the last being its end.
{form}"""  # noqa: E501
NUMBERS = "Answer with one JSON list of numbers [{names}] for each subgoal, one a line, and nothing else."
WORDS = "Answer with a JSON list of texts, and nothing else."
CHOICES = "Choose among: {choices}. Answer with a JSON list of these texts, and nothing else."


def first_reached(reached: np.ndarray, ordered: bool) -> np.ndarray:
    """The number of subgoals that are reached for the first time at each step: int64 [T].

    reached: bool [N, T + 1], whether subgoal n is reached in state t; column 0 is the start, where reaching is no
    achievement. ordered: subgoal n counts only from the step at which n - 1 was reached on (that step included: one
    step may reach several).
    """
    steps = np.zeros(reached.shape[1] - 1, np.int64)
    since = 0
    for row in reached:
        from_here = np.flatnonzero(row[since:] if ordered else row)
        if not len(from_here):
            if ordered:
                break
            continue
        at = int(from_here[0]) + (since if ordered else 0)
        if at > 0:
            steps[at - 1] += 1
        since = at
    return steps


def positions(dataset: Dataset, entries: Sequence[int], start: int, end: int) -> np.ndarray:
    """Positions at rows start to end - 1, and the one after the last: [T + 1, G]. Raises UserError."""
    if not entries:
        goals = dataset.columns["achieved_goals"][start:end].numpy()
        return np.concatenate([goals, goals[-1:]])  # what the last step achieved stands nowhere
    rows = dataset.columns["observations"][start:end].reshape(end - start, -1).numpy()
    last = dataset.columns["next_observations"][end - 1 : end].reshape(1, -1).numpy()
    return np.concatenate([rows, last])[:, list(entries)]


def label_subgoals(
    dataset: Dataset,
    labeller: Labeller,
    task: str,
    *,
    render: Renderer | None = None,
    answers: Answers | None = None,
    most: int = 4,
    entries: Sequence[int] = (),
    radius: float = 0.5,
    reached: Reached | None = None,
    where: str = "reached",
    choices: Sequence[str] = (),
    ordered: bool = True,
    bonus: float = 1.0,
    add_to_rewards: bool = True,
    on_missing: str = "refuse",
    quiet: bool = False,
    limit: int | None = None,
) -> tuple[np.ndarray, Counts]:
    """(rewards float32 [R], counts): `bonus` at the steps that reach one of the proposed subgoals for the first time in
    their episode.

    The model is asked once for each start of an episode that reads differently. A subgoal is a point, reached within
    Euclidean distance `radius` of it: in the entries `entries` of the observation, or in the column achieved_goals.
    With `reached`, a function of an episode's columns and a subgoal in words, it is words (of `choices`, where there
    are any): it returns [T] flags, whether the subgoal is reached after each step. add_to_rewards: add the bonus to the
    recorded rewards. on_missing: as for `label_by_score`. Raises UserError.
    """
    check_labelable(dataset)
    render = render or Renderer(dataset.spec)
    width, spec = dataset.spec.observation_dim, dataset.spec
    if reached is None:
        if not entries and "achieved_goals" not in dataset.columns:
            raise UserError(
                f"{spec.name} has no column achieved_goals: say which numbers of the observation a subgoal fixes with "
                "entries=[0,1], or what reaches it with reached=file.py:function"
            )
        if any(not 0 <= i < width for i in entries):
            raise UserError(f"entries={list(entries)}: an observation of {spec.name} has the numbers 0 to {width - 1}")
        names = [render.called(i) for i in entries] or [f"g{i}" for i in range(spec.goal_dim)]
        form = NUMBERS.format(names=", ".join(names))
    else:
        form = CHOICES.format(choices=", ".join(choices)) if choices else WORDS
    bounds = list(dataset.spans())
    prompts = []
    for start, _ in bounds:
        first = (
            render(episode_columns(dataset, start, start + 1))
            if render.function
            else render.state(dataset.columns["observations"][start].cpu().numpy())
        )
        prompts.append(SUBGOAL_PROMPT.format(task=task, state=first, most=most, form=form))
    replies, counts = ask(labeller, prompts, answers, title="asking for subgoals", quiet=quiet, limit=limit)
    rewards = dataset.columns["rewards"].numpy().copy() if add_to_rewards else np.zeros(len(dataset), np.float32)
    if reached is None:
        proposed: list[Any] = counts.read(prompts, replies, lambda answer: parse.points(answer, names, most))
    else:
        proposed = counts.read(prompts, replies, lambda answer: parse.words(answer, choices, most))
    for episode, (targets, (start, end)) in enumerate(zip(proposed, bounds, strict=True)):
        if targets is None:
            if on_missing == "recorded":
                rewards[start:end] = dataset.columns["rewards"][start:end].numpy()
            continue
        if reached is None:
            coordinates = positions(dataset, entries, start, end).astype(np.float64)
            flags = np.linalg.norm(coordinates - np.asarray(targets)[:, None], axis=-1) <= radius
        else:
            flags = _flags(dataset, start, end, reached, targets, f"{where}, episode {episode}")
        rewards[start:end] += np.float32(bonus) * first_reached(flags, ordered)
    refuse(dataset, counts, on_missing, "subgoals of the form that was asked for")
    return rewards.astype(np.float32), counts


def _flags(dataset: Dataset, start: int, end: int, reached: Reached, subgoals: list[str], where: str) -> np.ndarray:
    """bool [N, T + 1] from the user's function. Raises UserError for other than T flags."""
    rows = []
    for subgoal in subgoals:
        flags = np.asarray(guarded(where, reached, episode_columns(dataset, start, end), subgoal))
        if flags.shape not in ((end - start,), (end - start, 1)) or flags.dtype.kind not in "biu":
            raise UserError(
                f"{where}: it gave {flags.dtype} values of shape {list(flags.shape)}; {end - start} flags are due"
            )
        rows.append(np.concatenate([[False], flags.reshape(-1).astype(bool)]))
    return np.array(rows)
