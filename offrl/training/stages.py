"""Runs that another run builds on: values that make prompts, a world model, a reference policy. Named by a setting, or
trained first.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch

from offrl import registry
from offrl.algorithm import with_settings
from offrl.data.dataset import Dataset, DataSpec
from offrl.data.fit import check_columns, check_normalisation
from offrl.errors import UserError, say, warn
from offrl.nn.encoders.streams import ENCODER, OWN
from offrl.nn.meta_check import of_file, outline
from offrl.pretrained import Pretrained, Requirement
from offrl.runs import record as runs
from offrl.settings.evaluation import EvalConfig
from offrl.settings.kinds import restored
from offrl.settings.replicas import seed_list
from offrl.settings.train import CheckpointConfig
from offrl.settings.untrusted import read_settings
from offrl.system import files as checkpoint
from offrl.system import trust
from offrl.system.locks import alone
from offrl.training.loop import train
from offrl.training.setup import check_kind, check_n_step, with_encoder

if TYPE_CHECKING:
    from offrl.settings.train import TrainConfig

# settings that a required run has from this one
SHARED = ("dataset", "device", "precision", "threads", "runs_dir", "quiet", "compile")
SHAPES = ("observation_shape", "goal_dim", "action_dim", "num_actions", "action_low", "action_high")


def ready(config: TrainConfig, dataset: Dataset) -> tuple[TrainConfig, dict[str, Any]]:
    """`config` with everything that it leaves open, and what its algorithm builds on, trained now where no run is
    named.

    Raises UserError where the data are no data for it, and for runs that do not suit.
    """
    kind = registry.get("algo", config.algo.name)
    check_kind(kind, config.algo.name, dataset)
    check_n_step(config.algo, kind.traits.n_step)
    with trust.settings_of_file(bool(config.resume) or not trust.typed_settings()):
        config, pretrained = resolve(config, dataset)
    return runs.fit(config, dataset), pretrained


def resolve(config: TrainConfig, dataset: Dataset) -> tuple[TrainConfig, dict[str, Any]]:
    """`config` with everything its algorithm requires named, and what its algorithm is handed of it: trained now where
    there is none.

    Raises UserError for runs that do not suit.
    """
    kind = registry.get("algo", config.algo.name)
    requirements = kind.requires(config, dataset)
    pretrained = {}
    for name, requirement in requirements.items():
        path = getattr(config.algo, name) or str(train_first(config, dataset, name, requirement))
        result = pretrained[name] = load(path, dataset.spec, f"algo.{name}", requirement)
        if result.fingerprint not in ("", dataset.fingerprint) and not requirement.allow_other_normalisation:
            warn(
                f"algo.{name}={path} was trained on other data than {dataset.spec.name}: it may know little about "
                "these data"
            )
        filled = {name: path, f"{name}_id": result.identity, f"{name}_settings": getattr(result, "settings", {})}
        algo = dataclasses.replace(
            config.algo, **{key: value for key, value in filled.items() if key in vars(config.algo)}
        )
        config = dataclasses.replace(config, algo=algo)
    config = kind.adopt(config, dataset, pretrained)
    pretrained = {name: requirements[name].select(result) for name, result in pretrained.items()}
    if config.encoder.pretrained:
        run = encoder_run(config.encoder.pretrained, with_encoder(config, dataset.spec, kind.traits))
        pretrained |= first_encoder(run)
        encoder = dataclasses.replace(config.encoder, pretrained_id=run.identity)
        config = dataclasses.replace(config, encoder=encoder)
    return config, pretrained


def first_encoder(run: Pretrained) -> dict[str, Any]:
    """What an algorithm is handed that starts from the encoder of a run."""
    return {ENCODER: run.state.params[ENCODER]}


def encoder_run(path: str, spec: DataSpec) -> Pretrained:
    """The run `encoder.pretrained`, of any algorithm whose encoder is that of `spec` and reads the same streams;
    actions, goals and statistics may be others. Raises UserError.
    """

    def form(other: DataSpec) -> dict[str, str]:
        assert other.encoder is not None
        streams = ", ".join(f"{s.name} {list(s.shape)}" for s in other.streams)
        return {
            "streams": streams,
            "numbers of the vector": str(other.window_dim),
            "dataset.frames": str(other.frames),
            "encoder": other.encoder.name,
            "encoder.width": str(other.encoder.width),
        }

    def check(run: Pretrained) -> None:
        other = run.algorithm.data_spec
        if other.encoder is None or run.algorithm.encoder_module == OWN or run.algorithm.encoder is None:
            raise UserError(
                f"encoder.pretrained: the run of {other.name} has no encoder of all networks; name one on images, "
                "without encoder.trained_by=own"
            )
        for name, value in form(other).items():
            if value != (needed := form(spec)[name]):
                raise UserError(
                    f"encoder.pretrained: the run of {other.name} has {name}={value}, and this one on {spec.name} "
                    f"{needed}; both must agree"
                )

    requirement = Requirement(check=check, allow_other_normalisation=True)
    return cast(Pretrained, load(path, spec, "encoder.pretrained", requirement))


def train_first(config: TrainConfig, dataset: Dataset, name: str, requirement: Requirement) -> Path:
    """The directory of the run that the setting `name` of `config` would name, trained on the same data: now, unless it
    is there.
    """
    kind = registry.get("algo", requirement.algo)
    run_config = type(config)(
        algo=kind.Config(**requirement.settings),
        experiment="none",
        seeds=[seed_list(config.seeds)[0] if requirement.seed is None else requirement.seed],
        label=requirement.label,
        eval=EvalConfig(every=0, env="none"),
        checkpoint=CheckpointConfig(keep=1),
    )
    common = {shared: getattr(config, shared) for shared in SHARED} | (
        {"steps": requirement.steps} if requirement.steps else {}
    )
    run_config, pretrained = ready(dataclasses.replace(run_config, **common), dataset)
    run_dir = runs.directory(run_config, dataset)
    trust.check_folder(run_dir)
    with alone(run_dir / ".part", f"the run {run_dir}", config.quiet):
        if not _finished(run_dir, requirement):
            if not config.quiet:
                say(
                    f"{config.algo.name} needs {requirement.algo}: training it in {run_dir} (algo.{name}=RUN takes "
                    "another)"
                )
            train(run_config, dataset, run_dir, pretrained)
    if requirement.artifact and not _finished(run_dir, requirement):
        raise UserError(
            f"{run_dir}: {requirement.algo} diverged; train it with other settings (`offrl train "
            f"algo={requirement.algo} ...`) and name the run: algo.{name}=RUN"
        )
    return run_dir


def _finished(run_dir: Path, requirement: Requirement) -> bool:
    if requirement.artifact:
        return any(run_dir.glob(requirement.artifact))
    latest = checkpoint.load_latest(run_dir) if run_dir.is_dir() else None
    return latest is not None and latest[1]["step"] >= (requirement.steps or 0)


def load(path: str | Path, spec: DataSpec, setting: str, requirement: Requirement) -> Any:
    """The prerequisite that `setting` names, for data of `spec`: of a run the replicas that did not diverge.

    Raises UserError where there is none, or for data of other shapes, another normalisation, or rewards in other units
    where that matters."""
    result = (
        load_run(Path(path), spec, setting, requirement)
        if requirement.load is None
        else requirement.load(str(path), spec)
    )
    requirement.check(result)
    return result


def load_run(run_dir: Path, spec: DataSpec, setting: str, requirement: Requirement) -> Pretrained:
    """Load as `load` does, without the requirement's own check."""
    where = f"{setting}={run_dir}"
    if not (run_dir / runs.RECORD).is_file():
        cure = (
            "name a run directory, or leave the setting out to train one first"
            if requirement.algo
            else "name a run directory"
        )
        raise UserError(f"{where}: there is no run; {cure}")
    record = runs.read_record(run_dir, ("identity.dataset", "data"))
    latest = checkpoint.load_latest(run_dir)
    if latest is None:
        raise UserError(f"{where}: the run has no checkpoint, and a policy file is not enough; train it again")
    identity = record["identity"]
    if identity.get("grid") and not requirement.every_replica:
        raise UserError(f"{where}: it is a grid of settings; name a run of one of them")
    kind = registry.get("algo", identity["algo"]["name"])
    recorded = runs.spec_of(record, run_dir)
    _check_data(recorded, spec, where, requirement)
    try:
        config = restored(kind.Config, {**_places(run_dir, kind), **identity["algo"]}, str(run_dir))
    except TypeError as error:
        raise UserError(f"{where} does not fit this version of offrl ({error}); train it again") from None
    if requirement.of_rewards and not kind.traits_for(config).goal_conditioned:
        _check_rewards(recorded, spec, where)
    tensors, meta = latest
    alive = torch.nonzero(tensors["alive"]).flatten().tolist()
    if not alive:
        raise UserError(f"{where}: all its replicas diverged")
    with of_file(tensors), outline(str(run_dir)):
        fresh = kind(config, recorded)
        fresh.buffers = dict  # it may be large, and nothing that builds on it needs it
        template = fresh.init(0)._replace(opt={}, buffers={})
    replicas = runs.replicas_of(record)
    states = []
    for i in alive if requirement.every_replica else alive[:1]:
        flat = {key: value[i] for key, value in tensors.items() if key.startswith("state/")}
        states.append((i, checkpoint.unflatten({"state": template}, flat, str(run_dir))["state"]))
    algorithm = kind(config, recorded)
    algorithm.buffers = dict
    pairs = [(with_settings(algorithm, dict(replicas[i].values)), state) for i, state in states]
    first = checkpoint.flatten({"params": pairs[0][1].params, "target": pairs[0][1].target})
    checksum = meta["sha256"] if requirement.every_replica else checkpoint.tensor_digest(first)
    return Pretrained(tuple(pairs), dict(identity["algo"]), str(checksum)[:16], record["data"].get("fingerprint", ""))


