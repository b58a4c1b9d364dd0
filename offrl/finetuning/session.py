"""What the loops of `offrl finetune` have in common: metrics, scores and checkpoints when they are due, and
stopping.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import torch

from offrl.algorithm import Metrics, TrainState
from offrl.errors import Interrupted, UserError, unsaid, warn
from offrl.evaluation.evaluator import Evaluator
from offrl.finetuning.episodes import EpisodeLog
from offrl.finetuning.play.environments import Play
from offrl.finetuning.play.snapshots import TASK
from offrl.finetuning.play.turns import Turn
from offrl.finetuning.start import Start
from offrl.runs.log import RunLog
from offrl.settings.evaluation import worker_count
from offrl.system.progress import Progress
from offrl.system.signals import StopSignals
from offrl.training.engine import LocalEngine, first_state, policies_of
from offrl.training.execution import PAYS_FROM, why_eager
from offrl.training.run.checkpoints import Checkpoints, Saved, part
from offrl.training.run.scores import Scores
from offrl.training.updates import check_divergence, loss_limit, metric_means, rows, warn_diverged, warn_of_rates

EVALUATIONS = 20  # of a run, unless eval.every says otherwise
CURE = "A smaller algo.learning_rate or utd often helps"  # of replicas that diverge


class OnlineLoop(ABC):
    """A run while it plays and learns. `t` counts environment steps of each replica, `updates` the updates of their
    parameters.

    A subclass plays and learns between two looks at what is due, which are `round` environment steps apart.
    """

    COUNTERS: tuple[str, ...] = ("lined", "scored", "line_updates", "updates", "goal")  # a checkpoint holds them
    first = 0  # updates that were made before the run
    learner: LocalEngine

    def __init__(
        self,
        start: Start,
        run_dir: Path,
        device: torch.device,
        mode: str,
        evaluator: Evaluator,
        play: Play,
        arithmetic: str,
    ) -> None:
        """mode: of the step. arithmetic: in words, for the reader."""
        self.start, self.config, self.run_dir, self.play = start, start.config, run_dir, play
        self.device, self.mode, self.replicas = device, mode, start.replicas
        config, self.many, self.envs = start.config, len(start.replicas), start.config.envs or 1
        self.round, self.most_updates = self.lengths(start)
        self.loss_limit = loss_limit(start.dataset)
        self.steps = self._rounds(config.steps)
        eval_interval = config.eval.every
        self.eval_every = (
            self.steps if eval_interval == 0 else self._rounds(eval_interval or math.ceil(self.steps / EVALUATIONS))
        )
        self.log_every = self._rounds(config.log_every)
        self.save_every = self._rounds(config.checkpoint.every) if config.checkpoint.every else self.eval_every
        self.signals = StopSignals()
        self.scored = self.saved = -1
        # line_updates: those at the last line, whose means are over the updates since
        self.t = self.lined = self.updates = self.line_updates = self.goal = 0
        self.alive = torch.ones(self.many, dtype=torch.bool)
        # since the last line: number, sums of returns and of lengths
        self.episodes = torch.zeros(3, self.many, dtype=torch.float64)
        self.clock = time.monotonic()  # at the last line
        self.recent: deque[float] = deque(maxlen=20)
        self.checkpoints = Checkpoints(run_dir, config.checkpoint.keep, start.algorithm.config.name, self.replicas)
        state = first_state(start.algorithm, self.replicas) if start.state is None else start.state
        saved = self.checkpoints.load(state)
        self._prepare(state if saved is None else saved.state)
        restarted: list[int] = []
        if saved is None:
            play.begin()
        else:
            restarted = self._return_to(saved)
        self._open(evaluator, saved, state)
        self._introduce(saved is not None, arithmetic, restarted)

    def _rounds(self, count: int) -> int:
        """Environment steps in whole rounds."""
        return -(-count // self.round) * self.round

    # ---- of a subclass

    @staticmethod
    @abstractmethod
    def lengths(start: Start) -> tuple[int, int]:
        """(environment steps of a round, the most updates that a run may make)."""

    @abstractmethod
    def _prepare(self, state: TrainState) -> None:
        """Make the learner and what it needs, for replicas that begin at `state`."""

    @abstractmethod
    def _title(self) -> str:
        """What learns where, from what, for the reader."""

    def _online(self) -> list[str]:
        """Further lines for the reader: settings that differ online."""
        return []

    @abstractmethod
    def _step(self) -> None:
        """Play a round."""

    @abstractmethod
    def _learn(self) -> None:
        """The updates that are due, less those that a signal puts off."""

    def _holds(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """(tensors, values) of a checkpoint besides those that every loop has."""
        return {}, {}

    @abstractmethod
    def _restore(self, saved: Saved) -> None:
        """Take back what `_holds` gave."""

    @abstractmethod
    def _resume_play(self, saved: Saved, turns: list[Turn], restarted: list[int]) -> None:
        """Go on within the running episodes: see `Play.resume`."""

    def _means(self, means: Metrics) -> Metrics:
        """The metrics of a line, from their means over the updates since the last one."""
        return means

    def _played(self) -> dict[str, list[float]]:
        """Further metrics of what was played since the last line."""
        return {}

    # ---- begin

    def _open(self, evaluator: Evaluator, saved: Saved | None, state: TrainState) -> None:
        """The learner's state, the log and what scores."""
        self.learner.load(*((state, state, {}) if saved is None else (saved.state, saved.good, saved.sums)))
        start, config = self.start, self.config
        self.log = RunLog(
            self.run_dir,
            resume_step=None if saved is None else self.t - (self.lined != self.t),
            unscored=self.t
            if saved is not None and self.lined == self.t != self.scored and self._due(self.eval_every)
            else None,
            quiet=True,
            total_steps=self.steps,
            replicas=self.replicas,
            title="",
        )
        self.played = EpisodeLog(self.run_dir, self.replicas, -1 if saved is None else self.t)
        self.bar = Progress(f"{start.label} in {self.play.name}", self.steps, "steps", config.quiet, self.t)
        # with fewer updates processes that score beside them do not pay
        brief = config.eval.workers is None and self.most_updates < PAYS_FROM
        workers = 0 if brief else worker_count(config.eval)
        self.scores = Scores(evaluator, workers, self.log, self.replicas, start.spec.name, self.signals, self._show)

    def _introduce(self, resumed: bool, arithmetic: str, restarted: list[int]) -> None:
        """The first lines for the reader."""
        start, say = self.start, self.bar.say
        lines = (
            self._title(),
            f"{arithmetic}; step {self.mode}; {self.run_dir}",
            *why_eager(self.config.compile, self.mode, self.device, self.most_updates, start.algorithm.traits),
            self.play.backend.note,
            *self._online(),
        )
        for line in filter(None, lines):
            say(line)
        warn_of_rates(start.algorithm.config, start.grid)
        for note in unsaid((*start.notes, *getattr(start.dataset, "notes", ()))):
            say(note)
        if resumed and self.t >= self.steps:
            say(f"this run has its {self.t:,} steps already: nothing is played (a larger steps= continues it)")
        elif resumed:
            say(f"continuing from step {self.t:,}; episodes that were running go on where they were")
        if restarted:
            names = ", ".join(self.play.seats[k].where() for k in restarted[:3])
            warn(
                f"{self.play.name} is not decided by its seed alone: {len(restarted)} of the episodes that were "
                f"running did not come back to where they were, and new ones begin in their place {names}"
            )

    # ---- run

    def run(self) -> None:
        """To the end, or raise Interrupted or UserError."""
        with self.log, self.played.lines.file, self.bar, self.signals.handled(self.bar.say):
            try:
                while True:
                    self._learn()
                    self._look()
                    if self.t >= self.steps or not self.alive.any():
                        break
                    try:
                        self._step()
                    except UserError as error:
                        self._save()
                        raise UserError(
                            f"{error}; what was learnt up to step {self.t:,} is saved in {self.run_dir}"
                        ) from error
                if self.saved != self.t:
                    self._save()
                for replica, policy in zip(self.replicas, self._policies(), strict=True):
                    policy.save(self.run_dir / "policies" / f"{replica.name}.safetensors")
            finally:
                self.scores.close()

    def _due(self, interval: int) -> bool:
        return self.t % interval == 0 or self.t >= self.steps

    def _look(self) -> None:
        """Metrics, scores and checkpoints that are due at this step, if they were not there before the run was stopped
        here.
        """
        if self.signals.count:
            self._interrupt()
        if self._due(self.log_every) and self.lined != self.t:
            self._line()
        if self._due(self.eval_every) and self.scored != self.t:
            if self.lined != self.t:
                self._line()  # what diverged is not scored
            self._score()
        if self._due(self.save_every) and self.saved != self.t:
            self._save()

    def _interrupt(self) -> None:
        if self.saved != self.t or self.updates != self.goal:
            self._save()
        raise Interrupted(self.t, self.run_dir)

    def _count(self, turn: Turn, t: int) -> None:
        """The episodes that ended at step t, for episodes.csv, the next line and the progress bar."""
        self.played.add(t, turn.ended)
        for episode in turn.ended:
            if episode.start == TASK:  # others are shorter, and begin elsewhere
                self.recent.append(episode.total)
                counts = torch.tensor([1.0, episode.total, float(episode.length)], dtype=torch.float64)
                self.episodes[:, episode.replica] += counts

    def _report(self, t: int) -> None:
        """Show the progress at step t."""
        self.bar.update(
            t,
            "  ".join(x for x in (f"return {np.mean(self.recent):.1f}" if self.recent else "", self.scores.text) if x),
        )

    def _drop(self, finite: np.ndarray) -> None:
        """Freeze the replicas whose actions are not `finite` [N]."""
        for n in np.flatnonzero(~finite & self.alive.numpy()).tolist():
            warn_diverged(self.replicas[n], self.lined, self.t, "its actions are not finite", CURE)
        self.alive &= torch.from_numpy(finite)
        self.learner.freeze(self.alive)

    def _hopeless(self, finite: np.ndarray) -> str:
        """The mistake where frozen replicas still give actions that are not `finite` [N]."""
        names = ", ".join(str(self.replicas[n]) for n in np.flatnonzero(~finite).tolist())
        return (
            f"the policy of {names} gives actions that are not finite for observations of {self.play.name} at step "
            f"{self.t:,}: it had diverged before, or the observations are far outside the data's"
        )

    # ---- look

    def _line(self) -> None:
        """Write the means since the last line, and freeze every replica whose losses are no longer finite, or beyond
        all measure.
        """
        means: dict[str, list[float]] = {}
        if self.updates > self.line_updates:
            values = self._means(metric_means(self.learner.sums(), self.updates - self.line_updates))
            self.alive, diverged = check_divergence(values, self.alive, self.loss_limit)
            for n, reason in diverged.items():
                warn_diverged(self.replicas[n], self.lined, self.t, reason, CURE)
            means = rows(values, self.alive)
        self.learner.settle(self.alive)
        count, total, length = self.episodes
        # NaN, null in the file, where no episode ended
        metrics = {"online/episodes": count, "online/length": length / count, "online/return": total / count}
        self.log.metrics(
            self.t, dict(sorted({**means, **{k: v.tolist() for k, v in metrics.items()}, **self._played()}.items()))
        )
        now = time.monotonic()
        self.log.timing(self.t, online=now - self.clock, updates=self.updates - self.first)
        self.clock = now
        self.episodes.zero_()
        self.lined, self.line_updates = self.t, self.updates
        self.saved = min(self.saved, self.t - 1)  # a checkpoint of this step does not know of the line

    def _policies(self) -> list[Any]:
        return policies_of(self.start.algorithm, self.learner.acting(), self.replicas)

    def _score(self) -> None:
        """Score the policies as they are; raises Interrupted where a signal cuts that short."""
        self.scores.begin(self.t, self._policies)
        self.scores.wait()
        if self.scores.step is not None:
            self.scores.cancel()
            self._interrupt()
        self.scored = self.t
        self.saved = min(self.saved, self.t - 1)

    def _show(self, scores: str) -> None:
        self.bar.say(f"step {self.t:,}: {scores}")

    # ---- checkpoints

    def _save(self) -> None:
        tree, meta = self._holds()
        self.log.sync()
        self.played.lines.sync()
        meta = {**{k: getattr(self, k) for k in self.COUNTERS}, **meta}
        tree = {"play": self.play.state(), "episodes": self.episodes, **tree}
        self.checkpoints.save(self.t, self.learner, self.alive, self.updates == self.line_updates, tree, meta)
        self.saved = self.t

    def _return_to(self, saved: Saved) -> list[int]:
        """Go on from a checkpoint; the environments that did not come back to where they were."""
        self.t = self.saved = saved.step
        for name in self.COUNTERS:
            setattr(self, name, saved.meta[name])
        self.alive, self.episodes = saved.alive, saved.tensors["episodes"]
        self._restore(saved)
        if self.t >= self.steps:  # nothing more is played
            return []
        self.play.t = self.t
        turns, restarted = self.play.resume(part(saved.tensors, "play"))
        self._resume_play(saved, turns, restarted)
        return restarted
