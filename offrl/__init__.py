"""offrl: offline and model-based reinforcement learning for control.

    run = offrl.train(algo="iql", dataset="hopper-medium-v2", seeds=4, steps=1_000_000)
    action = run.policy(seed=0).act(observation)
    run = offrl.load("runs/...")

Names are imported when they are first used: `import offrl` is instant.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from offrl.api import Run, distill, finetune, train, tune
    from offrl.api import Run as load
    from offrl.data import load_dataset
    from offrl.data.arrays import from_arrays
    from offrl.data.dataset import Dataset
    from offrl.data.tables.frame import from_dataframe
    from offrl.errors import Interrupted, UserError
    from offrl.evaluation.policy import TrainedPolicy
    from offrl.interop.policies import load_policy
    from offrl.registry import register
    from offrl.system.trust import trusted
    from offrl.tasks.task import Task
    from offrl.training.run.callbacks import EvaluationEvent

__all__ = [
    "Dataset",
    "EvaluationEvent",
    "Interrupted",
    "ModelEnv",
    "ModelVectorEnv",
    "Run",
    "Task",
    "TrainedPolicy",
    "UserError",
    "distill",
    "finetune",
    "from_arrays",
    "from_dataframe",
    "load",
    "load_dataset",
    "load_policy",
    "register",
    "train",
    "trusted",
    "tune",
]

_WHERE = {
    "Dataset": ("offrl.data.dataset", "Dataset"),
    "EvaluationEvent": ("offrl.training.run.callbacks", "EvaluationEvent"),
    "Interrupted": ("offrl.errors", "Interrupted"),
    "ModelEnv": ("offrl.world_models.environment", "ModelEnv"),
    "ModelVectorEnv": ("offrl.world_models.environment", "ModelVectorEnv"),
    "Run": ("offrl.api", "Run"),
    "Task": ("offrl.tasks.task", "Task"),
    "TrainedPolicy": ("offrl.evaluation.policy", "TrainedPolicy"),
    "UserError": ("offrl.errors", "UserError"),
    "distill": ("offrl.api", "distill"),
    "finetune": ("offrl.api", "finetune"),
    "from_arrays": ("offrl.data.arrays", "from_arrays"),
    "from_dataframe": ("offrl.data.tables.frame", "from_dataframe"),
    "load": ("offrl.api", "Run"),
    "load_dataset": ("offrl.data.loading.load", "load_dataset"),
    "load_policy": ("offrl.interop.policies", "load_policy"),
    "register": ("offrl.registry", "register"),
    "train": ("offrl.api", "train"),
    "trusted": ("offrl.system.trust", "trusted"),
    "tune": ("offrl.api", "tune"),
}


def _linked() -> None:
    """In a checkout by a git that makes no links (Windows), `offrl/algorithms` and the like are small files: the
    folders count.
    """
    import os

    if not os.path.isdir(os.path.join(__path__[0], "algorithms")):
        __path__.append(os.path.dirname(__path__[0]))


_linked()


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("offrl")
    if name not in _WHERE:
        raise AttributeError(f"module 'offrl' has no attribute '{name}'")
    import importlib

    module, attribute = _WHERE[name]
    return getattr(importlib.import_module(module), attribute)
