"""Monte-Carlo returns of tokens steer a cloned policy (the baseline "MC returns" of LMRL-Gym, Abdulhai et al., 2023, arXiv 2311.18232)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from offrl.algorithm import Metrics, TrainState
from offrl.data.samplers.transitions import Batch
from offrl.lm.algorithm import SHARE, chosen
from offrl.lm.sampler import IDS, RETURN
from offrl.lm.value_guided import SteeredSettings, TokenTD, action_mask
from offrl.optim import Params
from offrl.registry import register


@dataclass
class LMMCConfig(SteeredSettings):
    """Settings of Monte-Carlo returns."""

    name: str = "lm_mc"


@register("algo", "lm_mc")
class LMMC(TokenTD):
    """Q(token) is fitted to the return that followed it, discounted for each token, with CQL's term."""

    Config = LMMCConfig
    returns_discount: ClassVar[str] = "discount"

    def value_loss(self, value: Params, state: TrainState, batch: Batch) -> tuple[Tensor, Metrics]:
        c, share = self.config, batch[SHARE][0]
        hidden = self.apply("value", value, "hidden", batch[IDS])
        before, tokens = chosen(hidden, batch)
        (q,) = self.apply("value", value, "judge", before, "q1")
        returns = batch[RETURN][action_mask(batch)]
        fit = (0.5 * self.head.loss(self.of_token(q, tokens), returns) * share).sum()
        conservative = (self.conservative(q, tokens) * share).sum()
        cloning, metrics = self.clone_loss(value, hidden, batch)
        mean = (self.head.mean(self.of_token(q, tokens)) * share).sum()
        return fit + c.conservative_weight * conservative + cloning, {
            **metrics, "value/loss": fit, "value/conservative": conservative, "value/q": mean,
        }  # fmt: skip
