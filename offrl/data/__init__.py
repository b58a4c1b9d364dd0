"""Data sets: `load_dataset` for anything with a name or a path, `Dataset.from_arrays` for arrays. Imported lazily, torch is heavy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from offrl.settings.dataset import DatasetConfig

if TYPE_CHECKING:
    from offrl.data.dataset import Dataset, DataSpec
    from offrl.data.demonstrations import append_expert
    from offrl.data.load import load_dataset
    from offrl.data.reward_labels import label_rewards
    from offrl.data.weights import weight_episodes
    from offrl.relabel.actions import action_free_dataset, label_actions, split_labelled
    from offrl.relabel.inverse_dynamics import InverseSettings
    from offrl.relabel.preferences import PreferenceModel, PreferenceSettings

__all__ = [
    "DataSpec",
    "Dataset",
    "DatasetConfig",
    "InverseSettings",
    "PreferenceModel",
    "PreferenceSettings",
    "action_free_dataset",
    "append_expert",
    "label_actions",
    "label_rewards",
    "load_dataset",
    "split_labelled",
    "weight_episodes",
]
_WHERE = {
    "Dataset": "offrl.data.dataset",
    "DataSpec": "offrl.data.dataset",
    "InverseSettings": "offrl.relabel.inverse_dynamics",
    "PreferenceModel": "offrl.relabel.preferences",
    "PreferenceSettings": "offrl.relabel.preferences",
    "action_free_dataset": "offrl.relabel.actions",
    "append_expert": "offrl.data.demonstrations",
    "label_actions": "offrl.relabel.actions",
    "label_rewards": "offrl.data.reward_labels",
    "load_dataset": "offrl.data.load",
    "split_labelled": "offrl.relabel.actions",
    "weight_episodes": "offrl.data.weights",
}


def __getattr__(name: str) -> Any:
    if name in _WHERE:
        import importlib

        return getattr(importlib.import_module(_WHERE[name]), name)
    raise AttributeError(f"module 'offrl.data' has no attribute '{name}'")
