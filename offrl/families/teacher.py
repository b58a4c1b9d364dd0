"""Values of a pretrained run, which sequence models learn from: the choice of the run, and its values at every row of
the data; and the runs whose policies can be imitated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from offrl import registry, rng
from offrl.algorithm import Dataset, DataSpec, TrainConfig, Traits
from offrl.errors import UserError
from offrl.pretrained import Pretrained, Requirement
from offrl.settings.field import setting

CHUNK = 16_384  # rows whose values are computed at once
MOST_STEPS = 1_000_000  # of values that are trained first: what is published, however long the run that takes them


@dataclass
class TeacherSettings:
    """Settings of algorithms that learn from the values of a pretrained run."""

    values: str = setting("", "a trained run whose values are used; empty: one is trained first", place=True)
    values_id: str = setting("", "which one that is", filled=True)
    values_settings: dict[str, Any] = setting({}, "its algorithm's settings", filled=True)
    values_steps: int | None = setting(
        None,
        "updates of the run that is trained first; null: in the published proportion to this run's (vadt: 10 times as "
        "many, qdt: 5, gadt: 1), but more than 1,000,000 only where this run has more",
        low=1,
        place=True,
    )


def values_requirement(
    config: TrainConfig, algo: str, settings: Mapping[str, Any], check: Callable[[Pretrained], None], ratio: int = 1
) -> dict[str, Requirement]:
    """The requirement "values": the run that is named, or one of `algo`, of `ratio` updates for each of this run's, as
    published.

    It has the same data and normalisation, and serves all seeds.
    """
    steps = config.algo.values_steps or max(config.steps, min(ratio * config.steps, MOST_STEPS))
    return {"values": Requirement(algo, settings, steps=steps, label=f"values-{algo}", check=check, of_rewards=True)}


def make_teacher(config: TeacherSettings, spec: DataSpec, settings: Mapping[str, Any]) -> Any:
    """The algorithm of the run "values": by its settings, or by these, which have a name, before there is a run."""
    settings = config.values_settings or settings
    kind = registry.get("algo", settings["name"])
    return kind(kind.Config(**settings), spec)


def check_critics(run: Pretrained, alternatives: str) -> None:
    """Raise UserError for a run without Q. alternatives: the algorithms to take instead."""
    if not run.algorithm.traits.critic_modules:
        raise UserError(f"algo.values: {run.algorithm.config.name} has no values; use a run of {alternatives}")


@torch.no_grad()
def q_of_data(run: Pretrained, dataset: Dataset) -> Tensor:
    """Q(s, a) of every row, [R] float32 on the CPU, in training units."""
    observations, actions = observation_rows(dataset), dataset.columns["actions"].cpu()
    return torch.cat([_value(run, o, a) for o, a in zip(observations.split(CHUNK), actions.split(CHUNK), strict=True)])


@torch.no_grad()
def v_of_policy(run: Pretrained, observations: Tensor, samples: int) -> Tensor:
    """The mean Q(s, a) of `samples` actions of the run's policy at observations [R, O], [R] float32."""
    values, actor = [], run.algorithm.actor(run.state)
    for i, rows in enumerate(observations.split(CHUNK)):
        keys = rng.split(rng.fold_in(run.state.key, i), samples)
        actions = [actor.act(None, rows, key, explore=True)[0] for key in keys]
        values.append(torch.stack([_value(run, rows, a) for a in actions]).mean(0))
    return torch.cat(values)


def _value(run: Pretrained, observations: Tensor, actions: Tensor) -> Tensor:
    value = run.algorithm.q_value(run.state, observations, actions)
    assert value is not None
    return value.float()


def observation_rows(dataset: Dataset) -> Tensor:
    """The observations of every row as critics take them, [R, O] float32 on the CPU."""
    return dataset.flat("observations").cpu().float()


def check_imitable(name: str, traits: Traits) -> None:
    """Raise UserError for an algorithm whose policies no function of one observation imitates."""
    if traits.policy_modules and not traits.text and not traits.goal_conditioned:
        return
    kind = "a language policy" if traits.text else "a policy that takes goals" if traits.policy_modules else "a model"
    raise UserError(
        f"a run of {name} is {kind}, and a student maps numbers that it observes to one action: distil a run of iql, "
        "td3_bc or another policy of observations alone"
    )


def check_memoryless(run: Pretrained) -> None:
    """Raise UserError for a teacher with a memory, or as `check_imitable` does."""
    algorithm, state = run.replicas[0]
    name = algorithm.config.name
    check_imitable(name, algorithm.traits)
    if algorithm.actor(state).start(1) is not None:
        raise UserError(
            f"a policy of {name} remembers the episode, and a student sees one observation at a time: distil a run of "
            "a policy without a memory, such as iql or td3_bc"
        )
