"""The start of a residual: the frozen policies of a run, and the settings of what learns on top of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from offrl.actor import Actor, bind
from offrl.algorithm import stack
from offrl.errors import UserError, nearest
from offrl.evaluation.policy import TrainedPolicy
from offrl.families.on_policy.residual import Residual, ResidualConfig
from offrl.families.on_policy.residual_actor import frozen
from offrl.finetuning.config import FinetuneConfig, choose
from offrl.finetuning.on_policy.learner import minibatches
from offrl.finetuning.on_policy.parents import check_settings, parent_run, policies_of
from offrl.finetuning.start import Start, task_of
from offrl.settings.compose import fill
from offrl.tasks.environments import make_env
from offrl.tasks.episodes import success_of
from offrl.tasks.task import Task


@dataclass
class _Settings:
    algo: ResidualConfig = field(default_factory=ResidualConfig)


def begin(
    run: str | Path | None,
    config: FinetuneConfig,
    settings: Mapping[str, Any],
    other: Mapping[str, Any],
    env: Callable[[], Any] | None,
) -> Start:
    """From the settings of a command to what will run. settings: all that were given; other: those that are not of
    `config`.

    Raises UserError for what is wrong with them, and for policies that cannot be built on.
    """
    if run is None:
        raise UserError("mode=residual learns on top of the policies of a run: offrl finetune RUN mode=residual env=ID")
    path = Path(run)
    check_settings(settings, "a residual")
    for name in other:
        if not name.startswith("algo."):
            raise UserError(
                f"{name}= has no place with mode=residual, which needs no data: algo.SETTING=value changes the residual"
            )
    algo = _algorithm(other)
    config = choose(config, {"mixing": 0.0}, fresh=False)
    minibatches(algo, config.envs or 1)
    saved = parent_run(path, "a residual", "adds to")
    spec, label = saved.spec, saved.algorithm
    task = task_of(
        spec, config, str(saved.record.get("env", "auto")), env, f"offrl finetune {path} mode=residual env=ID"
    )
    policies, parent = policies_of(saved)
    for policy in policies:
        check_base(policy, path)
    algo = dataclasses.replace(
        algo, base=dataclasses.asdict(policies[0].algorithm.config), rewards=rewards_of(algo.rewards, task)
    )
    algorithm = Residual(algo, spec)
    states = []
    for policy in policies:
        state = algorithm.init(policy.seed)
        extra = {**state.extra, "base": frozen(policy.algorithm, policy.state)}
        # the same key: a scale of 0 is the base, draws included
        states.append(state._replace(key=policy.state.key, extra=extra))
    return Start(
        config,
        algorithm,
        saved.replicas,
        {},
        spec,
        task,
        label,
        None,
        saved.record["data"],
        None,
        stack(states),
        parent,
    )


def _algorithm(other: Mapping[str, Any]) -> ResidualConfig:
    known = [
        f.name for f in dataclasses.fields(ResidualConfig) if f.metadata.get("help") and not f.metadata.get("filled")
    ]
    for name in other:
        if name.removeprefix("algo.") not in known:
            raise UserError(
                f"a residual has no setting '{name}'.{nearest(name.removeprefix('algo.'), known)} Settings: "
                f"{', '.join(known)}"
            )
    algo = fill(_Settings(), other, "finetune").algo
    if not algo.scale > 0.0:
        raise UserError(f"algo.scale={algo.scale:g} must be above 0: with 0 nothing that is learnt would act")
    return algo


def check_base(policy: TrainedPolicy, path: Path) -> None:
    """Raise UserError for a policy whose memory is not one of single episodes, or that needs more than observations."""
    algorithm = policy.algorithm
    name = f"{path}: a policy of {algorithm.config.name}"
    if algorithm.traits.goal_conditioned:
        raise UserError(
            f"{name} acts towards goals, which a residual does not see: it can be built on policies of one task"
        )
    if algorithm.assets()[0]:
        raise UserError(f"{name} keeps a model beside its parameters, and a residual's file has no place for it")
    actor = algorithm.actor(bind(algorithm, policy.state))
    if type(actor).observe_reward is not Actor.observe_reward:
        raise UserError(f"{name} looks at the rewards of its episode, which a residual would change")
    if actor.start(2) is not None and not actor.resettable:
        raise UserError(f"{name} remembers episodes that began together, and those of a residual begin one by one")


def rewards_of(rewards: str, task: Task) -> str:
    """What `rewards`=auto means in an environment: success where its first step reports it. Raises UserError for a
    failing environment.
    """
    if rewards != "auto":
        return rewards
    env: Any = make_env(task)
    try:
        env.reset(seed=0)
        info = env.step(env.action_space.sample())[-1]
    except Exception as error:  # third-party environment
        raise UserError(f"{task.name} failed in its first step: {type(error).__name__}: {error}") from error
    finally:
        env.close()
    return "env" if success_of(info) is None else "success"
