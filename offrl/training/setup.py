"""Decisions before training: the algorithm for the data, the device, how the step runs, how many replicas share a
program.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from offrl import registry
from offrl.algorithm import Algorithm, TrainState, Traits
from offrl.data.dataset import Dataset, DataSpec
from offrl.data.fit import TRAINING_CURE, check_fit, seen_besides, settled
from offrl.data.samplers.prefetch import Prefetcher
from offrl.encoding import set_spec
from offrl.errors import UserError, nearest, warn
from offrl.evaluation.evaluator import Evaluator
from offrl.nn.encoders.images import IMAGE_ENCODERS
from offrl.nn.encoders.streams import ENCODER, OWN
from offrl.runs import record as runs
from offrl.settings.encoder import EncoderConfig
from offrl.settings.replicas import Replica, replicas
from offrl.settings.train import TrainConfig
from offrl.system import backend
from offrl.system.devices import pick_device
from offrl.system.locks import exclusive
from offrl.tasks.environments import resolve_task
from offrl.tasks.episodes import check_goals
from offrl.training import distributed
from offrl.training.engine import LocalEngine, Plan
from offrl.training.execution import CPU_GROUP, Execution, try_update
from offrl.training.run.clock import RunClock
from offrl.training.workers import Engine, WorkerEngine, WorkersUnavailable, shares

WINDOW_ENCODERS = ("stack", "gru")
OWN_WINDOWS = ("history", "context")  # settings of algorithms that look back by themselves


@dataclass(frozen=True)
class Setup:
    """All that is decided before a run's first update."""

    replicas: list[Replica]
    devices: list[torch.device]  # a process trains on each
    dataset: Dataset  # with what the environment says of it
    plan: Plan
    source: Any  # what the algorithm's sampler prepared: on the only device, or on the CPU
    evaluator: Evaluator | None  # None: there is no environment, or nothing that acts
    arithmetic: str  # in words
    start_workers: bool  # it trains for so long that starting processes pays


def set_up(
    config: TrainConfig,
    dataset: Dataset,
    run_dir: Path,
    pretrained: Mapping[str, Any] | None,
    resources: contextlib.ExitStack,
) -> Setup:
    """Claim `run_dir` for this run and decide how it trains.

    config, pretrained: as `stages.ready` gives them. resources: close what is opened here. Raises UserError for
    settings that do not fit the data, the environment or the run in `run_dir`.
    """
    members = replicas(config)
    device = distributed.own_device(pick_device(config.device))
    group = distributed.join(device, len(members), config.algo.batch_size)
    resources.callback(distributed.leave)
    arithmetic = backend.configure(device, config.threads, config.precision)
    algorithm = make_algorithm(config, dataset, pretrained)
    if not algorithm.traits.vectorized and len(members) > 1 and config.group not in (None, 1):
        raise UserError(f"{config.algo.name} trains one replica at a time: leave out group=")
    if algorithm.every and group.size > 1:
        raise UserError(f"{config.algo.name} trains in one process; start it without torchrun")
    evaluator = None
    if group.first and algorithm.traits.policy_modules:
        task = resolve_task(dataset.spec.task, config.eval, algorithm.traits.goal_conditioned)
        if task is not None:
            evaluator = resources.enter_context(Evaluator(task, config.eval))
            check_fit(dataset.spec, task, evaluator.envs[0], TRAINING_CURE)
            if algorithm.traits.goal_conditioned:
                check_goals(evaluator.envs[0], task, config.algo.name)
            set_spec(algorithm, settled(algorithm.data_spec, evaluator.envs[0], dataset))
    dataset = dataclasses.replace(dataset, spec=algorithm.data_spec)
    if group.first:
        resources.enter_context(exclusive(run_dir))
    plan = Plan(
        algorithm,
        config.algo.batch_size,
        "eager",
        config.precision,
        CPU_GROUP if algorithm.traits.vectorized and algorithm.data_spec.encoder is None else 1,
        group,
    )
    execution = Execution(config, dataset, plan, members, device)
    if group.first:
        mode, size = runs.prepare(run_dir, config, dataset, execution.mode_and_group, device)
    else:
        mode, size = execution.mode_and_group()
    if dataset.mapped:
        size = len(members)  # batches are read ahead for all replicas together
    plan = dataclasses.replace(plan, mode=mode, group=size)
    return Setup(
        members, execution.devices, dataset, plan, execution.source, evaluator, arithmetic, execution.start_workers
    )


