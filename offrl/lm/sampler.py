"""A text data set as tokens: flat arrays of whole episodes, and the sampler that draws sequences from them.

An episode is the stream obs_0, action_0, obs_1, ..., action_{T-1}, final obs (where it is known), each text encoded on its own. Whatever a
model is shown is a slice of a stream. Shapes in comments: K tokens in all, R turns, E episodes, B batch, L tokens in a sequence.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from offrl import rng
from offrl.data.dataset import Dataset
from offrl.data.samplers.transitions import Batch, Episodes, alias_table
from offrl.data.transforms.columns import returns_to_go
from offrl.errors import UserError
from offrl.lm.models.tokenizer import Tokenizer
from offrl.system.files import cache_dir

SLOW = 2.0  # seconds; what takes longer to encode is kept on disk
ARRAYS = ("ids", "is_action", "turn", "obs_begin", "action_begin", "action_end", "final_begin", "final_end")
IDS, VALID, ACTION, OBSERVED, LAST = "ids", "valid", "action", "observed", "last"
REWARD, DONE, KNOWN, SUCCESSOR, RETURN = "reward", "done", "known", "successor", "return"
COUNT = "count"  # action tokens of the whole batch for each of its sequences, [B]: a process that has a share of the batch needs it
NEXT = "next_"  # before the names of what belongs to the window at the next state


@dataclass(frozen=True)
class Stream:
    """Episodes as tokens, in memory or memory-mapped."""

    ids: np.ndarray  # [K] int32
    is_action: np.ndarray  # [K] bool: tokens of actions, which a policy chooses
    turn: np.ndarray  # [K] int32: the turn (row of the data) that each token belongs to; a final observation to the last one
    obs_begin: np.ndarray  # [R] int64
    action_begin: np.ndarray  # [R] int64
    action_end: np.ndarray  # [R] int64, exclusive
    final_begin: np.ndarray  # [E] int64: of the final observation
    final_end: np.ndarray  # [E] int64, exclusive: the episode's end; equals final_begin where that observation is not known


def stream(dataset: Dataset, tokenizer: Tokenizer, append_end: bool) -> Stream:
    """The data's episodes as tokens, kept on disk if making them took long. append_end: actions get the tokenizer's end token.

    Raises UserError for other than text data.
    """
    if not dataset.spec.text:
        raise UserError(f"{dataset.spec.name} is no text: language-model policies need a text data set, such as text-maze")
    folder = cache_dir() / "tokens" / _key(dataset, tokenizer, append_end)
    kept = _read(folder)
    if kept is not None:
        return kept
    began = time.perf_counter()
    made = encode(dataset, tokenizer, append_end)
    if time.perf_counter() - began > SLOW:
        _write(folder, made)
        return _read(folder) or made
    return made


def encode(dataset: Dataset, tokenizer: Tokenizer, append_end: bool) -> Stream:
    """As `stream`, always anew."""
    columns = {n: dataset.columns[n].cpu().numpy() for n in ("observations", "actions", "next_observations")}
    known = dataset.columns["successor_known"].cpu().numpy()
    texts = tokenizer.encode(dataset.strings)
    sizes = np.array([len(t) for t in texts], np.int64)
    flat = np.concatenate([np.zeros(0, np.int32), *texts])
    where = np.cumsum(sizes) - sizes
    start, end = dataset.episode_start.cpu().numpy(), dataset.episode_end.cpu().numpy()
    rows, extra = len(dataset), int(append_end)
    last = end - 1
    final = np.where(known[last], sizes[columns["next_observations"][last]], 0)
    obs, act = sizes[columns["observations"]], sizes[columns["actions"]] + extra
    episode = np.repeat(np.arange(len(start)), end - start)
    before = np.concatenate([[0], np.cumsum(final)])[episode]  # final observations of earlier episodes
    both = np.cumsum(obs + act)
    obs_begin = both - obs - act + before
    action_begin = obs_begin + obs
    action_end = action_begin + act
    final_begin = action_end[last]
    total = int(final_begin[-1] + final[-1]) if rows else 0
    ids = np.full(total, tokenizer.end if tokenizer.end is not None else 0, np.int32)  # end tokens stay
    is_action, turn = np.zeros(total, bool), np.zeros(total, np.int32)

    def put(begin: np.ndarray, text: np.ndarray, row: np.ndarray, action: bool) -> None:
        size = sizes[text]
        step = np.arange(int(size.sum())) - np.repeat(np.cumsum(size) - size, size)
        at = np.repeat(begin, size) + step
        ids[at] = flat[np.repeat(where[text], size) + step]
        turn[at] = np.repeat(row, size)
        if action:
            is_action[at] = True

    every = np.arange(rows)
    put(obs_begin, columns["observations"], every, False)
    put(action_begin, columns["actions"], every, True)
    if extra:
        is_action[action_end - 1], turn[action_end - 1] = True, every
    put(final_begin[known[last]], columns["next_observations"][last][known[last]], last[known[last]], False)
    return Stream(ids, is_action, turn, obs_begin, action_begin, action_end, final_begin, final_begin + final)


def _key(dataset: Dataset, tokenizer: Tokenizer, append_end: bool) -> str:
    digest = hashlib.sha256(f"1 {tokenizer.identity} {append_end}".encode())
    for text in dataset.strings:
        digest.update(f"{len(text)} {text}".encode("utf-8", "surrogatepass"))
    for name in ("observations", "actions", "next_observations", "successor_known"):
        digest.update(dataset.columns[name].cpu().numpy().tobytes())
    digest.update(dataset.episode_end.cpu().numpy().tobytes())
    return digest.hexdigest()[:24]


def _read(folder: Path) -> Stream | None:
    try:
        sizes = json.loads((folder / "sizes.json").read_text())
        arrays = {name: np.load(folder / f"{name}.npy", mmap_mode="c", allow_pickle=False) for name in ARRAYS}
        if {name: len(a) for name, a in arrays.items()} != sizes:
            return None
        return Stream(**arrays)
    except (OSError, ValueError, KeyError, TypeError):  # not there, or damaged: made anew
        return None


def _write(folder: Path, made: Stream) -> None:
    """Nothing where there is no room for it."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        aside = Path(tempfile.mkdtemp(dir=folder.parent, prefix="building-"))
        try:
            for name in ARRAYS:
                np.save(aside / f"{name}.npy", getattr(made, name), allow_pickle=False)
            (aside / "sizes.json").write_text(json.dumps({name: len(getattr(made, name)) for name in ARRAYS}))
            if folder.is_dir():
                shutil.rmtree(folder)
            os.replace(aside, folder)
        finally:
            shutil.rmtree(aside, ignore_errors=True)
    except OSError:
        return


