"""Monte-Carlo returns of tokens guide a cloned policy (the baseline "MC returns" of LMRL-Gym, Abdulhai et al., 2023,
arXiv 2311.18232).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from offrl.algorithm import Batch, Loss, Params, Sampler, TrainState, Update
from offrl.lm.algorithm import TextAlgorithm
from offrl.lm.sampler import IDS, RETURN, SHARE, action_mask, states_and_tokens, trim_padding
from offrl.lm.value_guided import ValueGuided, ValueGuidedSettings
from offrl.registry import register


@dataclass
class LMMCConfig(ValueGuidedSettings):
    """Settings of Monte-Carlo returns."""

    name: str = "lm_mc"


@register("algo", "lm_mc")
class LMMC(ValueGuided[LMMCConfig], TextAlgorithm[LMMCConfig]):
    """Q(token) is fitted to the return that followed it, discounted for each token, with CQL's term."""

    traits = replace(TextAlgorithm.traits, policy_modules=("value",))

    def sampler(self) -> Sampler:
        sampler: Any = super().sampler()
        return replace(sampler, discount=float(self.config.discount))

    def value_loss(self, value: Params, state: TrainState, batch: Batch) -> Loss:
        """1/2 E (R - Q(h, a))^2 - alpha E log softmax(Q(h))[a]; with trunk=shared also -E log pi(a|h), the cloning
        loss.
        """
        c, values, share = self.config, self.values, batch[SHARE][0]
        hidden = values(value, "hidden", batch[IDS])
        states, tokens = states_and_tokens(hidden, batch)
        (logits,) = values(value, "outputs", states, "q1")
        q = values.of_tokens(logits, tokens)
        fit = (0.5 * values.head.loss(q, batch[RETURN][action_mask(batch)]) * share).sum()
        cql = (values.cql(logits, tokens) * share).sum()
        loss = fit + c.conservative_weight * cql
        metrics = {"value/loss": fit, "value/conservative": cql, "value/q": (values.head.mean(q) * share).sum()}
        return self.with_cloning(loss, metrics, value, hidden, batch)

    def update(self, state: TrainState, batch: Batch, key: Tensor, *, phase: int) -> Update:
        return self.descend(state, "value", self.value_loss, trim_padding(batch))