def make_engine(
    config: TrainConfig,
    dataset: Dataset,
    setup: Setup,
    state: TrainState,
    clock: RunClock,
    resources: contextlib.ExitStack,
) -> tuple[Engine, str]:
    """The engine that trains the replicas from update number `clock.step`, to be loaded with `state`, and words for the
    log on its processes. resources: close what is opened here.
    """
    plan, source, device = setup.plan, setup.source, setup.devices[0]
    if plan.mode.startswith("compiled"):
        backend.cache_compiled()
    if config.grid:
        try_update(plan, source, setup.replicas, device if len(setup.devices) == 1 else torch.device("cpu"))
    processes = len(shares(len(setup.replicas), plan.group, len(setup.devices)))
    if processes > 1 and clock.running:
        try:
            workers = WorkerEngine(plan, source, setup.replicas, setup.devices, config.threads)
            resources.callback(workers.close)
            return workers, f" in {processes} processes"
        except WorkersUnavailable as error:
            warn(f"training in one process: {error}")
            source = backend.move(source, device)
    prefetcher = None
    if dataset.mapped and clock.running:
        prefetcher = Prefetcher(plan.algorithm.sampler(), source, state.key, config.algo.batch_size, clock.step, device)
        resources.callback(prefetcher.close)
    engine = LocalEngine(plan, source, setup.replicas, device, prefetcher)
    return engine, f" in {len(engine.parts)} groups" if len(engine.parts) > 1 else ""


def make_algorithm(config: TrainConfig, dataset: Dataset, pretrained: Mapping[str, Any] | None = None) -> Algorithm:
    """The configured algorithm for this data, with what it builds on (see `stages.ready`). Raises UserError where it
    does not support the data's actions, or sees goals in them."""
    algorithm_class = registry.get("algo", config.algo.name)
    check_kind(algorithm_class, config.algo.name, dataset)
    check_n_step(config.algo, algorithm_class.traits.n_step)
    if dataset.spec.discrete and not algorithm_class.traits.discrete:
        able = [n for n, c in registry.names("algo").items() if c.traits.discrete]
        raise UserError(
            f"{config.algo.name} needs continuous actions and {dataset.spec.name} has discrete ones; use "
            f"{' or '.join(able)}"
        )
    if config.encoder.pretrained and ENCODER not in (pretrained or {}):
        raise UserError(
            f"encoder.pretrained={config.encoder.pretrained} is for offrl train: train from it first, and go on with "
            "that run"
        )
    spec = with_encoder(config, dataset.spec, algorithm_class.traits)
    algorithm: Algorithm = algorithm_class(config.algo, spec, pretrained)
    if (settings := algorithm.data_spec.encoder) is not None:
        start = f", from {config.encoder.pretrained}" if config.encoder.pretrained else ""
        module = algorithm.encoder_module
        trained = {OWN: "one inside each network", "": "not trained"}.get(module, f"trained by the loss of '{module}'")
        trained = "a part of the model" if algorithm.encoder is None else trained
        text = f"encoder={settings.name}{start}, {trained}"
        algorithm.runtime.notes = (*algorithm.runtime.notes, f"observations have {seen_besides(dataset.spec)}: {text}")
    if (n_step := getattr(config.algo, "n_step", 1)) > 1:
        check_n_step(config.algo, getattr(algorithm.sampler(), "n_step", 1) >= n_step)
    check_stitching(config.algo, algorithm, dataset)
    task = dataset.spec.task
    if algorithm.traits.goal_conditioned and task is not None and "desired_goal" in task.observation_keys:
        other_keys = ",".join(k for k in task.observation_keys if k != "desired_goal")
        raise UserError(
            f"the observations of {dataset.spec.name} hold the desired goal, which {config.algo.name} must be told "
            f"apart from them: dataset.observation_keys=[{other_keys}]"
        )
    return algorithm


