"""Data that trained models make: missing actions from inverse dynamics, rewards from preferences or images
of success.
"""

from offrl.relabel.actions import action_free_dataset, label_actions, split_labelled
from offrl.relabel.inverse_dynamics import InverseSettings
from offrl.relabel.preferences import PreferenceModel, PreferenceSettings
from offrl.relabel.success import SuccessClassifier, SuccessSettings

__all__ = [
    "InverseSettings",
    "PreferenceModel",
    "PreferenceSettings",
    "SuccessClassifier",
    "SuccessSettings",
    "action_free_dataset",
    "label_actions",
    "split_labelled",
]
