"""TD3+BC: "A Minimalist Approach to Offline Reinforcement Learning" (Fujimoto and Gu, 2021, arXiv 2106.06860)."""

from __future__ import annotations

from dataclasses import dataclass

from offrl.algorithm import Batch, Loss, Params, TrainState
from offrl.families.critics import ConstraintSettings, RepresentationSettings, RiskSettings
from offrl.families.td3 import TD3, TD3Settings
from offrl.registry import register
from offrl.settings.field import setting


@dataclass
class TD3BCConfig(TD3Settings, ConstraintSettings, RepresentationSettings, RiskSettings):
    """Settings of TD3+BC; the defaults are the paper's."""

    name: str = "td3_bc"
    alpha: float = setting(2.5, "weight of the normalised value against imitation; larger is greedier", low=0.0)


@register("algo", "td3_bc")
class TD3BC(TD3[TD3BCConfig]):
    """TD3 whose actor also imitates the data; the critics' loss and the update are TD3's."""

    def actor_loss(self, actor: Params, state: TrainState, batch: Batch) -> Loss:
        """E [(pi(s) - a)^2 - lambda Q_1(s, pi(s))] with lambda = alpha / E |Q_1(s, pi(s))| (section 5)."""
        (action,) = self.apply("actor", actor, batch["observations"])
        q = self.first_q(state, batch["observations"], action)
        scale = self.config.alpha / q.detach().abs().mean()
        imitation = (action - batch["actions"]).square().mean()
        loss = imitation - scale * q.mean()
        metrics = {"actor/loss": loss, "actor/bc": imitation, "actor/q": q.mean()}
        return self.limited(loss, metrics, state, batch["observations"], action)
