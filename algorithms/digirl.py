"""Filtering as in DigiRL: "DigiRL: Training In-The-Wild Device-Control Agents with Autonomous Reinforcement Learning"
(Bai et al., 2024, arXiv 2406.11896)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from offrl.algorithm import Batch, Dataset, Grid, Loss, Params, Sampler, TrainState, Update
from offrl.errors import UserError
from offrl.lm.algorithm import TextAlgorithm
from offrl.lm.models.configured import language_model
from offrl.lm.sampler import IDS, KNOWN, NEXT, RETURN, REWARD, VALID
from offrl.lm.utterance_critic import VS, UtteranceCriticSettings, UtteranceNetwork, critic_lm
from offrl.lm.utterances import EACH, UtteranceSampler, UtteranceSource, first_of, trim, utterance_sampler, with_rates
from offrl.registry import register
from offrl.settings.field import setting


@dataclass
class DigiRLConfig(UtteranceCriticSettings):
    """Settings of DigiRL-style filtering."""

    name: str = "digirl"
    discount: float = setting(0.95, "of the Monte-Carlo returns, for each turn", low=0.0, high=1.0)
    threshold: float = setting(0.0, "a turn went well if the return from it on is above this")
    margin: float = setting(0.05, "what the chance of going well has to rise by, and more, for a turn to be cloned")
    outcome_weight: float = setting(
        1.0,
        "of the turn's reward and return, which are added to that rise (the authors: 1); 0: the rise alone decides",
        low=0.0,
    )


@dataclass(frozen=True)
class ThresholdSampler(UtteranceSampler):
    """`UtteranceSampler` over turns with returns on both sides of a threshold. Raises UserError where they all lie on
    one.
    """

    threshold: float = 0.0

    def prepare(self, dataset: Dataset) -> UtteranceSource:
        source = super().prepare(dataset)
        returns = source.columns[RETURN]
        successes = returns > self.threshold
        if bool(successes.all()) or not bool(successes.any()):
            raise UserError(
                f"{dataset.spec.name}: the returns of its turns are all "
                f"{'above' if bool(successes.all()) else 'at or below'} algo.threshold={self.threshold:g}, so there is "
                f"nothing to tell apart; they lie between {float(returns.min()):.4g} and {float(returns.max()):.4g}. "
                "Set algo.threshold between them, and where returns are never above 0 algo.outcome_weight=0"
            )
        return source


@register("algo", "digirl")
class DigiRL(TextAlgorithm[DigiRLConfig]):
    """A critic learns by cross-entropy whether the return is above a threshold, from the state before a turn and from
    that after it; turns with V(s') - V(s) - margin + r + return > 0 are cloned, V the smaller of two (arXiv 2406.11896,
    section 4.2, as in the authors' code).

    The authors' other filter, of whole trajectories by their first state, is dataset.top_fraction or weighting here.
    """

    @classmethod
    def fit_config(cls, config: DigiRLConfig, dataset: Dataset, grid: Grid = None) -> DigiRLConfig:
        rates = {"actor_learning_rate": (1e-5, 3e-4), "critic_learning_rate": (1e-4, 1e-3)}
        return with_rates(super().fit_config(config, dataset, grid), rates)

    def modules(self) -> dict[str, nn.Module]:
        critic = UtteranceNetwork(critic_lm(self.config), dict.fromkeys(VS, 2), {}, self.config.value_layers)
        return {"policy": language_model(self.config), "critic": critic}

    def sampler(self) -> Sampler:
        turns = utterance_sampler(self.config, self.config.discount)
        return ThresholdSampler(turns.inner, turns.discount, self.config.threshold)

    def logits(self, critic: Params, ids: Tensor, count: Tensor) -> Tensor:
        """[2, B, 2]: of going badly and of going well, by both heads, after the first `count` tokens."""
        return torch.stack(
            self.apply("critic", critic, "outputs", self.apply("critic", critic, "encode", ids, count), *VS)
        )

    def critic_loss(self, critic: Params, state: TrainState, batch: Batch) -> Loss:
        """-sum_i E [log p_i(y|s) + log p_i(y|s')], y: the return is above the threshold; the second where s' is
        known.
        """
        successes, known = (batch[RETURN] > self.config.threshold).long(), batch[KNOWN].float()
        state_logits = self.logits(critic, batch[IDS], first_of(batch))
        next_logits = self.logits(critic, batch[NEXT + IDS], batch[NEXT + VALID].sum(-1))

        def loss(logits: Tensor) -> Tensor:
            return (
                nn.functional.cross_entropy(logits.flatten(0, 1), successes.repeat(2), reduction="none")
                .view(2, -1)
                .sum(0)
            )

        entropy, row_weight = loss(state_logits) + loss(next_logits) * known, batch[EACH]
        correct = (state_logits[0].argmax(-1) == successes).float()
        return (entropy * row_weight).sum(), {
            "critic/loss": (entropy * row_weight).sum(),
            "critic/accuracy": (correct * row_weight).sum(),
        }

    def cloned(self, state: TrainState, batch: Batch) -> Tensor:
        """[B] bool: the turns that are cloned. Where the state after a turn is not known, its chance counts as
        unchanged.
        """
        c, critic = self.config, state.params["critic"]
        with torch.no_grad():
            chance = self.logits(critic, batch[IDS], first_of(batch)).softmax(-1)[..., 1].amin(0)
            next_chance = (
                self.logits(critic, batch[NEXT + IDS], batch[NEXT + VALID].sum(-1)).softmax(-1)[..., 1].amin(0)
            )
            rise = torch.where(batch[KNOWN], next_chance - chance, 0.0)
            return rise - c.margin + c.outcome_weight * (batch[REWARD] + batch[RETURN]) > 0.0

    def actor_loss(self, policy: Params, state: TrainState, batch: Batch) -> Loss:
        """-E 1(V(s') - V(s) - margin + w (r + return) > 0) log pi(a|s), V the smaller of two."""
        row_weight, cloned = batch[EACH], self.cloned(state, batch).float()
        loss = -(cloned * self.log_probs(policy, batch).sum(-1) * row_weight).sum()
        return loss, {"actor/loss": loss, "actor/filter_rate": (cloned * row_weight).sum()}

    def update(self, state: TrainState, batch: Batch, key: Tensor, *, phase: int) -> Update:
        batch = trim(batch)
        state, metrics = self.descend(state, "critic", self.critic_loss, batch)
        state, policy_metrics = self.descend(state, "policy", self.actor_loss, batch)
        return state, {**metrics, **policy_metrics}
