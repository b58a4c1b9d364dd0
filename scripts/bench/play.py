"""Environment steps per second of play in `offrl finetune`, beside Stable-Baselines3's vectors, by turns.

    python scripts/bench/play.py [--env Pendulum-v1 Hopper-v5 Humanoid-v5] [--envs 1 16] [--steps 1600] [--repeats 5]
        [--only sequential processes threads warp]

Prints a Markdown table of medians: by the seconds that passed, and by those that were computed, which is what as many
undisturbed cores would need, but for the waking of processes and threads: the asking thread's, whose share is as large
as that of threads beside it, and the sum of its processes' over the cores that they have. All take the same random
actions, and nothing learns; it stops where `processes` or `threads` play other numbers than `sequential`. `warp` steps
on the GPU where torch finds one. The last line has the machine's load before and after.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Sequence
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from evaluation import computed
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv

from offrl.finetuning.play.environments import Play
from offrl.finetuning.start import spec_of
from offrl.settings.evaluation import cores
from offrl.tasks.task import Task

EXACT = ("sequential", "processes", "threads")
BACKENDS = (*EXACT, "warp")
VECTORS = ("DummyVecEnv", "SubprocVecEnv")


def measure(env_id: str, envs: int, steps: int, repeats: int, columns: Sequence[str]) -> list[str]:
    """Two lines of the table."""
    spec, task = spec_of(Task(env_id, env_id=env_id))
    low, high = spec.action_bounds
    actions = np.random.default_rng(0).uniform(-1, 1, (steps // envs, envs, spec.action_dim)).astype(np.float32)
    sent = low + (actions + 1) * (high - low) / 2
    makers = [lambda: gym.make(env_id)] * envs
    run: dict[str, tuple[Any, np.ndarray, list[int]]] = {}  # who steps, the actions, the processes that help
    for name in columns:
        if name in BACKENDS:
            device = "auto" if torch.cuda.is_available() else "cpu"
            play = Play(task, spec, (0,), envs, 0, None, backend=name, device=device)
            run[name] = play, actions, [p.pid for p, _ in getattr(play.backend, "workers", [])]
            play.begin()
        else:
            vector = DummyVecEnv(makers) if name == "DummyVecEnv" else SubprocVecEnv(makers, start_method="fork")
            run[name] = vector, sent, [p.pid for p in getattr(vector, "processes", [])]
            vector.reset()
    passed: dict[str, list[float]] = {name: [] for name in columns}
    used: dict[str, list[float]] = {name: [] for name in columns}
    for repeat in range(repeats + 1):
        for name, (stepper, rows, pids) in run.items():
            start, before = time.perf_counter(), [time.thread_time(), *map(computed, pids)]
            for row in rows:
                stepper.step(row)
            seconds = time.perf_counter() - start
            after = [time.thread_time(), *map(computed, pids)]
            asking, *others = (now - then for now, then in zip(after, before, strict=True))
            if repeat:  # the first one warms up
                passed[name].append(actions.shape[0] * envs / seconds)
                used[name].append(actions.shape[0] * envs / (asking + sum(others) / max(1, min(cores(), len(others)))))
        played = {name: stepper.current.tobytes() for name, (stepper, *_) in run.items() if name in EXACT}
        if len({*played.values()}) > 1:
            raise SystemExit(f"{env_id}: the observations of {', '.join(played)} are not the same")
    for stepper, *_ in reversed(run.values()):
        stepper.close()
    return [
        f"| {env_id} | {envs} | {how} | {' | '.join(f'{statistics.median(rates[n]):,.0f}' for n in columns)} |"
        for how, rates in (("passed", passed), ("computed", used))
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--env", nargs="*", default=["Pendulum-v1", "Hopper-v5", "Humanoid-v5"])
    parser.add_argument("--envs", type=int, nargs="*", default=[1, 16])
    parser.add_argument("--steps", type=int, default=1600, help="of all environments, in each turn")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--only", nargs="*", choices=(*BACKENDS, *VECTORS), default=[*BACKENDS[:2], *VECTORS])
    options = parser.parse_args()
    before = os.getloadavg()[0]
    print(f"| Environment | Side by side | Seconds | {' | '.join(options.only)} |\n{'|---' * (3 + len(options.only))}|")
    for env_id in options.env:
        for envs in options.envs:
            print(*measure(env_id, envs, options.steps, options.repeats, options.only), sep="\n", flush=True)
    print(f"\nLoad of the machine's {os.cpu_count()} cores: {before:.1f} before, {os.getloadavg()[0]:.1f} after")


if __name__ == "__main__":
    main()
