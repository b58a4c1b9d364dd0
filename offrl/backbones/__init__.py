"""What families of algorithms share: critics, soft actor-critics, TD3, learning inside the data. An algorithm's file is its difference."""

from offrl.backbones.critics import CriticAlgorithm, CriticSettings, Target
from offrl.backbones.dual import DualQ, DualSettings
from offrl.backbones.in_sample import InSampleQ, InSampleSettings
from offrl.backbones.soft import SoftActorCritic, SoftSettings
from offrl.backbones.td3 import TD3, TD3Settings

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
