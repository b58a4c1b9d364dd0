"""offrl: offline and model-based reinforcement learning for control.

    run = offrl.train(algo="iql", dataset="hopper-medium-v2", seeds=4, steps=1_000_000)
    action = run.policy(seed=0).act(observation)
    run = offrl.load("runs/...")

Names are imported when they are first used: `import offrl` is instant.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from offrl.api import train
    from offrl.data.dataset import Dataset
    from offrl.data.load import load_dataset
    from offrl.errors import UserError
    from offrl.online.api import finetune
    from offrl.policy import TrainedPolicy
    from offrl.registry import register
    from offrl.runs import Run
    from offrl.runs import Run as load
    from offrl.tasks import Task
    from offrl.train import Interrupted

__all__ = ["Dataset", "Interrupted", "ModelEnv", "ModelVectorEnv", "Run", "Task", "TrainedPolicy", "UserError", "finetune", "load",
           "load_dataset", "register", "train"]  # fmt: skip

_WHERE = {
    "Dataset": ("offrl.data.dataset", "Dataset"),
    "Interrupted": ("offrl.train", "Interrupted"),
    "ModelEnv": ("offrl.world_models.environment", "ModelEnv"),
    "ModelVectorEnv": ("offrl.world_models.environment", "ModelVectorEnv"),
    "Run": ("offrl.runs", "Run"),
    "Task": ("offrl.tasks", "Task"),
    "TrainedPolicy": ("offrl.policy", "TrainedPolicy"),
    "UserError": ("offrl.errors", "UserError"),
    "finetune": ("offrl.online.api", "finetune"),
    "load": ("offrl.runs", "Run"),
    "load_dataset": ("offrl.data.load", "load_dataset"),
    "register": ("offrl.registry", "register"),
    "train": ("offrl.api", "train"),
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("offrl")
    if name not in _WHERE:
        raise AttributeError(f"module 'offrl' has no attribute '{name}'")
    import importlib

    module, attribute = _WHERE[name]
    return getattr(importlib.import_module(module), attribute)


class _Package(ModuleType):
    """`offrl.train` is the function; Python would put the module of that name in its place when something imports it."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name == "train" and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
