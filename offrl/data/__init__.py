"""Data sets: `load_dataset` for anything with a name or a path, `Dataset.from_arrays` for arrays. Imported lazily, torch is heavy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from offrl.data.config import DatasetConfig

if TYPE_CHECKING:
    from offrl.data.dataset import Dataset, DataSpec
    from offrl.data.load import load_dataset

__all__ = ["DataSpec", "Dataset", "DatasetConfig", "load_dataset"]
_WHERE = {"Dataset": "offrl.data.dataset", "DataSpec": "offrl.data.dataset", "load_dataset": "offrl.data.load"}


def __getattr__(name: str) -> Any:
    if name in _WHERE:
        import importlib

        return getattr(importlib.import_module(_WHERE[name]), name)
    raise AttributeError(f"module 'offrl.data' has no attribute '{name}'")
