"""Monte-Carlo returns of tokens guide a cloned policy (the baseline "MC returns" of LMRL-Gym, Abdulhai et al., 2023,
arXiv 2311.18232).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import Tensor, nn

from offrl.algorithm import Actor, Batch, Dataset, Grid, Loss, Params, Sampler, TrainState, Update
from offrl.lm import reference_policy
from offrl.lm.algorithm import TextAlgorithm
from offrl.lm.models.configured import language_model
from offrl.lm.sampler import IDS, RETURN, SHARE, action_mask, cross_entropy, states_and_tokens, trim_padding
from offrl.lm.value_guided import TokenValues, ValueGuidedActor, ValueGuidedSettings, with_token_value_range
from offrl.registry import register


@dataclass
class LMMCConfig(ValueGuidedSettings):
    """Settings of Monte-Carlo returns."""

    name: str = "lm_mc"


@register("algo", "lm_mc")
class LMMC(TextAlgorithm):
    """Q(token) is fitted to the return that followed it, discounted for each token, with CQL's term."""

    Config = LMMCConfig
    traits = replace(TextAlgorithm.traits, policy_modules=("value",))

    @classmethod
    def fit_config(cls, config: Any, dataset: Dataset, grid: Grid = None) -> Any:
        return with_token_value_range(super().fit_config(config, dataset, grid), dataset)

    def modules(self) -> dict[str, nn.Module]:
        lm = language_model(self.config)
        self.reference = reference_policy.frozen_reference(self.config, self.pretrained)
        self.values = TokenValues(self.config, self.spec, lm, ("q1",))
        self.runtime.notes = self.values.notes
        return {"value": self.values.network}

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
        if c.trunk == "shared":
            metrics["policy/loss"] = cross_entropy(partial(values, value, "logits"), hidden, batch)
            loss = loss + c.clone_weight * metrics["policy/loss"]
        return loss, metrics

    def update(self, state: TrainState, batch: Batch, key: Tensor, *, phase: int) -> Update:
        return self.descend(state, "value", self.value_loss, trim_padding(batch))

    def actor(self, state: TrainState) -> Actor:
        return ValueGuidedActor(self, state, self.values, self.reference)

    def assets(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        tensors, about = super().assets()
        reference, identity = reference_policy.pack(self.pretrained, self.config.policy_id)
        return {**tensors, **reference}, {**about, **identity}

    @classmethod
    def load_assets(cls, tensors: dict[str, Tensor], about: dict[str, Any]) -> Mapping[str, Any]:
        remainder, pretrained = reference_policy.unpack(tensors)
        if "identity" in about:
            super().load_assets(remainder, about)
        return pretrained
