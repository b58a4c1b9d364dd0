"""Environment steps per second of evaluation: Gymnasium's SyncVectorEnv, `Evaluator` and `EvaluationPool`, by turns, on
the same policies.

    python scripts/bench/evaluation.py [--run runs/NAME] [--env Hopper-v4] [--episodes 10 40] [--steps 300] [--repeats
    5] [--cpu]

Prints a Markdown table, and stops with an error where a return differs in any bit. All of them play the same episodes
of the same policies with the same number of threads (one) for the networks; SyncVectorEnv gets all episodes of a policy
as its batch. Policies are untrained (2 x 256), unless --run names a run, whose environment and policies are then used.
So that untrained policies play episodes of full length, environments that can end an episode early are told not to
(`terminate_when_unhealthy=False`); with --run they are not. With --cpu, seconds are those that a process computes, of
the busiest worker for the pool: what an undisturbed machine would need, measured on a shared one."""

from __future__ import annotations

import argparse
import dataclasses
import os
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import gymnasium as gym
import numpy as np
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from offrl import registry
from offrl.api import Run
from offrl.data.dataset import DataSpec
from offrl.evaluation.evaluator import Evaluator, plain_products
from offrl.evaluation.policy import TrainedPolicy
from offrl.evaluation.pool.host import EvaluationPool
from offrl.settings.evaluation import EvalConfig
from offrl.system import backend
from offrl.tasks.environments import make_env
from offrl.tasks.episodes import observe_reward, reset_seed
from offrl.tasks.task import Task

ENVIRONMENTS = ("Hopper-v4", "HalfCheetah-v4", "Walker2d-v4", "Ant-v4")


def untrained(env_id: str, count: int) -> tuple[Task, list[TrainedPolicy]]:
    """A task, and TD3+BC's policies for it before the first update."""
    task = Task(env_id, env_id=env_id)
    env = make_env(task)
    if hasattr(env.unwrapped, "_terminate_when_unhealthy"):
        task = dataclasses.replace(task, env_kwargs={"terminate_when_unhealthy": False})
    algorithm_class = registry.get("algo", "td3_bc")
    space = env.action_space
    assert isinstance(space, gym.spaces.Box) and env.observation_space.shape is not None
    low, high = tuple(map(float, space.low)), tuple(map(float, space.high))
    spec = DataSpec(env.observation_space.shape, space.shape[0], action_low=low, action_high=high, name=env_id)
    algorithm = algorithm_class(algorithm_class.Config(), spec)
    return task, [TrainedPolicy(algorithm, algorithm.init(seed), seed) for seed in range(count)]


def trained(path: str) -> tuple[Task, list[TrainedPolicy]]:
    """The task and the policies of a run."""
    run = Run(path)
    task = DataSpec.from_json(run.record["spec"]).task
    assert task is not None, "the run's dataset has no environment"
    return task, [run.policy(seed) for seed in run.seeds]


def by_vector(vector: SyncVectorEnv, policies: Sequence[TrainedPolicy], config: EvalConfig) -> tuple[np.ndarray, int]:
    """Returns [N, E] of each environment's first episode, and all steps that were made, those of further episodes
    included.
    """
    returns, steps = np.zeros((len(policies), config.episodes)), 0
    space = vector.single_action_space
    assert isinstance(space, gym.spaces.Box)
    for n, policy in enumerate(policies):
        observations, _ = vector.reset(seed=[reset_seed(config.seed, policy.seed, e) for e in range(config.episodes)])
        carry, running = policy.start(config.episodes), np.ones(config.episodes, bool)
        for t in range(config.max_steps or 1000):
            # a row whose episode is over must be zero, as in offrl, for the comparison of returns to be one of bits
            raw, carry = policy.step(carry, np.where(running[:, None], observations, 0.0).astype(np.float32), t)
            actions = np.clip(raw, space.low, space.high).astype(space.dtype)
            observations, rewards, terminated, truncated, _ = vector.step(actions)
            returns[n] += np.where(running, rewards, 0.0)
            carry = observe_reward(policy, carry, np.where(running, rewards, 0.0))
            running &= ~(terminated | truncated)
            steps += config.episodes
            if not running.any():
                break
    return returns, steps


