"""A run while it trains: its replicas' states and clock, and all that happens to them between updates."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

from offrl import registry
from offrl.algorithm import Algorithm, Metrics
from offrl.data.dataset import Dataset
from offrl.errors import Interrupted, UserError, unsaid, warn
from offrl.evaluation.background import Scorer
from offrl.evaluation.policy import TrainedPolicy
from offrl.runs.log import NoLog, RunLog
from offrl.runs.paths import stopped_at
from offrl.settings.advice import doubts
from offrl.settings.evaluation import worker_count
from offrl.settings.train import TrainConfig, logger_names
from offrl.system import backend, files
from offrl.system.signals import StopSignals
from offrl.training import distributed
from offrl.training.artifacts import FinishedRun, make_artifacts
from offrl.training.checkpoints import Checkpoints, Saved
from offrl.training.engine import Slices, first_state, policies_of
from offrl.training.listeners.callback import BY_CALLBACK, Callbacks, OnEvaluation
from offrl.training.scores import Scores
from offrl.training.setup import PAYS_FROM, Setup, make_engine
from offrl.training.stopping import StoppingRule
from offrl.training.updates import (
    loss_limit,
    metric_means,
    rows,
    sound,
    warn_diverged,
    warn_of_no_rewards,
    warn_of_rates,
)


class Session:
    """The run of `offrl.training.loop.train`, which counts `step` on."""

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
        self.algorithm, self.world = setup.plan.algorithm, setup.plan.world
        self.loss_limit = loss_limit(dataset)
        self.step = self.since = 0  # updates done; those at which the sums of metrics began
        self.alive = torch.ones(len(self.replicas), dtype=torch.bool)
        self.text, self.shows_scores = (
            "",
            False,
        )  # beside the progress: the last scores, or before the first ones a loss
        self.slices, self.signals = Slices(self.algorithm.traits.period), StopSignals()
        self.checkpoints = Checkpoints(run_dir, config.checkpoint.keep, config.algo.name, self.replicas)
        state = good = first_state(self.algorithm, self.replicas)
        sums: Metrics = {}
        saved = self.checkpoints.load(state)
        if saved is not None:
            self.step, self.since, self.alive = saved.step, saved.meta["since"], saved.alive
            state, good, sums = saved.state, saved.good, saved.sums
        resume_step = None if saved is None else saved.step
        self.stopping_rule: StoppingRule | None = None
        if config.stop != "none":
            if self.world.size > 1:
                raise UserError(f"stop={config.stop} needs one process; under torchrun leave it out")
            rule: StoppingRule = registry.get("stop", config.stop)(
                config, dataset, run_dir, self.replicas, resume_step, self.device
            )
            resources.callback(rule.close)
            self.stopping_rule = rule
        self.callbacks = Callbacks(on_evaluation, run_dir, config.steps)
        if self.callbacks.functions and self.world.size > 1:
            raise UserError("on_evaluation needs one process; under torchrun leave it out")
        self.end = self._last_step()
        self.engine, processes = make_engine(config, dataset, setup, state, self.step, self.step < self.end, resources)
        self.engine.load(state, good, sums)
        if saved is not None and self.step < self.end and self.finished():
            self.end = self.step
        every = config.eval.every
        self.eval_every = math.ceil(config.steps / 10) if every is None else every or config.steps
        self.save_every = config.checkpoint.every or min(self.eval_every, math.ceil(config.steps / 20))
        scored_step = saved.meta.get("scoring", saved.step) if saved is not None and saved.meta["unscored"] else None
        self.log: RunLog | NoLog = (RunLog if self.world.first else NoLog)(
            run_dir,
            resume_step=resume_step,
            unscored=scored_step,
            quiet=config.quiet,
            total_steps=config.steps,
            replicas=self.replicas,
            title=setup.title(config, dataset, run_dir, processes),
            loggers=logger_names(config.logger),
            settings={
                "algo": config.algo.name,
                **vars(config.algo),
                "dataset": dataset.spec.name,
                "steps": config.steps,
            },
        )
        self._introduce(saved is not None, setup.evaluator is not None)
        traits = self.algorithm.traits
        # a language model is no small thing to hand to other processes, which act on the CPU
        in_process = traits.text or (traits.acts_on_device and self.device.type == "cuda")
        brief = config.eval.workers is None and (not setup.long or self.step >= self.end or in_process)
        scorer = None if setup.evaluator is None else Scorer(setup.evaluator, 0 if brief else worker_count(config.eval))
        self.scores = Scores(scorer, self.log, self.replicas, dataset.spec.name, self.signals, self._show, self._heard)
        resources.callback(self.scores.close)
        self.rescored = scorer is not None and scored_step is not None
        if scorer is not None and saved is not None and scored_step is not None:
            scorer.begin(scored_step, self._policies_of(saved, scored_step), self.replicas)

    def _introduce(self, resumed: bool, scored: bool) -> None:
        """Say where the run begins, and what a person should know about it."""
        config, say = self.config, self.log.say
        if resumed and self.step < self.end:
            say(f"continuing from step {self.step:,}")
        elif resumed and self.end < config.steps:
            rule = self.stopping_rule
            why = (
                "nothing gets better any more"
                if rule is None or rule.end is None
                else f"{rule.reason} (stop={config.stop})"
            )
            why = BY_CALLBACK if stopped_at(self.run_dir, config.steps) is not None else why
            say(f"this run ended at step {self.end:,}: {why}")
        elif resumed:
            say(f"this run has its {self.step:,} updates already: nothing is trained (a larger steps= continues it)")
        for note in unsaid((*self.dataset.notes, *self.algorithm.runtime.notes)):
            say(note)
        if not scored and self.algorithm.traits.policy_modules:
            say("no environment: policies are trained but not scored (eval.env=ID names one)")
        warn_of_rates(config.algo, config.grid)
        for doubt in doubts(config, len(next(iter(self.dataset.columns.values())))):
            warn(doubt)
        if config.dataset.expert is None:
            warn_of_no_rewards(self.algorithm.traits, config.algo.name, self.dataset)
        decay = getattr(config.algo, "decay_steps", None)
        if decay and getattr(config.algo, "actor_schedule", "") == "cosine":
            if decay < config.steps:
                end = f"algo.decay_steps={config.steps} moves that to the end of the run"
                warn(f"the actor's learning rate reaches 0 at step {decay:,}, and it does not learn after that; {end}")
            elif decay > config.steps >= PAYS_FROM:  # shorter runs are trials
                share = 0.5 * (1.0 + math.cos(math.pi * config.steps / decay))
                say(
                    f"the actor's learning rate falls over {decay:,} updates (algo.decay_steps); this run ends at "
                    f"{share:.0%} of it"
                )

    # ---- the steps at which the loop stops

    def next_stop(self) -> int:
        """The next step at which metrics, scores or a checkpoint are due."""
        marks = (
            (self.step // every + 1) * every for every in (self.config.log_every, self.eval_every, self.save_every)
        )
        return min(self.config.steps, *marks)

    def due(self, every: int) -> bool:
        """True at a multiple of `every` updates, and at the end."""
        return self.step % every == 0 or self.step == self.end

    def finished(self) -> bool:
        """True where the algorithm needs no more updates of any replica that is trained."""
        if type(self.algorithm).finished is Algorithm.finished:
            return False  # without a query: the replicas may be in other processes
        flags = self.engine.finished()
        return flags is not None and bool((flags | ~self.alive).all())

    def consult_stopping_rule(self) -> None:
        """With stop=NAME: let the rule judge the policies, and end the run here where it says so."""
        if self.stopping_rule is not None:
            self.log.say(self.stopping_rule.look(self.step, self.policies(), self.alive))
            self.end = self._last_step()
            if self.end < self.config.steps:
                self.log.say(f"stopping at step {self.end:,}: {self.stopping_rule.reason}")

    def _last_step(self) -> int:
        """The step at which the run ends: its `steps`, or before, where the stopping rule or a callback ended it."""
        ends = (
            None if self.stopping_rule is None else self.stopping_rule.end,
            stopped_at(self.run_dir, self.config.steps),
        )
        return min([self.config.steps, *(end for end in ends if end is not None)])

    def heed_callbacks(self) -> None:
        """End the run here where a callback asked for it."""
        if self.callbacks.stops and self.step < self.end:
            self.callbacks.record(self.step)
            self.end = self.step
            self.log.say(f"stopping at step {self.end:,}: {BY_CALLBACK}")

    def _heard(self, step: int, rows: list[dict[str, Any]], policies: list[Any]) -> None:
        self.callbacks(step, rows, policies)
        if self.callbacks.problem and not self.signals.count:
            self.signals.count = 1  # all is saved, as after a signal

    def interrupted(self) -> Interrupted | UserError:
        """The exception that ends a run after a request to stop, or a callback that failed."""
        if self.callbacks.problem:
            return UserError(f"{self.callbacks.problem}; all is saved in {self.run_dir}: the same call continues")
        return Interrupted(self.step, self.run_dir)

    # ---- metrics, policies, checkpoints

    def write_metrics(self) -> None:
        """Write the means since the last line, and freeze every replica whose losses are no longer finite, or beyond
        all measure.
        """
        sums = self.engine.sums()
        if self.world.size > 1:
            names = sorted(sums)
            means = distributed.mean(torch.stack([sums[n] for n in names]).to(self.device)).cpu()
            sums = dict(zip(names, means.unbind(0), strict=True))
        values = metric_means(sums, self.step - self.since)
        alive, diverged = sound(values, self.alive, self.loss_limit)
        cure = "A smaller algo.learning_rate or dataset.normalize_observations=true often helps"
        if diverged and (problem := self.engine.doubt()):
            cure = (
                f"The compiled step computes something else than the uncompiled one ({problem}): "
                f"{backend.set_aside_compiled()}, "
            )
            cure += "and train again, or with compile=eager"
        for index, reason in diverged.items():
            warn_diverged(self.replicas[index], self.since, self.step, reason, cure)
        self.alive = alive
        self.engine.settle(alive)
        self.log.metrics(self.step, rows(dict(sorted(values.items())), alive))
        self.since = self.step
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
        if scores.step not in (None, self.step) and not cut_short:
            scores.wait()
        if not self.world.first:
            return
        self.log.sync()
        earlier = scores.policies() if scores.step not in (None, self.step) else []
        # only an interrupted run is between two lines of metrics here
        settled = self.step == self.since
        tree = {"scoring": [policy.state for policy in earlier]}
        meta = {"since": self.since, "unscored": scores.step is not None, "scoring": scores.step}
        self.checkpoints.save(self.step, self.engine, self.alive, settled, tree, meta)
        if cut_short:
            scores.cancel()

    def write_results(self) -> None:
        """Write the policies and the artifacts of a finished run."""
        if not self.world.first:
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

    def _show(self, scores: str) -> None:
        self.text, self.shows_scores = scores, True
        self.log.progress(self.step, self.slices.recent, scores)
