"""The training loop: one for all algorithms. Everything that an algorithm does not say is here, in plain order, without callbacks."""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

from offrl import backend, checkpoint, registry, runs
from offrl.algorithm import Algorithm, Metrics, TrainState
from offrl.config import TrainConfig, seed_list
from offrl.data.dataset import Dataset
from offrl.data.prefetch import Prefetcher
from offrl.errors import UserError, warn
from offrl.evaluate import Evaluator, check_fit, resolve_task
from offrl.logging import RunLog, duration, interval_text
from offrl.policy import TrainedPolicy
from offrl.step import choose_mode, make_step, metric_means, select, stack

SLICE_SECONDS = 0.5  # how long an interrupt may wait


class Interrupted(Exception):
    """Training was asked to stop; everything is saved."""


def train(config: TrainConfig, dataset: Dataset, run_dir: Path) -> None:
    """Train all seeds to `config.steps` updates in `run_dir`, going on from its newest checkpoint if there is one.

    Raises UserError for settings that do not fit the data, the environment or the run found in `run_dir`; Interrupted after Ctrl-C or
    SIGTERM, when all is saved.
    """
    seeds = seed_list(config.seeds)
    device = pick_device(config.device)
    arithmetic = backend.configure(device, config.threads)
    algorithm = make_algorithm(config, dataset)
    task = resolve_task(dataset.spec.task, config.eval)
    evaluator = None
    if task is not None:
        evaluator = Evaluator(task, config.eval)
        check_fit(dataset.spec, task, evaluator.envs[0])
    with contextlib.ExitStack() as stack_:
        if evaluator is not None:
            stack_.enter_context(evaluator)
        stack_.enter_context(_lock(run_dir))
        mode = runs.prepare(run_dir, config, dataset, lambda: choose_mode(config.compile, device, config.steps), device)
        _Loop(config, dataset, run_dir, seeds, device, algorithm, evaluator, mode, arithmetic).run()


def make_algorithm(config: TrainConfig, dataset: Dataset) -> Algorithm:
    """The configured algorithm for this data. Raises UserError where it does not support the data's actions."""
    algorithm_class = registry.get("algo", config.algo.name)
    if dataset.spec.discrete and not algorithm_class.discrete:
        able = [n for n, c in registry.names("algo").items() if c.discrete]
        raise UserError(f"{config.algo.name} needs continuous actions and {dataset.spec.name} has discrete ones; use {' or '.join(able)}")
    return algorithm_class(config.algo, dataset.spec)


