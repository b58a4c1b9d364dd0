"""ReBRAC: "Revisiting the Minimalist Approach to Offline Reinforcement Learning" (Tarasov et al., 2023, arXiv 2305.09836)."""

from __future__ import annotations

from dataclasses import dataclass

from offrl.families.penalised import PenalisedSettings, PenalisedTD3
from offrl.registry import register


@dataclass
class ReBRACConfig(PenalisedSettings):
    """Settings of ReBRAC."""

    name: str = "rebrac"


@register("algo", "rebrac")
class ReBRAC(PenalisedTD3):
    """TD3+BC with deeper critics that have LayerNorm, and a penalty of its own in their target."""

    Config = ReBRACConfig