# ---- sequences


@dataclass(frozen=True)
class Sequences:
    """What TextSampler draws from: flat columns [K], and for each item the slice that is shown and where its trained actions begin."""

    flat: dict[str, Tensor]
    begin: Tensor  # [I] int64
    train: Tensor  # [I] int64: action tokens from here on are learnt from
    end: Tensor  # [I] int64, exclusive
    next_begin: Tensor | None  # [I] int64: the window at the next state, where it is not a part of the same slice
    next_end: Tensor | None
    length: int  # L, of the longest item
    next_length: int
    start: int  # the token before each sequence
    weighted: Episodes | None = None
    cut: int = 0  # items whose beginning did not fit


@dataclass(frozen=True)
class TextSampler:
    """Sequences of tokens; pure, like all samplers.

    history None: items are whole episodes, all of whose actions are learnt from; what is longer than `length` is cut into several that
    overlap by half. history n: an item is one turn: the last n texts before its action, and the action; the same window one turn later is
    the next state. Items are drawn uniformly, or in proportion to the weight of their episode.

    Columns [B, L + 1], where position 0 is the start token: ids int64; valid, action (tokens of actions to learn from), observed (tokens of
    observations among these) and last (the last token of an action) bool; at that last token reward float32, done bool, and known bool
    (whether its target can be made; True elsewhere); successor int64, the position whose state comes after this token; return float32,
    the sum of the rewards from here on, discounted by `discount` for each token of an action. With a history also next_ids and next_valid
    [B, L' + 1], whose last valid position is the state after the item's action.
    """

    tokenizer: Tokenizer
    append_end: bool
    history: int | None
    length: int
    discount: float = 1.0
    following: bool = False  # with a history: the item goes on with the observation that came of the action

    def prepare(self, dataset: Dataset) -> Sequences:
        """Raises UserError for other than text data."""
        s = stream(dataset, self.tokenizer, self.append_end)
        if not s.is_action.any():
            raise UserError(
                f"{dataset.spec.name}: no action has a token: they are empty texts, or the tokenizer knows none of what they say"
            )
        flat = _columns(s, dataset, self.discount)
        items = _windows(s, dataset, self.history, self.length, self.following) if self.history else _episodes(s, dataset, self.length)
        device = dataset.device

        def there(values: np.ndarray) -> Tensor:
            return torch.from_numpy(np.ascontiguousarray(values)).to(device)

        later = None if items.next_begin is None or items.next_end is None else (items.next_begin, items.next_end)
        return Sequences(
            {name: there(column) for name, column in flat.items()},
            there(items.begin),
            there(items.train),
            there(items.end),
            None if later is None else there(later[0]),
            None if later is None else there(later[1]),
            int((items.end - items.begin).max()),
            0 if later is None else int((later[1] - later[0]).max()),
            self.tokenizer.start,
            _weighted(dataset, items.owner, device),
            items.cut,
        )

    def __call__(self, source: Sequences, key: Tensor, batch_size: int) -> Batch:
        if source.weighted is None:
            item = rng.randint(key, (batch_size,), len(source.begin))
        else:
            item = source.weighted.draw(key, batch_size)
        return take(source, item)


