"""Sequences of tokens: the sampler that draws slices of a dataset's token streams, and the quantities that losses read
off a batch of them.

Shapes in comments: K tokens in all, R turns, E episodes, B batch, L length of a sequence, M action tokens, D width, V
vocabulary."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from offrl.data.dataset import Dataset
from offrl.data.samplers.transitions import Batch, Episodes, alias_table, draw_rows
from offrl.data.transforms.columns import returns_to_go
from offrl.errors import UserError
from offrl.lm.models.tokenizer import Tokenizer
from offrl.lm.tokens import Stream, stream

IDS, VALID, ACTION, OBSERVED, LAST = "ids", "valid", "action", "observed", "last"
REWARD, DONE, KNOWN, SUCCESSOR, RETURN = "reward", "done", "known", "successor", "return"
# action tokens of the whole batch for each of its sequences, [B]: a process that has a share of the batch needs it
COUNT = "count"
NEXT = "next_"  # before the names of what belongs to the window at the next state
SHARE = "share"  # 1 over the number of action tokens of the whole batch, [B]
Logits = Callable[[Tensor], Tensor]  # states [..., D] -> logits [..., V] of the next token


@dataclass(frozen=True)
class Sequences:
    """The source of TextSampler: flat columns [K], and for each item the slice that is shown and where its trained
    actions begin.
    """

    flat: dict[str, Tensor]
    begin: Tensor  # [I] int64
    train: Tensor  # [I] int64: action tokens from here on are learnt from
    end: Tensor  # [I] int64, exclusive
    length: int  # L, of the longest item
    next_length: int
    start: int  # the token before each sequence
    next_begin: Tensor | None = None  # [I] int64: the window at the next state, where it is no part of the same slice
    next_end: Tensor | None = None
    weighted: Episodes | None = None
    cut: int = 0  # items whose beginning did not fit


@dataclass(frozen=True)
class TextSampler:
    """Sequences of tokens; pure, like all samplers.

    history None: items are whole episodes, all of whose actions are learnt from; what is longer than `length` is cut
    into several that overlap by half. history n: an item is one turn: the last n texts before its action, and the
    action; the same window one turn later is the next state. Items are drawn uniformly, or in proportion to the weight
    of their episode.

    Columns [B, L + 1], where position 0 is the start token: ids int64; valid, action (tokens of actions to learn from),
    observed (tokens of observations among these) and last (the last token of an action) bool; at that last token reward
    float32, done bool, and known bool (whether its target can be made; True elsewhere); successor int64, the position
    whose state comes after this token; return float32, the sum of the rewards from here on, discounted by `discount`
    for each token of an action. With a history also next_ids and next_valid [B, L' + 1], whose last valid position is
    the state after the item's action.
    """

    tokenizer: Tokenizer
    append_end: bool
    history: int | None
    length: int
    discount: float = 1.0
    with_observation: bool = False  # with a history: the item goes on with the observation that came of the action

    def prepare(self, dataset: Dataset) -> Sequences:
        """The source of sequences. Raises UserError for other than text data."""
        s = stream(dataset, self.tokenizer, self.append_end)
        if not s.is_action.any():
            raise UserError(
                f"{dataset.spec.name}: no action has a token: they are empty texts, or the tokenizer knows none of "
                "what they say"
            )
        bounds, owner, cut = (
            _windows(s, dataset, self.history, self.length, self.with_observation)
            if self.history
            else _episodes(s, dataset, self.length)
        )
        tables = [
            {name: torch.from_numpy(np.ascontiguousarray(x)).to(dataset.device) for name, x in table.items()}
            for table in (_columns(s, dataset, self.discount), bounds)
        ]
        return Sequences(
            tables[0],
            **tables[1],
            length=int((bounds["end"] - bounds["begin"]).max()),
            next_length=int((bounds["next_end"] - bounds["next_begin"]).max()) if self.history else 0,
            start=self.tokenizer.start,
            weighted=_weighted(dataset, owner, dataset.device),
            cut=cut,
        )

    def __call__(self, source: Sequences, key: Tensor, batch_size: int) -> Batch:
        return take(source, draw_rows(key, batch_size, len(source.begin), source.weighted))


def take(source: Sequences, item: Tensor) -> Batch:
    """The items of numbers [B]; see TextSampler."""
    begin, end = source.begin[item].unsqueeze(-1), source.end[item].unsqueeze(-1)
    index = begin + torch.arange(-1, source.length, device=item.device)
    inside = (index >= begin) & (index < end)
    rows = torch.minimum(torch.maximum(index, begin), end - 1)
    batch = {
        name: torch.where(inside, column[rows], torch.zeros((), dtype=column.dtype, device=item.device))
        for name, column in source.flat.items()
    }
    batch[IDS] = torch.where(index < begin, source.start, batch[IDS].long())
    batch[VALID] = index < end
    trainable = inside & (index >= source.train[item].unsqueeze(-1))
    batch[OBSERVED] = trainable & ~batch[ACTION]
    batch[ACTION] = trainable & batch[ACTION]
    batch[COUNT] = batch[ACTION].sum().float().expand(len(item)) / len(item)
    # position 0 is the start token, so the stream's index i is position i - begin + 1
    successor = batch[SUCCESSOR] - begin + 1
    batch[SUCCESSOR] = successor.clamp(0, source.length)
    if source.next_begin is None or source.next_end is None:
        # an action whose next observation is too long to be shown with it; its end needs no value
        batch[KNOWN] &= batch[DONE] | (successor <= end - begin)
        return batch
    next_begin, next_end = source.next_begin[item].unsqueeze(-1), source.next_end[item].unsqueeze(-1)
    index = next_begin + torch.arange(-1, source.next_length, device=item.device)
    rows = torch.minimum(
        torch.maximum(index, next_begin), source.flat[IDS].new_tensor(len(source.flat[IDS]) - 1, dtype=torch.int64)
    )
    ids = torch.where(index < next_end, source.flat[IDS][rows].long(), 0)
    batch[NEXT + IDS], batch[NEXT + VALID] = torch.where(index < next_begin, source.start, ids), index < next_end
    return batch


def _columns(s: Stream, dataset: Dataset, discount: float) -> dict[str, np.ndarray]:
    """Flat columns [K]."""
    rewards = dataset.columns["rewards"].cpu().numpy()
    terminal, known = (dataset.columns[n].cpu().numpy() for n in ("terminations", "successor_known"))
    count = len(s.ids)
    nonempty = s.action_end > s.action_begin  # an empty action has no token to carry its reward
    last_token = s.action_end[nonempty] - 1
    reward, known_target = np.zeros(count, np.float32), np.ones(count, bool)
    done, ends = np.zeros(count, bool), np.zeros(count, bool)
    reward[last_token], ends[last_token] = rewards[nonempty], True
    done[last_token] = terminal[nonempty]
    known_target[last_token] = (terminal | known)[nonempty]
    # the state after an action's token is the one before the next token that a policy chooses: after the observation
    # that follows
    index = np.arange(count)
    successor = index.copy()
    last_of_episode = np.zeros(len(s.action_end), bool)
    last_of_episode[dataset.episode_end.cpu().numpy() - 1] = True
    state_end = np.empty(len(s.action_end), np.int64)
    state_end[~last_of_episode] = s.action_begin[1:][~last_of_episode[:-1]] - 1
    state_end[last_of_episode] = s.final_end - 1
    successor[last_token] = state_end[nonempty]
    return {
        IDS: np.asarray(s.ids),
        ACTION: np.asarray(s.is_action),
        LAST: ends,
        REWARD: reward,
        DONE: done,
        KNOWN: known_target,
        SUCCESSOR: successor,
        RETURN: returns(s, dataset, reward, discount),
    }


def returns(s: Stream, dataset: Dataset, reward: np.ndarray, discount: float) -> np.ndarray:
    """[K] float32: at each action token the sum of the rewards from it to the episode's end, discounted by each action
    token in between.
    """
    positions = np.flatnonzero(s.is_action)
    owner = np.searchsorted(dataset.episode_end.cpu().numpy(), np.asarray(s.turn)[positions], side="right")
    number = np.arange(dataset.num_episodes)
    start, end = np.searchsorted(owner, number, side="left"), np.searchsorted(owner, number, side="right")
    nonempty = end > start
    result = np.zeros(len(s.ids), np.float32)
    result[positions] = returns_to_go(
        reward[positions], np.zeros(len(positions)), start[nonempty], end[nonempty], discount
    )
    return result


# slices [I] of the stream by their bounds (see `Sequences`), the episode of each, and how many were cut
Items = tuple[dict[str, np.ndarray], np.ndarray, int]


def _episodes(s: Stream, dataset: Dataset, length: int) -> Items:
    """Items that are whole episodes, or overlapping pieces of those that are longer than `length`."""
    start, stop = dataset.episode_start.cpu().numpy(), dataset.episode_end.cpu().numpy()
    items, cut = [], 0
    for e, (first, last) in enumerate(zip(start.tolist(), stop.tolist(), strict=True)):
        begin, end = int(s.obs_begin[first]), int(s.final_end[e])
        if end - begin <= length:
            items.append((begin, begin, end, e))
            continue
        actions = s.action_begin[first:last]
        ends = np.append(actions[1:], end)  # with the observation that follows an action, where its value is needed
        train = begin
        while train < end:
            turn = int(np.searchsorted(ends, train, side="right"))
            # an action and what follows it stay together where they can: rather less of what was before, as when acting
            fits_whole = ends[turn] - actions[turn] <= length
            begin = max(begin, int(ends[turn] if fits_whole else s.action_end[first + turn]) - length)
            train = max(train, begin)
            fit = int(np.searchsorted(ends, begin + length, side="right")) - 1
            # longer than the sequence: cut where it must be
            split = int(ends[fit]) if fit >= turn else min(begin + length, end)
            items.append((begin, train, split, e))
            cut += begin > int(s.obs_begin[first])
            train, begin = split, max(begin + 1, split - length // 2)
    table = np.array(items, np.int64)
    return {"begin": table[:, 0], "train": table[:, 1], "end": table[:, 2]}, table[:, 3], cut


def _windows(s: Stream, dataset: Dataset, history: int, length: int, with_observation: bool) -> Items:
    """Items that are single turns with the last `history` texts before them."""
    start, stop = dataset.episode_start.cpu().numpy(), dataset.episode_end.cpu().numpy()
    owner = np.repeat(np.arange(len(start)), stop - start)
    row = np.arange(len(owner))
    first = 2 * start + np.arange(len(start))  # number of each episode's first text, of all texts one after another
    begin_of, end_of = np.empty(2 * len(row) + len(start), np.int64), np.empty(2 * len(row) + len(start), np.int64)
    text = first[owner] + 2 * (row - start[owner])  # of each turn's observation
    begin_of[text], end_of[text] = s.obs_begin, s.action_begin
    begin_of[text + 1], end_of[text + 1] = s.action_begin, s.action_end
    final = first + 2 * (stop - start)
    begin_of[final], end_of[final] = s.final_begin, s.final_end
    nonempty = s.action_end > s.action_begin  # an empty action has no token to learn
    text, owner = text[nonempty], owner[nonempty]
    end = end_of[text + 2] if with_observation else end_of[text + 1]
    uncut = begin_of[np.maximum(text - (history - 1), first[owner])]
    begin = np.maximum(uncut, end - length)
    train = np.maximum(begin_of[text + 1], begin)
    next_end = end_of[text + 2]
    next_begin = np.maximum(begin_of[np.maximum(text + 2 - (history - 1), first[owner])], next_end - length)
    bounds = {"begin": begin, "train": train, "end": end, "next_begin": next_begin, "next_end": next_end}
    return bounds, owner, int((begin > uncut).sum())


def _weighted(dataset: Dataset, owner: np.ndarray, device: torch.device) -> Episodes | None:
    """The weighted draw of items of episodes `owner` [I], which stand in order, where `Dataset.weights` differ."""
    if dataset.weights is None:
        return None
    weights = dataset.weights.cpu().numpy()
    if (weights == weights[0]).all():
        return None
    count = np.bincount(owner, minlength=dataset.num_episodes)
    first = np.cumsum(count) - count
    indices = np.flatnonzero((weights > 0.0) & (count > 0))
    if not len(indices):
        raise UserError(f"{dataset.spec.name}: no episode has a weight above 0: take another dataset.weighting")
    threshold, alias = alias_table((weights * count)[indices])
    return Episodes(
        *(
            torch.from_numpy(np.ascontiguousarray(x)).to(device)
            for x in (threshold, alias, first[indices], count[indices])
        )
    )


# ---- what losses read off a batch


def trim_padding(batch: Batch) -> Batch:
    """A batch without the columns that are padding in all rows, and with `share`: 1 over its number of action tokens,
    [B].

    Of a batch that processes share it is that of the whole batch times the number of processes, whose gradients are
    averaged.
    """
    width = int(batch[VALID].sum(-1).max())
    columns = {k: (v[:, :width] if v.ndim > 1 and not k.startswith(NEXT) else v) for k, v in batch.items()}
    if SUCCESSOR in batch:
        columns[SUCCESSOR] = columns[SUCCESSOR].clamp(max=width - 1)
    if NEXT + VALID in batch:
        width = int(batch[NEXT + VALID].sum(-1).max())
        columns |= {k: v[:, :width] for k, v in columns.items() if k.startswith(NEXT) and v.ndim > 1}
    rows = len(columns[IDS])
    count = columns.pop(COUNT)[0] * rows if COUNT in columns else columns[ACTION].sum()
    return {**columns, SHARE: (1.0 / count.clamp(min=1)).expand(rows)}


def states_and_tokens(hidden: Tensor, batch: Batch, column: str = ACTION) -> tuple[Tensor, Tensor]:
    """(states [M, D] before the action tokens of a batch, or those of `column`; these tokens int64 [M])."""
    mask = batch[column][:, 1:]
    return hidden[:, :-1][mask], batch[IDS][:, 1:][mask]


def action_mask(batch: Batch) -> Tensor:
    """[B, L] bool: the action tokens of a batch, in the order of `states_and_tokens`."""
    mask = batch[ACTION].clone()
    mask[:, 0] = False
    return mask


def cross_entropy(logits: Logits, hidden: Tensor, batch: Batch, column: str = ACTION) -> Tensor:
    """-log pi of the tokens of `column`, given states [B, L, D]: their sum over the number of the batch's action
    tokens.
    """
    states, tokens = states_and_tokens(hidden, batch, column)
    return (F.cross_entropy(logits(states), tokens, reduction="none") * batch[SHARE][0]).sum()


def token_log_probs(logits: Logits, hidden: Tensor, batch: Batch) -> Tensor:
    """[B, L - 1]: log pi of each action token at the position before it, 0 elsewhere; a row's sum is that of its
    action.
    """
    states, tokens = states_and_tokens(hidden, batch)
    log_probs = -F.cross_entropy(logits(states), tokens, reduction="none")
    mask = batch[ACTION][:, 1:]
    return torch.zeros(mask.shape, dtype=log_probs.dtype, device=log_probs.device).index_put(
        mask.nonzero(as_tuple=True), log_probs
    )
