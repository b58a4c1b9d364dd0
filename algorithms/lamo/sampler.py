"""LaMo's batches: windows of episodes, and of a text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from offrl import rng
from offrl.algorithm import Batch, Dataset, Sampler
from offrl.data.samplers.sequences import Sequences
from offrl.errors import UserError
from offrl.lm.models import tokenizer

if TYPE_CHECKING:
    from offrl.algorithms.lamo.algorithm import LaMo

TEXT = "text"  # a column of batches: tokens [TEXT_BATCH, text_length]
TEXT_BATCH = 2  # windows of text in an update
SPEAKING = 3_001  # folded into an update's key for the text that is drawn, and for the dropout on it


@dataclass(frozen=True)
class LanguageSource:
    """Data of all replicas: windows of episodes, the language model's frozen tensors, and a text's tokens [N]."""

    sequences: Sequences
    frozen: dict[str, Tensor]
    text: Tensor | None


@dataclass(frozen=True)
class LanguageSampler:
    """Windows of episodes, and of a text."""

    algorithm: LaMo
    inner: Sampler

    def prepare(self, dataset: Dataset) -> LanguageSource:
        actor, c = self.algorithm.networks["actor"], self.algorithm.config
        text = tokenizer.tokens(self.algorithm.language, c.text).to(dataset.device) if c.text else None
        if text is not None and len(text) < self.algorithm.text_length:
            raise UserError(
                f"algo.text={c.text} has {len(text)} tokens, fewer than algo.text_length={self.algorithm.text_length}"
            )
        copies: dict[int, Tensor] = {}  # words and the head may be one tensor
        frozen = {
            name: copies.setdefault(id(t), t.to(dataset.device))
            for name, t in actor.named_buffers(remove_duplicate=False)
        }
        return LanguageSource(self.inner.prepare(dataset), frozen, text)

    def __call__(self, source: LanguageSource, key: Tensor, batch_size: int) -> Batch:
        batch = self.inner(source.sequences, key, batch_size)
        if source.text is None:
            return batch
        length = self.algorithm.text_length
        begin = rng.randint(rng.fold_in(key, SPEAKING), (TEXT_BATCH,), len(source.text) - length + 1)
        rows = begin.unsqueeze(-1) + torch.arange(length, device=begin.device)
        return {**batch, TEXT: source.text[rows]}
