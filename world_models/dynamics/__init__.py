"""Ensembles of dynamics models: their settings, what they are trained on, and their training."""

from offrl.world_models.dynamics.algorithm import Dynamics, member_losses, save_calibrated
from offrl.world_models.dynamics.data import DynamicsSampler, DynamicsSource, Split, data_range, split, targets
from offrl.world_models.dynamics.settings import DynamicsSettings, HeldOutSettings

__all__ = [
    "Dynamics",
    "DynamicsSampler",
    "DynamicsSettings",
    "DynamicsSource",
    "HeldOutSettings",
    "Split",
    "data_range",
    "member_losses",
    "save_calibrated",
    "split",
    "targets",
]
