"""What a fine-tuning run starts from: its states and settings, its task and its data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from offrl import registry
from offrl.algorithm import Algorithm, TrainState
from offrl.data import load_dataset
from offrl.data.dataset import Dataset, DataSpec
from offrl.data.fit import check_normalisation
from offrl.data.transforms.apply import apply_transforms
from offrl.errors import UserError
from offrl.finetuning.config import FinetuneConfig
from offrl.runs import record as runs
from offrl.settings.dataset import DatasetConfig
from offrl.settings.evaluation import EvalConfig
from offrl.settings.replicas import Replica
from offrl.settings.train import TrainConfig
from offrl.system.devices import pick_device
from offrl.tasks.environments import resolve_task
from offrl.tasks.task import Task, with_factory

KIND = "finetune"  # of a run's record
Factory = Callable[[], Any]


@dataclass
class Start:
    """All that decides a fine-tuning run but its settings."""

    config: FinetuneConfig  # without open ends
    algorithm: Algorithm  # with its settings as they are online
    replicas: list[Replica]
    grid: dict[str, list[float]]
    spec: DataSpec
    task: Task
    label: str
    data: DatasetConfig | None  # settings of the data; None: there are none
    described: dict[str, Any]  # the data in the record
    dataset: Dataset | None = None  # None where no batch needs it
    state: TrainState | None = None  # on the CPU; None: of the run's own checkpoint
    parent: dict[str, Any] | None = None  # the run that it began from; None: fresh parameters
    fixed: dict[str, float] = field(default_factory=dict)  # settings that change online, where a grid has another value
    anneal: dict[str, tuple[float, float, float]] = field(default_factory=dict)
    user_settings: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    run_dir: Path | None = None  # of a run that goes on


def check_rewards(settings: DatasetConfig, config: FinetuneConfig) -> None:
    """Raise UserError where batches would mix labelled rewards with the environment's."""
    if getattr(settings, "reward_labels", None) and config.mixing != 0.0:
        raise UserError(
            "the data's rewards are labels (dataset.reward_labels), and the environment gives its own: batches would "
            "mix two kinds of rewards; mixing=0 learns from the environment's alone"
        )


def run_data(
    parent: TrainConfig, config: FinetuneConfig, dataset: Dataset | None, record: dict[str, Any], path: Path
) -> Dataset:
    """The run's own data again. Raises UserError where they are gone or others."""
    if (
        dataset is None
        and runs.spec_of(record, path).source == "arrays"
        and parent.dataset.name not in registry.names("dataset")
    ):
        raise UserError(
            f"{path} was trained on arrays from Python: give them, offrl.finetune(run, dataset=...), or leave them "
            "out, mixing=0"
        )
    try:
        data = load(parent.dataset, config, dataset)
    except UserError as error:
        raise UserError(
            f"{error} (the data of {path}, which mixing={null_or_number(config.mixing)} needs; dataset=PATH says where "
            "they are, mixing=0 goes on without them)"
        ) from None
    if data.fingerprint != record["data"]["fingerprint"]:
        raise UserError(
            f"{path} was trained on {record['data']['name']} ({record['data']['fingerprint'][:12]}) and this is "
            f"{data.spec.name} ({data.fingerprint[:12]}): give its own data, or mixing=0"
        )
    check_normalisation(runs.spec_of(record, path), data.spec, str(path))
    return data


def load(settings: DatasetConfig, config: FinetuneConfig, dataset: Dataset | None) -> Dataset:
    device = str(pick_device(config.device))
    return load_dataset(settings, device) if dataset is None else apply_transforms([dataset], settings)


def null_or_number(value: float | None) -> str:
    return "null" if value is None else f"{value:g}"


def task_of(spec: DataSpec, config: FinetuneConfig, env_id: str, env: Factory | None, cure: str) -> Task:
    """The task to learn. Raises UserError where there is no environment."""
    if env is not None:
        return with_factory(spec.task, env, spec.name)
    name = config.env if config.env is not None else "auto" if env_id == "none" else env_id
    task = resolve_task(spec.task, EvalConfig(env=name)) if name != "none" else None
    if task is None:
        raise UserError(f"there is no environment to learn in; name one: {cure}")
    return task
