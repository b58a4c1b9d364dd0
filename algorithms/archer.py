"""ArCHer from data: "ArCHer: Training Language Model Agents via Hierarchical Multi-Turn RL" (Zhou et al., 2024, arXiv
2402.19446).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from offrl.algorithm import Batch, Dataset, Grid, Loss, Params, Sampler, TrainState, Update
from offrl.lm.algorithm import TextAlgorithm
from offrl.lm.models.configured import language_model
from offrl.lm.sampler import KNOWN
from offrl.lm.settings import ValueHeadSettings, with_value_range
from offrl.lm.utterance_critic import UtteranceCritic, UtteranceCriticSettings
from offrl.lm.utterances import EACH, trim, utterance_sampler, with_rates
from offrl.registry import register
from offrl.settings.field import setting

# the authors', and for new networks
RATES = {"actor_learning_rate": (1e-4, 3e-4), "critic_learning_rate": (1e-5, 1e-3)}


@dataclass
class ArCHerConfig(ValueHeadSettings, UtteranceCriticSettings):
    """Settings of offline ArCHer."""

    name: str = "archer"
    discount: float = setting(0.99, "discount factor, of each turn", low=0.0, high=1.0)
    polyak: float = setting(0.05, "rate at which the critic's target follows", low=0.0, high=1.0)
    expectile: float = setting(0.9, "of V's fit to the targets of Q", low=0.5, high=1.0)
    temperature: float = setting(1.0, "inverse temperature of the actor's weights", low=0.0)
    max_weight: float = setting(100.0, "cap of the actor's weights, which the authors' code does not have", low=0.0)


@register("algo", "archer")
class ArCHer(TextAlgorithm[ArCHerConfig]):
    """A critic of whole utterances, learnt as IQL's, above an actor that writes tokens (arXiv 2402.19446, section 4.3,
    in its offline form by the authors). Two Qs and two Vs, each pair with targets of its own."""

    traits = replace(TextAlgorithm.traits, targets=("critic",))

    @classmethod
    def fit_config(cls, config: ArCHerConfig, dataset: Dataset, grid: Grid = None) -> ArCHerConfig:
        return with_value_range(with_rates(super().fit_config(config, dataset, grid), RATES), dataset)

    def modules(self) -> dict[str, nn.Module]:
        self.critic = UtteranceCritic(self.config, self.spec)
        return {"policy": language_model(self.config), "critic": self.critic.network}

    def sampler(self) -> Sampler:
        return utterance_sampler(self.config, self.config.discount)

    def q_loss(self, q: Tensor, state: TrainState, batch: Batch) -> Tensor:
        """sum_i E (r + gamma (1 - d) Vbar_i(s') - Q_i(s, a))^2, where s' is known or not needed. q: outputs [2, B,
        K].
        """
        target = self.critic.td_target(state.target["critic"], batch)
        return (self.critic.head.loss(q, target) * batch[KNOWN].float() * batch[EACH]).sum()

    def v_loss(self, v: Tensor, target_q: Tensor, batch: Batch) -> Tensor:
        """sum_i E |tau - 1(Qbar_i < V_i)| (Qbar_i(s, a) - V_i(s))^2. v: outputs [2, B, K]; target_q: Qbar [2, B]."""
        c, value = self.config, self.critic.head.mean(v)
        weight = torch.where(target_q < value, 1.0 - c.expectile, c.expectile).detach()
        return (weight * self.critic.head.loss(v, target_q) * batch[EACH]).sum()

    def critic_loss(self, critic: Params, state: TrainState, batch: Batch) -> Loss:
        """L_Q + L_V."""
        q, v = self.critic.q_and_v(critic, batch)
        target_q = self.critic.target_q(state.target["critic"], batch)
        q_loss, v_loss = self.q_loss(q, state, batch), self.v_loss(v, target_q, batch)
        means = {
            name: (self.critic.head.mean(x)[0] * batch[EACH]).sum() for name, x in (("critic/q", q), ("critic/v", v))
        }
        return q_loss + v_loss, {"critic/q_loss": q_loss, "critic/v_loss": v_loss, **means}

    def actor_loss(self, policy: Params, state: TrainState, batch: Batch) -> Loss:
        """-E min(exp(beta A), cap) log pi(a|s), the whole utterance's, with A = min_i Q_i(s, a) - min_i V_i(s)."""
        c, row_weight = self.config, batch[EACH]
        advantage = self.critic.advantage(state.params["critic"], batch)
        weight = (c.temperature * advantage).exp().clamp(max=c.max_weight)
        log_prob = self.log_probs(policy, batch).sum(-1)
        loss = -(weight * log_prob * row_weight).sum()
        means = {"actor/weight": weight, "actor/advantage": advantage, "actor/log_prob": log_prob}
        return loss, {"actor/loss": loss, **{name: (x * row_weight).sum() for name, x in means.items()}}

    def update(self, state: TrainState, batch: Batch, key: Tensor, *, phase: int) -> Update:
        batch = trim(batch)
        state, metrics = self.descend(state, "critic", self.critic_loss, batch)
        state = self.polyak(state, "critic")
        state, policy_metrics = self.descend(state, "policy", self.actor_loss, batch)
        return state, {**metrics, **policy_metrics}
