"""`offrl model`: how good a trained world model is, on its own data or on others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from offrl import registry
from offrl.data.dataset import Dataset
from offrl.data.load import load_dataset
from offrl.errors import UserError
from offrl.ope.candidates import recorded, settings_of
from offrl.registry import register
from offrl.report import world_model as reports
from offrl.runs.record import Run
from offrl.settings.compose import compose
from offrl.settings.field import describe, setting
from offrl.settings.replicas import Replica
from offrl.world_models.dynamics import Split, split
from offrl.world_models.model import FOLDER, Trained, WorldModel, load
from offrl.world_models.quality import ood, sample


@register("command", "model")
def report_again(name: str, dataset: str | None, reading: Mapping[str, Any], config: Any) -> None:
    """Measure the models of the run (or file) `name` on their own data, or on `dataset`; print and write what came out.

    reading: dataset.SETTING=value, of `dataset` and of config.ood. config: `offrl.cli.model.ModelConfig`. Raises UserError.
    """
    path = Path(name)
    found = _models(path)
    first, run_dir = found[0][1], found[0][1].path.parent.parent
    own = _own_data(run_dir, first) if dataset is None or config.ood else None
    other = _read(dataset, reading, first) if dataset is not None else None
    if other is not None and other.fingerprint == first.meta["data"]["fingerprint"] and (run_dir / "run.json").exists():
        own, other = own or _own_data(run_dir, first), None
    data = other if other is not None else own
    assert data is not None
    chosen = sample(data, _parts(data, first))
    outside = _read(config.ood, reading, first) if config.ood else None
    models = [(replica, trained.tree) for replica, trained in found]
    about = reports.about_of([str(trained.meta["sha256"]) for _, trained in found], data)
    result = reports.measure(first.model, models, data, chosen, about)
    reports.show(result)
    if outside is not None:
        assert own is not None
        rows = sample(own, _parts(own, first)).rows
        areas = [ood(first.model, tree, own, outside, rows) for _, tree in models]
        reports.show_ood(areas, own.spec.name, outside.spec.name)
        result["ood"] = {"inside": own.spec.name, "outside": outside.spec.name, "auroc": areas}
    words = ["model", *([] if path.is_dir() else [path.stem]), *([] if other is None else [_plain(other.spec.name)])]
    out = Path(config.out) if config.out else run_dir / "-".join(words) if words[1:] else run_dir
    reports.write(out, result)
    print(f"{out / reports.PICTURE}, {out / reports.NUMBERS}")


def _plain(name: str) -> str:
    return "".join(c if c.isalnum() or c in "-_." else "-" for c in name)


def _models(path: Path) -> list[tuple[Replica, Trained]]:
    """The models of a run, or the one in a file, with their replicas. Raises UserError."""
    first = load(path)
    if not isinstance(first.model, WorldModel):
        raise UserError(f"{path} holds a model of another kind ({getattr(first.model, 'kind', '?')}): offrl model reports on ensembles")
    if not path.is_dir():
        return [(Replica(int(first.meta.get("seed", 0))), first)]
    found = [(r, path / FOLDER / f"{r.name}.safetensors") for r in Run(path).replicas]
    return [(replica, load(file)) for replica, file in found if file.exists()]  # those that diverged left none


def _own_data(run_dir: Path, trained: Trained) -> Dataset:
    """What the model was trained on, as it was then. Raises UserError where it is not there any more, or is not what it was."""
    if not (run_dir / "run.json").exists():
        raise UserError(f"{trained.path} does not stand in its run, which says how its data were read; name the data: dataset=NAME")
    run = Run(run_dir)
    config = settings_of(run).dataset
    if run.record["spec"]["source"] == "arrays" and config.name not in registry.names("dataset"):
        raise UserError(f"{run_dir} was trained on arrays from Python; name data of the same spaces: dataset=NAME")
    try:
        dataset = load_dataset(config, quiet=True)
    except UserError as error:
        raise UserError(f"the data of {run_dir} cannot be read ({error}); name others of the same spaces: dataset=NAME") from None
    if dataset.fingerprint != trained.meta["data"]["fingerprint"]:
        raise UserError(f"{config.name} is not what {run_dir} was trained on any more; to measure on it as new data: dataset={config.name}")
    return _in_memory(dataset)


def _read(name: str, reading: Mapping[str, Any], trained: Trained) -> Dataset:
    """Other data, in the units of the model's. Raises UserError where they are of other spaces."""
    settings = compose({**reading, "dataset": name, "algo": "bc", "experiment": "none"}).dataset
    dataset = reports.in_units_of(load_dataset(recorded(settings)), trained.model.spec)
    trained.check(dataset.spec)
    return _in_memory(dataset)


def _in_memory(dataset: Dataset) -> Dataset:
    if dataset.mapped:
        raise UserError(f"{dataset.spec.name}: data to measure a model on must fit in memory; raise dataset.memory_limit_gb")
    return dataset


def _parts(dataset: Dataset, trained: Trained) -> Any:
    """Which rows the model was not trained on: of its own data as it split them, else all."""
    if dataset.fingerprint == trained.meta["data"]["fingerprint"]:
        return split(dataset, trained.model.config)
    nothing = torch.zeros(0, dtype=torch.int64)
    if not bool(dataset.columns["successor_known"].any()):
        raise UserError(f"{dataset.spec.name} has no row whose next observation is known: nothing to measure a model on")
    return Split(nothing, nothing, torch.arange(dataset.num_episodes), nothing)


@dataclass
class ModelConfig:
    """Settings of `offrl model`."""

    ood: str | None = setting(None, "another data set: how well each measure of uncertainty tells its rows from the model's own data")
    out: str | None = setting(None, "folder of model.json and model.png; null: RUN, or RUN/model-NAME for other data or one file")


USAGE = "\n".join(
    [
        "usage: offrl model RUN [dataset=NAME] [name=value ...]",
        "",
        "Measures the world models of a run of algo=dynamics (or one file of its models/): errors, likelihood and coverage of intervals",
        "one step ahead, errors many steps ahead under recorded actions, terminations. On its own data it takes the episodes kept apart.",
        "",
        "  dataset=null                             other data to measure on, all its episodes; also dataset.SETTING=value, for ood= too",
        *describe(ModelConfig()),
    ]
)
LITERAL = ("ood", "out")  # taken as they stand, whatever characters they hold


def run(arguments: list[str]) -> int:
    if not arguments or "=" in arguments[0]:
        raise UserError("usage: offrl model RUN [dataset=NAME] [ood=DATASET] [out=DIR]; offrl model --help says more")
    literal = {k: v for k, _, v in (a.partition("=") for a in arguments[1:]) if k in LITERAL and v}
    from offrl.settings.compose import fill, parse

    values = parse([a for a in arguments[1:] if a.partition("=")[0] not in literal])
    about_data = {k: values.pop(k) for k in list(values) if k.partition(".")[0] == "dataset"}
    config = fill(ModelConfig(), {**values, **literal}, "model")
    dataset = about_data.pop("dataset", None)
    if about_data and dataset is None and config.ood is None:
        raise UserError(f"{next(iter(about_data))} needs the data set itself: dataset=NAME")
    from offrl import registry

    registry.get("command", "model")(arguments[0], dataset, about_data, config)
    return 0
