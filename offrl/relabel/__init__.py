"""Data that trained models make: missing actions from inverse dynamics, rewards from preferences."""

from offrl.relabel.actions import action_free_dataset, label_actions, split_labelled
from offrl.relabel.inverse_dynamics import InverseSettings
from offrl.relabel.preferences import PreferenceModel, PreferenceSettings

__all__ = [
    "InverseSettings",
    "PreferenceModel",
    "PreferenceSettings",
    "action_free_dataset",
    "label_actions",
    "split_labelled",
]
