"""ILQL: "Offline RL for Natural Language Generation with Implicit Language Q Learning" (Snell et al., 2022, arXiv
2206.11871).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from offrl.algorithm import Batch, Loss, Params, TrainState, Update
from offrl.lm.algorithm import TextAlgorithm
from offrl.lm.sampler import IDS, SHARE, states_and_tokens, trim_padding
from offrl.lm.value_guided import ValueGuided, ValueGuidedSettings
from offrl.registry import register
from offrl.settings.field import setting


@dataclass
class ILQLConfig(ValueGuidedSettings):
    """Settings of ILQL."""

    name: str = "ilql"
    expectile: float = setting(0.9, "of V's fit to the targets of Q", low=0.5, high=1.0)
    polyak: float = setting(0.005, "rate at which the targets of Q follow, their language model too", low=0.0, high=1.0)


@register("algo", "ilql")
class ILQL(ValueGuided[ILQLConfig], TextAlgorithm[ILQLConfig]):
    """Values of tokens: Q follows r + gamma V(next), V an expectile of the smaller target Q, and CQL's term keeps
    unseen tokens low. Means are over the tokens of actions; a state h is a history up to a token a."""

    traits = replace(TextAlgorithm.traits, targets=("value",), policy_modules=("value",))
    q_heads, v_heads = ("q1", "q2"), ("v",)

    def q_loss(self, qs: tuple[Tensor, Tensor], value: Params, hidden: Tensor, batch: Batch) -> Tensor:
        """1/2 sum_j E (r + gamma V(h') - Q_j(h, a))^2, where h' is known. qs: outputs of both heads for the tokens [M,
        K].
        """
        y, known = self.values.td_target(batch, self.values.next_values(value, hidden, batch, "v"))
        each = self.values.head.loss(qs[0], y) + self.values.head.loss(qs[1], y)
        return 0.5 * (each * known * batch[SHARE][0]).sum()

    def v_loss(self, v: Tensor, state: TrainState, batch: Batch) -> Tensor:
        """1/2 E |tau - 1(Qbar < V)| (Qbar - V(h))^2, Qbar the smaller target Q of h and a. v: outputs of the head [M,
        K].
        """
        with torch.no_grad():
            states, tokens = states_and_tokens(self.values(state.target["value"], "hidden", batch[IDS]), batch)
            targets = self.values(state.target["value"], "outputs", states, "q1", "q2")
            q = torch.stack([self.values.head.mean(self.values.of_tokens(x, tokens)) for x in targets]).amin(0)
            weight = torch.where(q < self.values.v_head.mean(v), 1.0 - self.config.expectile, self.config.expectile)
        return 0.5 * (weight * self.values.v_head.loss(v, q) * batch[SHARE][0]).sum()

    def cql_loss(self, q1: Tensor, q2: Tensor, tokens: Tensor, batch: Batch) -> Tensor:
        """-sum_j E log softmax(Q_j(h))[a] (equation 6). q1, q2: outputs for all tokens [M, V * K]."""
        return ((self.values.cql(q1, tokens) + self.values.cql(q2, tokens)) * batch[SHARE][0]).sum()

    def value_loss(self, value: Params, state: TrainState, batch: Batch) -> Loss:
        """L_Q + L_V + alpha L_CQL; with trunk=shared also -E log pi(a|h), the cloning loss of the same language
        model.
        """
        c, values, share = self.config, self.values, batch[SHARE][0]
        hidden = values(value, "hidden", batch[IDS])
        states, tokens = states_and_tokens(hidden, batch)
        q1, q2, v = values(value, "outputs", states, "q1", "q2", "v")
        qs = values.of_tokens(q1, tokens), values.of_tokens(q2, tokens)
        q_loss = self.q_loss(qs, value, hidden, batch)
        v_loss = self.v_loss(v, state, batch)
        cql = self.cql_loss(q1, q2, tokens, batch)
        loss = q_loss + v_loss + c.conservative_weight * cql
        means = {"value/q": values.head.mean(qs[0]), "value/v": values.v_head.mean(v)}
        metrics = {"value/q_loss": q_loss, "value/v_loss": v_loss, "value/conservative": cql}
        metrics |= {name: (x * share).sum() for name, x in means.items()}
        return self.with_cloning(loss, metrics, value, hidden, batch)

    def update(self, state: TrainState, batch: Batch, key: Tensor, *, phase: int) -> Update:
        state, metrics = self.descend(state, "value", self.value_loss, trim_padding(batch))
        return self.polyak(state, "value"), metrics