def with_encoder(config: TrainConfig, spec: DataSpec, traits: Traits | None = None) -> DataSpec:
    """The specification with the encoder that the run is to have; as it is where observations are one vector. traits:
    the algorithm's. Raises UserError for an encoder that nothing needs."""
    settings = config.encoder
    if not spec.streams and not spec.windowed:
        if settings != EncoderConfig():
            of_windows = "" if settings.name not in WINDOW_ENCODERS else ", or say dataset.history=n for it to read"
            raise UserError(
                f"encoder={settings.name}: the observations of {spec.name} are a vector, which needs no encoder; leave "
                f"it out{of_windows}"
            )
        return spec
    if not spec.streams:
        return with_window_encoder(settings, spec)
    if settings.name in WINDOW_ENCODERS:
        raise UserError(
            f"encoder={settings.name} reads vectors alone, and {spec.name} has "
            f"{', '.join(s.name for s in spec.streams)}: take {', '.join(IMAGE_ENCODERS)}, beside which the window of "
            "vectors is seen"
        )
    if traits is not None and traits.observations == "streams":
        return dataclasses.replace(spec, encoder=encoder_of_model(settings, config.algo.name, traits))
    if settings.trained_by == "none" and not settings.pretrained:
        raise UserError(
            "encoder.trained_by=none leaves the encoder as it begins, which is at random: name a run that trained one, "
            "encoder.pretrained=RUN"
        )
    if settings.fusion == "early" and settings.pretrained:
        raise UserError(
            f"encoder.fusion=early: the encoder of {settings.pretrained} takes one image, and not state and goal side "
            "by side; leave fusion out"
        )
    name = "drq" if settings.name == "auto" else settings.name
    return dataclasses.replace(spec, encoder=dataclasses.replace(settings, name=name, pretrained="", pretrained_id=""))


def encoder_of_model(settings: EncoderConfig, name: str, traits: Traits) -> EncoderConfig:
    """The encoder of the images of an algorithm whose own networks read streams. Raises UserError for settings of
    encoders that stand before an algorithm.
    """
    free = ("name", "shift") if traits.shifts_images else ("name",)
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        if value and value != field.default and field.name not in free:
            raise UserError(
                f"encoder.{field.name}={value}: the encoder is a part of {name}'s model, of which "
                f"{' and '.join(f'encoder.{f}' for f in free)} can be set; leave it out"
            )
    image = traits.image_encoder if settings.name == "auto" else settings.name
    return EncoderConfig(name=image, shift=settings.shift if traits.shifts_images else 0)


def with_window_encoder(settings: EncoderConfig, spec: DataSpec) -> DataSpec:
    """The specification with what reads windows of vectors: a GRU, or as it is, `stack`."""
    if settings.name in ("auto", "stack"):
        if settings != EncoderConfig(name=settings.name):
            raise UserError(
                "encoder=stack has no parameters: networks see the window itself; leave out the other settings of the "
                "encoder, or take encoder=gru"
            )
        return spec
    if settings.name != "gru":
        raise UserError(
            f"encoder={settings.name} is of images, and {spec.name} has windows of vectors: take stack or gru."
            f"{nearest(settings.name, WINDOW_ENCODERS)}"
        )
    if settings.trained_by == OWN or settings.pretrained:
        raise UserError(
            "encoder=gru is trained with the run, one for all networks: leave out pretrained and trained_by=own"
        )
    if spec.history_stride > 1 and spec.history_actions:
        raise UserError(
            "encoder=gru reads each observation with the action before it: leave out history_stride, or take "
            "encoder=stack"
        )
    return dataclasses.replace(spec, encoder=settings)


