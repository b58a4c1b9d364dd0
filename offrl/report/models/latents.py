"""`offrl model` of a run that learns a latent model: open-loop predictions and probes, on its own data or on others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from offrl import registry
from offrl.algorithm import Params
from offrl.data import load_dataset
from offrl.data.dataset import Dataset, DataSpec
from offrl.data.fit import check_columns
from offrl.data.raw.infer import listed
from offrl.errors import UserError, nearest, say
from offrl.evaluation.predict import saved_modules
from offrl.ope.candidates import load_again, recorded
from offrl.report.models.data import in_units_of, reading_of
from offrl.runs.paths import RECORD
from offrl.runs.record import read_record
from offrl.runs.run import SavedRun
from offrl.runs.settings import run_settings
from offrl.settings.dataset import DatasetConfig
from offrl.settings.replicas import Replica
from offrl.system.files import file_name
from offrl.training.run.open_loop import LEARNT, LatentReport, report

PROBED = "probe"  # the name under which a column is read that the data leave out
UNSEEN, UNKNOWN = "data that it was not trained on", "data of which it may have learnt some"
SEEN = ("frames", "history", "history_stride", "history_actions")  # settings of what a model sees of its data


def is_latent(path: Path) -> bool:
    """Whether there is a run of an algorithm with a latent model. Raises UserError for a damaged run."""
    if not (path / RECORD).exists():
        return False
    return hasattr(registry.get("algo", read_record(path)["identity"]["algo"]["name"]), "open_loop")


def report_again(
    name: str, dataset: str | None, reading: Mapping[str, Any], column: str | None, out: str | None
) -> None:
    """Measure the latent models of the run `name` on their own data, or on `dataset`; write and print the results.

    reading: dataset.SETTING=value, of `dataset`. column: that latent states are probed for. out: the folder of the
    files; None: the run's, or one in it. Raises UserError.
    """
    run = SavedRun(name)
    learnt_from = _own_settings(run)
    if dataset is None and learnt_from is None:
        raise UserError(f"{run.dir} is a fine-tuning run; name the data to measure its model on: dataset=NAME")
    models = _models(run)
    spec = models[0][1].data_spec
    if dataset is None:
        assert learnt_from is not None
        settings, measured_on, folder = learnt_from, LEARNT, run.dir
        data = load_again(run, settings, quiet=True)
    else:
        view = {f"dataset.{name}": getattr(spec, name) for name in SEEN}
        settings = reading_of(dataset, {**view, **reading})
        data = load_dataset(settings)
        _check(spec, data.spec, run)
        measured_on = UNSEEN if learnt_from is not None and _other_part(learnt_from, settings) else UNKNOWN
        folder = run.dir / f"model-{file_name(data.spec.name)}"
    if column is not None:
        data = _with_column(data, settings, column)
    data = in_units_of(data, spec)
    data = replace(data, spec=replace(data.spec, encoder=spec.encoder))
    files = report(Path(out) if out else folder, LatentReport(models, data, measured_on, column))
    say(*[", ".join(map(str, files))] * bool(files))


def _models(run: SavedRun) -> list[tuple[Replica, Any, dict[str, Params]]]:
    """The models of a run's replicas, less those that diverged. Raises UserError."""
    diverged, models = run.diverged, []
    for index, replica in enumerate(run.replicas):
        if replica not in diverged:
            policy = run.load_policy(replica, "cpu")
            unused = saved_modules(run.dir, policy, index, "its model")
            models.append((replica, policy.algorithm, {**policy.state.params, **unused}))
    if not models:
        raise UserError(f"{run.dir}: all seeds diverged, so that there is no model to measure")
    return models


def _own_settings(run: SavedRun) -> DatasetConfig | None:
    """The settings of the data that a run learnt from; None where it played."""
    return None if run.record.get("kind") == "finetune" else run_settings(run.dir).dataset


def _other_part(trained_on: DatasetConfig, other: DatasetConfig) -> bool:
    """Whether the same episodes were split alike, and these are the two parts: with any other difference they may have
    episodes in common.
    """
    names = [f.name for f in fields(DatasetConfig) if not f.metadata.get("place")]
    first, second = (recorded(c) for c in (trained_on, other))
    differing = [n for n in names if getattr(first, n) != getattr(second, n)]
    return trained_on.name == other.name and differing == ["split_part"]


def _check(expected: DataSpec, spec: DataSpec, run: SavedRun) -> None:
    """Raises UserError for data of other spaces than the run's."""
    shapes = [_spaces(s) for s in (expected, spec)]
    if shapes[0] != shapes[1]:
        raise UserError(
            f"{run.dir} was trained on {run.dataset} with {shapes[0]}; {spec.name} has {shapes[1]}: name data of the "
            "same spaces"
        )
    if not np.allclose(expected.action_bounds, spec.action_bounds):
        low, high = map(listed, expected.action_bounds)
        raise UserError(
            f"{run.dir} was trained with another range of actions than {spec.name} has: dataset.action_low={low} "
            f"dataset.action_high={high} reads them alike"
        )
    check_columns(expected, spec, str(run.dir))


def _spaces(spec: DataSpec) -> str:
    shapes = {"numbers": spec.observation_shape, **{s.name: s.shape for s in spec.streams}}
    observations = ", ".join(f"{name} {'x'.join(map(str, shape))}" for name, shape in shapes.items() if shape != (0,))
    actions = f"{spec.num_actions} choices of action" if spec.discrete else f"{spec.action_dim} action dimensions"
    return f"observations {observations} and {actions}"


def _with_column(dataset: Dataset, settings: DatasetConfig, column: str) -> Dataset:
    """The dataset with a column of its source, which is read again where it was left out. Raises UserError."""
    if column in dataset.columns:
        return dataset
    try:
        columns = load_dataset(replace(settings, fields={**settings.fields, PROBED: column}), "cpu", True).columns
    except UserError as error:
        raise UserError(str(error).replace(f"dataset.fields.{PROBED}", "probe=")) from None
    if PROBED not in columns:  # data that no file holds have no further columns
        raise UserError(
            f"{dataset.spec.name} has no column '{column}' to probe for.{nearest(column, dataset.columns)} It has: "
            f"{', '.join(dataset.columns)}"
        )
    return replace(dataset, columns={**dataset.columns, column: columns[PROBED]})
