"""MOPO: "MOPO: Model-based Offline Policy Optimization" (Yu et al., 2020, arXiv 2005.13239)."""

from __future__ import annotations

from dataclasses import dataclass

from offrl.registry import register
from offrl.settings.field import setting
from offrl.world_models.actor_critic import ModelBased, ModelBasedSettings


@dataclass
class MOPOConfig(ModelBasedSettings):
    """Settings of MOPO; the defaults are OfflineRL-Kit's for D4RL's HalfCheetah."""

    name: str = "mopo"
    penalty: float = setting(0.5, "times the uncertainty, is taken off each imagined reward (lambda)", low=0.0)


@register("algo", "mopo")
class MOPO(ModelBased):
    """Imagined rewards are r - lambda u(s, a), with u how uncertain the model is (section 4.2); they stay as they were when imagined."""

    Config = MOPOConfig
