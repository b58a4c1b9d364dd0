"""What each command knows by name: its settings, for options without a value (--quiet) and for the completion of
commands.
"""

from __future__ import annotations

import dataclasses
import importlib
from typing import Any

# command -> (prefix, module:dataclass); train's settings are benchmark's too. Modules that import no torch.
SETTINGS: dict[str, tuple[tuple[str, str], ...]] = {
    "train": (("", "offrl.settings.train:TrainConfig"),),
    "tune": (("", "offrl.tuning.config:TuneConfig"), ("dataset.", "offrl.settings.dataset:DatasetConfig")),
    "finetune": (("", "offrl.finetuning.config:FinetuneConfig"), ("", "offrl.benchmark.config:VariantsConfig")),
    "distill": (("", "offrl.settings.train:TrainConfig"),),
    "evaluate": (("", "offrl.cli.evaluate:EvaluateConfig"),),
    "adapt": (("", "offrl.cli.adapt:AdaptConfig"),),
    "benchmark": (("", "offrl.benchmark.config:BenchmarkConfig"), ("", "offrl.settings.train:TrainConfig")),
    "report": (("", "offrl.report:ReportConfig"),),
    "select": (("", "offrl.cli.select:SelectConfig"),),
    "data": (
        ("", "offrl.cli.data:Output"),
        ("", "offrl.ope.config:HorizonConfig"),
        ("dataset.", "offrl.settings.dataset:DatasetConfig"),
    ),
    "collect": (("", "offrl.collect.config:CollectConfig"),),
    "model": (("", "offrl.cli.model:ModelConfig"),),
    "export": (("", "offrl.export:ExportConfig"),),
    "doctor": (("", "offrl.cli.doctor:DoctorConfig"),),
}
MORE = {  # what the dataclasses do not hold
    "train": ("config", "resume"),
    "tune": ("dataset", "space", "resume"),
    "finetune": ("algo", "dataset", "seeds"),
    "distill": ("into",),
    "select": ("dataset", "policy"),
    "model": ("dataset",),
    "data": ("rows", "episodes", "drop_faulty", "min_return", "max_return", "top", "fraction", "seed", "out"),
    "list": ("algo", "dataset"),
}
SWITCHES = {"data": ("drop_faulty",)}


def settings(command: str) -> dict[str, Any]:
    """name -> the dataclass field of each setting of a command, with the prefixes of groups; None for what is in no
    dataclass.
    """
    result: dict[str, Any] = {}
    for prefix, where in SETTINGS.get(command, ()):
        module, name = where.split(":")
        for key, field in _fields(getattr(importlib.import_module(module), name)(), prefix).items():
            result.setdefault(key, field)
    return {**result, **dict.fromkeys(MORE.get(command, ()))}


def _fields(config: Any, prefix: str) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for spec in dataclasses.fields(config):
        value = getattr(config, spec.name)
        if dataclasses.is_dataclass(value):
            result |= _fields(value, f"{prefix}{spec.name}.")
        elif spec.metadata.get("help"):
            result[prefix + spec.name] = spec
    return result


def switches(command: str) -> set[str]:
    """Names of the settings that are true or false, with and without the prefix of their group."""
    full = {name for name, field in settings(command).items() if field is not None and isinstance(field.default, bool)}
    return {*full, *(name.rpartition(".")[2] for name in full), *SWITCHES.get(command, ()), "trust"}
