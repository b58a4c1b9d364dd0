"""Datasets: `load_dataset` for anything with a name or a path, `from_arrays` for arrays. Imported lazily, torch is
heavy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from offrl.settings.dataset import DatasetConfig

if TYPE_CHECKING:
    from offrl.data.arrays import from_arrays
    from offrl.data.dataset import Dataset, DataSpec
    from offrl.data.loading.load import load_dataset
    from offrl.data.transforms.demonstrations import append_expert
    from offrl.data.transforms.reward_labels import label_rewards
    from offrl.data.transforms.weights import weight_episodes

__all__ = [
    "DataSpec",
    "Dataset",
    "DatasetConfig",
    "append_expert",
    "from_arrays",
    "label_rewards",
    "load_dataset",
    "weight_episodes",
]
_WHERE = {
    "Dataset": "offrl.data.dataset",
    "DataSpec": "offrl.data.dataset",
    "append_expert": "offrl.data.transforms.demonstrations",
    "from_arrays": "offrl.data.arrays",
    "label_rewards": "offrl.data.transforms.reward_labels",
    "load_dataset": "offrl.data.loading.load",
    "weight_episodes": "offrl.data.transforms.weights",
}


def __getattr__(name: str) -> Any:
    if name in _WHERE:
        import importlib

        return getattr(importlib.import_module(_WHERE[name]), name)
    raise AttributeError(f"module 'offrl.data' has no attribute '{name}'")
