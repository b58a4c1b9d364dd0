"""A-LoL: "Leftover Lunch: Advantage-based Offline Reinforcement Learning for Language Models" (Baheti et al., 2023,
arXiv 2305.14718).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from offrl.algorithm import Grid, Loss, TrainState, Update
from offrl.algorithms.alol.advantages import WEIGHT, AdvantageSampler
from offrl.data.dataset import Dataset
from offrl.data.samplers.transitions import Batch, Sampler
from offrl.errors import UserError
from offrl.lm import reference_policy
from offrl.lm.actor import PROMPTS
from offrl.lm.algorithm import TextAlgorithm
from offrl.lm.models.configured import language_model
from offrl.lm.models.pretrained import SCRATCH
from offrl.lm.sampler import IDS, token_log_probs
from offrl.lm.utterances import EACH, UtteranceSettings, trim, utterance_sampler, with_rates
from offrl.optim import Adam, Params
from offrl.registry import register
from offrl.settings.evaluation import EvalConfig
from offrl.settings.field import setting
from offrl.tasks.environments import resolve_task

VARIANTS = ("a_lol", "a_lol_seq", "ref_free", "kl", "r_lol")


@dataclass
class ALoLConfig(UtteranceSettings):
    """Settings of A-LoL."""

    name: str = "alol"
    start: str = setting(
        "cloned",
        "the reference policy, which the actor begins with: a cloned policy (algo.policy), or the language model as it "
        "is",
        choices=("cloned", "language_model"),
    )
    variant: str = setting(
        "a_lol",
        "how the ratio of the actor's probability to the reference's weighs an action: that of the whole action "
        "(a_lol), of each token "
        "(a_lol_seq), not at all (ref_free), by a penalty on its logarithm (kl); r_lol: as a_lol, with rewards in "
        "place of advantages",
        choices=VARIANTS,
    )
    clip: float = setting(0.9, "ratios are kept within 1 - clip and 1 + clip", low=0.0)
    kl_weight: float = setting(0.1, "variant=kl: weight of the penalty", low=0.0)
    credit: str = setting(
        "return",
        "what an action earned: its turn's reward, or the rewards from there to the episode's end",
        choices=("reward", "return"),
    )
    discount: float = setting(1.0, "of these rewards, for each turn", low=0.0, high=1.0)
    sampling: str = setting(
        "advantage",
        "actions are drawn in proportion to their advantage, as in the paper, or as the data's weights say",
        choices=("advantage", "uniform"),
    )
    values_from: str = setting(
        "auto",
        "what values are fitted to: episodes that the reference plays, or the data's rewards; auto: episodes if an "
        "environment is there",
        choices=("auto", "rollouts", "data"),
    )
    values_episodes: int = setting(512, "episodes that the reference plays for it", low=1)
    values_steps: int = setting(1_000, "updates of the values", low=1)
    values_learning_rate: float = setting(1e-3, "Adam's learning rate of the values", low=0.0)
    value_layers: int = setting(
        2, "layers of the values' head, on the reference's state at the end of the prompt", low=1
    )
    parallel: int = setting(32, "episodes that are played side by side", low=1, high=PROMPTS)


@register("algo", "alol")
class ALoL(TextAlgorithm):
    """Minimise the mean of -A rho log pi(y|x), A = max(0, R - V_ref(x)), rho = clip(pi / pi_ref) without gradient, over
    actions y drawn in proportion to A (arXiv 2305.14718, equations 4 to 8).

    log pi(y|x) is the sum over the tokens of y, not their mean: so the authors' later code, which notes that the sum is
    always better."""

    Config = ALoLConfig

    @classmethod
    def fit_config(cls, config: Any, dataset: Dataset, grid: Grid = None) -> Any:
        """The config with its learning rates. Raises UserError for a reference that was never trained."""
        if config.lm == SCRATCH and config.start != "cloned":
            raise UserError(
                f"algo.start={config.start}: algo.lm=scratch is no policy to stay close to; take algo.start=cloned"
            )
        return with_rates(super().fit_config(config, dataset, grid), {"actor_learning_rate": (2e-5, 3e-4)})

    def modules(self) -> dict[str, nn.Module]:
        c = self.config
        # None: it is the actor without its adapters, or nothing is to be learnt
        self.reference = reference_policy.frozen_reference(c, self.pretrained)
        if c.start != "cloned" and c.tune != "adapters":
            self.reference = language_model(c, "none").requires_grad_(False)
        return {"policy": language_model(c)}

    def sampler(self) -> Sampler:
        return AdvantageSampler(utterance_sampler(self.config, self.config.discount), self)

    def optimizer(self, name: str) -> Adam:
        return replace(super().optimizer(name), learning_rate=self.config.actor_learning_rate)

    @property
    def plays(self) -> Any:
        """The task that the reference plays, or None where its values are fitted to the data. Raises UserError where
        there is none.
        """
        c = self.config
        task = None if c.values_from == "data" else resolve_task(self.spec.task, EvalConfig())
        if task is None and c.values_from == "rollouts":
            raise UserError(
                f"algo.values_from=rollouts: {self.spec.name} names no environment; take algo.values_from=data"
            )
        return task

    def reference_log_probs(self, policy: Params, batch: Batch) -> Tensor:
        """`log_probs` of the reference policy, without gradient: [B, L - 1]."""
        with torch.no_grad():
            if self.reference is None:
                with self.lm().reference():
                    return self.log_probs(policy, batch)
            reference = self.reference.to(batch[IDS].device)
            return token_log_probs(reference.logits, reference.hidden(batch[IDS]), batch)

    def actor_loss(self, policy: Params, state: TrainState, batch: Batch) -> Loss:
        """-E A rho log pi(y|x), rho = clip(pi(y|x) / pi_ref(y|x), 1 - eps, 1 + eps) without gradient (equation 4);
        variants: rho of each token (a_lol_seq), rho = 1 (ref_free), and rho = 1 with + lambda log(pi / pi_ref) (kl)."""
        c, row_weight, weight = self.config, batch[EACH], batch[WEIGHT]
        tokens = self.log_probs(policy, batch)
        log_prob = tokens.sum(-1)
        metrics = {"actor/advantage": (weight * row_weight).sum(), "actor/log_prob": (log_prob * row_weight).sum()}
        if c.variant == "ref_free":
            loss = -(weight * log_prob * row_weight).sum()
            return loss, {"actor/loss": loss, **metrics}
        reference = self.reference_log_probs(policy, batch)
        log_ratio = log_prob - reference.sum(-1)
        metrics["actor/kl"] = (log_ratio * row_weight).sum()
        if c.variant == "kl":
            loss = ((c.kl_weight * log_ratio - weight * log_prob) * row_weight).sum()
            return loss, {"actor/loss": loss, **metrics}
        low, high = 1.0 - c.clip, 1.0 + c.clip
        if c.variant == "a_lol_seq":
            ratio = (tokens - reference).exp().clamp(low, high).detach()
            objective = (ratio * tokens).sum(-1)
        else:
            ratio = log_ratio.exp().clamp(low, high).detach()
            metrics["actor/ratio"] = (ratio * row_weight).sum()
            objective = ratio * log_prob
        loss = -(weight * objective * row_weight).sum()
        return loss, {"actor/loss": loss, **metrics}

    def update(self, state: TrainState, batch: Batch, key: Tensor, *, phase: int) -> Update:
        return self.descend(state, "policy", self.actor_loss, trim(batch))
