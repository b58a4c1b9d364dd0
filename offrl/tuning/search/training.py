"""The runs of a rung: ordinary run directories whose replicas are the settings of one program, with all their seeds."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from offrl.data import load_dataset
from offrl.data.dataset import Dataset
from offrl.errors import UserError
from offrl.runs import record as runs
from offrl.runs.paths import RECORD
from offrl.runs.run import SavedRun
from offrl.settings.compose import compose
from offrl.settings.replicas import Replica, expand
from offrl.settings.train import TrainConfig
from offrl.system import files
from offrl.system.devices import pick_device
from offrl.training.loop import train
from offrl.training.stages import ready
from offrl.tuning.search.space import Space

Values = Mapping[str, Any]


@dataclass(frozen=True)
class RungRun:
    """Settings of one algorithm that are one program, with their seeds: what a process trains."""

    directory: Path
    settings: Mapping[str, Any]  # of `offrl train`
    trials: tuple[str, ...]  # the names of the settings, in the grid's order
    origin: Path | None = None  # the run in which these replicas were trained before
    origin_indices: tuple[int, ...] = ()  # theirs in that run

    @property
    def replicas(self) -> list[Replica]:
        """Of each setting one for each seed."""
        grid = {n.removeprefix("grid."): v for n, v in self.settings.items() if n.startswith("grid.")}
        return expand(grid, self.settings["seeds"], True)


@dataclass
class DataSets:
    """Data sets by the settings that prepare them, read once."""

    known: dict[str, Dataset] = field(default_factory=dict)

    def get(self, config: TrainConfig) -> Dataset:
        key = repr(dataclasses.asdict(config.dataset))
        if key not in self.known:
            self.known[key] = load_dataset(config.dataset, str(pick_device(config.device)), config.quiet)
        return self.known[key]


def programs(space: Space, trials: Mapping[str, Values]) -> list[list[str]]:
    """The settings' names, those of one program together, in their order."""
    groups: dict[tuple[Any, ...], list[str]] = {}
    for name, values in trials.items():
        groups.setdefault(space.program(values), []).append(name)
    return list(groups.values())


def settings_of(space: Space, trials: Mapping[str, Values], names: Sequence[str]) -> dict[str, Any]:
    """Settings of `offrl train` for settings that are one program: a paired grid over what replicas can differ in."""
    first = trials[names[0]]
    result = {f"algo.{d.name}": _plain(first[d.name]) for d in space.dimensions if not d.tensor}
    columns = {name: [float(trials[n][name]) for n in names] for name in space.tensors}
    if len(names) == 1:
        return result | {f"algo.{name}": column[0] for name, column in columns.items()}
    return result | {f"grid.{name}": column for name, column in columns.items()} | {"paired": True}


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def origin_of(names: Sequence[str], before: Sequence[RungRun], seeds: int) -> tuple[Path | None, tuple[int, ...]]:
    """The run of the rung before that has the replicas of these settings, and their indices in it; (None, ()) in a
    first rung."""
    for run in before:
        if names[0] in run.trials:
            return run.directory, tuple(run.trials.index(n) * seeds + s for n in names for s in range(seeds))
    return None, ()


def train_rung(run: RungRun, data: DataSets) -> None:
    """Train one run, or go on with it; at once where it is finished. Raises UserError; Interrupted, when all is
    saved.
    """
    config = compose({**run.settings, "name": run.directory.name, "runs_dir": str(run.directory.parent)})
    dataset = data.get(config)
    config, pretrained = ready(config, dataset)
    if run.origin is not None and not files.steps(run.directory):
        _begin_from(run, config, dataset)
    train(config, dataset, run.directory, pretrained)


def _begin_from(run: RungRun, config: TrainConfig, dataset: Dataset) -> None:
    """The record of a run and its first checkpoint, made of replicas of another run: training goes on from there."""
    assert run.origin is not None
    old = SavedRun(run.origin)
    latest = files.load_latest(run.origin)
    if latest is None:
        raise UserError(
            f"{run.origin} has no checkpoint any more, and {run.directory.name} goes on from it: remove both, and "
            "tune again"
        )
    tensors, meta = latest
    indices = torch.tensor(run.origin_indices)
    selected = {
        name: tensor[indices] for name, tensor in tensors.items() if name.partition("/")[0] in ("state", "alive")
    }
    mode, group = str(old.record["mode"]), int(old.record["group"])
    if not (run.directory / RECORD).exists():
        run.directory.mkdir(parents=True, exist_ok=True)
        runs.prepare(run.directory, config, dataset, lambda: (mode, group), torch.device(old.record["device"]))
    details = {"since": meta["since"], "unscored": False, "scoring": None, "algorithm": config.algo.name}
    files.save(run.directory, meta["step"], selected, {**details, "seeds": [r.seed for r in run.replicas]}, keep=0)
