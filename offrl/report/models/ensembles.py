"""A trained model's report: model.json (numbers), model.png and a short table."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from offrl.algorithm import Algorithm
from offrl.data import load_dataset
from offrl.data.dataset import Dataset, DataSpec
from offrl.errors import UserError, say
from offrl.figures.world_model import draw
from offrl.ope.candidates import load_again
from offrl.registry import register
from offrl.report.models.data import in_units_of, reading_of
from offrl.runs.run import SavedRun
from offrl.runs.settings import run_settings
from offrl.runs.tables import print_table
from offrl.settings.replicas import Replica
from offrl.system import files as checkpoint
from offrl.system.files import file_name
from offrl.training.run.artifacts import FinishedRun
from offrl.world_models.dynamics import Split, split
from offrl.world_models.model import FOLDER, ModelTrainer, Trained, Tree, WorldModel, load
from offrl.world_models.quality import LEVELS, Sample, dimensions, measured, ood, own_deviations, sample

NUMBERS, PICTURE = "model.json", "model.png"
FORMAT = 2  # raise it when the numbers change meaning
MOST_LINES = 20  # dimensions in the table
SHOWN_STEPS = (1, 2, 5, 10, 20, 50)


def report(
    run_dir: Path, model: Any, models: Sequence[tuple[Replica, Tree]], dataset: Dataset, parts: Any, quiet: bool
) -> Mapping[str, Any]:
    """Measure each replica's model of a run on `parts` (`offrl.world_models.dynamics.Split`) of its data; write and
    print what came out.

    models: (replica, tree), as saved in run_dir/models. Nothing is measured again where run_dir/model.json is about
    these very models. Returns the numbers.
    """
    run_dir = Path(run_dir)
    description = about_of([_identity(run_dir, r) for r, _ in models], dataset)
    old = read(run_dir / NUMBERS)
    if old.get("about") == description and None not in description["models"] and (run_dir / PICTURE).exists():
        return old
    result = measure(model, models, dataset, sample(dataset, parts), description)
    write(run_dir, result)
    if not quiet and models:
        show(result)
        say(f"{run_dir / PICTURE}")
    return result


@register("artifact", "world_model_report")
class WorldModelReport:
    """model.json and model.png of a run that trains world models."""

    after: ClassVar[tuple[str, ...]] = ("world_model",)

    @staticmethod
    def applies(algorithm: Algorithm, spec: DataSpec) -> bool:
        return isinstance(algorithm, ModelTrainer) and algorithm.trains_model

    @staticmethod
    def make(run: FinishedRun) -> None:
        dataset, config = run.dataset.to("cpu"), run.algorithm.config
        models = [(replica, load(run.dir / FOLDER / f"{replica.name}.safetensors").tree) for replica in run.replicas]
        report(run.dir, run.algorithm.model, models, dataset, split(dataset, config), run.quiet)


def about_of(identities: Sequence[str | None], dataset: Dataset) -> dict[str, Any]:
    """The models and data of a report, which is written again for any others."""
    return {"format": FORMAT, "models": list(identities), "data": dataset.fingerprint}


def measure(
    model: Any, models: Sequence[tuple[Replica, Tree]], dataset: Dataset, chosen: Sample, description: Mapping[str, Any]
) -> dict[str, Any]:
    """The numbers of all replicas, as plain values."""
    results = [
        {"name": r.name, "seed": r.seed, "values": dict(r.values), **measured(model, tree, dataset, chosen)}
        for r, tree in models
    ]
    return {
        "about": dict(description),
        "dataset": dataset.spec.name,
        "measured_on": chosen.description,
        "dimensions": dimensions(model),
        "levels": list(LEVELS),
        "calibrated": bool(model.config.calibrated),
        "own_deviations": own_deviations(model),
        "models": results,
    }


def _identity(run_dir: Path, replica: Replica) -> str | None:
    """The checksum of a replica's saved model; None where it is not saved, or damaged."""
    try:
        return str(checkpoint.read(run_dir / FOLDER / f"{replica.name}.safetensors")[1]["sha256"])
    except UserError:
        return None


def read(path: Path) -> dict[str, Any]:
    """The file that `write` wrote; {} where it is missing or cannot be read."""
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return result if isinstance(result, dict) else {}


