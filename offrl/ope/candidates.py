"""Policies to choose from: the checkpoints and final policies of runs, and the data they were trained on."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from offrl import registry
from offrl.data import load_dataset
from offrl.data.dataset import Dataset, DataSpec
from offrl.errors import UserError, warn
from offrl.nn.outline import outline
from offrl.ope.problem import unique_names
from offrl.runs.paths import RECORD
from offrl.runs.run import SavedRun
from offrl.runs.settings import run_settings
from offrl.settings.dataset import DatasetConfig
from offrl.system import files as checkpoint
from offrl.training.engine import first_state, policies_of


def find_runs(paths: Sequence[str | Path]) -> list[SavedRun]:
    """The runs at these paths: run directories, or folders of them. Raises UserError where there is none."""
    runs: list[SavedRun] = []
    for path in map(Path, paths):
        if (path / RECORD).exists() or not path.is_dir():
            runs.append(SavedRun(path))  # says what is wrong when this is no run
            continue
        below = sorted(p.parent for p in path.glob(f"*/{RECORD}"))
        if not below:
            raise UserError(f"{path} is no run directory, and none is in it (a run has a {RECORD})")
        runs += [SavedRun(p) for p in below]
    return runs


def run_candidates(run: SavedRun) -> dict[str, Any]:
    """Every replica's policy at every checkpoint that is there, and its final one: {"RUN/seed_0@50000": policy}.

    From a checkpoint a policy knows its own critic too. A damaged checkpoint is named in a warning and passed over; a
    replica that had diverged is left out. Raises UserError where there is no policy at all.
    """
    config, spec = run_settings(run.dir, parts=()), run.spec
    if "reward_scale" not in run.record["spec"]:
        scale, shift = reward_transform(run)
        spec = dataclasses.replace(spec, reward_scale=scale, reward_shift=shift)
    kind, replicas = registry.get("algo", config.algo.name), run.replicas
    with outline(str(run.dir)):
        template = first_state(kind(config.algo, spec), replicas, "meta")
    algorithm = None
    base = run.dir.resolve().name
    candidates: dict[str, Any] = {}
    steps = set()
    for step in checkpoint.steps(run.dir):
        path = run.dir / checkpoint.FOLDER / f"step_{step:09d}.safetensors"
        try:
            tensors, _ = checkpoint.read(path)
            state = checkpoint.unflatten({"state": template}, tensors, str(path))["state"]
            alive = run.alive(tensors)
        except UserError as error:
            warn(f"{error}; it is left out")
            continue
        algorithm = algorithm or kind(config.algo, spec)  # whose shapes are those of the checkpoint
        for replica, policy, good in zip(replicas, policies_of(algorithm, state, replicas), alive, strict=True):
            if good:
                candidates[f"{base}/{replica.name}@{step}"] = policy
        steps.add(step)
    if config.steps not in steps and (run.dir / "policies").is_dir():
        for replica in replicas:
            if (run.dir / "policies" / f"{replica.name}.safetensors").exists():
                candidates[f"{base}/{replica.name}@final"] = run.policy(replica.seed, **dict(replica.values))
    if not candidates:
        raise UserError(f"{run.dir} has no checkpoint and no policy yet; `offrl train resume={run.dir}` continues it")
    return candidates


def reward_transform(run: SavedRun) -> tuple[float, float]:
    """(scale, shift) of a run's rewards against the recorded ones, for records that do not hold them: from its list of
    transforms.
    """
    scale, shift = 1.0, 0.0
    for text in run.record["data"].get("transforms", ()):
        if match := re.fullmatch(r"reward_by_return_range (\S+) / (\S+)", text):
            factor, added = float(match[1]) / float(match[2]), 0.0
        elif match := re.fullmatch(r"rewards \* (\S+) \+ (\S+)", text):
            factor, added = float(match[1]), float(match[2])
        else:
            continue
        scale, shift = scale * factor, shift * factor + added
    return scale, shift


def recorded(config: DatasetConfig) -> DatasetConfig:
    """The same data with rewards and observations as recorded, and all episodes that were not left out on purpose.

    `top_fraction` belongs to an algorithm, and would change where episodes start; `subsample` is kept, and so are
    labels of actions and rewards, without which the data would be others.
    """
    default = DatasetConfig()
    undone = [name for name in DatasetConfig.TRANSFORMS if name not in DatasetConfig.CONTENT]
    return dataclasses.replace(config, **{name: getattr(default, name) for name in undone})


def data_of(runs: Sequence[SavedRun], device: str = "cpu") -> Dataset:
    """The dataset that these runs were trained on, as recorded.

    Raises UserError where they were trained on different data, where it is not there any more, or is not what it was.
    """
    first = runs[0]
    prints = {run.fingerprint: run for run in reversed(runs)}
    if len(prints) > 1:
        names = " and ".join(
            f"{run.dir} ({run.record['data']['name']}, {key[:12]})" for key, run in list(prints.items())[:2]
        )
        raise UserError(f"{names} were trained on different data: say which to evaluate on with dataset=")
    config = run_settings(first.dir).dataset
    if first.spec.source == "arrays" and config.name not in registry.names("dataset"):
        raise UserError(
            f"{first.dir} was trained on arrays from Python: offrl.ope.select([...], dataset=...) takes them"
        )
    try:
        dataset = load_dataset(recorded(config), device)
    except UserError as error:
        raise UserError(
            f"the data of {first.dir} cannot be read ({error}); name others of the same spaces with dataset="
        ) from None
    if dataset.fingerprint != first.fingerprint:
        raise UserError(
            f"{config.name} is not what {first.dir} was trained on any more ({dataset.fingerprint[:12]}, then "
            f"{first.fingerprint[:12]}); dataset={config.name} evaluates on it all the same"
        )
    return dataset


def load_policies(texts: Sequence[str], spec: DataSpec) -> dict[str, Any]:
    """Policies from elsewhere (see `offrl.interop.policies`) for data of these spaces, by name."""
    from offrl.interop.policies import load_agents

    low, high = (None if spec.discrete else np.asarray(x, np.float32) for x in (spec.action_low, spec.action_high))
    names: list[str] = []
    policies: list[Any] = []
    for text in texts:
        agents = load_agents(
            text, observation_dim=spec.observation_dim, action_low=low, action_high=high, discrete=spec.discrete
        )
        base = Path(text).resolve().name + "/" if Path(text).is_dir() else ""
        names += [base + name for name in agents]
        policies += agents.values()
    return dict(zip(unique_names(names), policies, strict=True))


def join(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """All candidates under names that differ."""
    names = unique_names([name for part in parts for name in part])
    return dict(zip(names, [policy for part in parts for policy in part.values()], strict=True))