def pick_device(name: str) -> torch.device:
    """auto, cpu, cuda or cuda:N. Raises UserError for anything else or a GPU that is not there."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    kind, _, index = name.partition(":")
    if kind not in ("cpu", "cuda") or (index and not index.isdigit()) or (kind == "cpu" and index):
        raise UserError(f"device={name} is not known; use auto, cpu, cuda or cuda:N")
    if kind == "cuda" and not torch.cuda.is_available():
        raise UserError(f"device={name}, but torch {torch.__version__} finds no CUDA GPU; use device=cpu or install a CUDA build of torch")
    if index and int(index) >= torch.cuda.device_count():
        raise UserError(f"device={name}, but there are only {torch.cuda.device_count()} GPUs")
    return torch.device(name)


@contextlib.contextmanager
def _lock(run_dir: Path) -> Iterator[None]:
    """Only one process may train in a run directory. The system drops the lock with the process, however it ends."""
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        file = open(run_dir / ".lock", "w")  # noqa: SIM115 - held until the end
    except OSError as error:
        raise UserError(f"cannot write to the run directory {run_dir}: {error.strerror}; choose another with runs_dir=") from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UserError(f"another process is training in {run_dir}; wait for it, or choose another name=") from None
        yield


class _CutShort(Exception):
    """An evaluation was abandoned because of a signal."""


class _Loop:
    """The state of a run while it trains."""

    def __init__(
        self,
        config: TrainConfig,
        dataset: Dataset,
        run_dir: Path,
        seeds: list[int],
        device: torch.device,
        algorithm: Algorithm,
        evaluator: Evaluator | None,
        mode: str,
        arithmetic: str,
    ) -> None:
        self.config, self.run_dir, self.seeds, self.device = config, run_dir, seeds, device
        self.algorithm, self.evaluator, self.spec = algorithm, evaluator, dataset.spec
        self.state: TrainState = stack([algorithm.init(s) for s in seeds], device)
        self.good = self.state  # at the last line of metrics, when every loss was finite
        self.sums: Metrics = {}
        self.since = 0  # the update at which `sums` began
        self.alive = torch.ones(len(seeds), dtype=torch.bool)
        self.step = 0
        self.unscored = False  # an evaluation is due at this step
        self.last_score, self.seconds_evaluating = "", 0.0
        resumed = self._restore()
        if not dataset.mapped:
            dataset = dataset.to(device)
        sampler = algorithm.sampler()
        source = sampler.prepare(dataset)
        batch_size = config.algo.batch_size
        self.prefetcher = None
        if dataset.mapped and self.step < config.steps:
            self.prefetcher = Prefetcher(sampler, source, self.state.key.cpu(), batch_size, self.step, device)
        self.update = make_step(algorithm, source, batch_size=batch_size, replicas=len(seeds), mode=mode, batches=self.prefetcher)
        every = config.eval.every
        self.eval_every = math.ceil(config.steps / 10) if every is None else every or config.steps
        self.save_every = config.checkpoint.every or min(self.eval_every, math.ceil(config.steps / 20))
        self.stop = 0  # signals seen
        title = (
            f"{config.label} on {dataset.spec.name}: {len(dataset):,} rows, {dataset.num_episodes:,} episodes, "
            f"{len(seeds)} seed{'s' if len(seeds) > 1 else ''}, {config.steps:,} updates\n"
            f"{arithmetic}; step {mode}; settings {config.experiment}; {run_dir}"
        )
        self.log = RunLog(
            run_dir, resume_step=self.step if resumed else None, quiet=config.quiet, total_steps=config.steps, seeds=seeds, title=title
        )
        if resumed and self.step < config.steps:
            self.log.say(f"continuing from step {self.step:,}")
        elif resumed:
            self.log.say(f"this run has its {self.step:,} updates already: nothing is trained (a larger steps= continues it)")
        for note in dataset.notes:
            self.log.say(note)
        if evaluator is None:
            self.log.say("no environment: policies are trained but not scored (eval.env=ID names one)")
        decay = getattr(config.algo, "decay_steps", None)
        if decay and decay < config.steps and getattr(config.algo, "actor_schedule", "") == "cosine":
            warn(f"the actor's learning rate reaches 0 at step {decay:,} (algo.decay_steps); it does not learn after that")

    def run(self) -> None:
        """Train to the end, or raise Interrupted."""
        config, started = self.config, time.monotonic()
        with self.log, _signals(self):
            try:
                self._evaluate(0.0)  # what an interrupt cut short
                if self.update.mode.startswith("compiled") and self.step < config.steps:
                    self.log.say("compiling the step, 10 to 30 seconds; less where it was compiled before")
                period, warm, rate = self.algorithm.period, False, 0.0
                slice_ = period
                while self.step < config.steps and self.alive.any():
                    stop_at = min(self._next(n) for n in (config.log_every, self.eval_every, self.save_every))
                    tick, first = time.monotonic(), self.step
                    while self.step < stop_at and not self.stop:
                        now, end = time.monotonic(), min(self.step + slice_, stop_at)
                        if end < stop_at:
                            end -= end % period  # parts of a pattern round differently, and where a slice ends depends on the clock
                        count = end - self.step
                        self.state, self.sums = self.update.run(self.state, self.sums, self.step, count)
                        self.step = end
                        seconds = time.monotonic() - now
                        if not warm:  # tracing and compiling are no measure of speed
                            warm, tick, first = True, time.monotonic(), self.step
                            self.log.timing(self.step, first_updates=seconds)
                            continue
                        # on a GPU this measures the queueing only, which still bounds how many updates wait behind an interrupt
                        slice_ = max(period, min(4 * slice_, int(count * SLICE_SECONDS / max(seconds, 1e-9))))
                        rate = (self.step - first) / (time.monotonic() - tick)
                        if self.step < config.steps:
                            self.log.progress(self.step, rate, self.last_score)
                    if self.step == stop_at:
                        self._log_metrics()
                        self.log.timing(self.step, updates_per_second=rate)
                        self.unscored = self.evaluator is not None and self._due(self.eval_every)
                        self._evaluate(rate)
                        if self._due(self.save_every):
                            self._save()
                    if self.stop:
                        self._save()
                        raise Interrupted(f"stopped at step {self.step:,}; all is saved in {self.run_dir}: the same command continues")
                if not self.alive.any() and self.step < config.steps:
                    self._save()
            finally:
                if self.prefetcher is not None:
                    self.prefetcher.close()
            for seed, policy in zip(self.seeds, self.policies(), strict=True):
                policy.save(self.run_dir / "policies" / f"seed_{seed}.safetensors")
            if rate > 0.0:
                self.log.say(f"trained in {duration(time.monotonic() - started)}, of which evaluation {duration(self.seconds_evaluating)}")

    def policies(self) -> list[TrainedPolicy]:
        """The current policies, one for each seed."""
        state = pytree.tree_map(lambda x: x.cpu(), self.state)
        return [TrainedPolicy(self.algorithm, select(state, i), seed) for i, seed in enumerate(self.seeds)]

    def _next(self, every: int) -> int:
        return min(self.config.steps, (self.step // every + 1) * every)

    def _due(self, every: int) -> bool:
        return self.step % every == 0 or self.step == self.config.steps

    def _log_metrics(self) -> None:
        """Write the means since the last line, and freeze every replica whose losses are no longer finite."""
        values = metric_means(self.sums, self.step - self.since)
        finite = torch.stack([v.isfinite() for v in values.values()]).all(0)
        for index in torch.nonzero(self.alive & ~finite).squeeze(-1).tolist():
            warn(
                f"seed {self.seeds[index]} diverged between step {self.since:,} and {self.step:,} (a loss is not finite): its parameters "
                f"stay as they were at step {self.since:,}; the other seeds go on. A smaller algo.learning_rate or "
                "dataset.normalize_observations=true often helps"
            )
        self.alive &= finite
        self._freeze()
        self.good = self.state
        dead = (~self.alive).numpy()
        rows = {k: [math.nan if d else x for x, d in zip(v.tolist(), dead, strict=True)] for k, v in sorted(values.items())}
        self.log.metrics(self.step, rows)
        self.sums, self.since = {}, self.step

    def _freeze(self) -> None:
        """Put the replicas that diverged back to their last good state."""
        if not self.alive.all():
            alive = self.alive.to(self.device)
            self.state = pytree.tree_map(
                lambda new, old: torch.where(alive.view(-1, *[1] * (new.ndim - 1)), new, old), self.state, self.good
            )

    def _evaluate(self, rate: float) -> None:
        """Score the policies and write the scores, if that is due; an interrupt leaves it due."""
        if self.unscored and self.evaluator is not None:
            started = time.monotonic()
            self._freeze()
            try:
                result = self.evaluator(self.policies(), self.seeds, self._heed_signals)
            except _CutShort:
                return
            names = {"return": "return_mean", "length": "length_mean"}
            rows = [{names.get(k, k): v for k, v in row.items()} for row in result.rows()]
            self.log.scores(self.step, [{**row, "dataset": self.spec.name, "environment": result.label} for row in rows])
            self.unscored = False
            self.last_score = f"{'score' if result.scores is not None else 'return'} {interval_text(result.interval())}"
            seconds = time.monotonic() - started
            self.seconds_evaluating += seconds
            self.log.timing(self.step, evaluation=seconds)
            self.log.progress(self.step, rate, self.last_score)
        elif self.step == self.config.steps and rate > 0.0:
            self.log.progress(self.step, rate, self.last_score)

    def _heed_signals(self, done: int, total: int) -> None:
        if self.stop:
            raise _CutShort

    def _save(self) -> None:
        self.log.sync()
        self._freeze()
        between = self.step != self.since  # only when interrupted: every regular checkpoint stands at a line of metrics
        tree = {"state": self.state, "good": self.good if between else {}, "alive": self.alive, "sums": self.sums}
        meta = {"since": self.since, "unscored": self.unscored, "algorithm": self.config.algo.name, "seeds": self.seeds}
        checkpoint.save(self.run_dir, self.step, checkpoint.flatten(tree), meta, self.config.checkpoint.keep)

    def _restore(self) -> bool:
        found = checkpoint.load_latest(self.run_dir)
        if found is None:
            return False
        tensors, meta = found
        where = f"checkpoint of step {meta['step']:,} in {self.run_dir}"
        self.step, self.since, self.unscored = meta["step"], meta["since"], meta["unscored"]
        self.state = self.good = checkpoint.unflatten({"state": self.state}, tensors, where)["state"]
        if self.step != self.since:
            self.good = checkpoint.unflatten({"good": self.good}, tensors, where)["good"]
        self.alive = tensors["alive"]
        self.sums = {k.removeprefix("sums/"): v.to(self.device) for k, v in tensors.items() if k.startswith("sums/")}
        return True


@contextlib.contextmanager
def _signals(loop: _Loop) -> Iterator[None]:
    """The first Ctrl-C or SIGTERM saves and stops; a second one quits at once."""

    def handler(number: int, frame: Any) -> None:
        loop.stop += 1
        if loop.stop > 1:
            os._exit(128 + number)
        loop.log.say("stopping: saving a checkpoint (once more quits without)")

    try:
        old = {s: signal.signal(s, handler) for s in (signal.SIGINT, signal.SIGTERM)}
    except ValueError:  # not in the main thread, where Python handles no signals
        yield
        return
    try:
        yield
    finally:
        for number, previous in old.items():
            signal.signal(number, previous)