def take(source: Sequences, item: Tensor) -> Batch:
    """The items of numbers [B]; see TextSampler."""
    begin, end = source.begin[item].unsqueeze(-1), source.end[item].unsqueeze(-1)
    at = begin + torch.arange(-1, source.length, device=item.device)
    inside = (at >= begin) & (at < end)
    rows = torch.minimum(torch.maximum(at, begin), end - 1)
    batch = {
        name: torch.where(inside, column[rows], torch.zeros((), dtype=column.dtype, device=item.device))
        for name, column in source.flat.items()
    }
    batch[IDS] = torch.where(at < begin, source.start, batch[IDS].long())
    batch[VALID] = at < end
    learnt = inside & (at >= source.train[item].unsqueeze(-1))
    batch[OBSERVED] = learnt & ~batch[ACTION]
    batch[ACTION] = learnt & batch[ACTION]
    batch[COUNT] = batch[ACTION].sum().float().expand(len(item)) / len(item)
    # position 0 is the start token, so the stream's index i is position i - begin + 1
    later = batch[SUCCESSOR] - begin + 1
    batch[SUCCESSOR] = later.clamp(0, source.length)
    if source.next_begin is None or source.next_end is None:
        # an action whose next observation is too long to be shown with it; its end needs no value
        batch[KNOWN] &= batch[DONE] | (later <= end - begin)
        return batch
    first, last = source.next_begin[item].unsqueeze(-1), source.next_end[item].unsqueeze(-1)
    at = first + torch.arange(-1, source.next_length, device=item.device)
    rows = torch.minimum(torch.maximum(at, first), source.flat[IDS].new_tensor(len(source.flat[IDS]) - 1, dtype=torch.int64))
    ids = torch.where(at < last, source.flat[IDS][rows].long(), 0)
    batch[NEXT + IDS], batch[NEXT + VALID] = torch.where(at < first, source.start, ids), at < last
    return batch


def _columns(s: Stream, dataset: Dataset, discount: float) -> dict[str, np.ndarray]:
    """Flat columns [K]."""
    rewards = dataset.columns["rewards"].cpu().numpy()
    terminal, known = (dataset.columns[n].cpu().numpy() for n in ("terminations", "successor_known"))
    many = len(s.ids)
    filled = s.action_end > s.action_begin  # an empty action has no token to carry its reward
    at = s.action_end[filled] - 1
    reward, done, can, ends = np.zeros(many, np.float32), np.zeros(many, bool), np.ones(many, bool), np.zeros(many, bool)
    reward[at], ends[at] = rewards[filled], True
    done[at] = terminal[filled]
    can[at] = (terminal | known)[filled]
    # the state after an action's token is the one before the next token that a policy chooses: after the observation that follows
    where = np.arange(many)
    successor = where.copy()
    last_of_episode = np.zeros(len(s.action_end), bool)
    last_of_episode[dataset.episode_end.cpu().numpy() - 1] = True
    following = np.empty(len(s.action_end), np.int64)
    following[~last_of_episode] = s.action_begin[1:][~last_of_episode[:-1]] - 1
    following[last_of_episode] = s.final_end - 1
    successor[at] = following[filled]
    return {
        IDS: np.asarray(s.ids), ACTION: np.asarray(s.is_action), LAST: ends, REWARD: reward, DONE: done, KNOWN: can, SUCCESSOR: successor,
        RETURN: returns(s, dataset, reward, discount),
    }  # fmt: skip


