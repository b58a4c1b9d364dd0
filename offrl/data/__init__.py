"""Data sets: `load_dataset` for anything with a name or a path, `Dataset.from_arrays` for arrays. Imported lazily, torch is heavy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from offrl.data.config import DatasetConfig

if TYPE_CHECKING:
    from offrl.data.action_free import action_free_dataset, label_actions, split_labelled
    from offrl.data.dataset import Dataset, DataSpec
    from offrl.data.imitation import append_expert
    from offrl.data.inverse import InverseSettings
    from offrl.data.labels import label_rewards
    from offrl.data.load import load_dataset
    from offrl.data.preferences import PreferenceModel, PreferenceSettings
    from offrl.data.weights import weight_episodes

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
    "InverseSettings": "offrl.data.inverse",
    "PreferenceModel": "offrl.data.preferences",
    "PreferenceSettings": "offrl.data.preferences",
    "action_free_dataset": "offrl.data.action_free",
    "append_expert": "offrl.data.imitation",
    "label_actions": "offrl.data.action_free",
    "label_rewards": "offrl.data.labels",
    "load_dataset": "offrl.data.load",
    "split_labelled": "offrl.data.action_free",
    "weight_episodes": "offrl.data.weights",
}


def __getattr__(name: str) -> Any:
    if name in _WHERE:
        import importlib

        return getattr(importlib.import_module(_WHERE[name]), name)
    raise AttributeError(f"module 'offrl.data' has no attribute '{name}'")
