"""A ring of turns of fixed shape, for `TrainState.buffers`: the newest turns of a policy's episodes in an
environment.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from offrl import rng
from offrl.algorithm import Tree
from offrl.data.samplers.transitions import Batch
from offrl.lm.algorithm import TextAlgorithm
from offrl.lm.models.decoding import right_padded
from offrl.lm.sampler import ACTION, DONE, IDS, KNOWN, NEXT, RETURN, REWARD, VALID
from offrl.lm.utterances import UtteranceSource, first_of, turns

FIRST, END = "first", "end"  # positions: of the first token of the action, and behind the last one
PART = 4_096  # turns of the data that are moved at once


def empty(capacity: int, width: int) -> Tree:
    """A ring for `capacity` turns of at most `width` tokens, state and action together."""
    number = torch.zeros((), dtype=torch.int64)
    count, tokens = torch.zeros(capacity, dtype=torch.int32), torch.zeros(capacity, width, dtype=torch.int32)
    turn = {IDS: tokens, FIRST: count, END: count, NEXT + IDS: tokens, NEXT + END: count, REWARD: torch.zeros(capacity)}
    turn |= dict.fromkeys((DONE, KNOWN), torch.zeros(capacity, dtype=torch.bool))
    return {name: column.clone() for name, column in (turn | {"at": number, "count": number}).items()}


def push(ring: Tree, batch: Batch) -> Tree:
    """The ring with a batch of turns added, over the oldest ones where it is full. Turns beyond its capacity are left
    out.
    """
    capacity, width = ring[IDS].shape
    rows = {
        IDS: pad(batch[IDS], width),
        FIRST: first_of(batch),
        END: batch[VALID].sum(-1),
        NEXT + IDS: pad(batch[NEXT + IDS], width),
        NEXT + END: batch[NEXT + VALID].sum(-1),
        REWARD: batch[REWARD],
        DONE: batch[DONE],
        KNOWN: batch[KNOWN],
    }
    rows = {name: column[-capacity:] for name, column in rows.items()}
    count = len(rows[END])
    slots = (ring["at"] + torch.arange(count, device=ring["at"].device)) % capacity
    columns = {name: ring[name].index_copy(0, slots, column.to(ring[name].dtype)) for name, column in rows.items()}
    return {**columns, "at": (ring["at"] + count) % capacity, "count": (ring["count"] + count).clamp(max=capacity)}


def draw(ring: Tree, key: Tensor, count: int) -> Batch:
    """`count` turns of the ring, with the columns of `UtteranceSampler` but returns."""
    return turns_at(ring, rng.randint(key, (count,), ring["count"].clamp(min=1)))


def turns_at(ring: Tree, item: Tensor) -> Batch:
    """The turns in places [B]."""
    return as_batch({name: column[item] for name, column in ring.items() if name not in ("at", "count")})


def as_batch(turn: Mapping[str, Tensor]) -> Batch:
    """Turns in the columns of a ring as a batch, whose masks say where a text and an action are."""
    columns = dict(turn)
    first, end, next_end = (columns.pop(name).unsqueeze(-1) for name in (FIRST, END, NEXT + END))
    position = torch.arange(columns[IDS].shape[1], device=first.device)
    masks = {VALID: position < end, ACTION: (position >= first) & (position < end), NEXT + VALID: position < next_end}
    return {**columns, **{name: columns[name].long() for name in (IDS, NEXT + IDS)}, **masks}


def fill(ring: Tree, source: UtteranceSource) -> Tree:
    """The ring with the data's last turns in it."""
    count = len(source.sequences.begin)
    for begin in range(max(0, count - len(ring[END])), count, PART):
        ring = push(ring, turns(source, torch.arange(begin, min(begin + PART, count), device=ring["at"].device)))
    return ring


def join(first: Batch, second: Batch) -> Batch:
    """Two batches of turns one after the other; columns that only one has are left out."""
    names = (IDS, VALID, ACTION, NEXT + IDS, NEXT + VALID)
    width = max(b[n].shape[1] for b in (first, second) for n in names)
    columns = [{n: pad(c, width) if n in names else c for n, c in b.items() if n != RETURN} for b in (first, second)]
    return {n: torch.cat([columns[0][n], columns[1][n]]) for n in columns[0] if n in columns[1]}


def pad(column: Tensor, width: int) -> Tensor:
    """[B, T] -> [B, width], with zeros."""
    return F.pad(column, (0, width - column.shape[1]))


def of_episodes(
    algorithm: TextAlgorithm,
    episodes: Sequence[Mapping[str, Any]],
    width: int,
    device: torch.device,
    discount: float = 1.0,
) -> Batch:
    """The turns of episodes in the canonical form as a batch with the columns of `UtteranceSampler` but row; rewards in
    the units that the algorithm is trained in. Actions without a token are left out."""
    c, tokenizer, spec = algorithm.config, algorithm.tokenizer, algorithm.spec
    states, actions, next_states, rewards, returns, dones = [], [], [], [], [], []
    for episode in episodes:
        texts: list[str] = []
        episode_rewards = [turn["reward"] * spec.reward_scale + spec.reward_shift for turn in episode["turns"]]
        returns_from = list(
            itertools.accumulate(reversed(episode_rewards), lambda total, reward: reward + discount * total)
        )[::-1]
        for number, turn in enumerate(episode["turns"]):
            texts.append(turn["obs"])
            action = tokenizer.encode([turn["action"]])[0]
            if c.append_end:
                action = np.append(action, np.int32(tokenizer.end or 0))
            is_last = number + 1 == len(episode["turns"])
            next_text = episode["final_obs"] if is_last else episode["turns"][number + 1]["obs"]
            if len(action):
                action = action[: width - 2]
                prompt = algorithm.prompt(texts)
                states.append(np.append(prompt[:1], prompt[1:][-(width - 1 - len(action)) :]))
                actions.append(action)
                next_states.append(algorithm.prompt([*texts, turn["action"], next_text]))
                rewards.append(episode_rewards[number])
                returns.append(returns_from[number])
                dones.append(is_last and bool(episode["terminated"]))
            texts.append(turn["action"])
    sequences = [np.concatenate([s, a]) for s, a in zip(states, actions, strict=True)]
    (ids, end), (next_ids, next_end) = (right_padded(rows, 0, device) for rows in (sequences, next_states))
    return as_batch(
        {
            IDS: pad(ids, width),
            FIRST: torch.tensor([len(state) for state in states], device=device),
            END: end,
            NEXT + IDS: pad(next_ids, width),
            NEXT + END: next_end,
            REWARD: torch.tensor(rewards, dtype=torch.float32, device=device),
            DONE: torch.tensor(dones, dtype=torch.bool, device=device),
            KNOWN: torch.ones(len(sequences), dtype=torch.bool, device=device),
            RETURN: torch.tensor(returns, dtype=torch.float32, device=device),
        }
    )