def returns(s: Stream, dataset: Dataset, reward: np.ndarray, discount: float) -> np.ndarray:
    """[K] float32: at each action token the sum of the rewards from it to the episode's end, discounted by each action token in between."""
    chosen = np.flatnonzero(s.is_action)
    owner = np.searchsorted(dataset.episode_end.cpu().numpy(), np.asarray(s.turn)[chosen], side="right")
    number = np.arange(dataset.num_episodes)
    start, end = np.searchsorted(owner, number, side="left"), np.searchsorted(owner, number, side="right")
    some = end > start
    result = np.zeros(len(s.ids), np.float32)
    result[chosen] = returns_to_go(reward[chosen], np.zeros(len(chosen)), start[some], end[some], discount)
    return result


@dataclass(frozen=True)
class Items:
    """Slices [I] of the stream; see `Sequences`."""

    begin: np.ndarray
    train: np.ndarray
    end: np.ndarray
    owner: np.ndarray  # the episode of each
    next_begin: np.ndarray | None = None
    next_end: np.ndarray | None = None
    cut: int = 0


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
        ends = np.append(actions[1:], end)  # with the observation that follows an action, where its value is asked for
        train = begin
        while train < end:
            turn = int(np.searchsorted(ends, train, side="right"))
            # an action and what follows it stay together where they can: rather less of what was before, as when acting
            whole = ends[turn] - actions[turn] <= length
            begin = max(begin, int(ends[turn] if whole else s.action_end[first + turn]) - length)
            train = max(train, begin)
            fits = int(np.searchsorted(ends, begin + length, side="right")) - 1
            piece = int(ends[fits]) if fits >= turn else min(begin + length, end)  # longer than the sequence: cut where it must be
            items.append((begin, train, piece, e))
            cut += begin > int(s.obs_begin[first])
            train, begin = piece, max(begin + 1, piece - length // 2)
    table = np.array(items, np.int64)
    return Items(table[:, 0], table[:, 1], table[:, 2], table[:, 3], cut=cut)


def _windows(s: Stream, dataset: Dataset, history: int, length: int, following: bool) -> Items:
    """Items that are single turns with the last `history` texts before them."""
    start, stop = dataset.episode_start.cpu().numpy(), dataset.episode_end.cpu().numpy()
    owner = np.repeat(np.arange(len(start)), stop - start)
    row = np.arange(len(owner))
    first = 2 * start + np.arange(len(start))  # number of each episode's first text, of all texts one after another
    begin_of, end_of = np.empty(2 * len(row) + len(start), np.int64), np.empty(2 * len(row) + len(start), np.int64)
    now = first[owner] + 2 * (row - start[owner])  # of each turn's observation
    begin_of[now], end_of[now] = s.obs_begin, s.action_begin
    begin_of[now + 1], end_of[now + 1] = s.action_begin, s.action_end
    final = first + 2 * (stop - start)
    begin_of[final], end_of[final] = s.final_begin, s.final_end
    keep = s.action_end > s.action_begin  # an empty action has no token to learn
    now, owner = now[keep], owner[keep]
    end = end_of[now + 2] if following else end_of[now + 1]
    full = begin_of[np.maximum(now - (history - 1), first[owner])]
    begin = np.maximum(full, end - length)
    train = np.maximum(begin_of[now + 1], begin)
    later_end = end_of[now + 2]
    later = np.maximum(begin_of[np.maximum(now + 2 - (history - 1), first[owner])], later_end - length)
    return Items(begin, train, end, owner, later, later_end, int((begin > full).sum()))


def _weighted(dataset: Dataset, owner: np.ndarray, device: torch.device) -> Episodes | None:
    """How items of episodes `owner` [I], which stand in order, are drawn where `Dataset.weights` differ."""
    if dataset.weights is None:
        return None
    weights = dataset.weights.cpu().numpy()
    if (weights == weights[0]).all():
        return None
    count = np.bincount(owner, minlength=dataset.num_episodes)
    first = np.cumsum(count) - count
    drawn = np.flatnonzero((weights > 0.0) & (count > 0))
    if not len(drawn):
        raise UserError(f"{dataset.spec.name}: no episode has a weight above 0: take another dataset.weighting")
    keep, other = alias_table((weights * count)[drawn])
    return Episodes(*(torch.from_numpy(np.ascontiguousarray(x)).to(device) for x in (keep, other, first[drawn], count[drawn])))
