"""The first lines of a run's log: what trains on what, where it goes on, and what a person should know about it."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

from offrl.algorithm import Algorithm
from offrl.data.dataset import Dataset
from offrl.errors import one_line, unsaid, warn
from offrl.settings.advice import sanity_checks
from offrl.settings.train import TrainConfig
from offrl.training.execution import PAYS_FROM, why_eager
from offrl.training.run.clock import RunClock
from offrl.training.setup import Setup
from offrl.training.updates import warn_of_no_rewards, warn_of_rates


def title(setup: Setup, config: TrainConfig, dataset: Dataset, run_dir: Path, processes: str) -> str:
    """Data, seeds and updates; hardware, settings and place; why a long run is not compiled. processes: words on how
    many train.
    """
    seeds = len({r.seed for r in setup.replicas})
    count = f"{seeds} seed{'s' if seeds > 1 else ''}"
    if config.grid:
        count += f" of {len(setup.replicas) // seeds} settings"
    row = f" ({config.match[0]})" if len(config.match) == 1 else ""  # of the experiment's table
    lines = (
        f"{config.label} on {dataset.spec.name}: {len(dataset):,} rows, {dataset.num_episodes:,} episodes, {count}, "
        f"{config.steps:,} updates",
        f"{setup.arithmetic}; step {setup.plan.mode}{processes}; settings {config.experiment}{row}; {run_dir}",
        *why_eager(config.compile, setup.plan.mode, setup.devices[0], config.steps, setup.plan.algorithm.traits),
    )
    return "\n".join(map(one_line, lines))


def log_start(
    say: Callable[[str], None],
    config: TrainConfig,
    dataset: Dataset,
    algorithm: Algorithm,
    clock: RunClock,
    resumed: bool,
    end_reason: str,
) -> None:
    """Say where the run begins, what its data are noted for, and which settings look like mistakes. end_reason: why a
    run that is resumed had ended before its last step.
    """
    if resumed and clock.running:
        say(f"continuing from step {clock.step:,}")
    elif resumed and clock.end < config.steps:
        say(f"this run ended at step {clock.end:,}: {end_reason}")
    elif resumed:
        say(f"this run has its {clock.step:,} updates already: nothing is trained (a larger steps= continues it)")
    for note in unsaid((*dataset.notes, *algorithm.runtime.notes)):
        say(note)
    warn_of_rates(config.algo, config.grid)
    for doubt in sanity_checks(config, len(dataset)):
        warn(doubt)
    if config.dataset.expert is None:
        warn_of_no_rewards(algorithm.traits, config.algo.name, dataset)
    decay = getattr(config.algo, "decay_steps", None)
    if not decay or getattr(config.algo, "actor_schedule", "") != "cosine":
        return
    if decay < config.steps:
        warn(
            f"the actor's learning rate reaches 0 at step {decay:,}, and it does not learn after that; "
            f"algo.decay_steps={config.steps} moves that to the end of the run"
        )
    elif decay > config.steps >= PAYS_FROM:  # shorter runs are trials
        share = 0.5 * (1.0 + math.cos(math.pi * config.steps / decay))
        say(
            f"the actor's learning rate falls over {decay:,} updates (algo.decay_steps); this run ends at {share:.0%} "
            "of it"
        )
