"""Decision Transformer: "Decision Transformer: Reinforcement Learning via Sequence Modeling" (Chen et al., 2021, arXiv 2106.01345)."""

from __future__ import annotations

from dataclasses import dataclass

from offrl.families.sequence import SequenceAlgorithm, SequenceSettings
from offrl.registry import register


@dataclass
class DTConfig(SequenceSettings):
    """Settings of DT."""

    name: str = "dt"


@register("algo", "dt")
class DT(SequenceAlgorithm):
    """Tokens (return to go, observation, action) of each step; the action is read from the observation's token (section 3)."""

    Config = DTConfig
