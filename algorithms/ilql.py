"""ILQL: "Offline RL for Natural Language Generation with Implicit Language Q Learning" (Snell et al., 2022, arXiv 2206.11871)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from offrl.algorithm import Metrics, TrainState
from offrl.data.samplers.transitions import Batch
from offrl.lm.algorithm import SHARE, chosen
from offrl.lm.sampler import IDS
from offrl.lm.value_guided import SteeredSettings, TokenTD
from offrl.optim import Params
from offrl.registry import register
from offrl.settings.field import setting


@dataclass
class ILQLConfig(SteeredSettings):
    """Settings of ILQL."""

    name: str = "ilql"
    expectile: float = setting(0.9, "of V's fit to the targets of Q", low=0.5, high=1.0)
    polyak: float = setting(0.005, "rate at which the targets of Q follow, their language model too", low=0.0, high=1.0)


@register("algo", "ilql")
class ILQL(TokenTD):
    """Values of tokens: Q follows r + discount V(next), V an expectile of the smaller target Q, and CQL's term keeps unseen tokens low."""

    Config = ILQLConfig
    traits = replace(TokenTD.traits, targets=("value",))
    outs: ClassVar[tuple[str, ...]] = ("q1", "q2")
    single: ClassVar[tuple[str, ...]] = ("v",)

    def value_loss(self, value: Params, state: TrainState, batch: Batch) -> tuple[Tensor, Metrics]:
        c, head, v_head, share = self.config, self.head, self.v_head, batch[SHARE][0]
        hidden = self.apply("value", value, "hidden", batch[IDS])
        before, tokens = chosen(hidden, batch)
        q1, q2, v = self.apply("value", value, "judge", before, "q1", "q2", "v")
        y, known = self.target(batch, self.next_values(value, hidden, batch, "v"))
        with torch.no_grad():
            still, _ = chosen(self.apply("value", state.target["value"], "hidden", batch[IDS]), batch)
            both = self.apply("value", state.target["value"], "judge", still, "q1", "q2")
            bar = torch.stack([head.mean(self.of_token(q, tokens)) for q in both]).amin(0)
            weight = torch.where(bar < v_head.mean(v), 1.0 - c.expectile, c.expectile)  # |expectile - 1[Qbar < V]|
        each = head.loss(self.of_token(q1, tokens), y) + head.loss(self.of_token(q2, tokens), y)
        fit = 0.5 * (each * known * share).sum()
        expectile = 0.5 * (weight * v_head.loss(v, bar) * share).sum()
        conservative = ((self.conservative(q1, tokens) + self.conservative(q2, tokens)) * share).sum()
        cloning, metrics = self.clone_loss(value, hidden, batch)
        loss = fit + expectile + c.conservative_weight * conservative + cloning
        means = {"value/q": (head.mean(self.of_token(q1, tokens)) * share).sum(), "value/v": (v_head.mean(v) * share).sum()}
        return loss, {**metrics, "value/q_loss": fit, "value/v_loss": expectile, "value/conservative": conservative, **means}
