"""Trained runs as parts of another algorithm's run: values that make prompts, a behaviour policy. Named by a path, or trained first."""

from __future__ import annotations

import dataclasses
import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from offrl import registry
from offrl.algorithm import Algorithm, TrainState
from offrl.data.dataset import Dataset, DataSpec
from offrl.errors import UserError, warn
from offrl.runs import record as runs
from offrl.system import files as checkpoint
from offrl.system.locks import alone

if TYPE_CHECKING:
    from offrl.settings.train import TrainConfig

SHARED = ("dataset", "device", "precision", "threads", "runs_dir", "quiet", "compile")  # settings that a part has from the whole

OF_REWARDS = ("values", "task_model")  # settings of parts that say something in units of the rewards they were trained on


@dataclass(frozen=True)
class Part:
    """A trained replica, with everything that training knew: critics and targets too."""

    algorithm: Algorithm
    state: TrainState  # without a replica axis, on the CPU; without optimiser states and `buffers`
    settings: dict[str, Any]  # of the algorithm: with them it can be built again
    identity: str  # a checksum of its parameters
    fingerprint: str  # of the data it was trained on


def train_first(config: TrainConfig, dataset: Dataset, algo: Any, steps: int, label: str, setting: str) -> Path:
    """The run directory of `algo` (an algorithm's config) trained on the same data for `steps` updates with the run's first seed: trained
    now, unless such a run is there. `label`: what its directory is called. `setting`: the one that would name another run."""
    from offrl.settings.replicas import seed_list
    from offrl.settings.train import CheckpointConfig, EvalConfig
    from offrl.training.loop import train as run_training

    kind = registry.get("algo", algo.name)
    seed = seed_list(config.seeds)[0]
    own = type(config)(
        algo=kind.fit_config(algo, dataset),
        experiment="none",
        seeds=[seed],
        steps=steps,
        label=label,
        eval=EvalConfig(every=0, env="none"),
        checkpoint=CheckpointConfig(keep=1),
    )
    own = dataclasses.replace(own, **{name: getattr(config, name) for name in SHARED})
    run_dir = runs.directory(own, dataset)
    with alone(run_dir / ".part", f"the run {run_dir}", config.quiet):
        found = checkpoint.load_latest(run_dir) if run_dir.is_dir() else None
        if found is None or found[1]["step"] < steps:
            if not config.quiet:
                print(f"{config.algo.name} needs {algo.name}: training it in {run_dir} (algo.{setting}=RUN takes another)", flush=True)
            run_training(own, dataset, run_dir)
    return run_dir


def load(path: str | Path, spec: DataSpec, setting: str) -> Part:
    """The first replica that did not diverge of the run at `path`. Raises UserError where there is none, or for data of other shapes or
    another normalisation than `spec`, or of rewards in other units where that matters. `setting`: which one named it."""
    where = f"algo.{setting}={path}"
    run_dir = Path(path)
    if not (run_dir / runs.RECORD).is_file():
        raise UserError(f"{where}: there is no run; name a run directory, or leave the setting out to train one first")
    record = runs.read_record(run_dir)
    found = checkpoint.load_latest(run_dir)
    if found is None:
        raise UserError(f"{where}: the run has no checkpoint")
    if record["identity"].get("grid"):
        raise UserError(f"{where}: it is a grid of settings; name a run of one of them")
    settings = record["identity"]["algo"]
    kind = registry.get("algo", settings["name"])
    own = DataSpec.from_json(record["spec"])
    _check(own, spec, where)
    algorithm = kind(kind.Config(**{**_defaults(kind), **_places(run_dir, kind), **settings}), own)
    if setting in OF_REWARDS and not algorithm.traits.goal_conditioned:
        _check_rewards(own, spec, where)
    tensors, _ = found
    alive = torch.nonzero(tensors["alive"]).flatten().tolist()
    if not alive:
        raise UserError(f"{where}: all its replicas diverged")
    algorithm.buffers = dict  # it may be large, and no part needs it
    template = algorithm.init(0)._replace(opt={}, buffers={})
    flat = {name: value[alive[0]] for name, value in tensors.items() if name.startswith("state/")}
    state = checkpoint.unflatten({"state": template}, flat, str(run_dir))["state"]
    digest = hashlib.sha256()
    for name, value in sorted(checkpoint.flatten({"params": state.params, "target": state.target}).items()):
        digest.update(name.encode() + value.contiguous().numpy().tobytes())
    return Part(algorithm, state, dict(settings), digest.hexdigest()[:16], record["data"].get("fingerprint", ""))


def there(path: str | Path, identity: str, spec: DataSpec, setting: str) -> Part | None:
    """As `load`; None where the run is gone or became another, which is nothing to a policy whose file holds what it needs."""
    if not (Path(path) / runs.RECORD).is_file():
        return None
    try:
        part = load(path, spec, setting)
    except UserError:
        return None
    return part if part.identity == identity else None


def named(path: str | Path, dataset: Dataset, setting: str) -> Part:
    """As `load`; a run on other data is a warning."""
    part = load(path, dataset.spec, setting)
    if part.fingerprint and part.fingerprint != dataset.fingerprint:
        warn(f"algo.{setting}={path} was trained on other data than {dataset.spec.name}")
    return part


def _defaults(kind: Any) -> dict[str, Any]:
    return dataclasses.asdict(kind.Config())


def _places(run_dir: Path, kind: Any) -> dict[str, Any]:
    """The settings of a run that say where something lies, such as a language model: they are no part of its identity."""
    from offrl.settings.presets import read_yaml

    given = read_yaml(run_dir / runs.CONFIG).get("algo", {})
    return {f.name: given[f.name] for f in dataclasses.fields(kind.Config) if f.metadata.get("place") and f.name in given}


def _check(own: DataSpec, spec: DataSpec, where: str) -> None:
    for name in ("observation_shape", "goal_dim", "action_dim", "num_actions", "action_low", "action_high"):
        mine, theirs = getattr(own, name), getattr(spec, name)
        if tuple(mine) != tuple(theirs) if isinstance(mine, tuple) else mine != theirs:
            raise UserError(f"{where}: it was trained on data with {name}={mine}, and {spec.name} has {theirs}")
    for name in ("observation_mean", "observation_std"):
        mine, theirs = getattr(own, name), getattr(spec, name)
        if (mine is None) != (theirs is None) or (mine is not None and not _close(mine, theirs)):
            raise UserError(
                f"{where}: its observations were normalised in another way than those of {spec.name}; "
                "train it with the same dataset.normalize_observations"
            )


def _check_rewards(own: DataSpec, spec: DataSpec, where: str) -> None:
    mine, theirs = (own.reward_scale, own.reward_shift), (spec.reward_scale, spec.reward_shift)
    if not _close(mine, theirs):
        raise UserError(
            f"{where}: it was trained on rewards times {mine[0]:g} plus {mine[1]:g}, and those of {spec.name} are times {theirs[0]:g} plus "
            f"{theirs[1]:g}; train both with the same dataset.reward_* settings"
        )


def _close(a: Any, b: Any) -> bool:
    return len(a) == len(b) and all(abs(x - y) <= 1e-5 * (1.0 + abs(y)) for x, y in zip(a, b, strict=True))