def write(out: Path, result: Mapping[str, Any]) -> None:
    """model.png, then model.json. Raises UserError where the disk refuses."""
    if result["models"]:
        draw(result, out / PICTURE)
    checkpoint.write_text(out / NUMBERS, json.dumps(checkpoint.finite(result), indent=1, allow_nan=False) + "\n")


# ---- `offrl model`


def report_again(
    name: str, dataset: str | None, reading: Mapping[str, Any], outside: str | None, out: str | None
) -> None:
    """Measure the models of the run (or file) `name` on their own data, or on `dataset`; write and print the results.

    reading: dataset.SETTING=value, of `dataset` and of `outside`, to distinguish from the models' data. out: the folder
    of the files; None: the run's, or one in it. Raises UserError.
    """
    path = Path(name)
    trained_models = _models(path)
    first, run_dir = trained_models[0][1], trained_models[0][1].path.parent.parent
    own_data = _own_data(run_dir, first) if dataset is None or outside else None
    other = _read(dataset, reading, first) if dataset is not None else None
    if other is not None and other.fingerprint == first.meta["data"]["fingerprint"] and (run_dir / "run.json").exists():
        own_data, other = own_data or _own_data(run_dir, first), None
    data = other if other is not None else own_data
    assert data is not None
    chosen = sample(data, _parts(data, first))
    other_data = _read(outside, reading, first) if outside else None
    models = [(replica, trained.tree) for replica, trained in trained_models]
    description = about_of([str(trained.meta["sha256"]) for _, trained in trained_models], data)
    result = measure(first.model, models, data, chosen, description)
    show(result)
    if other_data is not None:
        assert own_data is not None
        rows = sample(own_data, _parts(own_data, first)).rows
        areas = [ood(first.model, tree, own_data, other_data, rows) for _, tree in models]
        show_ood(areas, own_data.spec.name, other_data.spec.name)
        result["ood"] = {"inside": own_data.spec.name, "outside": other_data.spec.name, "auroc": areas}
    name_parts = [
        "model",
        *([] if path.is_dir() else [path.stem]),
        *([] if other is None else [file_name(other.spec.name)]),
    ]
    folder = Path(out) if out else run_dir / "-".join(name_parts) if name_parts[1:] else run_dir
    write(folder, result)
    say(f"{folder / PICTURE}, {folder / NUMBERS}")


def _models(path: Path) -> list[tuple[Replica, Trained]]:
    """The models of a run, or the one in a file, with their replicas. Raises UserError."""
    first = load(path)
    if not isinstance(first.model, WorldModel):
        raise UserError(
            f"{path} holds a model of another kind ({getattr(first.model, 'kind', '?')}): offrl model reports on "
            "ensembles"
        )
    if not path.is_dir():
        return [(Replica(int(first.meta.get("seed", 0))), first)]
    files = [(r, path / FOLDER / f"{r.name}.safetensors") for r in SavedRun(path).replicas]
    return [(replica, load(file)) for replica, file in files if file.exists()]  # those that diverged left none


def _own_data(run_dir: Path, trained: Trained) -> Dataset:
    """The dataset that the model was trained on, unchanged. Raises UserError where it is missing or has changed."""
    if not (run_dir / "run.json").exists():
        raise UserError(
            f"{trained.path} does not stand in its run, which says how its data were read; name the data: dataset=NAME"
        )
    return _in_memory(load_again(SavedRun(run_dir), run_settings(run_dir).dataset, quiet=True))


def _read(name: str, reading: Mapping[str, Any], trained: Trained) -> Dataset:
    """Other data, in the units of the model's. Raises UserError where they are of other spaces."""
    dataset = in_units_of(load_dataset(reading_of(name, reading)), trained.model.spec)
    trained.check(dataset.spec)
    return _in_memory(dataset)


def _in_memory(dataset: Dataset) -> Dataset:
    if dataset.mapped:
        raise UserError(
            f"{dataset.spec.name}: data to measure a model on must fit in memory; raise dataset.memory_limit_gb"
        )
    return dataset


def _parts(dataset: Dataset, trained: Trained) -> Any:
    """The split of the data by what the model was trained on: its own for its own data; of other data every row is
    unseen.
    """
    if dataset.fingerprint == trained.meta["data"]["fingerprint"]:
        return split(dataset, trained.model.config)
    empty = torch.zeros(0, dtype=torch.int64)
    if not bool(dataset.columns["successor_known"].any()):
        raise UserError(
            f"{dataset.spec.name} has no row whose next observation is known: nothing to measure a model on"
        )
    return Split(empty, empty, torch.arange(dataset.num_episodes), empty)


