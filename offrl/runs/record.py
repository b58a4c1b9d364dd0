"""Run directories: the identity of a run, and the record and the settings that are written next to its checkpoints."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import platform
from collections.abc import Callable, Collection, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

from offrl import registry
from offrl.data.dataset import DataSpec
from offrl.data.fit import check_normalisation
from offrl.errors import UserError
from offrl.nn.custom.networks import factories
from offrl.runs.paths import RECORD, no_run
from offrl.settings.dataset import DatasetConfig
from offrl.settings.diff import difference
from offrl.settings.encoder import EncoderConfig
from offrl.settings.field import file_name, without_places
from offrl.settings.kinds import misfit
from offrl.settings.replicas import Replica, bounded, expand, grid_text, replicas
from offrl.settings.train import FREE, TrainConfig, seed_list
from offrl.system import files as checkpoint
from offrl.system import trust
from offrl.system.addresses import without_logins
from offrl.system.plugins.loading import checksums, of_file, used_by
from offrl.tasks.custom import place_of

if TYPE_CHECKING:
    import torch

    from offrl.data.dataset import Dataset

CONFIG, SCORES, CURVE, GRID = "config.yaml", "scores.csv", "learning_curve.png", "grid.png"
RESTORE = "restore the file that offrl wrote, or choose another name="
LATER = {  # settings of later versions, which are in a run's name where they are set alone
    "dataset": (
        *DatasetConfig.VIEW,
        *("image_size", "episodes", "mask", "intervention_share", "keep", "cost_labels", "multitask"),
    ),
    "encoder": ("pretrained_id", "fusion"),
    "algo": (
        *("cost_limit", "cost_horizon", "cost_discount", "cost_pessimism", "cost_after_end"),
        *("cost_states", "multiplier", "multiplier_rate", "risk", "value_quantiles", "discounts"),
    ),
}
PACKAGES = ("offrl", "torch", "numpy", "gymnasium", "mujoco", "minari", "h5py", "gymnasium-robotics", "mujoco-warp")


# ---- the entries of run.json: a stranger may have written the file, so what reads it checks it first


class Algo(TypedDict, total=False):
    """The algorithm's settings; the others are checked by its own config."""

    name: str


class Identity(TypedDict, total=False):
    """What decides the parameters that come out."""

    algo: Algo
    seeds: list[int]
    dataset: dict[str, Any]
    grid: list[tuple[str, list[float]]]
    finetune: dict[str, Any]
    parent: dict[str, Any] | None


class Data(TypedDict, total=False):
    """What `Dataset.describe` says of the data, less what is only shown."""

    name: str
    fingerprint: str
    source: str
    transforms: list[str]
    return_mean: float
    return_min: float
    return_max: float


class Online(TypedDict, total=False):
    """What a fine-tuning run says besides."""

    label: str
    parent: dict[str, Any] | None
    fixed: dict[str, float]
    anneal: dict[str, list[float]]


class RunRecord(TypedDict, total=False):
    """run.json, as far as anything reads it."""

    identity: Identity
    label: str
    data: Data
    spec: DataSpec
    env: str
    mode: str
    group: int
    device: str
    kind: str
    online: Online
    packages: dict[str, str | None]
    plugins: list[str]


def check_record(record: Any, needed: Sequence[str]) -> None:
    """Raises UserError for an entry of another type, one of `needed` (dotted names) that is not there, and more
    replicas than a run has.
    """
    if wrong := misfit(record, RunRecord, ""):
        raise UserError(wrong)
    check_entries(record, needed)
    identity = record["identity"]
    # replicas' files are called by them
    if bad := [field for field, _ in identity.get("grid", []) if not field.isidentifier()]:
        raise UserError(f"identity.grid has '{bad[0]}', which is no setting")
    bounded(dict(identity.get("grid", [])), len(seed_list(identity["seeds"])), identity.get("paired") is True)


def check_entries(record: Any, needed: Sequence[str]) -> None:
    """Raises UserError for the first of `needed`, dotted names, that is not in the record."""
    for name in needed:
        node = record
        for key in name.split("."):
            if not isinstance(node, dict) or key not in node:
                raise UserError(f"{name} is missing")
            node = node[key]


# ---- what a run is


def identity(config: TrainConfig) -> dict[str, Any]:
    """The settings that decide the parameters that come out; two runs that agree in these are the same run."""
    values = {k: v for k, v in dataclasses.asdict(config).items() if k not in FREE}
    # the fingerprint says what data are
    values |= {part: without_places(getattr(config, part)) for part in ("algo", "dataset", "encoder")}
    values["seeds"] = seed_list(config.seeds)
    if files := used_by(registry.get("algo", config.algo.name), *factories(config.algo).values()):
        values["plugins"] = checksums(files)  # with other content it is another run
    grid, paired = values.pop("grid"), values.pop("paired")
    if grid:
        values |= {"paired": True} if paired else {}
        # a list: the order of the fields is that of the replicas
        values["grid"] = [[field, cells] for field, cells in grid.items()]
        values["algo"] = _without(values["algo"], grid)
    return values


