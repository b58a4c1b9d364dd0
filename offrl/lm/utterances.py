"""Utterances as actions: turns of the data as transitions, for algorithms for which an action is the whole text of a
turn.

Shapes in comments: B batch, L tokens in a sequence, A tokens in an action, D width, I turns of the data.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from offrl.data.dataset import Dataset
from offrl.data.samplers.transitions import Batch, draw_rows
from offrl.data.transforms.columns import returns_to_go
from offrl.lm.models.configured import tokenizer_of
from offrl.lm.models.pretrained import SCRATCH
from offrl.lm.reference_policy import ReferenceSettings
from offrl.lm.sampler import (
    ACTION,
    DONE,
    IDS,
    KNOWN,
    NEXT,
    RETURN,
    REWARD,
    SHARE,
    VALID,
    Sequences,
    TextSampler,
    take,
    trim_padding,
)
from offrl.lm.tokens import stream
from offrl.settings.field import setting

ROW = "row"  # the row of the data that a turn is
EACH = "each"  # 1 over the number of turns in the whole batch, [B]
ALL = 1 << 40  # a history of this length holds all texts


@dataclass(frozen=True)
class UtteranceSource:
    """The source of UtteranceSampler."""

    sequences: Sequences
    columns: dict[str, Tensor]  # [I] each, of the same items


@dataclass(frozen=True)
class UtteranceSampler:
    """Turns: ids int64, valid and action bool [B, L + 1], next_ids int64 and next_valid bool [B, L' + 1] as of
    `TextSampler` with a history, and for each turn reward float32, done, known bool, return float32, discounted by
    `discount` for each turn, and its row of the data int64 [B]."""

    inner: TextSampler
    discount: float

    def prepare(self, dataset: Dataset) -> UtteranceSource:
        """The source of turns. Raises UserError for other than text data."""
        sequences = self.inner.prepare(dataset)
        s = stream(dataset, self.inner.tokenizer, self.inner.append_end)
        rows = torch.from_numpy(np.flatnonzero(s.action_end > s.action_begin)).to(dataset.device)
        columns = dataset.columns
        rewards, terminal = columns["rewards"].cpu().numpy(), columns["terminations"].cpu().numpy()
        start, end = dataset.episode_start.cpu().numpy(), dataset.episode_end.cpu().numpy()
        returns = (
            torch.from_numpy(returns_to_go(rewards, terminal, start, end, self.discount)).float().to(dataset.device)
        )
        each = {
            REWARD: columns["rewards"].float(),
            DONE: columns["terminations"],
            KNOWN: columns["terminations"] | columns["successor_known"],
            RETURN: returns,
            ROW: torch.arange(len(dataset), device=dataset.device),
        }
        return UtteranceSource(sequences, {name: column[rows] for name, column in each.items()})

    def __call__(self, source: UtteranceSource, key: Tensor, batch_size: int) -> Batch:
        inner = source.sequences
        return turns(source, draw_rows(key, batch_size, len(inner.begin), inner.weighted))


def turns(source: UtteranceSource, item: Tensor) -> Batch:
    """The turns of numbers [B]; see `UtteranceSampler`."""
    batch = take(source.sequences, item)
    tokens = {name: batch[name] for name in (IDS, VALID, ACTION, NEXT + IDS, NEXT + VALID)}
    return {**tokens, **{name: column[item] for name, column in source.columns.items()}}


def trim(batch: Batch) -> Batch:
    """A batch of turns without the positions that are padding in all rows, with `each` and `share` (see
    `offrl.lm.sampler`).
    """
    columns, rows = trim_padding(batch), len(batch[IDS])
    return {**columns, EACH: torch.full((rows,), 1.0 / rows, device=columns[SHARE].device)}


def first_of(batch: Batch) -> Tensor:
    """[B] int64: the position of each turn's first action token, which is how many tokens its state has."""
    return batch[ACTION].long().argmax(-1)


def action_of(batch: Batch) -> tuple[Tensor, Tensor]:
    """(ids int64 [B, 1 + A], how many of them count int64 [B]): each turn's action on its own, after the start
    token.
    """
    count = batch[ACTION].sum(-1)
    step = torch.arange(int(count.max()), device=count.device)
    index = (first_of(batch).unsqueeze(-1) + step).clamp(max=batch[IDS].shape[1] - 1)
    tokens = torch.where(step < count.unsqueeze(-1), batch[IDS].gather(1, index), 0)
    return torch.cat([batch[IDS][:, :1], tokens], 1), count + 1


def with_actions(batch: Batch, answers: Sequence[Sequence[int]]) -> Batch:
    """The batch with other actions: token ids for each turn, at least one."""
    device, first = batch[IDS].device, first_of(batch)
    count = torch.tensor([len(a) for a in answers], device=device)
    tokens = np.zeros((len(answers), int(count.max())), np.int64)
    for row, answer in enumerate(answers):
        tokens[row, : len(answer)] = answer
    end = (first + count).unsqueeze(-1)
    index = torch.arange(int(end.max()), device=device)
    action_ids = (
        torch.from_numpy(tokens).to(device).gather(1, (index - first.unsqueeze(-1)).clamp(0, tokens.shape[1] - 1))
    )
    state_ids = nn.functional.pad(batch[IDS], (0, max(0, len(index) - batch[IDS].shape[1])))[:, : len(index)]
    state = index < first.unsqueeze(-1)
    ids = torch.where(state, state_ids, torch.where(index < end, action_ids, 0))
    columns = {**batch, IDS: ids, VALID: index < end, ACTION: ~state & (index < end)}
    return {**columns, SHARE: (1.0 / count.sum()).expand(len(answers))}


# ---- settings


@dataclass
class UtteranceSettings(ReferenceSettings):
    """Settings of actors that learn whole utterances."""

    learning_rate: float = setting(1e-4, "Adam's learning rate of the lm_bc that is trained first", low=0.0)
    start: str = setting(
        "language_model",
        "what the actor begins with: the language model as it is, or a cloned policy (algo.policy)",
        choices=("language_model", "cloned"),
    )
    actor_learning_rate: float | None = setting(
        None, "Adam's learning rate of the actor; null: by whether algo.lm=scratch", low=0.0
    )

    @property
    def wants_reference(self) -> bool:
        return self.start == "cloned"


def with_rates(config: Any, rates: Mapping[str, tuple[float, float]]) -> Any:
    """The settings with learning rates where none are given. rates: setting -> value for a trained language model, and
    for a new one.
    """
    c = config
    for name, (trained_rate, scratch_rate) in rates.items():
        if getattr(c, name) is None:
            scratch = c.lm == SCRATCH or (name == "critic_learning_rate" and c.critic_lm == SCRATCH)
            c = dataclasses.replace(c, **{name: scratch_rate if scratch else trained_rate})
    return c


def utterance_sampler(config: Any, discount: float = 1.0) -> UtteranceSampler:
    """The sampler of turns with the histories that the settings ask for. discount: of returns, for each turn."""
    c = config
    return UtteranceSampler(
        TextSampler(tokenizer_of(c), bool(c.append_end), c.history or ALL, c.length), float(discount)
    )
