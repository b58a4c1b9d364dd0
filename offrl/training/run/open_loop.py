"""Open-loop predictions of a finished run's latent models: open_loop.json, open_loop.png, for images open_loop.gif, and
a short table.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch

from offrl import rng
from offrl.algorithm import Algorithm, Batch, select
from offrl.data.dataset import DataSpec
from offrl.errors import say
from offrl.figures.open_loop import FILM, PICTURE, Films, draw, film
from offrl.registry import register
from offrl.runs.tables import print_table
from offrl.system.files import finite, write_text
from offrl.training.run.artifacts import FinishedRun
from offrl.world_models.open_loop import CONTEXT, Expected, OpenLoopModel, errors, windows_of

NUMBERS = "open_loop.json"
FILMED = 2  # windows whose images are drawn
SHOWN_STEPS = (1, 2, 5, 10, 20, 45)


@register("artifact", "open_loop")
class OpenLoopReport:
    """open_loop.json, open_loop.png and open_loop.gif of a run with latent models."""

    after: ClassVar[tuple[str, ...]] = ()

    @staticmethod
    def applies(algorithm: Algorithm, spec: DataSpec) -> bool:
        return isinstance(algorithm, OpenLoopModel)

    @staticmethod
    @torch.no_grad()
    def make(run: FinishedRun) -> None:
        batch = windows_of(run.dataset.to("cpu"))
        if batch is None:
            if not run.quiet:
                say(f"no {PICTURE}: half of the episodes have {CONTEXT} states or fewer")
            return
        models: list[dict[str, Any]] = []
        films: Films = {}
        for i, replica in enumerate(run.replicas):
            expected = run.algorithm.open_loop(select(run.state, i).params, batch, CONTEXT, rng.make_key(0))
            films = films or _films(batch, expected)
            identity = {"name": replica.name, "seed": replica.seed, "values": dict(replica.values)}
            models.append({**identity, "errors": errors(batch, expected)})
        if not models:
            return
        states, windows = batch["actions"].shape[:2]
        result = {"dataset": run.dataset.spec.name, "context": CONTEXT, "states": states, "windows": windows}
        result["models"] = models
        write_text(run.dir / NUMBERS, json.dumps(finite(result), indent=1, allow_nan=False) + "\n")
        draw(run.dir / PICTURE, result, films)
        if films:
            film(run.dir / FILM, films)
        if not run.quiet:
            show(models, windows)


def show(models: Sequence[Mapping[str, Any]], windows: int) -> None:
    """Print the median errors, mean over models."""
    columns: dict[str, np.ndarray] = {}
    for name in models[0]["errors"]:
        for kind, label in (("model", name), ("guess", "their mean" if name == "rewards" else "nothing changes")):
            values = np.mean([m["errors"][name][kind]["median"] for m in models], 0)
            columns[label if label not in columns else f"{label}, {name}"] = values
    horizon = len(next(iter(columns.values())))
    steps = sorted({k for k in SHOWN_STEPS if k < horizon} | {horizon})
    rows = [[str(k), *(f"{x[k - 1]:.3f}" for x in columns.values())] for k in steps]
    print_table(["steps", *columns], rows, f"open-loop predictions: median error of {windows} windows of the data")


def _films(batch: Batch, expected: Expected) -> Films:
    """Images of the first windows, from the last that the model sees on."""
    observations: Any = batch["observations"]
    windows = range(min(FILMED, batch["actions"].shape[1]))
    films: dict[str, list[tuple[np.ndarray, np.ndarray]]] = {}
    for name, image in expected.images.items():
        recorded, predicted = observations[name][CONTEXT - 1 :].numpy() / 255.0, image.clamp(0.0, 1.0).numpy()
        films[name] = [(recorded[:, b], predicted[:, b]) for b in windows]
    return films
