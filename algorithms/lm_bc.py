"""Behaviour cloning of texts: a language model learns to write the actions of the data. Filtered BC: of its best
episodes only.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import Tensor, nn

from offrl.algorithm import Batch, Loss, Params, Sampler, TrainState, Update
from offrl.lm.algorithm import TextAlgorithm
from offrl.lm.models.configured import describe, language_model
from offrl.lm.sampler import IDS, OBSERVED, cross_entropy, trim_padding
from offrl.lm.settings import TextSettings
from offrl.registry import register
from offrl.settings.field import setting


@dataclass
class LMBCConfig(TextSettings):
    """Settings of behaviour cloning with a language model."""

    name: str = "lm_bc"
    observation_weight: float = setting(
        0.0,
        "weight of the loss on tokens of the observations, whose prediction teaches a model from scratch what the "
        "texts are about",
        low=0.0,
    )


@register("algo", "lm_bc")
class LMBC(TextAlgorithm[LMBCConfig]):
    """Minimise -log pi(token), the mean over all tokens of actions (LMRL-Gym, arXiv 2311.18232)."""

    def modules(self) -> dict[str, nn.Module]:
        policy = language_model(self.config)
        self.runtime.notes = [describe(policy, self.config)]
        return {"policy": policy}

    def sampler(self) -> Sampler:
        sampler: Any = super().sampler()
        return replace(sampler, with_observation=self.config.observation_weight > 0.0)

    def policy_loss(self, policy: Params, state: TrainState, batch: Batch) -> Loss:
        """-E log pi(a|h) over the tokens a of actions, and `observation_weight` times the same over those of
        observations.
        """
        hidden = self.apply("policy", policy, "hidden", batch[IDS])
        logits = partial(self.apply, "policy", policy, "logits")
        loss = cross_entropy(logits, hidden, batch)
        metrics = {"policy/loss": loss}
        if not self.config.observation_weight:
            return loss, metrics
        observed = cross_entropy(logits, hidden, batch, OBSERVED)
        return loss + self.config.observation_weight * observed, {**metrics, "observations/loss": observed}

    def update(self, state: TrainState, batch: Batch, key: Tensor, *, phase: int) -> Update:
        return self.descend(state, "policy", self.policy_loss, trim_padding(batch))
