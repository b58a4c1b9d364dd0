"""Policies to choose from: the checkpoints and final policies of runs, and the data they were trained on."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from offrl import registry
from offrl.data import load_dataset
from offrl.data.dataset import Dataset, DataSpec
from offrl.errors import UserError, warn
from offrl.nn.meta_check import outline
from offrl.ope.problem import unique_names
from offrl.runs.paths import RECORD
from offrl.runs.run import SavedRun
from offrl.runs.settings import run_settings
from offrl.settings.dataset import DatasetConfig
from offrl.settings.replicas import Replica
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


def run_policies(run: SavedRun) -> list[tuple[Replica, str, Any]]:
    """(replica, "50000" or "final", policy) of every replica at every checkpoint that is there, and its final policy.

    From a checkpoint a policy knows its own critic too. A damaged checkpoint is named in a warning and passed over; a
    replica that had diverged is left out. Raises UserError where there is no policy at all.
    """
    config, spec = run_settings(run.dir, parts=()), run.spec
    kind, replicas = registry.get("algo", config.algo.name), run.replicas
    with outline(str(run.dir)):
        template = first_state(kind(config.algo, spec), replicas, "meta")
    algorithm = None
    policies: list[tuple[Replica, str, Any]] = []
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
                policies.append((replica, str(step), policy))
        steps.add(step)
    if config.steps not in steps and (run.dir / "policies").is_dir():
        for replica in replicas:
            if (run.dir / "policies" / f"{replica.name}.safetensors").exists():
                policies.append((replica, "final", run.policy(replica.seed, **dict(replica.values))))
    if not policies:
        raise UserError(f"{run.dir} has no checkpoint and no policy yet; `{run.resume_command}` continues it")
    return policies


def run_candidates(run: SavedRun) -> dict[str, Any]:
    """`run_policies` by name: {"RUN/seed_0@50000": policy}."""
    base = run.dir.resolve().name
    return {f"{base}/{replica.name}@{step}": policy for replica, step, policy in run_policies(run)}


def recorded(config: DatasetConfig) -> DatasetConfig:
    """The same data with rewards and observations as recorded, and all episodes that were not left out on purpose.

    `top_fraction` belongs to an algorithm, and would change where episodes start; `subsample` is kept, and so are
    labels of actions and rewards, without which the data would be others.
    """
    default = DatasetConfig()
    undone = [name for name in DatasetConfig.TRANSFORMS if name not in DatasetConfig.CONTENT]
    return dataclasses.replace(config, **{name: getattr(default, name) for name in undone})


def data_of(runs: Sequence[SavedRun]) -> Dataset:
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
    return load_again(first, recorded(run_settings(first.dir).dataset))


def load_again(run: SavedRun, config: DatasetConfig, quiet: bool = False) -> Dataset:
    """The data of a run, read as `config`, the run's own or part of it, says. Raises UserError as `data_of`."""
    if run.spec.source == "arrays" and config.name not in registry.names("dataset"):
        raise UserError(
            f"{run.dir} was trained on arrays from Python: name data of the same spaces with dataset= (from Python, "
            "offrl.ope.select takes the arrays)"
        )
    try:
        dataset = load_dataset(config, "cpu", quiet)
    except UserError as error:
        raise UserError(
            f"the data of {run.dir} cannot be read ({error}); name others of the same spaces with dataset="
        ) from None
    if dataset.fingerprint != run.fingerprint:
        raise UserError(
            f"{config.name} is not what {run.dir} was trained on any more ({dataset.fingerprint[:12]}, then "
            f"{run.fingerprint[:12]}); dataset={config.name} takes it all the same"
        )
    return dataset


def load_policies(texts: Sequence[str], spec: DataSpec) -> dict[str, Any]:
    """Policies from elsewhere (see `offrl.interop.policies`) for data of these spaces, by name."""
    from offrl.interop.policies import load_agents

    names: list[str] = []
    policies: list[Any] = []
    for text in texts:
        agents = load_agents(
            text, observation_dim=spec.observation_dim, action_dim=spec.action_dim, discrete=spec.discrete
        )
        base = Path(text).resolve().name + "/" if Path(text).is_dir() else ""
        names += [base + name for name in agents]
        policies += agents.values()
    return dict(zip(unique_names(names), policies, strict=True))


def join(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """All candidates under names that differ."""
    names = unique_names([name for part in parts for name in part])
    return dict(zip(names, [policy for part in parts for policy in part.values()], strict=True))
