"""Critics of whole utterances (arXiv 2402.19446): a language model reads the state and the utterance, and heads give
their values.

Shapes in comments: B batch, T tokens, D width, K outputs of a value head.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from offrl.algorithm import Part
from offrl.data.dataset import DataSpec
from offrl.data.samplers.transitions import Batch
from offrl.lm.models.causal_lm import LM, LMWithHeads, Size, call, value_mlp
from offrl.lm.models.configured import language_model, tokenizer_of
from offrl.lm.models.pretrained import SCRATCH
from offrl.lm.sampler import DONE, IDS, NEXT, REWARD, VALID
from offrl.lm.settings import head_of
from offrl.lm.utterances import UtteranceSettings, action_of, first_of
from offrl.optim import Params
from offrl.settings.field import setting

QS, VS = ("q1", "q2"), ("v1", "v2")


@dataclass
class UtteranceCriticSettings(UtteranceSettings):
    """Settings of actors that learn whole utterances from a critic."""

    critic_lm: str = setting(
        "same",
        "the language model that the critic reads texts with: one of its own like the actor's, or a small GPT-2 of "
        "random weights with the settings width, layers and heads and the same tokens",
        choices=("same", SCRATCH),
    )
    critic_learning_rate: float | None = setting(
        None, "Adam's learning rate of the critic; null: by whether it is from scratch", low=0.0
    )
    value_layers: int = setting(3, "layers of each value head", low=1)

    @property
    def begins_anew(self) -> tuple[str, ...]:
        return ("critic",) if self.critic_lm == SCRATCH else ()


def critic_lm(config: Any) -> LM:
    """A new language model for the critic."""
    c = config
    if c.critic_lm == SCRATCH and c.lm != SCRATCH:
        tokens = max(tokenizer_of(c).size, language_model(c).vocabulary)
        size = Size(c.width, c.layers, c.heads, c.length + int(c.action_tokens or 0) + 1, tokens)
        return LM(None, size, checkpointing=c.checkpointing)
    return language_model(c)


class UtteranceNetwork(LMWithHeads):
    """A language model that reads states and actions, each on its own, and heads on its state at the last token of a
    text (the authors of ArCHer use RoBERTa's first one). Methods are called by name, as `LM`'s."""

    def __init__(self, lm: LM, state_heads: Mapping[str, int], pair_heads: Mapping[str, int], layers: int) -> None:
        """state_heads: heads on the state, name -> width of the output; pair_heads: those on state and action. They
        begin at 0.
        """
        super().__init__(lm, {}, layers)
        for outs, width in ((state_heads, lm.width), (pair_heads, 2 * lm.width)):
            self.heads.update({n: value_mlp(width, [lm.width] * (layers - 1), out) for n, out in outs.items()})

    def encode(self, ids: Tensor, count: Tensor) -> Tensor:
        """[B, D] of texts int64 [B, T], of which the first `count` [B] tokens are read."""
        hidden = self.lm.hidden(ids[:, : int(count.max())])
        return hidden[torch.arange(len(ids), device=ids.device), count - 1]


class UtteranceCritic(Part):
    """Two Qs of states and utterances and two Vs of states, the algorithm's module "critic"."""

    def __init__(self, config: Any, spec: DataSpec) -> None:
        super().__init__(config, spec)
        self.head = head_of(config)
        out = self.head.out_dim
        self.network = UtteranceNetwork(
            critic_lm(config), dict.fromkeys(VS, out), dict.fromkeys(QS, out), config.value_layers
        )

    def __call__(self, params: Params, *x: Any) -> Any:
        """The method x[0] of the network."""
        return call(self.network, params, *x)

    def q_and_v(self, params: Params, batch: Batch) -> tuple[Tensor, Tensor]:
        """Outputs of Q_i for the batch's states and actions, and of V_i for its states: [2, B, K] each."""
        state = self(params, "encode", batch[IDS], first_of(batch))
        return self.q(params, batch, state), self.v(params, state)

    def q(self, params: Params, batch: Batch, state: Tensor | None = None) -> Tensor:
        """Outputs of Q_i [2, B, K] for the batch's states and actions. state: the encoded states [B, D], where they are
        known already.
        """
        if state is None:
            state = self(params, "encode", batch[IDS], first_of(batch))
        action = self(params, "encode", *action_of(batch))
        return torch.stack(self(params, "outputs", torch.cat([state, action], -1), *QS))

    def v(self, params: Params, state: Tensor) -> Tensor:
        """Outputs of V_i [2, B, K] for encoded states [B, D]."""
        return torch.stack(self(params, "outputs", state, *VS))

    def td_target(self, target: Params, batch: Batch) -> Tensor:
        """r + discount (1 - d) Vbar_i(s') [2, B], without gradient."""
        with torch.no_grad():
            next_state = self(target, "encode", batch[NEXT + IDS], batch[NEXT + VALID].sum(-1))
            discount = self.config.discount * (~batch[DONE]).float()
            return batch[REWARD] + discount * self.head.mean(self.v(target, next_state))

    def target_q(self, target: Params, batch: Batch) -> Tensor:
        """Qbar_i(s, a) [2, B], without gradient."""
        with torch.no_grad():
            return self.head.mean(self.q(target, batch))

    def advantage(self, params: Params, batch: Batch) -> Tensor:
        """min_i Q_i(s, a) - min_i V_i(s) [B], without gradient."""
        with torch.no_grad():
            q, v = self.q_and_v(params, batch)
            return self.head.mean(q).amin(0) - self.head.mean(v).amin(0)
