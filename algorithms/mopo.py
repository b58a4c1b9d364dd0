"""MOPO: "MOPO: Model-based Offline Policy Optimization" (Yu et al., 2020, arXiv 2005.13239)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from offrl import rng
from offrl.algorithm import Grid, TrainState, Tree, Update
from offrl.data.dataset import Dataset
from offrl.data.samplers.transitions import Batch
from offrl.families.sac import SoftActorCritic
from offrl.pretrained import Requirement
from offrl.registry import register
from offrl.settings.field import setting
from offrl.world_models import model_rollouts
from offrl.world_models.model import Outcome, required
from offrl.world_models.model_rollouts import ModelBasedSettings, ModelRollouts, ModelSampler, ModelSource, policy_of
from offrl.world_models.rollout import Imagined, describe

if TYPE_CHECKING:
    from offrl.settings.train import TrainConfig


@dataclass
class MOPOConfig(ModelBasedSettings):
    """Settings of MOPO; the defaults are OfflineRL-Kit's for D4RL's HalfCheetah."""

    name: str = "mopo"
    max_entropy_weight: float | None = setting(
        1.0, "the entropy's weight counts as at most this; null: as it is", low=0.0
    )
    penalty: float = setting(0.5, "times the uncertainty, is taken off each imagined reward (lambda)", low=0.0)


@register("algo", "mopo")
class MOPO(SoftActorCritic):
    """SAC on the data's transitions and on rollouts in a model, whose rewards are penalised where the model is
    uncertain (algorithm 1).

    The losses are SAC's; rewards stay as they were when they were imagined.
    """

    Config = MOPOConfig
    traits = replace(SoftActorCritic.traits, actions=("continuous",), n_step=False)

    @classmethod
    def requires(cls, config: TrainConfig, dataset: Dataset) -> dict[str, Requirement]:
        return {"world_model": required({"members": config.algo.members})}

    @classmethod
    def fit_config(cls, config: Any, dataset: Dataset, grid: Grid = None) -> Any:
        model_rollouts.check(config, grid)
        return super().fit_config(config, dataset, grid)

    def modules(self) -> dict[str, nn.Module]:
        self.rollouts = ModelRollouts(self.config, self.spec)
        return super().modules()

    def sampler(self) -> ModelSampler:
        return ModelSampler(self.rollouts, self.pretrained)

    def buffers(self) -> Tree:
        return self.rollouts.buffers()

    @property
    def every(self) -> int:
        return self.config.rollout_every

    def penalised(self, outcome: Outcome, uncertainty: Tensor) -> tuple[Tensor, Tensor]:
        """r - lambda u(s, a), the uncertainty-penalised reward of section 4.2, and the model's own terminations."""
        return outcome.rewards - self.config.penalty * uncertainty, outcome.terminations

    def roll(self, state: TrainState, source: ModelSource, key: Tensor) -> Imagined:
        """New rollouts of the policy, with penalised rewards."""
        return self.rollouts.roll(source, policy_of(partial(self.sample, state.params["actor"])), self.penalised, key)

    def refresh(self, state: TrainState, source: ModelSource, key: Tensor, *, step: int) -> Update:
        imagined = self.roll(state, source, key)
        return self.rollouts.add(state, imagined), describe(imagined)

    def update(self, state: TrainState, batch: Batch, key: Tensor, *, phase: int) -> Update:
        return super().update(state, self.rollouts.mixed(state, batch, rng.fold_in(key, 301)), key, phase=phase)
