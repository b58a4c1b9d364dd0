"""Evaluation in other processes: the same bits, and no hang, orphan or riddle when something goes wrong."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from torch.utils import _pytree as pytree

from offrl import registry
from offrl.algorithm import select, stack, with_settings
from offrl.data.dataset import DataSpec
from offrl.errors import UserError
from offrl.evaluation.evaluator import Evaluator
from offrl.evaluation.policy import TrainedPolicy
from offrl.evaluation.pool import host, protocol
from offrl.evaluation.pool.host import EvaluationPool, PoolUnavailable, evaluate_parallel, poolable
from offrl.evaluation.result import Evaluation
from offrl.settings.evaluation import EvalConfig, cores, worker_count
from offrl.tasks.task import Task

TASK = Task("hopper", env_id="Hopper-v4", ref_min=-20.0, ref_max=3234.0, ref_label="D4RL")
CONFIG = EvalConfig(episodes=5, parallel=3)
NIGHTLY = pytest.mark.nightly


def policies(count: int, observations: int = 11, actions: int = 3, hidden: int = 16) -> list[TrainedPolicy]:
    """Untrained ones, cut from one stacked state as in training."""
    algorithm_class = registry.get("algo", "td3_bc")
    spec = DataSpec((observations,), actions, action_low=(-1.0,) * actions, action_high=(1.0,) * actions, name="x")
    algorithm = algorithm_class(algorithm_class.Config(hidden=[hidden, hidden]), spec)
    state = stack([algorithm.init(seed) for seed in range(count)])
    return [TrainedPolicy(algorithm, select(state, n), n) for n in range(count)]


def same(a: Evaluation, b: Evaluation) -> bool:
    assert a.scores is not None and b.scores is not None
    return (
        a.returns.tobytes() == b.returns.tobytes()
        and a.lengths.tobytes() == b.lengths.tobytes()
        and a.scores.tobytes() == b.scores.tobytes()
        and (a.successes, a.label, a.seeds, a.faults) == (b.successes, b.label, b.seeds, b.faults)
    )


def until(condition: Callable[[], Any], seconds: float = 60.0) -> Any:
    end = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < end, "it took too long"
        time.sleep(0.01)
    return value


@pytest.fixture(scope="module")
def pool() -> Iterator[EvaluationPool]:
    with EvaluationPool(TASK, CONFIG, 2) as started:
        assert not started.ready  # nobody waits for the start
        yield started


@pytest.fixture(scope="module")
def evaluator() -> Iterator[Evaluator]:
    with Evaluator(TASK, CONFIG) as alone:
        yield alone


@pytest.mark.parametrize("count", [1, 3, 4])
def test_the_same_bits_as_in_one_process(count: int, pool: EvaluationPool, evaluator: Evaluator) -> None:
    seeds = [7, 8, 8, 9][:count]
    calls: list[tuple[int, int]] = []
    expected = evaluator(policies(count), seeds)
    pool.submit(policies(count), seeds)
    assert pool.pending
    assert same(pool.wait(lambda done, total: calls.append((done, total))), expected)
    assert not pool.pending and pool.poll() is None
    assert calls and all(0 <= done <= total == 5 * count for done, total in calls)
    assert same(pool.evaluate(policies(count), seeds, evaluator), expected)  # this process takes part


def test_policies_of_a_grid(pool: EvaluationPool, evaluator: Evaluator) -> None:
    """Each has an algorithm of its own, and all of them the same networks."""
    mine = policies(3)
    for n, policy in enumerate(mine):
        policy.algorithm = with_settings(policy.algorithm, {"alpha": float(n)})
    blob = protocol.to_bytes([policy.algorithm for policy in mine])
    assert len(blob) < 2 * len(protocol.to_bytes(mine[0].algorithm))
    assert same(pool.evaluate(mine, [0, 0, 0]), evaluator(mine, [0, 0, 0]))


def test_the_policies_are_those_of_the_moment_they_were_handed_in(pool: EvaluationPool, evaluator: Evaluator) -> None:
    mine = policies(2)
    expected = evaluator(mine, [0, 1])
    pool.submit(mine, [0, 1])
    for policy in mine:  # as a step that reuses the memory of its state
        pytree.tree_map(lambda x: x.zero_(), policy.state.params)
    assert same(until(pool.poll), expected)
    assert not np.array_equal(evaluator(mine, [0, 1]).returns, expected.returns)


def test_neither_threads_nor_the_arithmetic_of_training_change_a_score(
    pool: EvaluationPool, evaluator: Evaluator
) -> None:
    big, threads = policies(1, hidden=256), torch.get_num_threads()
    matmul: Any = getattr(torch.backends.mkldnn, "matmul", None)  # None before PyTorch 2.9
    expected = evaluator(big, [0])
    try:
        torch.set_num_threads(2)
        if matmul is not None:
            matmul.fp32_precision = "bf16"
        assert same(evaluator(big, [0]), expected) and torch.get_num_threads() == 2
        assert matmul is None or matmul.fp32_precision == "bf16"
        assert same(pool.evaluate(big, [0]), expected)
    finally:
        torch.set_num_threads(threads)
        if matmul is not None:
            matmul.fp32_precision = "none"


class Stop(Exception):
    pass


def test_heed_may_raise_and_what_runs_can_be_cancelled(pool: EvaluationPool, evaluator: Evaluator) -> None:
    def stop(done: int, total: int) -> None:
        raise Stop

    pool.submit(policies(3), [0, 1, 2], shared=True)
    for own in (None, evaluator):
        with pytest.raises(Stop):
            pool.wait(stop, own)
        assert pool.pending  # it goes on
    with pytest.raises(RuntimeError, match="cancel"):
        pool.submit(policies(1), [0])
    pool.cancel()
    assert not pool.pending and pool.poll() is None
    pool.cancel()
    with pytest.raises(RuntimeError, match="no evaluation"):
        pool.wait()
    pool.submit(policies(3), [4, 5, 6])
    with pytest.raises(Stop):
        pool.wait(stop)
    assert same(pool.wait(), evaluator(policies(3), [4, 5, 6]))


@pytest.fixture
def _fresh(pool: EvaluationPool) -> Iterator[None]:
    yield
    pool.cancel()


@pytest.mark.usefixtures("_fresh")
def test_a_users_mistake_arrives_as_such(pool: EvaluationPool, evaluator: Evaluator) -> None:
    pool.submit(policies(2, actions=2), [0, 1])
    with pytest.raises(UserError, match=r"shape \(5, 2\), Hopper-v4 takes \(5, 3\)") as caught:
        until(pool.poll)
    assert not isinstance(caught.value, PoolUnavailable) and not pool.pending
    assert same(pool.evaluate(policies(1), [0]), evaluator(policies(1), [0]))


def test_warnings_are_shown_once(pool: EvaluationPool, evaluator: Evaluator, capfd: pytest.CaptureFixture[str]) -> None:
    broken = policies(4)
    for policy in broken:
        pytree.tree_map(lambda x: x.fill_(np.nan), policy.state.params)
    result = pool.evaluate(broken, [0, 1, 2, 3])
    err = capfd.readouterr().err
    assert (
        result.faults == 20
        and err.count("\n") == 1
        and err.startswith("offrl: warning: evaluation in Hopper-v4: a policy gave NaN")
    )
    assert same(evaluator(broken, [0, 1, 2, 3]), result)


@pytest.mark.usefixtures("heeds_signals")
def test_ctrl_c_in_a_terminal_does_not_reach_the_workers(pool: EvaluationPool, evaluator: Evaluator) -> None:
    pids = [worker.process.pid for worker in pool._workers]
    until(lambda: pool.ready)
    for pid in pids:
        assert os.getpgid(pid) != os.getpgid(0)
        os.kill(pid, signal.SIGINT)
    assert same(pool.evaluate(policies(2), [0, 1]), evaluator(policies(2), [0, 1]))


def test_a_killed_worker_is_named_and_closing_is_quick() -> None:
    with EvaluationPool(TASK, EvalConfig(episodes=2), 1) as pool:
        pool.submit(policies(1), [0])
        until(lambda: pool._workers)[0].process.kill()  # before it could start
        with pytest.raises(PoolUnavailable, match=r"killed by SIGKILL .*memory.*eval\.workers=0"):
            pool.wait()
        assert not pool.pending and not pool.ready
        with pytest.raises(PoolUnavailable, match="SIGKILL"):
            pool.submit(policies(1), [0])
        started = time.monotonic()
    assert time.monotonic() - started < 1.0
    pool.close()
    with pytest.raises(PoolUnavailable):
        pool.submit(policies(1), [0])


@pytest.mark.slow
def test_a_worker_killed_at_work() -> None:
    task = Task("cheetah", env_id="HalfCheetah-v4", max_episode_steps=10_000_000)
    with EvaluationPool(task, EvalConfig(episodes=2), 1) as pool:
        pool.submit(policies(1), [0])
        # a mistake in a program keeps its traceback
        with pytest.raises(RuntimeError, match="invalid for input of size 34"):
            pool.wait()
        pool.submit(policies(1, 17, 6), [0])
        until(lambda: pool._workers[0].unit)
        pool._workers[0].process.kill()
        with pytest.raises(PoolUnavailable, match="SIGKILL"):
            pool.wait()


@pytest.mark.slow
def test_what_other_processes_cannot_make() -> None:
    assert poolable(TASK) and poolable(Task("x", env_id="offrl.envs.compat:offrl/D4RL-Ant-v0"))
    assert not poolable(Task("x", env_factory=lambda: None)) and not poolable(Task("x"))
    assert not poolable(Task("x", env_id="Hopper-v4", env_kwargs={"f": lambda: None}))
    gym.register("OfTheScript-v0", entry_point="__main__:Environment")
    gym.register(
        "OfThisTest-v0", entry_point=lambda **kwargs: gym.make("Hopper-v4", **kwargs).unwrapped, max_episode_steps=9
    )
    try:
        assert not poolable(Task("x", env_id="OfTheScript-v0"))
        mine = Task("x", env_id="OfThisTest-v0", ref_min=0.0, ref_max=1.0)
        expected = evaluate_parallel(policies(1), [0], mine, CONFIG, workers=0)
        with (
            EvaluationPool(mine, CONFIG, 1) as pool,
            pytest.raises(PoolUnavailable, match=r"OfThisTest-v0.*eval\.workers=0"),
        ):
            pool.evaluate(policies(1), [0])
        # this process does it alone
        assert same(evaluate_parallel(policies(1), [0], mine, CONFIG, workers=1), expected)
    finally:
        del gym.registry["OfTheScript-v0"], gym.registry["OfThisTest-v0"]


def test_a_short_evaluation_starts_no_process(evaluator: Evaluator) -> None:
    started = time.monotonic()
    with EvaluationPool(TASK, CONFIG, 1, delay=60.0) as pool:
        assert same(pool.evaluate(policies(2), [0, 1], evaluator), evaluator(policies(2), [0, 1]))
        assert not pool._workers and not pool.ready
    assert time.monotonic() - started < 5.0


def test_policies_that_cannot_travel(pool: EvaluationPool) -> None:
    odd = policies(1)
    odd[0].extra = lambda: None  # type: ignore[attr-defined]
    with pytest.raises(PoolUnavailable, match="cannot be handed"):
        pool.submit(odd, [0])
    assert not pool.pending


@pytest.mark.slow
def test_the_script_is_not_run_again_and_nothing_outlives_it(tmp_path: Path) -> None:
    """A script without `if __name__ == "__main__"`, which dies without a word while its workers are busy."""
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent("""
            import os, signal, sys
            print("begun", flush=True)
            from offrl import registry
            from offrl.algorithm import with_settings
            from offrl.data.dataset import DataSpec
            from offrl.settings.evaluation import EvalConfig
            from offrl.evaluation.pool.host import EvaluationPool
            from offrl.evaluation.policy import TrainedPolicy
            from offrl.tasks.task import Task
            Algorithm = registry.get("algo", "td3_bc")
            spec = DataSpec((17,), 6, action_low=(-1.0,) * 6, action_high=(1.0,) * 6, name="x")
            algorithm = Algorithm(Algorithm.Config(hidden=[8]), spec)
            task = Task("x", env_id="HalfCheetah-v4", max_episode_steps=10_000_000)
            pool = EvaluationPool(task, EvalConfig(episodes=1), 1)
            pool.submit([TrainedPolicy(algorithm, algorithm.init(0), 0)], [0])
            while not pool._workers or pool._workers[0].unit is None:
                pass
            print(pool._workers[0].process.pid, flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        """)
    )
    path = os.pathsep.join(p for p in (str(Path(host.__file__).parents[2]), os.environ.get("PYTHONPATH", "")) if p)
    result = subprocess.run(
        [sys.executable, script], env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=60
    )
    words = result.stdout.split()
    assert result.returncode == -signal.SIGKILL and words[0] == "begun" and len(words) == 2, result.stderr

    def gone() -> bool:
        try:
            return Path(f"/proc/{words[1]}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
        except OSError:
            return True

    until(gone, 5.0)


@pytest.mark.parametrize(
    ("count", "episodes", "hands"), [(1, 10, 2), (4, 10, 2), (3, 10, 2), (5, 3, 4), (2, 1, 8), (64, 10, 8), (1, 1, 1)]
)
def test_the_work_is_shared_out(count: int, episodes: int, hands: int) -> None:
    shares = protocol.cut(count, episodes, hands)
    pairs = [(n, e) for n, es in shares for e in es]
    assert sorted(pairs) == [(n, e) for n in range(count) for e in range(episodes)]
    load = [0] * hands
    for _, es in shares:  # each piece goes to whoever is free first
        load[load.index(min(load))] += len(es)
    assert max(load) <= -(-count * episodes // hands) + (episodes if count >= 3 * hands else 1)
    if count % hands == 0:
        assert len(shares) == count  # no policy is asked twice


def test_how_many_workers() -> None:
    assert worker_count(EvalConfig(workers=3)) == 3 and worker_count(EvalConfig(workers=0)) == 0
    assert worker_count(EvalConfig()) == min(8, cores() // 2)


@pytest.mark.parametrize(
    "hidden", [pytest.param(7, marks=pytest.mark.slow), pytest.param(9, marks=NIGHTLY), pytest.param(33, marks=NIGHTLY)]
)
def test_weights_cut_out_of_a_stack_act_as_those_sent_to_a_process(hidden: int) -> None:
    """Products of a single row round differently where the weights lie at an odd address."""
    observations = np.random.default_rng(0).normal(size=(1, 11)).astype(np.float32)
    for policy in policies(5, hidden=hidden):
        sent = pickle.loads(pickle.dumps(policy))
        for t in (0, 5, 2_000):
            assert policy.step(None, observations, t)[0].tobytes() == sent.step(None, observations, t)[0].tobytes()
            assert (
                policy.step(None, observations, t, explore=True)[0].tobytes()
                == sent.step(None, observations, t, explore=True)[0].tobytes()
            )
