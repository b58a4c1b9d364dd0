"""ReCOIL: "Dual RL: Unification and New Methods for Reinforcement and Imitation Learning" (Sikchi et al., 2023, arXiv 2302.08560)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from offrl import losses, rng
from offrl.algorithm import Metrics, TrainState
from offrl.data.dataset import Dataset
from offrl.data.samplers.transitions import Batch, Sampler
from offrl.data.transforms.demonstrations import ExpertSampler
from offrl.families.critics import Target
from offrl.families.dual import DualQ, DualSettings
from offrl.nn import Bootstrap
from offrl.optim import Params
from offrl.registry import register
from offrl.settings.field import setting


@dataclass
class ReCOILConfig(DualSettings):
    """Settings of ReCOIL; the defaults are the authors' for D4RL's locomotion tasks. `dataset.expert` says which rows are the expert's."""

    name: str = "recoil"
    batch_size: int = setting(1024, "transitions in a batch, and as many of the expert's", low=1)
    gumbel_temperature: float = setting(
        5.0, "reverse_kl: V is this times log E[exp(Q / this)] over the data's actions; to be raised where Q diverges", low=1e-3
    )
    huber_delta: float = setting(
        0.0, "scalar value head: the critics' squared errors grow linearly beyond this; 0: never", low=0.0, structural=True
    )
    implicit_maximum: str = setting(
        "reverse_kl", "how V becomes the largest Q of the data: as in XQL or as in IQL", choices=("reverse_kl", "expectile")
    )
    expectile: float = setting(0.7, "implicit_maximum=expectile: 0.5 values the data's policy, 1.0 the best action", low=0.0, high=1.0)
    expert_weight: float = setting(0.1, "implicit_maximum=expectile: weight of the mean V of the data minus that of the expert", low=0.0)
    reward_gap: float = setting(2.0, "what a step outside the expert's data costs", low=0.0)
    value_gap: float = setting(200.0, "Q of the expert's data; and, with a minus, what is to come after a terminal", low=0.0)


@register("algo", "recoil")
class ReCOIL(DualQ):
    """Q is pulled to `value_gap` on the expert's transitions and falls, by Bellman's equation, away from them; V and the policy as in XQL.

    Rewards are never read. The data's batch, in which the expert's rows are as rare as they are in the data, trains V and the policy.
    """

    Config = ReCOILConfig

    @classmethod
    def fit_config(cls, config: Any, dataset: Dataset, grid: Mapping[str, Sequence[float]] | None = None) -> Any:
        """Bins, where the value head has any, cover all targets: the data's rewards say nothing of them."""
        if config.value_head == "scalar" or config.value_range:
            return config
        gap, cost, discount = (max(map(float, (grid or {}).get(n, [getattr(config, n)]))) for n in ("value_gap", "reward_gap", "discount"))
        never = cost / (1.0 - discount) if discount < 1.0 else gap  # what it costs to stay away from the expert for ever
        return dataclasses.replace(config, value_range=[-1.1 * max(gap, never), 1.1 * gap])

    def sampler(self) -> Sampler:
        return ExpertSampler()

    def value_error(self, difference: Tensor) -> Tensor:
        c = self.config
        if c.implicit_maximum == "expectile":
            return losses.expectile(difference, c.expectile)
        return losses.gumbel(difference, c.gumbel_temperature, c.gumbel_clip)

    def value_loss(
        self, value: Params, state: TrainState, batch: Batch, q: Tensor, q_logits: Tensor | None = None
    ) -> tuple[Tensor, Metrics]:
        loss, metrics = super().value_loss(value, state, batch, q, q_logits)
        if self.config.implicit_maximum == "expectile":
            gap = metrics["value/v"] - self.v(value, batch["expert_observations"]).mean()
            loss = loss + self.config.expert_weight * gap
            metrics = {**metrics, "value/loss": loss}
        return loss, metrics

    def critic_loss(self, critic: Params, state: TrainState, batch: Batch, key: Tensor) -> tuple[Tensor, Metrics]:
        """Mean error on the data plus mean error on the expert's transitions (fixed targets as in LS-IQ, arXiv 2303.00599)."""
        c, masks = self.config, batch["masks"]
        logits = self.apply("value", state.params["value"], batch["next_observations"])
        after = masks * self.head.mean(logits) - (1.0 - masks) * c.value_gap
        bootstrap = Bootstrap(logits, c.discount * masks) if self.head.distributional else None
        loss, metrics = self.td_loss(critic, batch, Target(c.discount * after - c.reward_gap, bootstrap), key)
        expert = {"observations": batch["expert_observations"], "actions": batch["expert_actions"]}
        best = Target(torch.ones_like(masks) * c.value_gap)
        more, found = self.td_loss(critic, expert, best, rng.fold_in(key, 1))
        return loss + more, {**metrics, "critic/expert_loss": more, "critic/expert_q": found["critic/q"]}
