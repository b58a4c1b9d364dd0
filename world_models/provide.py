"""Where an algorithm gets its world model: one that is named, or one that is trained first."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offrl.data.dataset import Dataset, DataSpec
from offrl.errors import UserError, warn
from offrl.runs import record as runs
from offrl.system.locks import alone
from offrl.world_models.dynamics import Dynamics, DynamicsSettings
from offrl.world_models.model import FOLDER, Trained, load

if TYPE_CHECKING:
    from offrl.settings.train import TrainConfig

SEED = 0  # of the model: one model serves runs of all seeds


def fitting(path: str, spec: DataSpec) -> Trained:
    """The model at `path`. Raises UserError where there is none, or where it does not fit data of `spec`."""
    trained = load(path)
    trained.check(spec)
    return trained


def named(path: str, dataset: Dataset) -> Trained:
    """As `fitting`; a model of other data of the same environment is a warning."""
    trained = fitting(path, dataset.spec)
    about = trained.meta["data"]
    if about["fingerprint"] != dataset.fingerprint:
        warn(f"world_model={path} was trained on {about['name']}, and this is {dataset.spec.name}: it may know little about these data")
    return trained


def train(config: TrainConfig, dataset: Dataset, settings: Mapping[str, Any]) -> Path:
    """The run directory of a model of `dataset`, trained now unless a run with the same settings is there."""
    from offrl.settings.train import CheckpointConfig
    from offrl.training.loop import train as run_training

    algo = Dynamics.fit_config(DynamicsSettings(**settings), dataset)
    keep = ("dataset", "device", "precision", "threads", "runs_dir", "quiet", "compile", "eval")
    own = type(config)(algo=algo, experiment="none", seeds=[SEED], label="dynamics", checkpoint=CheckpointConfig())
    own = dataclasses.replace(own, **{name: getattr(config, name) for name in keep})
    run_dir = runs.directory(own, dataset)
    with alone(run_dir / ".model", f"the world model {run_dir}", config.quiet):
        if not list((run_dir / FOLDER).glob("*.safetensors")):
            if not config.quiet:
                print(f"{config.algo.name} needs a world model: training one in {run_dir} (world_model=RUN takes another)", flush=True)
            run_training(own, dataset, run_dir)
    if not list((run_dir / FOLDER).glob("*.safetensors")):
        raise UserError(
            f"{run_dir}: the world model diverged; train one with other settings (`offrl train algo=dynamics "
            "...`) and name it: world_model=RUN"
        )
    return run_dir
