"""ReCOIL: "Dual RL: Unification and New Methods for Reinforcement and Imitation Learning" (Sikchi et al., 2023, arXiv
2302.08560).
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

from offrl import losses, rng
from offrl.algorithm import Batch, Dataset, Grid, Loss, Params, Sampler, TrainState, Update
from offrl.data.transforms.demonstrations import ExpertSampler
from offrl.families import in_sample
from offrl.families.critics import Target
from offrl.families.in_sample import SteepValue, SteepValueSettings
from offrl.registry import register
from offrl.settings.field import defaults, setting

EXPERT_Q = "expert_q"  # of the target critics at the expert's actions [B]


@dataclass
@defaults(huber_delta=0.0)
class ReCOILConfig(SteepValueSettings):
    """Settings of ReCOIL; the defaults are the authors' for D4RL's locomotion tasks. `dataset.expert` says which rows
    are the expert's.
    """

    name: str = "recoil"
    batch_size: int = setting(1024, "transitions in a batch, and as many of the expert's", low=1)
    gumbel_temperature: float = setting(
        5.0,
        "reverse_kl: V is this times log E[exp(Q / this)] over the data's actions; to be raised where Q diverges",
        low=1e-3,
    )
    gumbel_clip: float = setting(7.0, "largest (Q - V) / gumbel_temperature in the exponent", low=0.0)
    implicit_maximum: str = setting(
        "reverse_kl",
        "how V becomes the largest Q of the data: as in XQL or as in IQL",
        choices=("reverse_kl", "expectile"),
    )
    expectile: float = setting(
        0.7, "implicit_maximum=expectile: 0.5 values the data's policy, 1.0 the best action", low=0.0, high=1.0
    )
    expert_weight: float = setting(
        0.1, "implicit_maximum=expectile: weight of the mean V of the data minus that of the expert", low=0.0
    )
    reward_gap: float = setting(2.0, "what a step outside the expert's data costs", low=0.0)
    value_gap: float = setting(
        200.0, "Q of the expert's data; and, with a minus, what is to come after a terminal", low=0.0
    )


@register("algo", "recoil")
class ReCOIL(SteepValue[ReCOILConfig]):
    """Q is pulled to `value_gap` on the expert's transitions and falls, by Bellman's equation, away from them; V and
    the policy as in XQL.

    Rewards are never read. The data's batch, in which the expert's rows are as rare as they are in the data, trains V
    and the policy."""

    traits = dataclasses.replace(SteepValue.traits, n_step=False, observations="vector")

    @classmethod
    def fit_config(cls, config: ReCOILConfig, dataset: Dataset, grid: Grid = None) -> ReCOILConfig:
        """Bins, where the value head has any, cover all targets: the data's rewards say nothing of them."""
        if config.value_head == "scalar" or config.value_range:
            return config
        gap, cost, discount = (
            max(map(float, (grid or {}).get(n, [getattr(config, n)]))) for n in ("value_gap", "reward_gap", "discount")
        )
        # the cost of staying away from the expert for ever
        absence_cost = cost / (1.0 - discount) if discount < 1.0 else gap
        return dataclasses.replace(config, value_range=[-1.1 * max(gap, absence_cost), 1.1 * gap])

    def sampler(self) -> Sampler:
        return ExpertSampler()

    def value_loss(self, value: Params, state: TrainState, batch: Batch, q: Tensor) -> Loss:
        """V as the largest Q of the data: Gumbel regression, or an expectile and expert_weight (E_data V - E_expert V).

        q: at the data's actions. Gumbel regression is divided by the largest exponential
        of both (the authors' code), which makes batches that fall short of the expert count less.
        """
        c, v = self.config, self.value(value, batch["observations"]).mean
        expert_v = self.value(value, batch["expert_observations"]).mean
        if c.implicit_maximum == "reverse_kl":
            rows = losses.gumbel(q - v, c.gumbel_temperature, c.gumbel_clip, scale_rows=batch[EXPERT_Q] - expert_v)
            return rows.mean(), in_sample.value_metrics(rows, q, v)
        rows = losses.expectile(q - v, c.expectile)
        gap = v.mean() - expert_v.mean()
        loss = rows.mean() + c.expert_weight * gap
        return loss, {**in_sample.value_metrics(rows, q, v), "value/loss": loss}

    def critic_loss(self, critic: Params, state: TrainState, batch: Batch, key: Tensor) -> Loss:
        """Mean error on the data plus mean error on the expert's transitions (fixed targets as in LS-IQ, arXiv
        2303.00599).
        """
        c, masks, objective = self.config, batch["masks"], in_sample.huber_objective(self.config, self.critic)
        next_v = self.value(state.params["value"], batch["next_observations"])
        next_value = masks * next_v.mean - (1.0 - masks) * c.value_gap
        target = Target(c.discount * next_value - c.reward_gap, self.critic.bootstrap(next_v, c.discount * masks))
        loss, metrics = self.critic.loss(critic, batch, target, key, objective=objective)
        expert = {"observations": batch["expert_observations"], "actions": batch["expert_actions"]}
        expert_target = Target(torch.ones_like(masks) * c.value_gap)
        expert_loss, expert_metrics = self.critic.loss(
            critic, expert, expert_target, rng.fold_in(key, 1), objective=objective
        )
        return loss + expert_loss, {
            **metrics,
            "critic/expert_loss": expert_loss,
            "critic/expert_q": expert_metrics["critic/q"],
        }

    def update(self, state: TrainState, batch: Batch, key: Tensor, *, phase: int) -> Update:
        critics = self.critic.target_critics(state, key)
        expert_q = self.critic.min_q(critics, batch["expert_observations"], batch["expert_actions"]).mean
        return super().update(state, {**batch, EXPERT_Q: expert_q}, key, phase=phase)