# ---- tables


def averaged(result: Mapping[str, Any], part: str, key: str) -> np.ndarray:
    """One kind of number as float64, mean over models; NaN where some model has none."""
    return np.mean([np.array(m[part][key], dtype=np.float64) for m in result["models"]], 0)


def show(result: Mapping[str, Any]) -> None:
    """Print two tables, and a line on terminations."""
    names, models = result["dimensions"], result["models"]
    likelihood = "nll" if result["own_deviations"] else "nll_calibrated"
    r2, change, rmse, nll = (averaged(result, "one_step", k) for k in ("r2", "r2_change", "rmse", likelihood))
    before, after = (
        averaged(result, "one_step", k)[:, LEVELS.index(0.9)] for k in ("coverage", "coverage_recalibrated")
    )
    # of a model without deviations of its own, what is before calibration means nothing
    coverages = {"in 90% interval": after}
    if result["own_deviations"]:
        coverages = {"in 90% interval": before, "recalibrated": after}
    errors = {"RMSE": rmse, "R2": r2, "R2 of change": change, "NLL": nll}
    order, note = list(range(len(names))), ""
    if len(names) > MOST_LINES:
        hardest = np.argsort(np.where(np.isnan(change), np.inf, change)[:-1], kind="stable")[: MOST_LINES - 1]
        order = [*sorted(hardest.tolist()), len(names) - 1]
        note = f"; the {MOST_LINES - 1} hardest of {len(names) - 1} observations"
    rows = [
        [names[d], *(_number(x[d]) for x in errors.values()), *(f"{100 * x[d]:.0f}%" for x in coverages.values())]
        for d in order
    ]
    several = f", mean of {len(models)} models" if len(models) > 1 else ""
    title = (
        f"one step ahead: {models[0]['rows']:,} rows of {result['measured_on']} ({result['dataset']}){several}{note}"
    )
    print_table(["", *errors, *coverages], rows, title)
    _show_steps(result, several)
    say(*sorted({_ending_line(m["termination"]) for m in models}))


def show_ood(scores: Sequence[Mapping[str, float]], inside: str, outside: str) -> None:
    """Print the areas under the ROC curve of all models' measures, best first."""
    several = f", mean of {len(scores)} models" if len(scores) > 1 else ""
    mean = {name: float(np.mean([f[name] for f in scores])) for name in scores[0]}
    labels = {"single": "single (one network's aleatoric)"}
    rows = [[labels.get(name, name), f"{mean[name]:.3f}"] for name in sorted(mean, key=lambda n: -mean[n])]
    print_table(["uncertainty", "AUROC"], rows, f"tells {outside} from {inside}, 0.5: not at all, 1: always{several}")


def _show_steps(result: Mapping[str, Any], several: str) -> None:
    horizons = [m["many_steps"] for m in result["models"]]
    if not all(horizons):
        return
    steps = sorted({k for k in SHOWN_STEPS if k < horizons[0]["horizon"]} | {horizons[0]["horizon"]})
    kinds = {"mean of elites": "mean", "sampled": "sampled", "nothing changes": "unchanged"}
    values = {label: np.mean([m[kind]["median"] for m in horizons], 0) for label, kind in kinds.items()}
    title = (
        f"many steps ahead: median error, in standard deviations of the data, {horizons[0]['starts']} starts{several}"
    )
    print_table(["steps", *kinds], [[str(k), *(f"{v[k - 1]:.3f}" for v in values.values())] for k in steps], title)


def _ending_line(quality: Mapping[str, Any]) -> str:
    if not quality["recorded"] and not quality["predicted"]:
        return f"terminations ({quality['function']}): none recorded, none predicted"
    shares = [
        f"{name} {'-' if quality[name] is None else format(quality[name], '.2f')}" for name in ("precision", "recall")
    ]
    counts = f"{quality['recorded']} recorded, {quality['predicted']} predicted in {quality['rows']:,} rows"
    return f"terminations ({quality['function']}): {counts}, {', '.join(shares)}"


def _number(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.3f}" if 0.01 <= abs(value) < 1000 else f"{value:.3g}"