def _places(run_dir: Path, kind: Any) -> dict[str, Any]:
    """The settings of a run that say where something lies, such as a language model: they are no part of its
    identity.
    """
    settings = read_settings(run_dir / runs.CONFIG).get("algo") or {}
    return {
        f.name: settings[f.name]
        for f in dataclasses.fields(kind.Config)
        if f.metadata.get("place") and f.name in settings
    }


def _check_data(recorded: DataSpec, spec: DataSpec, where: str, requirement: Requirement) -> None:
    for name in SHAPES[:1] if requirement.allow_other_normalisation else SHAPES:
        trained, current = getattr(recorded, name), getattr(spec, name)
        if tuple(trained) != tuple(current) if isinstance(trained, tuple) else trained != current:
            raise UserError(f"{where}: it was trained on data with {name}={trained}, and {spec.name} has {current}")
    if not requirement.allow_other_normalisation:
        check_columns(recorded, spec, where)
        check_normalisation(recorded, spec, where)


def _check_rewards(recorded: DataSpec, spec: DataSpec, where: str) -> None:
    trained, units = (recorded.reward_scale, recorded.reward_shift), (spec.reward_scale, spec.reward_shift)
    if not np.allclose(trained, units, rtol=1e-5, atol=1e-5):
        raise UserError(
            f"{where}: it was trained on rewards times {trained[0]:g} plus {trained[1]:g}, and those of {spec.name} "
            f"are times {units[0]:g} plus {units[1]:g}; train both with the same dataset.reward_* settings"
        )