def _without(algo: dict[str, Any], grid: Collection[str]) -> dict[str, Any]:
    """An algorithm's settings less those that a grid decides."""
    return {k: v for k, v in algo.items() if k not in grid}


def fit(config: TrainConfig, dataset: Dataset) -> TrainConfig:
    """`config` with what its algorithm leaves to be found from the data."""
    with trust.settings_of_file(bool(config.resume) or not trust.typed_settings()):
        return dataclasses.replace(
            config, algo=registry.get("algo", config.algo.name).fit_config(config.algo, dataset, config.grid)
        )


def directory(config: TrainConfig, dataset: Dataset) -> Path:
    """The directory of a run: a name given by hand, or one made of the algorithm, the dataset and a hash of the
    settings.

    The same command therefore finds its own run again.
    """
    if config.name:
        return Path(config.runs_dir) / config.name
    settings = {**identity(config), "data": dataset.fingerprint, "env": config.eval.env}
    for part, kind in {"dataset": DatasetConfig, "encoder": EncoderConfig, "algo": type(config.algo)}.items():
        default, later = _defaults(kind), LATER[part]
        if settings[part].get("representation") == "none":  # what it has besides is of algorithms that had it before
            later = (*later, "representation", "representation_horizon", "latent")
        settings[part] = {k: v for k, v in settings[part].items() if k not in later or v != default[k]}
    if config.encoder == EncoderConfig():
        del settings["encoder"]
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode()).hexdigest()[:6]
    return Path(config.runs_dir) / f"{config.label}-{shortened(file_name(dataset.spec.name))}-{digest}"


def shortened(name: str) -> str:
    """What of a name fits into that of a folder, of 255 bytes at most, beside an algorithm and a hash."""
    return name.encode()[:150].decode(errors="ignore")


def prepare(
    run_dir: Path,
    config: TrainConfig,
    dataset: Dataset,
    choose: Callable[[], tuple[str, int]],
    device: torch.device,
) -> tuple[str, int]:
    """Check that `run_dir` is free or holds this very run, write its config and record, and return the mode of the step
    and how many replicas it trains as one program.

    A resumed run keeps those that it began with, unless overridden: others round differently. Raises UserError when
    another run is there.
    """
    old = (
        read_record(run_dir, ("data.fingerprint", "identity.dataset", "device", "mode"))
        if (run_dir / RECORD).exists()
        else None
    )
    settings = identity(config)
    _refuse_to_overwrite(run_dir, old is not None)
    if old is not None:
        if old["data"]["fingerprint"] != dataset.fingerprint:
            raise UserError(
                f"{run_dir} was trained on {old['data']['name']} ({old['data']['fingerprint'][:12]}) and this is "
                f"{dataset.spec.name} ({dataset.fingerprint[:12]}): a run continues on its own data only; choose "
                "another name="
            )
        changed = change(old["identity"], json.loads(json.dumps(settings, default=str)))
        if changed:
            raise UserError(
                f"{run_dir} holds another run ({changed}); choose another name=, or use the settings it began with"
            )
        if old.get("spec") is not None:
            check_normalisation(spec_of(old, run_dir), dataset.spec, str(run_dir))
    same_device = old is not None and old["device"] == device.type
    mode, group = choose()
    if old is not None and same_device:
        mode = old["mode"] if config.compile == "auto" else mode
        group = old.get("group", len(old["identity"]["seeds"]))
    group = config.group or group
    record = {
        "label": config.label,
        "identity": settings,
        "replicas": [{"seed": r.seed, **dict(r.values)} for r in replicas(config)],  # the columns of metrics.jsonl
        "data": dataset.describe(),
        "spec": dataset.spec.to_json(),
        "env": _environment(config, dataset),
        "mode": mode,
        "group": group,
        "device": device.type,
    }
    saved = dataclasses.asdict(dataclasses.replace(config, name=run_dir.name, resume=None, config=None))
    saved["algo"] = _without(saved["algo"], config.grid)
    write(run_dir, record, config.plugins, saved)
    return mode, group


