"""MOReL: "MOReL: Model-Based Offline Reinforcement Learning" (Kidambi et al., 2020, arXiv 2005.05951), with a soft
actor-critic.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

from offrl.algorithm import Dataset, Grid, Metrics, Tree
from offrl.errors import UserError, warn
from offrl.families.sac import SoftActorCritic
from offrl.registry import register
from offrl.settings.field import defaults, setting
from offrl.world_models.model import Outcome
from offrl.world_models.model_rollouts import (
    LearnsInModel,
    ModelBasedSettings,
    ModelSource,
)
from offrl.world_models.rollout import Imagined
from offrl.world_models.uncertainty import measure, names, on_data, quantile


@dataclass
@defaults(
    learning_rate=1e-4,
    hidden=[256, 256, 256],
    init="fixed_bias",
    critics=10,
    real_share=0.01,
    uncertainty="disagreement",
)
class MOReLConfig(ModelBasedSettings):
    """Settings of MOReL; the learner's defaults are unifloral's (10 critics), the threshold is the paper's kind."""

    name: str = "morel"
    threshold: str = setting(
        "deviations",
        "a step is unknown where its uncertainty is above: deviations (the mean of the data's rows and threshold_scale "
        "standard deviations), quantile (their threshold_scale quantile), maximum (threshold_scale times the largest)",
        choices=("deviations", "quantile", "maximum"),
    )
    threshold_scale: float | None = setting(
        None, "see threshold; null: 3 deviations, the 0.95 quantile, 1 times the maximum", low=0.0
    )
    halt_reward: float | None = setting(
        None, "reward of an unknown step, which ends the rollout; null: found with halt_offset"
    )
    halt_offset: float = setting(200.0, "an unknown step's reward is so far below the data's smallest reward", low=0.0)


SCALES = {"deviations": 3.0, "quantile": 0.95, "maximum": 1.0}


@register("algo", "morel")
class MOReL(LearnsInModel[MOReLConfig], SoftActorCritic[MOReLConfig]):
    """Rollouts end in HALT, with a large negative reward, where the model does not know (definition 3, the pessimistic
    MDP).

    HALT is a termination: its value is the one reward, not an endless sum of such rewards. Known steps keep the model's
    rewards."""

    @classmethod
    def fit_config(cls, config: MOReLConfig, dataset: Dataset, grid: Grid = None) -> MOReLConfig:
        """`config` with HALT's reward inside the bins' range, where that is found from the data. Warns of a HALT that
        would pay.
        """
        result, values = super().fit_config(config, dataset, grid), grid or {}
        minimum, mean = (
            float(x) for x in (dataset.columns["rewards"].min(), dataset.columns["rewards"].float().mean())
        )
        fixed = [] if config.halt_reward is None else [config.halt_reward]
        rewards = list(values.get("halt_reward", fixed)) or [
            minimum - float(x) for x in values.get("halt_offset", [config.halt_offset])
        ]
        perpetuity = mean / (1.0 - min(config.discount, 1.0 - 1e-9))
        if max(rewards) > perpetuity:
            warn(
                f"HALT costs less ({max(rewards):g}) than to go on as the data do for ever ({perpetuity:g}, from their "
                "mean reward and the discount): leaving what the model knows would pay; set algo.halt_reward lower"
            )
        if config.value_range or not result.value_range:
            return result
        low, high = result.value_range
        return dataclasses.replace(result, value_range=[min(low, *rewards), max(high, *rewards)])

    def derived(self, source: ModelSource, dataset: Dataset) -> Tree:
        """The uncertainty of each of the data's rows, in order, and the smallest reward of those rows."""
        c = self.config
        if c.uncertainty == "none":
            raise UserError(
                f"algo=morel halts where the model is uncertain: choose algo.uncertainty={' or '.join(names())}, not "
                "none"
            )
        if c.threshold == "quantile" and c.threshold_scale is not None and c.threshold_scale > 1.0:
            raise UserError(f"algo.threshold_scale={c.threshold_scale:g}: a quantile is at most 1")
        device = source.tree["low"].device
        values = on_data(measure(c.uncertainty), source.model, source.tree, dataset)
        if not torch.isfinite(values).all():
            raise UserError(
                f"{dataset.spec.name}: the world model's uncertainty is not finite on its own data; train another model"
            )
        return {
            "uncertainties": values.sort().values.to(device),
            "lowest": dataset.columns["rewards"][dataset.transition_rows()].min().to(device),
        }

    def limit(self, source: ModelSource) -> Tensor:
        """The uncertainty above which a step is unknown, []."""
        c, values = self.config, source.extra["uncertainties"]
        scale = SCALES[c.threshold] if c.threshold_scale is None else c.threshold_scale
        if c.threshold == "deviations":
            return values.mean() + scale * values.std(unbiased=False)
        if c.threshold == "maximum":
            return values[-1] * scale
        return quantile(values, scale)

    def judged(self, source: ModelSource, outcome: Outcome, uncertainty: Tensor) -> tuple[Tensor, Tensor]:
        """Rewards [B] and terminations [B] of the pessimistic MDP (definition 3): an unknown step ends in HALT and
        earns its reward.
        """
        c = self.config
        rewards, terminations = super().judged(source, outcome, uncertainty)
        unknown = uncertainty > self.limit(source)
        halt_reward = source.extra["lowest"] - c.halt_offset if c.halt_reward is None else c.halt_reward
        return torch.where(unknown, halt_reward, rewards), terminations | unknown

    def describe(self, source: ModelSource, imagined: Imagined) -> Metrics:
        """Metrics of rollouts, with the share of them that ended in HALT."""
        unknown = (imagined.valid & (imagined.uncertainty > self.limit(source))).any(0).float()
        share = unknown.sum() / imagined.valid[0].float().sum().clamp(min=1.0)
        return {**super().describe(source, imagined), "rollout/halted": share, "rollout/limit": self.limit(source)}
