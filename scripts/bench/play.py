"""Environment steps per second of play in `offrl finetune`, beside Stable-Baselines3's vectors, by turns.

    python scripts/bench/play.py [--env Pendulum-v1 Hopper-v5 Humanoid-v5] [--envs 1 16] [--steps 1600] [--repeats 5]

Prints a Markdown table of medians: by the seconds that passed, and by those that were computed, which is what as many
undisturbed cores would need, but for the waking of processes: the asking process's, and the sum of its workers' over
the cores that they have. All take the same random actions, and nothing learns; it stops where `processes` plays other
numbers than `sequential`.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
from evaluation import computed
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv

from offrl.finetuning.play.environments import Play
from offrl.finetuning.start import spec_of
from offrl.settings.evaluation import cores
from offrl.tasks.task import Task

COLUMNS = ("sequential", "processes", "DummyVecEnv", "SubprocVecEnv")


def measure(env_id: str, envs: int, steps: int, repeats: int) -> list[str]:
    """Two lines of the table."""
    spec, task = spec_of(Task(env_id, env_id=env_id))
    plays = {name: Play(task, spec, (0,), envs, 0, None, backend=name) for name in COLUMNS[:2]}
    makers = [lambda: gym.make(env_id)] * envs
    dummy, subproc = DummyVecEnv(makers), SubprocVecEnv(makers, start_method="fork")
    low, high = spec.action_bounds
    actions = np.random.default_rng(0).uniform(-1, 1, (steps // envs, envs, spec.action_dim)).astype(np.float32)
    sent = low + (actions + 1) * (high - low) / 2
    run: dict[str, tuple[Callable[[Any], Any], np.ndarray, list[int]]] = {
        "sequential": (plays["sequential"].step, actions, []),
        "processes": (plays["processes"].step, actions, [p.pid for p, _ in plays["processes"].backend.workers]),  # type: ignore[union-attr]
        "DummyVecEnv": (dummy.step, sent, []),
        "SubprocVecEnv": (subproc.step, sent, [p.pid for p in subproc.processes]),
    }
    for thing in plays.values():
        thing.begin()
    dummy.reset(), subproc.reset()
    passed: dict[str, list[float]] = {name: [] for name in COLUMNS}
    used: dict[str, list[float]] = {name: [] for name in COLUMNS}
    for repeat in range(repeats + 1):
        for name, (step, rows, pids) in run.items():
            start, before = time.perf_counter(), [computed(pid) for pid in (os.getpid(), *pids)]
            for row in rows:
                step(row)
            seconds = time.perf_counter() - start
            own, *others = (computed(pid) - n for pid, n in zip((os.getpid(), *pids), before, strict=True))
            if repeat:  # the first one warms up
                passed[name].append(actions.shape[0] * envs / seconds)
                used[name].append(actions.shape[0] * envs / (own + sum(others) / max(1, min(cores(), len(others)))))
        if plays["processes"].current.tobytes() != plays["sequential"].current.tobytes():
            raise SystemExit(f"{env_id}: the observations of processes are not those of sequential")
    for thing in (*plays.values(), dummy, subproc):
        thing.close()
    return [
        f"| {env_id} | {envs} | {how} | {' | '.join(f'{statistics.median(rates[n]):,.0f}' for n in COLUMNS)} |"
        for how, rates in (("passed", passed), ("computed", used))
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--env", nargs="*", default=["Pendulum-v1", "Hopper-v5", "Humanoid-v5"])
    parser.add_argument("--envs", type=int, nargs="*", default=[1, 16])
    parser.add_argument("--steps", type=int, default=1600, help="of all environments, in each turn")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    print(f"| Environment | Side by side | Seconds | {' | '.join(COLUMNS)} |\n{'|---' * 7}|")
    for env_id in options.env:
        for envs in options.envs:
            print(*measure(env_id, envs, options.steps, options.repeats), sep="\n", flush=True)


if __name__ == "__main__":
    main()
