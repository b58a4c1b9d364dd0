"""A run while it trains: its replicas' states and clock, and all that happens to them between updates."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

from offrl import registry
from offrl.algorithm import Algorithm, Metrics
from offrl.data.dataset import Dataset
from offrl.errors import Interrupted, UserError
from offrl.evaluation.policy import TrainedPolicy
from offrl.runs.log import NoLog, RunLog
from offrl.runs.paths import stopped_at
from offrl.settings.evaluation import worker_count
from offrl.settings.train import TrainConfig, logger_names
from offrl.system import backend, files
from offrl.system.signals import StopSignals
from offrl.training import distributed
from offrl.training.engine import Slices, first_state, policies_of
from offrl.training.run.artifacts import FinishedRun, make_artifacts
from offrl.training.run.callbacks import BY_CALLBACK, Callbacks, OnEvaluation
from offrl.training.run.checkpoints import Checkpoints, Saved
from offrl.training.run.clock import RunClock
from offrl.training.run.header import log_start, title
from offrl.training.run.scores import Scores
from offrl.training.run.stopping import StoppingRule
from offrl.training.setup import Setup, make_engine
from offrl.training.updates import (
    check_divergence,
    loss_limit,
    metric_means,
    rows,
    warn_diverged,
    warn_saturated,
)


class Session:
    """The run of `offrl.training.loop.train`, which counts `clock.step` on."""

    def __init__(
        self,
        config: TrainConfig,
        dataset: Dataset,
        run_dir: Path,
        setup: Setup,
        resources: contextlib.ExitStack,
        on_evaluation: OnEvaluation | Sequence[OnEvaluation] | None = None,
    ) -> None:
        """Raises UserError for a run in `run_dir` that cannot be continued. resources: close what is opened here."""
        self.config, self.dataset, self.run_dir = config, dataset, run_dir
        self.replicas, self.device = setup.replicas, setup.devices[0]
        self.algorithm, self.process_group = setup.plan.algorithm, setup.plan.world
        self.loss_limit = loss_limit(dataset)
        self.since = 0  # the step at which the sums of metrics began
        self.alive = torch.ones(len(self.replicas), dtype=torch.bool)
        self.saturated = False  # targets beyond the range of the bins were warned of
        # beside the progress: the last scores, or before the first ones a loss
        self.text, self.shows_scores = ("", False)
        self.slices, self.signals = Slices(self.algorithm.traits.period), StopSignals()
        self.checkpoints = Checkpoints(run_dir, config.checkpoint.keep, config.algo.name, self.replicas)
        state = good = first_state(self.algorithm, self.replicas)
        sums: Metrics = {}
        saved = self.checkpoints.load(state)
        if saved is not None:
            self.since, self.alive = saved.meta["since"], saved.alive
            state, good, sums = saved.state, saved.good, saved.sums
        resume_step = None if saved is None else saved.step
        self.clock = RunClock.of(config, resume_step or 0)
        self.stopping_rule: StoppingRule | None = None
        if config.stop != "none":
            if self.process_group.size > 1:
                raise UserError(f"stop={config.stop} needs one process; under torchrun leave it out")
            rule: StoppingRule = registry.get("stop", config.stop)(
                config, dataset, run_dir, self.replicas, resume_step, self.device
            )
            resources.callback(rule.close)
            self.stopping_rule = rule
        self.callbacks = Callbacks(on_evaluation, run_dir, config.steps)
        if self.callbacks.functions and self.process_group.size > 1:
            raise UserError("on_evaluation needs one process; under torchrun leave it out")
        self.clock.end = self._last_step()
        self.engine, processes = make_engine(config, dataset, setup, state, self.clock, resources)
        self.engine.load(state, good, sums)
        if saved is not None and self.clock.running and self.finished():
            self.clock.end = self.clock.step
        scored_step = saved.meta["scoring"] if saved is not None and saved.meta["unscored"] else None
        self.log: RunLog | NoLog = (RunLog if self.process_group.first else NoLog)(
            run_dir,
            resume_step=resume_step,
            unscored=scored_step,
            quiet=config.quiet,
            total_steps=config.steps,
            replicas=self.replicas,
            title=title(setup, config, dataset, run_dir, processes),
            loggers=logger_names(config.logger),
            settings={
                "algo": config.algo.name,
                **vars(config.algo),
                "dataset": dataset.spec.name,
                "steps": config.steps,
            },
        )
        reason = "nothing gets better any more"
        if stopped_at(run_dir, config.steps) is not None:
            reason = BY_CALLBACK
        elif self.stopping_rule is not None and self.stopping_rule.end is not None:
            reason = f"{self.stopping_rule.reason} (stop={config.stop})"
        log_start(self.log.say, config, dataset, self.algorithm, self.clock, saved is not None, reason)
        if setup.evaluator is None and self.algorithm.traits.policy_modules:
            self.log.say("no environment: policies are trained but not scored (eval.env=ID names one)")
        traits = self.algorithm.traits
        # a language model is no small thing to hand to other processes, which act on the CPU
        in_process = traits.text or (traits.acts_on_device and self.device.type == "cuda")
        brief = config.eval.workers is None and (not setup.start_workers or not self.clock.running or in_process)
        self.scores = Scores(
            setup.evaluator,
            0 if brief else worker_count(config.eval),
            self.log,
            self.replicas,
            dataset.spec.name,
            self.signals,
            self._show_scores,
            self._on_scores,
        )
        resources.callback(self.scores.close)
        self.rescored = setup.evaluator is not None and scored_step is not None
        if setup.evaluator is not None and saved is not None and scored_step is not None:
            self.scores.submit(scored_step, self._policies_of(saved, scored_step))

    def finished(self) -> bool:
        """True where the algorithm needs no more updates of any replica that is trained."""
        if type(self.algorithm).finished is Algorithm.finished:
            return False  # without a query: the replicas may be in other processes
        flags = self.engine.finished()
        return flags is not None and bool((flags | ~self.alive).all())

    def consult_stopping_rule(self) -> None:
        """With stop=NAME: let the rule judge the policies, and end the run here where it says so."""
        if self.stopping_rule is not None:
            self.log.say(self.stopping_rule.look(self.clock.step, self.policies(), self.alive))
            self.clock.end = self._last_step()
            if self.clock.end < self.config.steps:
                self.log.say(f"stopping at step {self.clock.end:,}: {self.stopping_rule.reason}")

    def _last_step(self) -> int:
        """The step at which the run ends: its `steps`, or before, where the stopping rule or a callback ended it."""
        ends = (
            None if self.stopping_rule is None else self.stopping_rule.end,
            stopped_at(self.run_dir, self.config.steps),
        )
        return min([self.config.steps, *(end for end in ends if end is not None)])

    def stop_if_callback_asked(self) -> None:
        """End the run here where a callback asked for it."""
        if self.callbacks.stops and self.clock.step < self.clock.end:
            self.callbacks.record(self.clock.step)
            self.clock.end = self.clock.step
            self.log.say(f"stopping at step {self.clock.end:,}: {BY_CALLBACK}")

    def _on_scores(self, step: int, rows: list[dict[str, Any]], policies: list[Any]) -> None:
        self.callbacks(step, rows, policies)
        if self.callbacks.problem and not self.signals.count:
            self.signals.count = 1  # all is saved, as after a signal

    def interrupted(self) -> Interrupted | UserError:
        """The exception that ends a run after a request to stop, or a callback that failed."""
        if self.callbacks.problem:
            return UserError(f"{self.callbacks.problem}; all is saved in {self.run_dir}: the same call continues")
        return Interrupted(self.clock.step, self.run_dir)

    # ---- metrics, policies, checkpoints

    def write_metrics(self) -> None:
        """Write the means since the last line, and freeze every replica whose losses are no longer finite, or beyond
        all measure.
        """
        sums = self.engine.sums()
        if self.process_group.size > 1:
            names = sorted(sums)
            means = distributed.mean(torch.stack([sums[n] for n in names]).to(self.device)).cpu()
            sums = dict(zip(names, means.unbind(0), strict=True))
        values = metric_means(sums, self.clock.step - self.since)
        alive, diverged = check_divergence(values, self.alive, self.loss_limit)
        cure = "A smaller algo.learning_rate or dataset.normalize_observations=true often helps"
        if diverged and (problem := self.engine.verify_compiled()):
            cure = (
                f"The compiled step computes something else than the uncompiled one ({problem}): "
                f"{backend.set_aside_compiled()}, "
            )
            cure += "and train again, or with compile=eager"
        for index, reason in diverged.items():
            warn_diverged(self.replicas[index], self.since, self.clock.step, reason, cure)
        self.alive = alive
        if not hasattr(self.algorithm.config, "value_range"):  # which is fitted to the data
            self.saturated = self.saturated or warn_saturated(values, None, self.replicas)
        self.engine.settle(alive)
        self.log.metrics(self.clock.step, rows(dict(sorted(values.items())), alive))
        self.since = self.clock.step
        name = next((name for name in values if name.endswith(("/loss", "error"))), None)
        if name is not None and not self.shows_scores:
            self.text = f"{name.rpartition('/')[2]} {float(values[name].nanmean()):.4g}"

    def policies(self) -> list[TrainedPolicy]:
        """The current policies, one for each replica."""
        return policies_of(self.algorithm, self.engine.acting(), self.replicas, self.device)

    def save(self, cut_short: bool = False) -> None:
        """Write a checkpoint. One that is not `cut_short` waits for the scores of earlier steps, so that none is
        written twice.
        """
        scores = self.scores
        if scores.step not in (None, self.clock.step) and not cut_short:
            scores.wait()
        if not self.process_group.first:
            return
        self.log.sync()
        earlier = scores.policies if scores.step not in (None, self.clock.step) else []
        # only an interrupted run is between two lines of metrics here
        settled = self.clock.step == self.since
        tree = {"scoring": [policy.state for policy in earlier]}
        meta = {"since": self.since, "unscored": scores.step is not None, "scoring": scores.step}
        self.checkpoints.save(self.clock.step, self.engine, self.alive, settled, tree, meta)
        if cut_short:
            scores.cancel()

    def write_results(self) -> None:
        """Write the policies and the artifacts of a finished run."""
        if not self.process_group.first:
            return
        if self.algorithm.traits.policy_modules:
            for replica, policy in zip(self.replicas, self.policies(), strict=True):
                policy.save(self.run_dir / "policies" / f"{replica.name}.safetensors")
        make_artifacts(self.algorithm, self.dataset.spec, self._finished_run)

    def _finished_run(self) -> FinishedRun:
        good = torch.nonzero(self.alive).squeeze(-1)
        state = pytree.tree_map(lambda x: x[good], self.engine.state())
        replicas = [self.replicas[i] for i in good.tolist()]
        return FinishedRun(
            self.run_dir, self.algorithm, self.dataset, replicas, state, self.config.eval.env, self.config.quiet
        )

    def _policies_of(self, saved: Saved, step: int) -> list[Any]:
        """The policies of a checkpoint whose evaluation was cut short: its own, or those of an earlier `step` that it
        holds.
        """
        policies = policies_of(self.algorithm, saved.state, self.replicas, self.device)
        if step == saved.step:
            return policies
        states = files.unflatten({"scoring": [p.state for p in policies]}, saved.tensors, saved.where)["scoring"]
        return [TrainedPolicy(p.algorithm, s, p.seed, self.device) for p, s in zip(policies, states, strict=True)]

    def _show_scores(self, scores: str) -> None:
        self.text, self.shows_scores = scores, True
        self.log.progress(self.clock.step, self.slices.recent, scores)