def computed(pid: int) -> float:
    """Seconds that a process has computed so far."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


def measure(
    task: Task, policies: list[TrainedPolicy], config: EvalConfig, repeats: int, workers: int, cpu: bool
) -> str:
    """One line of the table."""
    seeds = [policy.seed for policy in policies]
    vector = SyncVectorEnv([lambda: make_env(task)] * config.episodes, autoreset_mode=AutoresetMode.NEXT_STEP)
    rates: dict[str, list[float]] = {"vector": [], "one": [], "pool": []}

    def run(name: str, play: Callable[[], tuple[np.ndarray, int]]) -> np.ndarray:
        busy = [worker.process.pid for worker in pool._workers] if name == "pool" else [os.getpid()]
        start, before = time.perf_counter(), [computed(pid) for pid in busy]
        with plain_products():
            returns, steps = play()
        wall, used = (
            time.perf_counter() - start,
            max(computed(pid) - seconds for pid, seconds in zip(busy, before, strict=True)),
        )
        rates[name].append(steps / (used if cpu else wall))
        return returns

    with Evaluator(task, config) as evaluator, EvaluationPool(task, config, workers) as pool:
        while not pool.ready and pool.poll() is None:
            time.sleep(0.05)

        def alone() -> tuple[np.ndarray, int]:
            result = evaluator(policies, seeds)
            return result.returns, int(result.lengths.sum())

        def together() -> tuple[np.ndarray, int]:
            result = pool.evaluate(policies, seeds)
            return result.returns, int(result.lengths.sum())

        for repeat in range(repeats + 1):
            expected = run("vector", lambda: by_vector(vector, policies, config))
            for name, play in (("one", alone), ("pool", together)):
                if run(name, play).tobytes() != expected.tobytes():
                    raise SystemExit(f"{task.name}: the returns of '{name}' differ from SyncVectorEnv's")
            if repeat == 0:  # warming up
                for values in rates.values():
                    values.clear()
    vector.close()
    middle = {name: statistics.median(values) for name, values in rates.items()}
    ratios = {n: [a / b for a, b in zip(rates[n], rates["vector"], strict=True)] for n in ("one", "pool")}
    words = [f"{statistics.median(r):.2f} ({min(r):.2f} to {max(r):.2f})" for r in ratios.values()]
    return (
        f"| {task.env_id} | {len(policies)} x {config.episodes} | {middle['vector']:,.0f} | {middle['one']:,.0f} | "
        f"{middle['pool']:,.0f} | {words[0]} | {words[1]} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", help="a run directory, whose policies and environment are used")
    parser.add_argument("--env", nargs="*", default=list(ENVIRONMENTS))
    parser.add_argument("--policies", type=int, nargs="*", default=[1, 4])
    parser.add_argument("--episodes", type=int, nargs="*", default=[10, 40])
    parser.add_argument("--steps", type=int, default=300, help="at most, of an episode")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument(
        "--cpu", action="store_true", help="count the seconds that processes compute, not those that pass"
    )
    options = parser.parse_args()
    print(backend.configure(torch.device("cpu"), 1))
    columns = [
        "Environment",
        "Policies x episodes",
        "SyncVectorEnv",
        "Evaluator",
        f"EvaluationPool, {options.workers}",
        "Ratio, one",
    ]
    print(f"\n| {' | '.join([*columns, 'Ratio, pool'])} |\n{'|---' * 7}|")
    for env_id in [""] if options.run else options.env:
        for count in options.policies:
            task, policies = trained(options.run) if options.run else untrained(env_id, count)
            for episodes in options.episodes:
                config = EvalConfig(episodes=episodes, max_steps=options.steps)
                print(
                    measure(task, policies[:count], config, options.repeats, options.workers, options.cpu), flush=True
                )


if __name__ == "__main__":
    main()
