"""HIQL: "Offline Goal-Conditioned RL with Latent States as Actions" (Park et al., 2023, arXiv 2307.11949), as in OGBench (2410.20092)."""

from __future__ import annotations

from dataclasses import dataclass

from offrl.families.hierarchical import LevelSettings, TwoLevels
from offrl.registry import register


@dataclass
class HIQLConfig(LevelSettings):
    """Settings of HIQL."""

    name: str = "hiql"


@register("algo", "hiql")
class HIQL(TwoLevels):
    """One V for both levels: far goals have noisy values, but the difference over k steps stands out where that over one does not."""

    Config = HIQLConfig