def check_kind(algorithm_class: Any, name: str, dataset: Dataset) -> None:
    """Raise UserError where one of data and algorithm is of texts and the other of numbers, or observations are no
    vectors.
    """
    spec = dataset.spec
    if len(spec.observation_shape) > 1:
        raise UserError(
            f"{name} learns from vectors, and the observations of {spec.name} are numbers of shape "
            f"{list(spec.observation_shape)}: save each as one row of {spec.observation_dim}; of images save uint8, "
            "0 to 255, height x width x channels: numpy.rint(255 * x).astype(numpy.uint8) of those from 0 to 1"
        )
    if spec.streams and algorithm_class.traits.observations == "vector":
        able = [n for n, c in registry.names("algo").items() if c.traits.observations != "vector"]
        cure = ", or its vector alone: dataset.observation_keys=[...]" if spec.observation_shape != (0,) else ""
        raise UserError(
            f"{name} reads the numbers of observations, and {spec.name} has {', '.join(s.name for s in spec.streams)}: "
            f"take {', '.join(able[:8])}, ...{cure}"
        )
    if spec.windowed and algorithm_class.traits.observations != "encoded":
        setting = next((f.name for f in dataclasses.fields(algorithm_class.Config) if f.name in OWN_WINDOWS), "")
        cure = f"set algo.{setting}, its own, and leave out" if setting else "leave out"
        raise UserError(
            f"{name} reads single observations, and {spec.name} is shown as {seen_besides(spec)}: {cure} "
            "dataset.history, history_actions and action_delay"
        )
    if spec.windowed and algorithm_class.traits.goal_conditioned and not spec.goal_dim:
        raise UserError(
            f"the goals of {name} are single observations, and {spec.name} is shown as {seen_besides(spec)}: leave out "
            "dataset.history, history_actions and action_delay, or give goals of their own (achieved_goals)"
        )
    traits = algorithm_class.traits
    if spec.task is not None and spec.task.parts and not traits.multitask:
        able = [n for n, c in registry.names("algo").items() if c.traits.multitask]
        raise UserError(
            f"{name} learns one task, and {spec.name} is of several (dataset.multitask): take {', '.join(able)}"
        )
    # what such data lack is read as zeros
    if (
        spec.source == "lerobot"
        and traits.critic_modules
        and not traits.goal_conditioned
        and not dataset.columns["rewards"].any()
    ):
        raise UserError(
            f"{name} learns from rewards, and {spec.name} has none, as most LeRobot data: label them, "
            "dataset.reward_labels=file.py:function, or imitate: bc, chunk_bc, act, diffusion_bc, flow_bc"
        )
    if spec.text == traits.text:
        return
    able = [
        n for n, c in registry.names("algo").items() if c.traits.text == dataset.spec.text and c.traits.policy_modules
    ]
    kinds = ("numbers", "texts")
    names = f"{', '.join(able[:6])}{', ...' if len(able) > 6 else ''}"
    learns, holds = kinds[algorithm_class.traits.text], kinds[dataset.spec.text]
    raise UserError(f"{name} learns from {learns}, and {dataset.spec.name} holds {holds}; use one of {names}")


def check_n_step(config: Any, possible: bool) -> None:
    """Raise UserError for n-step targets of an algorithm whose batches are not steps of the data in a row."""
    if not possible and getattr(config, "n_step", 1) > 1:
        raise UserError(
            f"algo.n_step={config.n_step}: {config.name} has no n-step targets, for it does not learn from steps of "
            "the data in a row; leave it at 1 (docs/critics.md lists those that have them)"
        )


def check_stitching(config: Any, algorithm: Algorithm, dataset: Dataset) -> None:
    """Raise UserError for stitched goals of an algorithm that draws none."""
    if dataset.stitch and not getattr(algorithm.sampler(), "stitching", False):
        asks = next((f"algo.{field}=goal" for field in ("condition", "prompt") if "goal" in choices(config, field)), "")
        able = (
            f"{config.name} does with {asks}"
            if asks
            else "take one that learns towards goals, such as gcbc, gciql or hiql"
        )
        raise UserError(
            f"dataset.augment=stitch replaces the goals that a policy learns towards, and {config.name} has none; "
            f"{able}"
        )


def choices(config: Any, name: str) -> tuple[str, ...]:
    """What a setting may be; () where there is none of that name, or anything goes."""
    return next((f.metadata.get("choices") or () for f in dataclasses.fields(config) if f.name == name), ())
