"""What an algorithm cannot learn from in an environment, and what cannot be changed of a run."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from offrl.algorithm import Algorithm, TrainState
from offrl.data.samplers.decisions import DecisionSampler
from offrl.data.samplers.states import StateSampler
from offrl.errors import UserError
from offrl.finetuning.config import check_goals, check_length, check_memory, check_play
from offrl.finetuning.play.environments import Play
from offrl.finetuning.replay.balanced import check_balanced
from offrl.finetuning.replay.sources import is_chain
from offrl.finetuning.start import Start
from offrl.finetuning.transitions import columns_for
from offrl.settings.field import shown_value
from offrl.settings.groups import GROUPS

LENGTHS = ("horizon", "n_step", "representation_horizon")  # settings that decide how long windows of states are
# settings of networks that say what their parameters compute; init and dropout say how they are trained
FORMS = {*GROUPS["network"].split()} - {"init", "dropout"}


def check(start: Start) -> None:
    """Raise UserError for settings that do not fit the algorithm, and for what is not played."""
    config, algorithm = start.config, start.algorithm
    name, sampler, traits = algorithm.config.name, algorithm.sampler(), algorithm.traits
    if traits.on_policy:
        return
    columns_for(start.spec, sampler, name)
    if is_chain(sampler):
        check_length(config, sampler.length, name)
    if algorithm.actor_class.remembers_actions:
        check_memory(config, name)
    if traits.goal_conditioned:
        check_goals(config, name)
    if config.replay == "balanced":
        check_balanced(algorithm, start.spec)
    model = traits.learns_model
    if isinstance(sampler, DecisionSampler):
        check_play(config, f"both levels of {name}")
    if model and isinstance(sampler, StateSampler):
        check_play(config, f"the encoders of {name}")
    if model and not start.dataset and (config.warmup or 0) < algorithm.config.batch_size:
        raise UserError(
            f"warmup={config.warmup}: {name} learns a model of the environment before its first update, which so few "
            f"steps do not teach: warmup={algorithm.config.batch_size} or more"
        )
    if config.normalize == "running" and (model or traits.goal_conditioned):
        learner = "learns a model of" if model else "draws goals from"
        raise UserError(
            f"normalize=running: {name} {learner} observations as they were played, whose statistics must stay: leave "
            "it out"
        )


def check_windows(start: Start, play: Play) -> None:
    """Raise UserError where windows of states have more of them than any episode that will be played."""
    config, algo, traits, snapshots = start.config, start.algorithm.config, start.algorithm.traits, play.snapshots
    sampler = None if traits.on_policy or config.mixing == 1.0 else start.algorithm.sampler()
    if not isinstance(sampler, StateSampler) or is_chain(sampler):
        return
    limits = {"a larger max_steps=": play.limit, "more steps=": config.steps // (config.envs or 1)}
    if snapshots is not None and snapshots.share == 1.0 and snapshots.steps >= config.steps:
        limits["a larger start_limit="] = snapshots.limit
    cure, longest = min(limits.items(), key=lambda limit: limit[1])
    if longest + 1 >= sampler.length:
        return
    names = [n for n in LENGTHS if getattr(algo, n, 0) >= longest]
    cures = [f"a smaller {' and '.join(f'algo.{n}' for n in names)}"]
    if longest != play.limit or longest == config.eval.max_steps:  # not the environment's own
        cures.append(cure)
    learnt = "those alone that end in a terminal" if sampler.past_end else "none of them"
    raise UserError(
        f"{algo.name} learns from {sampler.length} states in a row of one episode, and those of {play.name} are played "
        f"for {longest} steps at most, so that it would learn from {learnt}: {', or '.join(cures)}"
    )


def continued(
    state_of: Callable[[Algorithm[Any]], TrainState],
    algorithm: Algorithm[Any],
    before: Any,
    changed: Mapping[str, Any],
    path: Path,
) -> TrainState:
    """`state_of(algorithm)`, the state of the checkpoint of the run in `path`. Raises UserError for a changed setting
    of its algorithm, `before`, that parameters or the state have fixed.
    """

    def fixed(key: str) -> UserError:
        return UserError(
            f"algo.{key}= cannot be changed: {path} was trained with algo.{key}={shown_value(getattr(before, key))}; "
            "leave it out, or train another run"
        )

    for key in changed:
        if key in FORMS:
            raise fixed(key)
    try:
        state = state_of(algorithm)
    except UserError:
        for key, value in changed.items():
            try:
                state_of(type(algorithm)(dataclasses.replace(before, **{key: value}), algorithm.data_spec))
            except UserError:
                raise fixed(key) from None
        raise
    for key in changed:
        if key in state.extra:
            raise fixed(key)
    return state
