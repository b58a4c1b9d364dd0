"""TD3-AWR: "A Clean Slate for Offline Reinforcement Learning" (Jackson et al., 2025, arXiv 2504.11453)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from offrl import losses
from offrl.algorithm import Metrics, TrainState
from offrl.data.samplers.transitions import Batch
from offrl.families.critics import Value
from offrl.families.penalised import PenalisedSettings, PenalisedTD3
from offrl.optim import Params
from offrl.registry import register
from offrl.settings.field import setting


@dataclass
class TD3AWRConfig(PenalisedSettings):
    """Settings of TD3-AWR. The authors search per task: actor_bc from 0.0005 to 1, critic_bc from 0 to 0.1, expectiles of 0.5, 0.7 and 0.9,
    temperatures of 0.5, 3 and 10. The defaults lie in between."""

    name: str = "td3_awr"
    actor_layer_norm: bool = setting(True, "LayerNorm after each hidden layer of the actor")
    expectile: float = setting(0.7, "of Q over the data's actions, which advantages are relative to", low=0.0, high=1.0)
    temperature: float = setting(3.0, "multiplies the advantage in the exponent of the imitation's weight; 0: ReBRAC", low=0.0)
    largest_weight: float = setting(100.0, "cap of the exponential weights", low=0.0)


@register("algo", "td3_awr")
class TD3AWR(PenalisedTD3):
    """ReBRAC that imitates an action the more the better it is: IQL's weights exp(temperature * (Q - V)), V an expectile of Q."""

    Config = TD3AWRConfig

    def modules(self) -> dict[str, nn.Module]:
        modules = super().modules()
        self.value = Value(self.config, self.spec)
        return {**modules, "value": self.value.network}

    def value_loss(self, value: Params, state: TrainState, batch: Batch) -> tuple[Tensor, Metrics]:
        q = self.critic.min_q(state.params["critic"], batch["observations"], batch["actions"])  # the online critics
        v = self.value(value, batch["observations"])
        loss = (losses.expectile_weight(q.mean - v.mean, self.config.expectile) * self.value.objective(v, q)).mean()
        return loss, {"value/loss": loss, "value/v": v.mean.mean()}

    def imitation(self, state: TrainState, batch: Batch) -> tuple[Tensor, Metrics]:
        q = self.critic.q(state.params["critic"], batch["observations"], batch["actions"]).amin(0)
        advantage = q - self.value(state.params["value"], batch["observations"]).mean
        weight = losses.advantage_weight(advantage, self.config.temperature, self.config.largest_weight)
        return weight, {"actor/advantage": advantage.mean(), "actor/weight": weight.mean()}

    def improve(self, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        state, value = self.descend(state, "value", self.value_loss, batch)  # V of the new critics, for the actor's weights
        state, actor = super().improve(state, batch)
        return state, {**value, **actor}
