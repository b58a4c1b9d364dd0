"""What a fine-tuning run starts from: its states and settings, its task and its data, or those of a run that was
stopped."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from offrl import registry
from offrl.algorithm import Algorithm, TrainState
from offrl.data import load_dataset
from offrl.data.dataset import Dataset, DataSpec
from offrl.data.fit import check_normalisation
from offrl.data.transforms.apply import apply_transforms
from offrl.errors import UserError
from offrl.finetuning.config import LATER, FinetuneConfig, choose
from offrl.finetuning.distillation.teacher import Teacher
from offrl.finetuning.play.snapshots import Snapshots
from offrl.finetuning.play.success import SuccessRewards
from offrl.runs import record as runs
from offrl.settings.compose import fill, flatten
from offrl.settings.dataset import DatasetConfig
from offrl.settings.evaluation import EvalConfig
from offrl.settings.kinds import misfit, restored
from offrl.settings.presets import finetune_settings
from offrl.settings.replicas import Replica
from offrl.settings.train import TrainConfig
from offrl.settings.untrusted import check_code, read_settings
from offrl.system import files as checkpoint
from offrl.system.devices import pick_device
from offrl.tasks.entries import entries
from offrl.tasks.environments import action_kind, flattener, make_env, resolve_task
from offrl.tasks.task import Task, with_factory

KIND = "finetune"  # of a run's record
Factory = Callable[[], Any]
IMAGES = "data say how many of them a policy sees, dataset=PATH mixing=0 takes what they say and learns from play alone"


@dataclass
class Start:
    """All that decides a fine-tuning run but its settings."""

    config: FinetuneConfig  # without open ends
    algorithm: Algorithm  # with its settings as they are online
    replicas: list[Replica]
    grid: dict[str, list[float]]
    spec: DataSpec
    task: Task
    label: str
    data: DatasetConfig | None  # settings of the data; None: there are none
    described: dict[str, Any]  # the data in the record
    dataset: Dataset | None = None  # None where no batch needs it
    state: TrainState | None = None  # on the CPU; None: of the run's own checkpoint
    parent: dict[str, Any] | None = None  # the run that it began from; None: fresh parameters
    fixed: dict[str, float] = field(default_factory=dict)  # settings that change online, where a grid has another value
    anneal: dict[str, tuple[float, float, float]] = field(default_factory=dict)
    user_settings: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    run_dir: Path | None = None  # of a run that goes on
    success: SuccessRewards | None = None  # which judges what is played
    teacher: Teacher | None = None  # whose actions are imitated


def check_rewards(settings: DatasetConfig, config: FinetuneConfig) -> None:
    """Raise UserError where batches would mix labelled rewards or costs with the environment's, or other rewards with
    those of a classifier of success.
    """
    if config.success is not None and config.mixing != 0.0 and settings.reward_labels != config.success:
        raise UserError(
            f"success={config.success} gives the rewards of what is played, and the data's are others: read them with "
            f"dataset.reward_labels={config.success}, or learn from play alone, mixing=0"
        )
    for quantity in ("reward", "cost"):
        same = quantity == "reward" and config.success is not None
        if getattr(settings, f"{quantity}_labels", None) and config.mixing != 0.0 and not same:
            raise UserError(
                f"the data's {quantity}s are labels (dataset.{quantity}_labels), and the environment gives its own: "
                f"batches would mix two kinds of {quantity}s; mixing=0 learns from the environment's alone"
            )


def run_data(
    parent: TrainConfig, config: FinetuneConfig, dataset: Dataset | None, record: dict[str, Any], path: Path
) -> Dataset:
    """The run's own data again. Raises UserError where they are gone or others."""
    if (
        dataset is None
        and runs.spec_of(record, path).source == "arrays"
        and parent.dataset.name not in registry.names("dataset")
    ):
        raise UserError(
            f"{path} was trained on arrays from Python: give them, offrl.finetune(run, dataset=...), or leave them "
            "out, mixing=0"
        )
    try:
        data = load(parent.dataset, config, dataset)
    except UserError as error:
        raise UserError(
            f"{error} (the data of {path}, which mixing={null_or_number(config.mixing)} needs; dataset=PATH says where "
            "they are, mixing=0 goes on without them)"
        ) from None
    if data.fingerprint != record["data"]["fingerprint"]:
        raise UserError(
            f"{path} was trained on {record['data']['name']} ({record['data']['fingerprint'][:12]}) and this is "
            f"{data.spec.name} ({data.fingerprint[:12]}): give its own data, or mixing=0"
        )
    check_normalisation(runs.spec_of(record, path), data.spec, str(path))
    return data


