"""CQL: "Conservative Q-Learning for Offline Reinforcement Learning" (Kumar et al., 2020, arXiv 2006.04779)."""

from __future__ import annotations

from dataclasses import dataclass

from offrl.families.conservative import Conservative, ConservativeSettings
from offrl.registry import register


@dataclass
class CQLConfig(ConservativeSettings):
    """Settings of CQL(H); the defaults are CORL's for D4RL's locomotion tasks."""

    name: str = "cql"


@register("algo", "cql")
class CQL(Conservative):
    """SAC whose critics are pushed down at actions that the policy would take and up at the data's."""

    Config = CQLConfig
