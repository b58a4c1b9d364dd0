"""Open-loop predictions of a finished run's latent models: open_loop.json, open_loop.png, for images open_loop.gif, of
a hierarchy goals.png, and a short table.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch.utils import _pytree as pytree

from offrl import rng
from offrl.algorithm import Algorithm, Batch, Params, select, with_settings
from offrl.data.dataset import Dataset, DataSpec
from offrl.errors import say
from offrl.figures import goals as goal_picture
from offrl.figures.goals import Shown
from offrl.figures.open_loop import FILM, PICTURE, Films, averaged, draw, film
from offrl.registry import register
from offrl.runs.tables import print_table
from offrl.settings.replicas import Replica
from offrl.system.files import finite, write_text
from offrl.training.run.artifacts import FinishedRun
from offrl.world_models.open_loop import (
    CONTEXT,
    Expected,
    GoalModel,
    Goals,
    OpenLoopModel,
    errors,
    numbers_of,
    windows_of,
)
from offrl.world_models.probe import halves_of, probe

NUMBERS = "open_loop.json"
FILMED = 2  # windows whose images are drawn
SHOWN_STEPS = (1, 2, 5, 10, 20, 45)
GOAL_WINDOWS = 16
MOST_LINES = 20  # dimensions in the table
LEARNT = "data that it learnt from"


class LatentReport(NamedTuple):
    """What is measured of latent models, and on what."""

    models: Sequence[tuple[Replica, Any, dict[str, Params]]]  # each with its algorithm and parameters
    dataset: Dataset
    measured_on: str  # LEARNT or another such text
    probe: str | None = None  # a column of `dataset`


@register("artifact", "open_loop")
class OpenLoopReport:
    """open_loop.json, open_loop.png and open_loop.gif of a run with latent models, goals.png of one with goals."""

    after: ClassVar[tuple[str, ...]] = ()

    @staticmethod
    def applies(algorithm: Algorithm, spec: DataSpec) -> bool:
        return isinstance(algorithm, OpenLoopModel)

    @staticmethod
    def make(run: FinishedRun) -> None:
        models = [
            (replica, with_settings(run.algorithm, dict(replica.values)), select(run.state, i).params)
            for i, replica in enumerate(run.replicas)
        ]
        if models:
            report(run.dir, LatentReport(models, run.dataset.to("cpu"), LEARNT), run.quiet)


@torch.no_grad()
def report(out: Path, subject: LatentReport, quiet: bool = False) -> list[Path]:
    """Measure the models; write the files, print what came out, and return the files' paths: none, and a line that says
    why, where the episodes are too short.
    """
    dataset = subject.dataset
    batch = windows_of(dataset)
    if batch is None:
        if not quiet:
            say(f"no {PICTURE}: half of the episodes have {CONTEXT} states or fewer")
        return []
    halves = halves_of(dataset, subject.probe) if subject.probe else []
    models: list[dict[str, Any]] = []
    films: Films = {}
    goals: Goals | None = None
    for replica, algorithm, params in subject.models:
        expected = algorithm.open_loop(params, batch, CONTEXT, rng.make_key(0))
        films = films or _films(batch, expected)
        identity = {"name": replica.name, "seed": replica.seed, "values": dict(replica.values)}
        models.append({**identity, "errors": errors(batch, expected)})
        if subject.probe:
            models[-1]["probe"] = probe(algorithm, params, halves, subject.probe)
        chosen = _goals(algorithm, params, batch)
        if chosen is not None:
            models[-1]["nearness"] = chosen.nearness.mean((0, 2)).tolist()
            goals = chosen if goals is None else goals
    states, windows = batch["actions"].shape[:2]
    result: dict[str, Any] = {"dataset": dataset.spec.name, "measured_on": subject.measured_on}
    result |= {"context": CONTEXT, "states": states, "windows": windows, "probe": subject.probe, "models": models}
    files = [out / PICTURE, out / NUMBERS]
    draw(files[0], result, films)
    if films:
        files.insert(1, out / FILM)
        film(files[1], films)
    if goals is not None:
        files.insert(1, out / goal_picture.PICTURE)
        _draw_goals(files[1], batch, goals)
    write_text(out / NUMBERS, json.dumps(finite(result), indent=1, allow_nan=False) + "\n")
    if not quiet:
        show(result)
    return files


def show(result: Mapping[str, Any]) -> None:
    """Print the median errors, mean over models, and what a probe explains."""
    models = result["models"]
    columns: dict[str, np.ndarray] = {}
    for name in models[0]["errors"]:
        for kind, label in (("model", name), ("guess", "their mean" if name == "rewards" else "nothing changes")):
            values = np.mean([m["errors"][name][kind]["median"] for m in models], 0)
            columns[label if label not in columns else f"{label}, {name}"] = values
    horizon = len(next(iter(columns.values())))
    steps = sorted({k for k in SHOWN_STEPS if k < horizon} | {horizon})
    rows = [[str(k), *(f"{x[k - 1]:.3f}" for x in columns.values())] for k in steps]
    data = f"{result['measured_on']} ({result['dataset']}){averaged(result)}"
    print_table(
        ["steps", *columns], rows, f"open-loop predictions: median error of {result['windows']} windows of {data}"
    )
    if result["probe"]:
        r2 = np.mean([m["probe"] for m in models], 0)
        rows = [[f"{result['probe']}[{i}]", "-" if np.isnan(x) else f"{x:.3f}"] for i, x in enumerate(r2[:MOST_LINES])]
        note = f", the first {MOST_LINES} of {len(r2)} dimensions" if len(r2) > MOST_LINES else ""
        print_table(["", "R2"], rows, f"linear probe of latent states, fitted on every other episode{note}")
    if "nearness" in models[0]:
        near = np.mean([m["nearness"] for m in models], 0)
        say(
            f"goals: max-cosine {near[0]:.2f} where they are chosen, {near[-1]:.2f} after {len(near) - 1} imagined "
            "steps towards them, 1 in the goal"
        )


def _goals(algorithm: Any, params: dict[str, Params], batch: Batch) -> Goals | None:
    if not isinstance(algorithm, GoalModel):
        return None
    some = pytree.tree_map(lambda x: x[:, :GOAL_WINDOWS], batch)
    return algorithm.goals(params, some, CONTEXT, rng.make_key(0))


def _draw_goals(out: Path, batch: Batch, goals: Goals) -> None:
    observations: Any = batch["observations"]
    numbers = None
    if goals.goals.numbers is not None and goals.imagined.numbers is not None:
        recorded = numbers_of(observations, goals.goals.images)
        numbers = Shown(*(x.numpy() for x in (recorded, goals.goals.numbers, goals.imagined.numbers)))
    images = {
        name: Shown(
            observations[name].numpy() / 255.0,
            *(x[name].clamp(0.0, 1.0).numpy() for x in (goals.goals.images, goals.imagined.images)),
        )
        for name in goals.goals.images
    }
    goal_picture.draw(out, goals.states, numbers, images)


def _films(batch: Batch, expected: Expected) -> Films:
    """Images of the first windows, from the last that the model sees on."""
    observations: Any = batch["observations"]
    windows = range(min(FILMED, batch["actions"].shape[1]))
    films: dict[str, list[tuple[np.ndarray, np.ndarray]]] = {}
    for name, image in expected.images.items():
        recorded, predicted = observations[name][CONTEXT - 1 :].numpy() / 255.0, image.clamp(0.0, 1.0).numpy()
        films[name] = [(recorded[:, b], predicted[:, b]) for b in windows]
    return films
