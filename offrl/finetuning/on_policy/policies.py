"""The start of PPO: fresh parameters, or the actors of a run of behaviour cloning with fresh critics."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

from offrl import registry
from offrl.algorithm import TrainState, stack
from offrl.errors import UserError, warn
from offrl.evaluation.policy import TrainedPolicy
from offrl.families.on_policy.algorithm import OnPolicy
from offrl.finetuning.config import FinetuneConfig, choose
from offrl.finetuning.on_policy.learner import minibatches
from offrl.finetuning.on_policy.parents import check_settings, parent_run, policies_of
from offrl.finetuning.start import Start, spec_of, task_of
from offrl.nn import Gaussian
from offrl.settings.compose import compose
from offrl.settings.presets import algorithm_group, base_algorithm
from offrl.settings.replicas import expand
from offrl.settings.train import seed_list
from offrl.tasks.task import Task
from offrl.training.engine import first_state

WARMUP = 5  # iterations in which only the critic beside the actor of a run learns
OF_RUN = ("hidden", "activation", "normalise_observations")  # settings that the actor of a run decides


def begin(
    run: str | Path | None,
    config: FinetuneConfig,
    settings: Mapping[str, Any],
    other: dict[str, Any],
    env: Callable[[], Any] | None,
) -> Start:
    """From the settings of a command to what will run. settings: all that were given; other: those that are not of
    `config`.

    Raises UserError for what is wrong with them, and for policies that cannot be gone on with.
    """
    name = algorithm_group(str(other.get("algo") or "ppo"))
    kind = registry.get("algo", base_algorithm(name))
    if not (kind.traits.on_policy and issubclass(kind, OnPolicy)) or (run is not None and name != "ppo"):
        raise UserError(f"algo={name}: mode=on_policy is of ppo alone; leave algo= or mode= out")
    if settings.get("mode", "on_policy") != "on_policy":
        raise UserError(f"mode={settings['mode']} is not of {name}, which learns from what it plays; leave it out")
    check_settings(settings, name)
    for key in other:
        if key.partition(".")[0] not in ("algo", *["seeds"] * (run is None)):
            reason = "which needs no data" if key.startswith("dataset") else "which has no use for it"
            raise UserError(f"{key}= has no place with {name}, {reason}; leave it out")
    typed = {k: v for k, v in other.items() if v is not None}
    parent = compose({**typed, "algo": name, "experiment": "none"})
    config = choose(dataclasses.replace(config, mode="on_policy"), {"mixing": 0.0}, fresh=False)
    minibatches(parent.algo, config.envs or 1)
    if run is None:
        return _fresh(config, kind, parent, env)
    return _of_run(Path(run), config, kind, parent.algo, typed, env)


def _fresh(config: FinetuneConfig, kind: type[OnPolicy], parent: Any, env: Callable[[], Any] | None) -> Start:
    algo = dataclasses.replace(parent.algo, value_warmup=parent.algo.value_warmup or 0)
    if config.env is None and env is None:
        raise UserError(f"the environment must be named: offrl finetune algo={algo.name} env=ID")
    task = Task(name=config.env or "environment", env_id=config.env, env_factory=env)
    spec, task = spec_of(task, f"{algo.name} takes rows of numbers")
    if spec.discrete:
        raise UserError(f"{algo.name} needs continuous actions, and {task.name} has discrete ones")
    algorithm, replicas = kind(algo, spec), expand({}, seed_list(parent.seeds))
    described = {"name": spec.name, "source": "environment", "fingerprint": "", "transforms": [], "notes": []}
    state, label = first_state(algorithm, replicas), parent.label or algo.name
    return Start(config, algorithm, replicas, {}, spec, task, label, None, described, None, state)


def _of_run(
    path: Path,
    config: FinetuneConfig,
    kind: type[OnPolicy],
    algo: Any,
    typed: Mapping[str, Any],
    env: Callable[[], Any] | None,
) -> Start:
    saved = parent_run(path, algo.name, "draws")
    spec = saved.spec
    policies, parent = policies_of(saved)
    cloned = policies[0].algorithm.config
    if cloned.name != "bc":
        raise UserError(
            f"{path}: mode=on_policy goes on with the actor of a run of bc, and this is one of {cloned.name}"
        )
    if cloned.policy not in ("deterministic", "gaussian") or cloned.actor_network is not None:
        form = f"algo.policy={cloned.policy}" if cloned.actor_network is None else "a network of one's own"
        raise UserError(f"{path}: its actor is {form}, and that of ppo a Gaussian: clone with algo.policy=gaussian")
    if clash := next((name for name in OF_RUN if f"algo.{name}" in typed), None):
        raise UserError(f"algo.{clash}= is decided by the actor of {path}: leave it out")
    if cloned.policy == "deterministic" and "algo.std_start" not in typed:
        raise UserError(f"{path}: its actor has no standard deviation to explore with; give one, algo.std_start=0.1")
    algo = dataclasses.replace(
        algo,
        hidden=cloned.hidden,
        activation="relu",
        bounded=True,
        normalise_observations=False,
        value_warmup=WARMUP if algo.value_warmup is None else algo.value_warmup,
    )
    iterations = math.ceil(config.steps / ((config.envs or 1) * algo.horizon))
    if iterations <= algo.value_warmup:
        warn(
            f"the policies will not learn: steps={config.steps:,} are {iterations} iterations, and in the first "
            f"{algo.value_warmup} the value alone does; more steps=, or a smaller algo.value_warmup"
        )
    task = task_of(
        spec, config, str(saved.record.get("env", "auto")), env, f"offrl finetune {path} mode=on_policy env=ID"
    )
    algorithm = kind(algo, spec)
    states = [_with_actor(algorithm.init(p.seed), p, "algo.std_start" in typed) for p in policies]
    return Start(
        config, algorithm, saved.replicas, {}, spec, task, saved.algorithm, None, saved.record["data"], None,
        stack(states), parent,
    )  # fmt: skip


def _with_actor(state: TrainState, policy: TrainedPolicy, own_std: bool) -> TrainState:
    """`state` with the actor of a clone. own_std: whether it keeps its own standard deviation, whatever the clone's."""
    fresh, cloned = state.params["actor"], policy.state.params["actor"]
    actor = {name: cloned.get(name, initial) for name, initial in fresh.items()}  # in the order of `fresh`
    if own_std or "log_std" not in cloned:
        actor["log_std"] = fresh["log_std"]
    else:
        actor["log_std"] = actor["log_std"].clamp(*cast(Gaussian, policy.algorithm.policy).bounds)
    return state._replace(params={**state.params, "actor": actor})