def load(settings: DatasetConfig, config: FinetuneConfig, dataset: Dataset | None) -> Dataset:
    device = str(pick_device(config.device))
    return load_dataset(settings, device) if dataset is None else apply_transforms([dataset], settings)


def null_or_number(value: float | None) -> str:
    return "null" if value is None else f"{value:g}"


def task_of(spec: DataSpec, config: FinetuneConfig, env_id: str, env: Factory | None, cure: str) -> Task:
    """The task to learn. Raises UserError where there is no environment."""
    if env is not None:
        return with_factory(spec.task, env, spec.name)
    name = config.env if config.env is not None else "auto" if env_id == "none" else env_id
    task = resolve_task(spec.task, EvalConfig(env=name)) if name != "none" else None
    if task is None:
        raise UserError(f"there is no environment to learn in; name one: {cure}")
    return task


def spec_of(task: Task, images: str = IMAGES) -> tuple[DataSpec, Task]:
    """The specification read from an environment, for fine-tuning without data, and the task with the order of its Dict
    observations. images: what to say of those. Raises UserError for them and for unbounded actions."""
    import gymnasium as gym

    env = make_env(task)
    try:
        # there are no data that differ: sorted
        if isinstance(env.observation_space, gym.spaces.Dict) and not task.observation_keys:
            keys = tuple("/".join(map(str, path)) for path, _ in entries(env.observation_space))
            task = dataclasses.replace(task, observation_keys=keys)
        _, shape, kind = flattener(env, task.observation_keys)
        discrete, size = action_kind(env)
        low, high = (), ()
        if not discrete:
            bounds = (env.action_space.low, env.action_space.high)  # type: ignore[attr-defined]
            low, high = (tuple(np.asarray(bound, np.float32).reshape(-1).tolist()) for bound in bounds)
            if not np.isfinite([low, high]).all():
                raise UserError(f"{task.name} has actions without bounds; wrap it in gymnasium.wrappers.RescaleAction")
    finally:
        env.close()
    if np.dtype(kind).names:
        raise UserError(f"{task.name} has images: {images}")
    spec = DataSpec(
        shape,
        1 if discrete else size,
        discrete,
        size if discrete else 0,
        low,
        high,
        name=task.name,
        source="environment",
        task=dataclasses.replace(task, env_factory=None),
    )
    return spec, task


def online_lines(start: Start, snapshots: Snapshots | None, steps: int) -> list[str]:
    """Lines for the reader about settings that differ online, or that decide what is learnt from. steps: of the run, in
    whole rounds.
    """
    config, algo, spec = start.config, start.algorithm.config, start.spec
    changed = [f"{k}={getattr(algo, k)}" for k in finetune_settings(algo.name, start.label) or {} if hasattr(algo, k)]
    changed += [
        f"{k} from {a:g} to {b:g} times its value by {c:.0%} of the steps" for k, (a, b, c) in start.anneal.items()
    ]
    lines = [f"online: {', '.join(changed)}"] if changed else []
    if hasattr(algo, "real_share"):
        lines.append(
            f"{algo.real_share:g} of each batch real rows, the others imagined by a model that learns from all "
            f"real ones every {start.algorithm.every / (config.utd or 1.0):g} steps"
        )
    if spec.reward_scale != 1.0 or spec.reward_shift != 0.0:
        lines.append(
            f"learning from rewards as the data's were transformed: {spec.reward_scale:g} x reward + "
            f"{spec.reward_shift:g}"
        )
    if config.normalize == "running":
        lines.append(
            "observations normalised by running statistics of what each replica has seen; its policy's file holds "
            "them as they are then"
        )
    if config.replay == "balanced":
        lines.append(
            f"rows of data and play drawn by the ratio of their densities to the power of "
            f"{1 / config.replay_temperature:g}; up to {config.replay_fresh:.0%} of each batch new rows of play"
        )
    if config.success is not None:
        lines.append(
            f"rewards of what is played: 1 where {config.success} sees success, which ends the episode; scores are "
            "the environment's"
        )
    if config.interventions is not None:
        source = "with the data's" if config.mixing else "as the others that were played"
        lines.append(
            f"{config.interventions} may act in the policy's place; rows of its actions are drawn {source}; scores "
            "are of the policy alone"
        )
    if snapshots is not None:
        end = min(snapshots.steps, steps)
        lines.append(
            f"{snapshots.share:.0%} of the episodes of the first {end:,} steps begin in one of "
            f"{len(snapshots.observations):,} states of {snapshots.where}, cut after {snapshots.limit:,} steps"
            + (", none where the task begins" if snapshots.share == 1.0 and end == steps else "")
        )
    return lines


