"""Policies of texts: an action is a text that answers the dialogue so far.

Shapes in comments: B prompts, T tokens, V tokens of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from offrl.actor import Actor, Carry
from offrl.lm.models import decoding
from offrl.lm.models import tokenizer as tokenizing
from offrl.lm.models.causal_lm import LM
from offrl.lm.models.pretrained import SCRATCH

if TYPE_CHECKING:
    from offrl.lm.algorithm import TextAlgorithm

PROMPTS = 256  # that are written to at once


class TextActor(Actor):
    """Policy that continues dialogues. A carry lists each episode's dialogue: a tuple of texts, observation, action,
    observation, ...
    """

    algorithm: TextAlgorithm

    def start(self, episodes: int) -> Carry:
        return [()] * episodes

    def act(self, carry: Carry, observations: Any, key: Tensor, *, explore: bool) -> tuple[Any, Carry]:
        """Actions (a list of E texts) for observations (E texts; None: an episode that is over, whose action is empty),
        and the next carry.

        Drawn or the likeliest, by the setting `decoding`; with `explore` always drawn. An observation may bring
        `legal_actions`."""
        indices = [e for e, text in enumerate(observations) if text is not None]
        histories = {e: (*carry[e], str(observations[e])) for e in indices}
        replies: dict[int, str] = {}
        for start in range(0, len(indices), PROMPTS):
            rows = indices[start : start + PROMPTS]
            legal = [getattr(observations[e], "legal_actions", None) for e in rows]
            texts = self.reply([histories[e] for e in rows], legal, rows, key, explore)
            replies |= dict(zip(rows, texts, strict=True))
        actions = [replies.get(e, "") for e in range(len(observations))]
        return actions, [(*histories[e], actions[e]) if e in histories else carry[e] for e in range(len(observations))]

    def reply(
        self, histories: Sequence[Sequence[str]], legal: Sequence[Any], rows: Sequence[int], key: Tensor, explore: bool
    ) -> list[str]:
        """An action for each history; `rows` number them, so that a draw does not depend on the others written beside
        it.
        """
        c, tokenizer = self.algorithm.config, self.algorithm.tokenizer
        stochastic = explore or c.decoding == "sample"
        prompts = [self.algorithm.prompt(texts) for texts in histories]
        rerank = c.legal == "rerank"
        rerank_rows = [i for i, actions in enumerate(legal) if rerank and actions]
        write_rows = [i for i, actions in enumerate(legal) if not (rerank and actions)]
        replies = [""] * len(prompts)
        if rerank_rows:
            noise = decoding.uniform_noise(key, [rows[i] for i in rerank_rows], self.device)(0) if stochastic else None
            choices = self.rerank([prompts[i] for i in rerank_rows], [list(legal[i]) for i in rerank_rows], noise)
            for i, action in zip(rerank_rows, choices, strict=True):
                replies[i] = action
        if write_rows:
            source = decoding.uniform_noise(key, [rows[i] for i in write_rows], self.device) if stochastic else None
            for i, ids in zip(write_rows, self.write([prompts[i] for i in write_rows], source), strict=True):
                replies[i] = tokenizer.decode(ids)
        return replies

    def write(self, prompts: Sequence[np.ndarray], noise: Callable[[int], Tensor] | None) -> list[list[int]]:
        """The tokens of an action for each prompt; see `decoding.write`."""
        c, tokenizer = self.algorithm.config, self.algorithm.tokenizer
        return decoding.write(
            self.reader(), prompts, pad=tokenizer.pad, stops=self._stops(), allowed=self._allowed(),
            max_tokens=int(c.action_tokens or 1), noise=noise, temperature=c.sampling_temperature,
        )  # fmt: skip

    def rerank(self, prompts: Sequence[np.ndarray], legal: Sequence[Sequence[str]], noise: Tensor | None) -> list[str]:
        """One of the legal actions for each prompt, drawn in proportion to how likely the policy is to write it, or the
        likeliest.
        """
        tokenizer, c = self.algorithm.tokenizer, self.algorithm.config
        choices = []
        for row, (prompt, actions) in enumerate(zip(prompts, legal, strict=True)):
            tokens = tokenizer.encode(actions)
            if c.append_end:
                tokens = [np.append(ids, np.int32(tokenizer.end or 0)) for ids in tokens]
            ids, lengths = decoding.right_padded(
                [np.append(prompt, action) for action in tokens], tokenizer.pad, self.device
            )
            log_probs = self.scores(ids[:, :-1])[..., : tokenizer.size].log_softmax(-1)
            token_log_probs = log_probs.gather(-1, ids[:, 1:].unsqueeze(-1)).squeeze(-1)
            position = torch.arange(token_log_probs.shape[1], device=self.device)
            mask = (position >= len(prompt) - 1) & (position < lengths.unsqueeze(-1) - 1)
            total = (token_log_probs * mask).sum(-1).unsqueeze(0)
            choices.append(
                actions[
                    int(decoding.choose(total, None if noise is None else noise[row : row + 1], c.sampling_temperature))
                ]
            )
        return choices

    def reader(self) -> decoding.Read:
        """The function that reads tokens and gives the logits of the next one; it keeps a cache of its own."""
        cache = LM.fresh_cache()

        def read(ids: Tensor, valid: Tensor) -> Tensor:
            return self.apply("policy", "logits", self.apply("policy", "hidden", ids, valid, cache)[:, -1])

        return read

    def scores(self, ids: Tensor) -> Tensor:
        """The logits [B, T, V] by which tokens are drawn, at every position of tokens [B, T], without a cache."""
        return self.apply("policy", "logits", self.apply("policy", "hidden", ids))

    @property
    def device(self) -> torch.device:
        """The device of the policy's parameters."""
        return next(iter(self.state.params[self.algorithm.traits.policy_modules[0]].values())).device

    def _stops(self) -> Tensor:
        """[V] bool: tokens that end an action."""
        tokenizer = self.algorithm.tokenizer
        flags = torch.zeros(max(tokenizer.size, self.algorithm.lm().vocabulary), dtype=torch.bool, device=self.device)
        if not self.algorithm.config.append_end:
            flags[: tokenizer.size] = torch.from_numpy(tokenizer.stops.copy()).to(self.device)
        if tokenizer.end is not None:
            flags[tokenizer.end] = True
        return flags

    def _allowed(self) -> Tensor:
        """[V] bool: tokens that may be written: not those that stand for nothing."""
        tokenizer = self.algorithm.tokenizer
        flags = torch.zeros(self.algorithm.lm().vocabulary, dtype=torch.bool, device=self.device)
        flags[: tokenizer.size] = True
        if self.algorithm.config.lm == SCRATCH:
            flags[: len(tokenizing.OWN)] = False
        if tokenizer.end is not None:
            flags[tokenizer.end] = True
        return flags
