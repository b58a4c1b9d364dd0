"""What families of algorithms share: critics, soft actor-critics, TD3, learning inside the data. An algorithm's file is its difference."""

from offrl.families.critics import CriticAlgorithm, CriticSettings, Target
from offrl.families.dual import DualQ, DualSettings
from offrl.families.in_sample import InSampleQ, InSampleSettings
from offrl.families.sac import SoftActorCritic, SoftSettings
from offrl.families.td3 import TD3, TD3Settings

__all__ = [
    "TD3",
    "CriticAlgorithm",
    "CriticSettings",
    "DualQ",
    "DualSettings",
    "InSampleQ",
    "InSampleSettings",
    "SoftActorCritic",
    "SoftSettings",
    "TD3Settings",
    "Target",
]
