"""The training loop: one for all algorithms. Everything that an algorithm does not say is here, in plain order, without callbacks."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import functools
import math
import os
import signal
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from offrl import registry
from offrl.algorithm import Algorithm, TrainState
from offrl.data.dataset import Dataset
from offrl.data.fit import check_fit
from offrl.data.prefetch import Prefetcher
from offrl.errors import UserError, warn
from offrl.evaluation.background import Scorer
from offrl.evaluation.evaluator import Evaluator
from offrl.evaluation.policy import TrainedPolicy
from offrl.runs import record as runs
from offrl.runs.log import NoLog, RunLog
from offrl.runs.tables import score_text
from offrl.settings.evaluation import worker_count
from offrl.settings.replicas import Replica, replicas
from offrl.settings.train import TrainConfig
from offrl.system import backend
from offrl.system import files as checkpoint
from offrl.system.devices import pick_device
from offrl.system.progress import Pace, duration
from offrl.system.signals import handled
from offrl.tasks.environments import resolve_task
from offrl.training import distributed
from offrl.training.engine import Engine, LocalEngine, Plan, first_state, policies_of
from offrl.training.grid import try_update
from offrl.training.setup import PAYS_FROM, choose_mode, default_group, make_algorithm, training_devices
from offrl.training.stopping import StoppingRule
from offrl.training.updates import metric_means
from offrl.training.workers import WorkerEngine, WorkersUnavailable, shares

SLICE_SECONDS = 0.5  # how long an interrupt may wait


class Interrupted(Exception):
    """Training was asked to stop; everything is saved."""


def train(config: TrainConfig, dataset: Dataset, run_dir: Path, pretrained: Mapping[str, Any] | None = None) -> None:
    """Train all seeds to `config.steps` updates in `run_dir`, going on from its newest checkpoint if there is one.

    config, pretrained: as `stages.ready` gives them.

    Raises UserError for settings that do not fit the data, the environment or the run found in `run_dir`; Interrupted after Ctrl-C or
    SIGTERM, when all is saved.
    """
    them = replicas(config)
    device = distributed.own_device(pick_device(config.device))
    world = distributed.join(device, len(them), config.algo.batch_size)
    arithmetic = backend.configure(device, config.threads, config.precision)
    algorithm = make_algorithm(config, dataset, pretrained)
    if not algorithm.traits.vectorized and len(them) > 1 and config.group not in (None, 1):
        raise UserError(f"{config.algo.name} trains one replica at a time: leave out group=")
    if algorithm.every and world.size > 1:
        raise UserError(f"{config.algo.name} trains in one process; start it without torchrun")
    task = (
        resolve_task(dataset.spec.task, config.eval, algorithm.traits.goal_conditioned)
        if world.first and algorithm.traits.policy_modules
        else None
    )
    evaluator = None
    if task is not None:
        evaluator = Evaluator(task, config.eval)
        check_fit(dataset.spec, task, evaluator.envs[0])
    with contextlib.ExitStack() as stack_:
        stack_.callback(distributed.leave)
        if evaluator is not None:
            stack_.enter_context(evaluator)
        if world.first:
            stack_.enter_context(lock(run_dir))
        devices = training_devices(config, device, len(them), dataset.mapped)

        @functools.cache
        def source() -> Any:  # what batches are drawn from; each of several processes moves it to its own device
            here = devices[0] if len(devices) == 1 else torch.device("cpu")
            return algorithm.sampler().prepare(dataset if dataset.mapped else dataset.to(here))

        plan = Plan(algorithm, config.algo.batch_size, "eager", config.precision, len(them), world)

        def choose() -> tuple[str, int]:
            mode = "eager" if world.size > 1 else choose_mode(config.compile, device, config.steps, algorithm)
            if dataset.mapped or config.group:
                return mode, config.group or len(them)
            group = default_group(len(them), len(devices), plan, backend.move(source(), device) if device.type == "cuda" else None, device)
            if device.type == "cuda":
                torch.cuda.empty_cache()  # other processes may train there
            return mode, group

        mode, group = runs.prepare(run_dir, config, dataset, choose, device) if world.first else choose()
        if dataset.mapped:
            group = len(them)  # batches are read ahead for all replicas together
        plan = dataclasses.replace(plan, mode=mode, group=group)
        _Loop(config, dataset, source(), run_dir, them, devices, plan, evaluator, arithmetic).run()


@contextlib.contextmanager
def lock(run_dir: Path) -> Iterator[None]:
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
    """A run while it trains."""

    def __init__(
        self,
        config: TrainConfig,
        dataset: Dataset,
        source: Any,
        run_dir: Path,
        them: list[Replica],
        devices: list[torch.device],
        plan: Plan,
        evaluator: Evaluator | None,
        arithmetic: str,
    ) -> None:
        self.config, self.run_dir, self.replicas, self.device, self.plan = config, run_dir, them, devices[0], plan
        self.dataset = dataset
        self.algorithm, self.spec, self.world = plan.algorithm, dataset.spec, plan.world
        self.since = 0  # the update at which the sums of metrics began
        self.alive = torch.ones(len(them), dtype=torch.bool)
        self.step = 0
        self.rate, self.shown, self.warm = 0.0, 0.0, False  # updates per second: of this stretch, of late
        self.pace, self.mark = Pace(), 0.0  # and when the last of them were made; 0: an evaluation came between
        self.slice = self.algorithm.traits.period  # updates between two looks at the clock and at signals
        self.last_score, self.seconds_evaluating = "", 0.0
        self.stop = 0  # signals seen
        state = first_state(self.algorithm, them)
        found = checkpoint.load_latest(run_dir)
        scoring, good, sums = None, state, {}
        if found is not None:
            state, good, sums, scoring = self._restore(state, *found)
        self.prefetcher: Prefetcher | None = None
        self.stopping_rule: StoppingRule | None = None
        if config.stop != "none":
            if self.world.size > 1:
                raise UserError(f"stop={config.stop} needs one process; under torchrun leave it out")
            rule = registry.get("stop", config.stop)
            self.stopping_rule = rule(config, dataset, run_dir, them, None if found is None else self.step, self.device)
        self.end = self._last_step()
        done = self.step >= self.end
        self.engine, where = self._engine(source, state, devices, done)
        self.engine.load(state, good, sums)
        if found is not None and not done and self._finished():
            self.end, done = self.step, True
        every = config.eval.every
        self.eval_every = math.ceil(config.steps / 10) if every is None else every or config.steps
        self.save_every = config.checkpoint.every or min(self.eval_every, math.ceil(config.steps / 20))
        seeds = len({r.seed for r in them})
        crowd = f"{seeds} seed{'s' if seeds > 1 else ''}" + (f" of {len(them) // seeds} settings" if config.grid else "")
        row = f" ({config.match[0]})" if len(config.match) == 1 else ""  # which row of the experiment's table
        title = (
            f"{config.label} on {dataset.spec.name}: {len(dataset):,} rows, {dataset.num_episodes:,} episodes, {crowd}, "
            f"{config.steps:,} updates\n{arithmetic}; step {plan.mode}{where}; settings {config.experiment}{row}; {run_dir}"
        )
        kind = RunLog if self.world.first else NoLog
        self.log: RunLog | NoLog = kind(
            run_dir,
            resume_step=None if found is None else self.step,
            unscored=scoring is not None and scoring[0] == self.step,
            quiet=config.quiet,
            total_steps=config.steps,
            replicas=them,
            title=title,
        )
        if found is not None and not done:
            self.log.say(f"continuing from step {self.step:,}")
        elif found is not None and self.end < config.steps:
            rule = self.stopping_rule
            why = "nothing gets better any more" if rule is None or rule.end is None else f"{rule.reason} (stop={config.stop})"
            self.log.say(f"this run ended at step {self.end:,}: {why}")
        elif found is not None:
            self.log.say(f"this run has its {self.step:,} updates already: nothing is trained (a larger steps= continues it)")
        for note in (*dataset.notes, *self.algorithm.notes):
            self.log.say(note)
        if evaluator is None and self.algorithm.traits.policy_modules:
            self.log.say("no environment: policies are trained but not scored (eval.env=ID names one)")
        decay = getattr(config.algo, "decay_steps", None)
        if decay and getattr(config.algo, "actor_schedule", "") == "cosine":
            if decay < config.steps:
                warn(f"the actor's learning rate reaches 0 at step {decay:,} (algo.decay_steps); it does not learn after that")
            elif decay > config.steps >= PAYS_FROM:  # shorter runs are trials
                left = 0.5 * (1.0 + math.cos(math.pi * config.steps / decay))
                self.log.say(
                    f"the actor's learning rate falls over {decay:,} updates (algo.decay_steps); this run ends at {left:.0%} of it"
                )
        # a language model is no small thing to hand to other processes, which act on the CPU
        here = self.algorithm.traits.text or (self.algorithm.traits.acts_on_device and self.device.type == "cuda")
        brief = config.eval.workers is None and (config.steps < PAYS_FROM or done or here)
        self.scorer = None if evaluator is None else Scorer(evaluator, 0 if brief else worker_count(config.eval))
        self.rescored = self.scorer is not None and scoring is not None
        if self.scorer is not None and scoring is not None:
            self.scorer.begin(scoring[0], scoring[1], them)

    def _engine(self, source: Any, state: TrainState, devices: list[torch.device], done: bool) -> tuple[Engine, str]:
        """What trains the replicas, and words for the log about how. source: prepared, on the only device, or the CPU."""
        config, mapped = self.config, self.dataset.mapped
        if self.plan.mode.startswith("compiled"):
            backend.cache_compiled()
        if config.grid:
            try_update(self.plan, source, self.replicas, devices[0] if len(devices) == 1 else torch.device("cpu"))
        used = len(shares(len(self.replicas), self.plan.group, len(devices)))
        if used > 1 and not done:
            try:
                engine = WorkerEngine(self.plan, source, self.replicas, devices, config.threads)
                return engine, f" in {used} processes"
            except WorkersUnavailable as error:
                warn(f"training in one process: {error}")
                source = backend.move(source, devices[0])
        if mapped and not done:
            self.prefetcher = Prefetcher(self.algorithm.sampler(), source, state.key, config.algo.batch_size, self.step, devices[0])
        local = LocalEngine(self.plan, source, self.replicas, devices[0], self.prefetcher)
        return local, f" in {len(local.parts)} groups" if len(local.parts) > 1 else ""

    def run(self) -> None:
        """Train to the end, or raise Interrupted."""
        config, started, trained = self.config, time.monotonic(), self.step < self.end
        with self.log, _signals(self):
            try:
                if trained and self.plan.mode.startswith("compiled"):
                    self.log.say("compiling the step, 10 to 30 seconds; less where it was compiled before")
                while self.step < self.end and self.alive.any():
                    stop_at = min(self._next(n) for n in (config.log_every, self.eval_every, self.save_every))
                    self._advance(stop_at)
                    if self.step == stop_at:
                        self._log_metrics()
                        if self.step < self.end and self._finished():
                            self.end = self.step
                            self.log.say(f"stopping at step {self.end:,}: nothing gets better any more")
                        self.log.timing(self.step, updates_per_second=self.rate)
                        if self._due(self.eval_every):
                            self._begin_scoring()
                            self._consult_stopping_rule()
                            self.mark = 0.0
                        if self.step == self.end:
                            self._wait_for_scores()
                        if self._due(self.save_every):
                            self._save()
                    if self.stop:
                        self._save(cut_short=True)
                        raise self._interrupted()
                self._wait_for_scores()
                if self.scorer is not None and self.scorer.step is not None:
                    raise self._interrupted()
                if self.rescored or (not self.alive.any() and self.step < self.end):
                    self._save()
                if self.world.first:
                    for replica, policy in zip(self.replicas, self.policies(), strict=True) if self.algorithm.traits.policy_modules else ():
                        policy.save(self.run_dir / "policies" / f"{replica.name}.safetensors")
                    self._deliver()
                if trained or self.rescored:
                    self.log.hparams({**vars(config.algo), "dataset": self.spec.name, "steps": self.step})
            finally:
                self.engine.close()
                if self.prefetcher is not None:
                    self.prefetcher.close()
                if self.scorer is not None:
                    self.scorer.close()
                if self.stopping_rule is not None:
                    self.stopping_rule.close()
            if trained:
                words = f", of which waiting for evaluation {duration(self.seconds_evaluating)}" if self.seconds_evaluating > 1.0 else ""
                self.log.say(f"trained in {duration(time.monotonic() - started)}{words}")

    def _interrupted(self) -> Interrupted:
        return Interrupted(f"stopped at step {self.step:,}; all is saved in {self.run_dir}: the same command continues")

    def _advance(self, stop_at: int) -> None:
        """Updates up to `stop_at`, in slices of about SLICE_SECONDS; fewer where a signal came."""
        period = self.algorithm.traits.period
        tick, first = time.monotonic(), self.step
        while self.step < stop_at and not self.stop:
            now, end = time.monotonic(), min(self.step + self.slice, stop_at)
            if self.world.size > 1:
                end, self.stop = distributed.agree(end, self.stop, self.device)
                if self.stop:
                    break
            if end < stop_at:
                end -= end % period  # parts of a pattern round differently, and where a slice ends depends on the clock
            count = end - self.step
            self.engine.run(self.step, count)
            self.step = end
            seconds = time.monotonic() - now
            if not self.warm:  # tracing and compiling are no measure of speed
                self.warm, tick, first = True, time.monotonic(), self.step
                self.log.timing(self.step, first_updates=seconds)
                continue
            self.slice = max(period, min(4 * self.slice, int(count * SLICE_SECONDS / max(seconds, 1e-9))))
            last, self.mark = self.mark or now, time.monotonic()
            self.rate, self.shown = (self.step - first) / (self.mark - tick), self.pace.add(count, self.mark - last)
            self._take_scores(None)
            if self.step < self.end:
                self.log.progress(self.step, self.shown, self.last_score)

    def _deliver(self) -> None:
        """What the algorithm leaves besides policies; most leave nothing, and then no state is gathered for it."""
        if type(self.algorithm).deliver is not Algorithm.deliver:
            good = torch.nonzero(self.alive).squeeze(-1)
            states = pytree.tree_map(lambda x: x[good], self.engine.state())
            self.algorithm.deliver(self.run_dir, [self.replicas[i] for i in good.tolist()], states, self.dataset, self.config.quiet)

    def _finished(self) -> bool:
        """Whether the algorithm says of every replica that is trained that it needs no more updates."""
        if type(self.algorithm).finished is Algorithm.finished:
            return False  # not asked: the replicas may be in other processes
        flags = self.engine.finished()
        return flags is not None and bool((flags | ~self.alive).all())

    def policies(self) -> list[TrainedPolicy]:
        """The current policies, one for each replica."""
        return policies_of(self.algorithm, self.engine.acting(), self.replicas, self.device)

    def _next(self, every: int) -> int:
        return min(self.config.steps, (self.step // every + 1) * every)

    def _due(self, every: int) -> bool:
        return self.step % every == 0 or self.step == self.end

    def _last_step(self) -> int:
        """Where the run ends: at its `steps`, or before, where the stopping rule ended it."""
        end = None if self.stopping_rule is None else self.stopping_rule.end
        return self.config.steps if end is None else min(end, self.config.steps)

    def _consult_stopping_rule(self) -> None:
        if self.stopping_rule is not None:
            self.log.say(self.stopping_rule.look(self.step, self.policies(), self.alive))
            self.end = self._last_step()
            if self.end < self.config.steps:
                self.log.say(f"stopping at step {self.end:,}: {self.stopping_rule.reason}")

    def _log_metrics(self) -> None:
        """Write the means since the last line, and freeze every replica whose losses are no longer finite."""
        sums = self.engine.sums()
        if self.world.size > 1:
            names = sorted(sums)
            means = distributed.mean(torch.stack([sums[n] for n in names]).to(self.device)).cpu()
            sums = dict(zip(names, means.unbind(0), strict=True))
        values = metric_means(sums, self.step - self.since)
        finite = torch.stack([torch.ones_like(self.alive), *(v.isfinite() for v in values.values())]).all(0)
        cure = "A smaller algo.learning_rate or dataset.normalize_observations=true often helps"
        if bool((self.alive & ~finite).any()) and (problem := self.engine.doubt()):
            said = f"The compiled step computes something else than the uncompiled one ({problem})"
            cure = f"{said}: {backend.set_aside_compiled()}, and train again, or with compile=eager"
        for index in torch.nonzero(self.alive & ~finite).squeeze(-1).tolist():
            named = [name for name, v in values.items() if name in self.algorithm.watched and not v[index].isfinite()]
            culprit = " and ".join(self.algorithm.watched[name] for name in named) or "a loss is not finite"
            warn(
                f"{self.replicas[index]} diverged between step {self.since:,} and {self.step:,} ({culprit}): its parameters "
                f"stay as they were at step {self.since:,}; the others go on. {cure}"
            )
        self.alive &= finite
        self.engine.settle(self.alive)
        dead = (~self.alive).numpy()
        rows = {k: [math.nan if d else x for x, d in zip(v.tolist(), dead, strict=True)] for k, v in sorted(values.items())}
        self.log.metrics(self.step, rows)
        self.since = self.step
        if self.algorithm.headline in values:
            self.last_score = f"{self.algorithm.headline.rpartition('/')[2]} {float(values[self.algorithm.headline].nanmean()):.4g}"

    # ---- scores: one evaluation at a time, of a copy of the policies, while training goes on

    def _begin_scoring(self) -> None:
        if self.scorer is not None:
            self._wait_for_scores(whatever=True)  # a checkpoint holds the policies of one evaluation only
            self.scorer.begin(self.step, self.policies(), self.replicas)
            if self.scorer.pool is None:
                self._wait_for_scores()

    def _wait_for_scores(self, whatever: bool = False) -> None:
        """Until the evaluation that runs, if any, is over, or, unless `whatever`, a signal came."""
        started = time.monotonic()
        with contextlib.suppress(_CutShort):
            self._take_scores((lambda done, total: None) if whatever else self._heed_signals)
        self.seconds_evaluating += time.monotonic() - started

    def _take_scores(self, heed: Any) -> None:
        """Write down the scores if they are there; with `heed` wait for them."""
        found = None if self.scorer is None else self.scorer.fetch(heed)
        if found is not None:
            step, result, seconds = found
            names = {"return": "return_mean", "length": "length_mean", "discounted": "discounted_mean"}
            rows = [{names.get(k, k): v for k, v in row.items()} for row in result.rows()]
            full = [{**row, "dataset": self.spec.name, "environment": result.label} for row in rows]
            self.log.scores(step, full, result.returns)
            self.last_score = score_text("score" if result.scores is not None else "return", result.per_seed().tolist(), self.replicas)
            self.log.timing(step, evaluation=seconds)
            self.log.progress(self.step, self.shown, self.last_score)

    def _heed_signals(self, done: int, total: int) -> None:
        if self.stop:
            raise _CutShort

    # ---- checkpoints

    def _save(self, cut_short: bool = False) -> None:
        """Write a checkpoint. One that is not `cut_short` waits for the scores of earlier steps, so that none is written twice."""
        if self.scorer is not None and self.scorer.step not in (None, self.step) and not cut_short:
            self._wait_for_scores()
        if not self.world.first:
            return
        self.log.sync()
        self.engine.freeze(self.alive)
        between = self.step != self.since  # only when interrupted: every regular checkpoint stands at a line of metrics
        scoring = None if self.scorer is None else self.scorer.step
        later = self.scorer is not None and scoring not in (None, self.step)
        tree = {
            "state": self.engine.state(),
            "good": self.engine.good() if between else {},
            "alive": self.alive,
            "sums": self.engine.sums() if between else {},
            "scoring": [p.state for p in self.scorer.policies] if later and self.scorer is not None else [],
        }
        meta = {
            "since": self.since,
            "unscored": scoring is not None,
            "scoring": scoring,
            "algorithm": self.config.algo.name,
            "seeds": [r.seed for r in self.replicas],
        }
        if cut_short and self.scorer is not None:
            self.scorer.cancel()
        checkpoint.save(self.run_dir, self.step, checkpoint.flatten(tree), meta, self.config.checkpoint.keep)

    def _restore(self, template: TrainState, tensors: dict[str, Tensor], meta: dict[str, Any]) -> Any:
        """(state, good state, sums, (step, policies) of an evaluation that is due) of a checkpoint."""
        where = f"checkpoint of step {meta['step']:,} in {self.run_dir}"
        self.step, self.since, self.alive = meta["step"], meta["since"], tensors["alive"]
        state = good = checkpoint.unflatten({"state": template}, tensors, where)["state"]
        if self.step != self.since:
            good = checkpoint.unflatten({"good": template._replace(buffers={})}, tensors, where)["good"]
        sums = {k.removeprefix("sums/"): v for k, v in tensors.items() if k.startswith("sums/")}
        scoring = None
        if meta["unscored"]:
            step = meta.get("scoring", self.step)
            policies = policies_of(self.algorithm, state, self.replicas, self.device)
            if step != self.step:
                old = checkpoint.unflatten({"scoring": [p.state for p in policies]}, tensors, where)["scoring"]
                policies = [TrainedPolicy(p.algorithm, s, p.seed, self.device) for p, s in zip(policies, old, strict=True)]
            scoring = step, policies
        return state, good, sums, scoring


@contextlib.contextmanager
def _signals(loop: _Loop) -> Iterator[None]:
    """The first Ctrl-C or SIGTERM saves and stops; a second one quits at once."""

    def handler(number: int, frame: Any) -> None:
        loop.stop += 1
        if loop.stop > 1:
            os._exit(128 + number)
        loop.log.say("stopping: saving a checkpoint (once more quits without)")

    with handled(handler, signal.SIGINT, signal.SIGTERM):
        yield
