"""Settings of evaluation. Imports nothing heavy, so that help and mistakes in a command are quick."""

from __future__ import annotations

import os
from dataclasses import dataclass

from offrl.settings.field import setting

MOST_WORKERS = 8
MOST_PROCESSES = 1024  # threads, too: with many more of either a machine ends the command, without a word
ACTING_HELP = (  # help of the setting `acting` of a command, for `TrainedPolicy.with_settings`
    "settings with which policies act otherwise than in training, such as acting.planning=false (planners), "
    "acting.beta=16 acting.decoding=greedy (language models)"
)


@dataclass
class EvalConfig:
    """Settings of the evaluation of a trained policy in its environment."""

    every: int | None = setting(
        None, "updates between evaluations; null: a few evenly spaced ones; 0: only at the end", low=0
    )
    episodes: int = setting(10, "episodes of each seed at each evaluation", low=1)
    seed: int = setting(0, "decides the start states, together with the replica's seed and the episode")
    parallel: int = setting(
        128, "environments alive at once in one process; changes memory and speed, never a score", low=1
    )
    workers: int | None = setting(
        None,
        "processes that evaluate beside training; null: half of the cores, at most 8, in runs that are not short; 0: "
        "none, training waits; never changes a score",
        low=0,
        high=MOST_PROCESSES,
    )
    env: str = setting(
        "auto",
        "auto (the dataset's own environment), none, a Gymnasium id, or file.py:Name, a class or function of yours",
    )
    estimate: bool = setting(
        True, "without an environment: when training ends, estimate the policies' values from the data"
    )
    cost_limit: float | None = setting(
        None,
        "where the environment gives costs: the limit of an episode's, for cost_normalized and safe; null: the "
        "algorithm's own",
        low=0.0,
    )
    max_steps: int | None = setting(None, "cut episodes after so many steps; null: the environment's own limit", low=1)


def cores() -> int:
    """The number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def worker_count(config: EvalConfig) -> int:
    """The number of processes that evaluate beside training."""
    return min(MOST_WORKERS, cores() // 2) if config.workers is None else config.workers
