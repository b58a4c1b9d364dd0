"""The start of fine-tuning: a run's states and settings, fresh parameters, or a fine-tuning run that was stopped."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from offrl import registry
from offrl.algorithm import Algorithm
from offrl.data.dataset import Dataset
from offrl.encoding import set_spec
from offrl.errors import UserError, nearest, warn
from offrl.families.goal_conditioned import GoalConditioned
from offrl.finetuning import expansion
from offrl.finetuning.checks import check, continued
from offrl.finetuning.config import CONVENTIONS, FinetuneConfig, choose
from offrl.finetuning.distillation import students
from offrl.finetuning.on_policy.policies import begin as begin_on_policy
from offrl.finetuning.on_policy.residual import begin as begin_residual
from offrl.finetuning.play.success import SuccessRewards
from offrl.finetuning.start import (
    KIND,
    Factory,
    Start,
    check_rewards,
    load,
    null_or_number,
    resume,
    run_data,
    spec_of,
    task_of,
)
from offrl.runs import record as runs
from offrl.runs.run import SavedRun
from offrl.runs.settings import run_settings
from offrl.settings.compose import compose, fill, flatten
from offrl.settings.presets import algorithm_group, base_algorithm, finetune_settings
from offrl.settings.replicas import expand
from offrl.settings.train import seed_list
from offrl.settings.untrusted import literal
from offrl.system import files as checkpoint
from offrl.system import trust
from offrl.tasks.environments import towards_goals
from offrl.tasks.task import Task
from offrl.training.engine import first_state
from offrl.training.setup import make_algorithm, with_encoder


def begin(
    run: str | Path | None, values: Mapping[str, Any], dataset: Dataset | None = None, env: Factory | None = None
) -> Start:
    """From the settings of a command (see `offrl finetune --help`) to what will run. Raises UserError for whatever is
    wrong with them.
    """
    settings = flatten(values)
    trust.typed(settings.get("env"))
    fields = {f.name for f in dataclasses.fields(FinetuneConfig)}
    other = {k: settings[k] for k in settings if k.partition(".")[0] not in fields}
    known = ("algo", "encoder", "dataset", "seeds", "grid", "experiment", "from")
    for name in other:
        if name.partition(".")[0] not in known:
            options = [*fields, *known]
            raise UserError(
                f"offrl finetune has no setting '{name}'.{nearest(name, options)} Settings: "
                f"{', '.join(sorted(options))}"
            )
    if "eval.env" in settings:
        raise UserError(f"eval.env={settings['eval.env']}: policies are scored where they learn; write env=")
    config = fill(FinetuneConfig(), {k: v for k, v in settings.items() if k not in other}, "finetune")
    source = other.pop("from", None)
    if source is not None and source != "none":
        if run is not None:
            raise UserError(f"{run} and from={source} are both given; leave one of them out")
        run = str(source)
    if config.mode == "residual" and config.resume is None:
        start = begin_residual(run, config, settings, other, env)
    elif config.resume is not None:
        start = resume(config, settings, other, run, dataset, env)
    elif config.mode == "distill":
        start = students.begin(run, config, settings, other, env)
    elif config.mode == "on_policy" or _on_policy(other.get("algo")):
        start = begin_on_policy(run, config, settings, other, env)
    elif run is not None:
        start = _of_run(Path(run), config, other, dataset, env)
    elif config.mode == "expansion":
        raise UserError("mode=expansion learns beside the policies of a run: offrl finetune RUN mode=expansion env=ID")
    else:
        start = _fresh(config, other, dataset, env)
    if config.resume is None:
        start.user_settings = {k: v for k, v in settings.items() if k not in ("name", "runs_dir")}
    check(start)
    if start.algorithm.traits.goal_conditioned:
        start.task = towards_goals(start.task)
    if start.config.success is not None:
        start.success = SuccessRewards(start.config.success, start.spec)
    # a policy's file says where it learnt
    start.spec = dataclasses.replace(start.spec, task=dataclasses.replace(start.task, env_factory=None))
    set_spec(start.algorithm, start.spec)
    return start


# ---- a trained run


def _of_run(
    path: Path, config: FinetuneConfig, other: dict[str, Any], dataset: Dataset | None, env: Factory | None
) -> Start:
    run = SavedRun(path)
    if run.record.get("kind") == KIND:
        raise UserError(
            f"{path} is a fine-tuning run: offrl finetune resume={path} continues it, with a larger steps= for more"
        )
    name = str(run.record["identity"]["algo"]["name"])
    heir = expansion.successor(run, path, config.mode)
    if heir == name:
        kind, changes = _kind(name, run.algorithm, str(path))
    else:
        kind, changes = registry.get("algo", name), finetune_settings(heir) or {}
    for key in other:
        if key.partition(".")[0] in ("algo", "encoder", "seeds", "grid", "experiment") and not key.startswith("algo."):
            raise UserError(
                f"{key}= cannot be changed: the replicas of {path} go on as they are; algo.SETTING=value changes a "
                "setting"
            )
    config = choose(config, changes, fresh=False)
    reads = config.reads_data or dataset is not None
    new = expansion.typed_for(heir, name, other)
    typed = {k: v for k, v in other.items() if v is not None and k not in new}
    parent = run_settings(path, typed, ("dataset",) if reads else ())
    if not kind.traits.vectorized and len(run.replicas) > 1:
        raise UserError(
            f"{parent.algo.name} trains one replica at a time, and {path} has {len(run.replicas)}: train single seeds"
        )
    algo, fixed, anneal = _online(changes, expansion.settings(heir, parent.algo, new), other)
    env_name = str(run.record.get("env", "auto"))
    record_spec = run.spec
    task = task_of(record_spec, config, env_name, env, f"offrl finetune {path} env=ID")
    data, spec = None, record_spec
    check_rewards(parent.dataset, config)
    if reads:
        data = run_data(parent, config, dataset, run.record, path)
        spec = dataclasses.replace(data.spec, encoder=record_spec.encoder)
    algorithm = kind(algo if heir == name else parent.algo, spec)
    saved = checkpoint.load_latest(path)
    if saved is None:
        raise UserError(
            f"{path} has no checkpoint, so its critics are gone: a policy file alone cannot learn on; train it again"
        )
    tensors, meta = saved
    where = f"the checkpoint of step {meta['step']:,} in {path}"

    def state_of(algorithm: Algorithm) -> Any:
        return checkpoint.unflatten({"state": first_state(algorithm, run.replicas)}, tensors, where)["state"]

    before = run_settings(path, parts=()).algo
    names = [k.removeprefix("algo.") for k in typed if k.startswith("algo.")]
    updates = {k: value for k in names if (value := getattr(parent.algo, k)) != getattr(before, k)}
    state = continued(state_of, algorithm, before, updates, path)
    if heir != name:
        algorithm = registry.get("algo", heir)(algo, spec)
        state = algorithm.after(state, first_state(algorithm, run.replicas))
    notes = []
    if meta["step"] < parent.steps:
        notes.append(f"{path} was stopped at step {meta['step']:,} of {parent.steps:,}: going on from there")
    dead = [str(r) for r, ok in zip(run.replicas, run.alive(tensors), strict=True) if not ok]
    if dead:
        warn(f"{', '.join(dead)} of {path} had diverged: going on from the last finite parameters")
    came = {"run": str(path), "step": int(meta["step"]), "sha256": str(meta["sha256"])}
    described = run.record["data"] if data is None else data.describe()
    return Start(
        config,
        algorithm,
        run.replicas,
        run.grid,
        spec,
        task,
        run.algorithm,
        parent.dataset,
        described,
        data,
        state,
        came,
        fixed,
        anneal,
        notes=notes,
    )


# ---- fresh parameters


def _fresh(config: FinetuneConfig, other: dict[str, Any], dataset: Dataset | None, env: Factory | None) -> Start:
    name = other.get("algo")
    if name is None:
        raise UserError(
            "usage: offrl finetune RUN env=ID steps=N, or from fresh parameters: offrl finetune algo=sac_n "
            "dataset=NAME env=ID"
        )
    label = algorithm_group(str(name))
    kind, changes = _kind(base_algorithm(label), label)
    new_dataset = other.get("dataset") is not None or dataset is not None
    config = choose(config, changes, fresh=True, without_data=not new_dataset)
    if not new_dataset and config.mixing != 0.0:
        raise UserError(
            f"mixing={null_or_number(config.mixing)} draws from data: name them, dataset=NAME, or learn without any, "
            "mixing=0"
        )
    if not new_dataset and config.starts == "data":
        raise UserError("starts=data begins episodes in states of data: name them, dataset=NAME")
    extra = (
        {"dataset": literal(dataset.spec.name)}
        if dataset is not None
        else {}
        if new_dataset
        else {"experiment": "none"}
    )
    parent = compose({k: v for k, v in other.items() if v is not None} | extra)
    algo, _, anneal = _online(changes, parent.algo, other)
    data = None
    if new_dataset:
        check_rewards(parent.dataset, config)
        data = load(parent.dataset, config, dataset)
        parent = dataclasses.replace(parent, algo=algo)
        parent = runs.fit(parent, data)
        algo, spec = parent.algo, with_encoder(parent, data.spec, kind.traits)
        task = task_of(spec, config, "auto", env, "env=ID")
        described = data.describe()
    else:
        if config.env is None and env is None:
            raise UserError("without data the environment must be named: offrl finetune algo=sac_n env=ID mixing=0")
        name = str(config.env or getattr(env, "__qualname__", "<"))
        name = "environment" if "<" in name else name  # of a lambda, or within a function
        spec, task = spec_of(Task(name=name, env_id=config.env, env_factory=env))
        described = {"name": spec.name, "source": "environment", "fingerprint": "", "transforms": [], "notes": []}
        # what data would decide, and a grid does
        algo = dataclasses.replace(algo, **{k: v[0] for k, v in parent.grid.items() if getattr(algo, k, v) is None})
    if spec.discrete and not kind.traits.discrete:
        raise UserError(f"{algo.name} needs continuous actions, and {task.name} has discrete ones")
    algorithm = make_algorithm(dataclasses.replace(parent, algo=algo), data) if data is not None else kind(algo, spec)
    seeds = seed_list(parent.seeds)
    replicas = expand(parent.grid, seeds, parent.paired)
    if not kind.traits.vectorized and len(replicas) > 1:
        raise UserError(f"{algo.name} trains one replica at a time: seeds=1")
    return Start(
        config,
        algorithm,
        replicas,
        parent.grid,
        spec,
        task,
        parent.label or algo.name,
        parent.dataset if new_dataset else None,
        described,
        data if config.mixing != 0.0 else None,
        first_state(algorithm, replicas),
        None,
        {},
        anneal,
    )


# ---- both


def _kind(name: str, label: str, where: str = "") -> tuple[type[Algorithm], dict[str, Any]]:
    """(the algorithm's class, what changes with it or with its preset `label`). Raises UserError for one that cannot
    learn from an environment's rewards.
    """
    kind, changes = registry.get("algo", name), finetune_settings(name, label)
    if name in expansion.ON_A_RUN:
        raise UserError(f"{name} learns from {expansion.ON_A_RUN[name]}")
    able = ", ".join(
        n
        for n, k in registry.names("algo").items()
        if n == "skill_iql"
        or (
            n not in expansion.ON_A_RUN
            and (_learns_from_rewards(k) or issubclass(k, GoalConditioned))
            and finetune_settings(n) is not None
        )
    )
    if changes is None or not (_learns_from_rewards(kind) or issubclass(kind, GoalConditioned)):
        raise UserError(
            f"{where and where + ': '}{name} has no form that learns from an environment's rewards; those that can be "
            f"fine-tuned: {able}"
        )
    return kind, changes


def _on_policy(name: Any) -> bool:
    """Whether an algorithm, as a command names it, is one that learns from its own play from fresh parameters on."""
    known = None if name is None else base_algorithm(algorithm_group(str(name)))
    return known is not None and known not in expansion.ON_A_RUN and registry.get("algo", known).traits.on_policy


def _learns_from_rewards(kind: type[Algorithm]) -> bool:
    """Whether it has a critic, and an actor or the critic itself for a policy (ARSQ)."""
    policy, critics = kind.traits.policy_modules, kind.traits.critic_modules
    learns = bool(critics) or "critic" in kind.traits.targets  # whose values may be of latent states
    return learns and ("actor" in policy or policy == critics)


def _online(
    changes: Mapping[str, Any], algo: Any, other: Mapping[str, Any]
) -> tuple[Any, dict[str, float], dict[str, tuple[float, float, float]]]:
    """(settings as they are online, those that a grid must not override, annealed ones). Settings on the command line
    stay as they are.
    """
    fields = {f.name for f in dataclasses.fields(algo)}
    for name in changes:
        if name not in fields and name not in (*CONVENTIONS, "anneal"):
            raise UserError(
                f"configs/algo/{algo.name}.yaml: finetune names '{name}', which is no setting nor one of "
                f"{', '.join(CONVENTIONS)}"
            )
    fixed = {k: v for k, v in changes.items() if k in fields and f"algo.{k}" not in other}
    anneal = {
        k: (first, last, until)
        for k, (first, last, until) in changes.get("anneal", {}).items()
        if f"algo.{k}" not in other
    }
    numbers = {k: float(v) for k, v in fixed.items() if isinstance(v, (int, float)) and not isinstance(v, bool)}
    return dataclasses.replace(algo, **fixed), numbers, anneal