# ---- a fine-tuning run that was stopped

NEEDED = (
    "data.name",
    "data.fingerprint",
    "identity.finetune",
    "online.label",
    "online.parent",
    "online.fixed",
    "online.anneal",
)


def resume(
    config: FinetuneConfig,
    user_settings: dict[str, Any],
    other: dict[str, Any],
    run: Any,
    dataset: Dataset | None,
    env: Factory | None,
) -> Start:
    path = Path(str(config.resume))
    record = runs.read_record(path)
    if record.get("kind") != KIND:
        raise UserError(f"{path} is no fine-tuning run: offrl finetune {path} begins one from it")
    if run is not None:
        raise UserError(f"resume={path} goes on with what it began from; leave out {run}")
    record = runs.read_record(path, NEEDED)
    saved = read_settings(path / runs.CONFIG, user_settings)
    if changed := [k for k in other if k not in ("dataset",) and not k.startswith(("dataset.cache", "dataset.memory"))]:
        raise UserError(f"resume={path} goes on with its own settings; leave out {changed[0]}=")
    identity = record["identity"]
    try:
        kind = registry.get("algo", identity["algo"]["name"])
        algo = restored(kind.Config, saved["algo"], str(path))
        settings = None if saved.get("dataset") is None else DatasetConfig(**saved["dataset"])
        if wrong := misfit(saved.get("dataset"), DatasetConfig | None, "dataset"):
            raise TypeError(wrong)
        run_settings = {
            k: saved[k] for k in (f.name for f in dataclasses.fields(FinetuneConfig)) if k in saved and k != "resume"
        }
    except (KeyError, TypeError) as error:
        raise UserError(
            f"{path / runs.CONFIG} does not fit this version of offrl ({error}); continue with the version that wrote "
            "it"
        ) from None
    run_settings.update({"runs_dir": str(path.resolve().parent), "name": path.resolve().name, "quiet": False})
    merged = {**flatten(run_settings), **{k: v for k, v in user_settings.items() if k not in other}}
    merged.pop("eval.env", None)
    config = choose(
        fill(FinetuneConfig(), merged, "finetune"),
        {},
        fresh=False,
        without_data=record["online"]["parent"] is None and settings is None,
    )
    initial = LATER | identity["finetune"]
    for name, value in user_settings.items():
        if name in initial and initial[name] != getattr(config, name):
            raise UserError(
                f"{path} began with {name}={initial[name]}, not {value}; begin another run, with another name="
            )
    spec = runs.spec_of(record, path)
    data = None
    check_code(path / runs.CONFIG, saved, user_settings, ("eval", "play", *(("dataset",) if config.reads_data else ())))
    if config.reads_data and settings is not None:
        # where the data are, and offrl's own files of them
        typed = {k.removeprefix("dataset."): v for k, v in other.items()}
        settings = dataclasses.replace(settings, **{"name" if k == "dataset" else k: v for k, v in typed.items()})
        stand_in = TrainConfig(algo=algo, dataset=settings)
        data = run_data(stand_in, config, dataset, record, path)
    if checkpoint.load_latest(path) is None:
        raise UserError(f"{path} has no checkpoint yet; run the command that began it again")
    known = spec.task is not None and (spec.task.env_id is not None or spec.task.parts)
    if env is None and not known and record.get("env", "auto") == "auto":
        raise UserError(f"{path}: a function made its environment: give the command or the call that began it again")
    task = task_of(
        spec,
        dataclasses.replace(config, env=None),
        str(record.get("env", "auto")),
        env,
        f"offrl finetune resume={path} env=ID",
    )
    grid = dict(identity.get("grid", []))
    more, replicas = record["online"], runs.replicas_of(record)
    return Start(
        config,
        kind(algo, spec),
        replicas,
        grid,
        spec,
        task,
        more["label"],
        settings,
        record["data"],
        data,
        None,
        more["parent"],
        more["fixed"],
        more["anneal"],
        saved["given"],
        run_dir=path,
    )