def write(run_dir: Path, record: Mapping[str, Any], plugins: Sequence[str], settings: Mapping[str, Any]) -> None:
    """Write run.json, with the plugins, packages and machine of this process beside `record`, and config.yaml."""
    from omegaconf import OmegaConf

    record = {
        **record,
        **({"plugins": plugins} if plugins else {}),
        "packages": {name: installed(name) for name in PACKAGES},
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}",
    }
    checkpoint.write_text(run_dir / RECORD, json.dumps(record, indent=1, default=str) + "\n")
    checkpoint.write_text(run_dir / CONFIG, OmegaConf.to_yaml(OmegaConf.create(without_logins(settings))))


def _environment(config: TrainConfig, dataset: Dataset) -> str:
    """The environment of a run's scores: the setting, or where the function stands that makes it, so that others can
    name it.
    """
    task = dataset.spec.task
    factory = task.env_factory if task is not None and config.eval.env == "auto" else None
    return config.eval.env if factory is None else place_of(factory) or config.eval.env


def _refuse_to_overwrite(run_dir: Path, known: bool) -> None:
    """Raise UserError where starting anew would write over files that are no run's, or over a finished run that lost
    its checkpoints.
    """
    if known and (run_dir / "policies").exists() and not checkpoint.steps(run_dir):
        raise UserError(
            f"{run_dir} holds a finished run without checkpoints, and training anew would overwrite it; remove that "
            "folder, or choose another name="
        )
    if not known and (entries := sorted(p.name for p in run_dir.iterdir() if not p.name.startswith("."))):
        raise UserError(
            f"{run_dir} is no run directory and not empty (it has {', '.join(entries[:3])}); choose another name= or "
            "runs_dir="
        )


def change(old: dict[str, Any], new: dict[str, Any]) -> str:
    """The differences between two identities, in words; an empty string when there are none."""
    grids = [
        grid_text(dict(settings.get("grid", []))) + " paired" * bool(settings.get("paired")) for settings in (old, new)
    ]
    if grids[0] != grids[1]:
        return f"{grids[0]} there, {grids[1]} here"
    changed = difference(complete(old), complete(new))
    return next((f"{name}: {before} there, {after} here" for name, (before, after) in changed.items()), "")


def complete(settings: Mapping[str, Any]) -> dict[str, Any]:
    """A run's identity with the defaults of the settings that it lacks: those added to the code since."""
    settings = {"encoder": _defaults(EncoderConfig), **settings}
    kinds: dict[str, Any] = {"dataset": DatasetConfig, "encoder": EncoderConfig}
    with contextlib.suppress(UserError):  # of an algorithm that is not installed any more
        kinds["algo"] = registry.get("algo", settings["algo"]["name"]).Config
    parts = {part: {**_defaults(kind), **settings[part]} for part, kind in kinds.items() if settings[part]}
    if "algo" in parts:
        parts["algo"] = _without(parts["algo"], [field for field, _ in settings.get("grid", [])])
    return {"precision": "float32", **settings, **parts}


@functools.cache
def _defaults(kind: Any) -> dict[str, Any]:
    """The settings of a config class at their defaults, only to be read."""
    return without_places(kind())


def installed(package: str) -> str | None:
    """The version of a package; None where it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def read_record(run_dir: Path, needed: Sequence[str] = ()) -> dict[str, Any]:
    """The record of a run that `prepare` wrote; any stranger may have, so every entry is checked.

    needed: dotted names of entries that must be there. Raises UserError when `run_dir` holds no run, its record is
    damaged, or a link leads out of it.
    """
    path = run_dir / RECORD
    trust.check_folder(run_dir)
    try:
        record = json.loads(trust.read_text(path))
    except (FileNotFoundError, NotADirectoryError):
        raise no_run(run_dir) from None
    except RecursionError:
        raise UserError(f"{path} cannot be read (it is nested too deeply); {RESTORE}") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read ({error}); {RESTORE}") from None
    try:
        check_record(record, ("identity.algo.name", "identity.seeds", *needed))
    except UserError as error:
        raise UserError(f"{path} is not what offrl writes ({error}); {RESTORE}") from None
    of_file(record.get("plugins"), str(path))
    return record


def replicas_of(record: Mapping[str, Any]) -> list[Replica]:
    """The replicas of a run, in the order in which it holds them."""
    identity = record["identity"]
    return expand(dict(identity.get("grid", [])), identity["seeds"], identity.get("paired") is True)


def spec_of(record: Mapping[str, Any], run_dir: Path) -> DataSpec:
    """The specification of the data in a run's record. Raises UserError where it lacks something."""
    task = (record.get("spec") or {}).get("task")
    try:
        check_entries(
            record, ("spec.observation_shape", "spec.action_dim", *(("spec.task.name",) if task is not None else ()))
        )
    except UserError as error:
        raise UserError(f"{run_dir / RECORD} is not what offrl writes ({error}); {RESTORE}") from None
    return DataSpec.from_json(record["spec"], str(run_dir / RECORD))
