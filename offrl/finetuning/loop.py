"""The loop of `offrl finetune`: play, learn, look; stop and go on at any step."""

from __future__ import annotations

import contextlib
import math
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import torch

from offrl.data.samplers.transitions import TransitionSampler
from offrl.errors import Interrupted, UserError, warn
from offrl.evaluation.background import Scorer
from offrl.evaluation.evaluator import Evaluator
from offrl.finetuning import record as place
from offrl.finetuning.environments import Play
from offrl.finetuning.learner import Learner
from offrl.finetuning.replay_buffer import MixedBatches, Replay, Ring
from offrl.finetuning.setup import Start
from offrl.finetuning.transitions import Rows, columns_for, returns_of
from offrl.runs.log import RunLog
from offrl.settings.evaluation import worker_count
from offrl.settings.presets import finetune_settings
from offrl.system import backend
from offrl.system.devices import pick_device
from offrl.system.locks import exclusive
from offrl.system.progress import Progress
from offrl.system.signals import StopSignals
from offrl.training.checkpoints import Checkpoints, Saved, part
from offrl.training.engine import Plan, first_state, policies_of
from offrl.training.scores import Scores
from offrl.training.setup import PAYS_FROM, choose_mode
from offrl.training.updates import loss_limit, metric_means, rows, sound, warn_diverged, warn_of_rates

SLICE = 16  # updates between two looks at signals
EVALUATIONS = 20  # of a run, unless eval.every says otherwise
CURE = "A smaller algo.learning_rate or utd often helps"  # of replicas that diverge


def finetune(start: Start, run_dir: Path) -> None:
    """Play and learn to `start.config.steps` environment steps of each replica, going on from the newest checkpoint in `run_dir`.

    Raises UserError for what does not fit, or where the environment fails (what was learnt is saved then); Interrupted after Ctrl-C or
    SIGTERM, when all is saved.
    """
    config = start.config
    device = pick_device(config.device)
    arithmetic = backend.configure(device, config.threads, config.precision)
    with contextlib.ExitStack() as stack:
        evaluator = stack.enter_context(Evaluator(start.task, config.eval))
        seeds = [r.seed for r in start.replicas]
        margin = 0.0 if start.data is None else start.data.action_margin
        play = stack.enter_context(Play(start.task, start.spec, seeds, config.envs, config.seed, config.eval.max_steps, margin))
        stack.enter_context(exclusive(run_dir))
        mode = choose_mode(config.compile, device, math.ceil(config.steps * config.utd), start.algorithm)
        if not start.algorithm.traits.vectorized:
            mode = "eager"
        mode = place.claim(run_dir, start, mode, device.type)
        if mode.startswith("compiled"):
            backend.cache_compiled()
        _Loop(start, run_dir, device, mode, evaluator, play, arithmetic).run()


class _Loop:
    """A run while it plays and learns. `t` counts environment steps of each replica, `updates` the updates of their parameters."""

    def __init__(
        self, start: Start, run_dir: Path, device: torch.device, mode: str, evaluator: Evaluator, play: Play, arithmetic: str
    ) -> None:
        self.start, self.config, self.run_dir, self.device, self.play = start, start.config, run_dir, device, play
        config, self.replicas, self.envs = start.config, start.replicas, start.config.envs
        self.many, self.loss_limit = len(self.replicas), loss_limit(start.dataset)
        self.steps = _whole(config.steps, self.envs)
        every = config.eval.every
        self.eval_every = self.steps if every == 0 else _whole(every or math.ceil(self.steps / EVALUATIONS), self.envs)
        self.log_every = _whole(config.log_every, self.envs)
        self.save_every = _whole(config.checkpoint.every, self.envs) if config.checkpoint.every else self.eval_every
        self.signals = StopSignals()
        self.t, self.lined, self.scored, self.saved = 0, 0, -1, -1
        self.ended = np.zeros(self.many, bool)  # an episode has ended since the last updates
        self.alive = torch.ones(self.many, dtype=torch.bool)
        self.warmup = config.warmup or 0
        self.episodes = torch.zeros(3, self.many, dtype=torch.float64)  # since the last line: number, sums of returns and of lengths
        self.recent: deque[float] = deque(maxlen=20)

        algorithm = start.algorithm
        sampler = algorithm.sampler()
        image = start.spec.observation_mean is None and play.kind == np.uint8
        columns = columns_for(start.spec, sampler, torch.uint8 if image else torch.float32, algorithm.config.name)
        assert isinstance(sampler, TransitionSampler)
        discount = start.data.discount_returns if start.data is not None else None
        discount = float(getattr(algorithm.config, "discount", 0.99)) if discount is None else discount
        self.rows = Rows(start.spec, columns, self.many, self.envs, returns_of(sampler, discount))
        capacity = min(config.capacity or self.steps, self.steps)
        self.ring = Ring(columns, self.many, capacity, device)
        self.replay = Replay(run_dir, self.ring)
        self.checkpoints = Checkpoints(run_dir, config.checkpoint.keep, algorithm.config.name, self.replicas)
        state = first_state(algorithm, self.replicas) if start.state is None else start.state
        saved = self.checkpoints.load(state)
        # line_updates: those at the last line of metrics, whose means are over the updates since then
        self.first = self.goal = self.updates = self.line_updates = int(state.step[0])
        lost: list[int] = []
        if saved is None:
            self.replay.discard(0)
            play.begin()
        else:
            lost = self._restore(saved)
        source = None
        if start.dataset is not None:
            data = start.dataset if start.dataset.mapped else start.dataset.to(device)
            source = sampler.prepare(data)
        self.batches = MixedBatches(self.ring, sampler, source, state.key, algorithm.config.batch_size, config.mixing)
        plan = Plan(algorithm, algorithm.config.batch_size, mode, config.precision, self.many)
        self.learner = Learner(plan, self.batches, self.replicas, device, start.fixed, start.anneal)
        self.learner.load(*((state, state, {}) if saved is None else (saved.state, saved.good, saved.sums)))
        self.log = RunLog(
            run_dir,
            resume_step=None if saved is None else self.t - (self.lined != self.t),
            unscored=self.t if saved is not None and self.lined == self.t != self.scored and self._due(self.eval_every) else None,
            quiet=True,
            total_steps=self.steps,
            replicas=self.replicas,
            title="",
        )
        self.bar = Progress(f"{start.label} in {play.name}", self.steps, "steps", config.quiet, self.t)
        brief = config.eval.workers is None and self.steps * config.utd < PAYS_FROM
        scorer = Scorer(evaluator, 0 if brief else worker_count(config.eval))
        self.scores = Scores(scorer, self.log, self.replicas, start.spec.name, self.signals, self._show)
        self._introduce(saved is not None, mode, arithmetic, lost)

    def _introduce(self, resumed: bool, mode: str, arithmetic: str, lost: list[int]) -> None:
        """The first lines for the reader."""
        start, config, spec = self.start, self.config, self.start.spec
        came = "fresh parameters" if start.parent is None else f"step {start.parent['step']:,} of {start.parent['run']}"
        mixing = {None: "batches from the union of data and play", 0.0: "no data"}.get(config.mixing, f"{config.mixing} of each batch data")
        say = self.bar.say
        say(
            f"{start.label} in {self.play.name} from {came}: {self.many} x {self.envs} environments, {self.steps:,} steps each, "
            f"{mixing}, {config.utd:g} updates a step\n{arithmetic}; step {mode}; {self.run_dir}"
        )
        algo = start.algorithm.config
        changed = [f"{k}={v}" for k, v in (finetune_settings(algo.name) or {}).items() if hasattr(algo, k)]
        changed += [f"{k} from {a:g} to {b:g} times its value by {c:.0%} of the steps" for k, (a, b, c) in start.anneal.items()]
        if changed:
            say(f"online: {', '.join(changed)}")
        if spec.reward_scale != 1.0 or spec.reward_shift != 0.0:
            say(f"learning from rewards as the data's were transformed: {spec.reward_scale:g} x reward + {spec.reward_shift:g}")
        warn_of_rates(algo, start.grid)
        for note in (*start.notes, *(start.dataset.notes if start.dataset is not None else ())):
            say(note)
        if resumed and self.t >= self.steps:
            say(f"this run has its {self.t:,} steps already: nothing is played (a larger steps= continues it)")
        elif resumed:
            say(f"continuing from step {self.t:,}; episodes that were running are played again up to where they were")
        if lost:
            names = ", ".join(self.play.seats[k].where() for k in lost[:3])
            warn(
                f"{self.play.name} is not decided by its seed alone: {len(lost)} of the episodes that were running did not come back to "
                f"where they were, and new ones begin in their place {names}"
            )

    def run(self) -> None:
        """To the end, or raise Interrupted or UserError."""
        with self.log, self.bar, self.signals.handled(self.bar.say):
            try:
                while True:
                    self._learn()
                    self._look()
                    if self.t >= self.steps or not self.alive.any():
                        break
                    self._step()
                if self.saved != self.t:
                    self._save()
                for replica, policy in zip(self.replicas, self._policies(), strict=True):
                    policy.save(self.run_dir / "policies" / f"{replica.name}.safetensors")
            finally:
                self.scores.close()

    def _due(self, every: int) -> bool:
        return self.t % every == 0 or self.t >= self.steps

    def _look(self) -> None:
        """Metrics, scores and checkpoints that are due at this step, if they were not there before the run was stopped here."""
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
        raise Interrupted(f"stopped at step {self.t:,}; all is saved in {self.run_dir}: the same command continues")

    # ---- play

    def _step(self) -> None:
        """One step of every environment; sets how many updates are then due."""
        config, started = self.config, self.t
        try:
            turn = self.play.step(self._actions())
        except UserError as error:
            self._save()
            raise UserError(f"{error}; what was learnt up to step {started:,} is saved in {self.run_dir}") from error
        self.replay.add(*self.rows.take(turn))
        self.t += self.envs
        for replica, total, length in turn.ended:
            self.ended[replica] = True
            self.recent.append(total)
            self.episodes[:, replica] += torch.tensor([1.0, total, float(length)], dtype=torch.float64)
        self.bar.update(self.t, "  ".join(x for x in (f"return {np.mean(self.recent):.1f}" if self.recent else "", self.scores.text) if x))
        if config.update_every == "episode":
            moment = bool(self.ended.all())
        else:
            moment = self.t // config.update_every != started // config.update_every
        ready = config.mixing == 1.0 or bool((self.ring.total > 0).all())
        if moment and ready and self.t > self.warmup:
            # a pure function of t; whole patterns only, because parts of one round differently when compiled
            goal = self.first + int(config.utd * (self.t - self.warmup) + 1e-9)
            goal -= goal % self.start.algorithm.traits.period
            self.goal = max(self.goal, goal)
            self.ended[:] = False

    def _actions(self) -> np.ndarray:
        """One action for each environment: [K, A] or [K]."""
        if self.start.parent is None and self.t < self.warmup:
            actions = self.learner.anything(self.envs, self.t)
            return actions.reshape(-1, *actions.shape[2:])
        spec = self.start.spec
        observations = self.rows.normal(self.play.current).reshape(self.many, self.envs, spec.observation_dim)
        for _ in range(2):
            actions = self.learner.act(observations, self.t, self.config.noise)
            good = np.isfinite(actions.reshape(self.many, -1)).all(1)
            if good.all():
                return actions.reshape(-1, *actions.shape[2:])
            for n in np.flatnonzero(~good & self.alive.numpy()).tolist():
                warn_diverged(self.replicas[n], self.lined, self.t, "its actions are not finite", CURE)
            self.alive &= torch.from_numpy(good)
            self.learner.freeze(self.alive)
        self._save()
        lost = ", ".join(str(self.replicas[n]) for n in np.flatnonzero(~good).tolist())
        raise UserError(f"the policy of {lost} gives actions that are not finite for observations of {self.play.name} at step {self.t:,}: "
                        "it had diverged before, or the observations are far outside the data's")  # fmt: skip

    # ---- learn

    def _learn(self) -> None:
        """The updates that are due, less those that a signal puts off."""
        self.learner.progress(min(1.0, self.t / self.steps))
        period = self.start.algorithm.traits.period
        while self.updates < self.goal and not self.signals.count:
            end = min(self.goal, self.updates + SLICE * period)
            end -= end % period
            self.learner.run(self.updates, end - self.updates)
            self.updates = end

    # ---- look

    def _line(self) -> None:
        """Write the means since the last line, and freeze every replica whose losses are no longer finite, or beyond all measure."""
        means: dict[str, list[float]] = {}
        if self.updates > self.line_updates:
            values = metric_means(self.learner.sums(), self.updates - self.line_updates)
            self.alive, diverged = sound(values, self.alive, self.loss_limit)
            for n, reason in diverged.items():
                warn_diverged(self.replicas[n], self.lined, self.t, reason, CURE)
            means = rows(values, self.alive)
        self.learner.settle(self.alive)
        count, total, length = self.episodes
        # NaN, null in the file, where no episode ended
        metrics = {"online/episodes": count, "online/length": length / count, "online/return": total / count}
        self.log.metrics(self.t, dict(sorted({**means, **{k: v.tolist() for k, v in metrics.items()}}.items())))
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
        files = self.replay.save()
        self.log.sync()
        tree = {"play": self.play.state(), "ended": torch.from_numpy(self.ended.copy()), "episodes": self.episodes}
        meta = {
            **{k: getattr(self, k) for k in ("lined", "scored", "line_updates", "updates", "goal", "first")},
            "files": files,
            "rows": self.ring.total.tolist(),
        }
        self.checkpoints.save(self.t, self.learner, self.alive, self.updates == self.line_updates, tree, meta)
        self.saved = self.t

    def _restore(self, saved: Saved) -> list[int]:
        """Go on from a checkpoint; the environments that did not come back to where they were."""
        self.t = self.saved = saved.step
        for name in ("lined", "scored", "line_updates", "updates", "goal", "first"):
            setattr(self, name, saved.meta[name])
        self.alive, self.episodes, self.ended = saved.alive, saved.tensors["episodes"], saved.tensors["ended"].numpy().copy()
        self.replay.load(saved.meta["files"], saved.meta["rows"])
        if self.t >= self.steps:  # nothing more is played
            return []
        turns, lost = self.play.resume(part(saved.tensors, "play"))
        for turn in turns:
            self.rows.take(turn)
        for k in lost:
            self.rows.drop(k)
        return lost


def _whole(count: int, envs: int) -> int:
    """Environment steps in whole steps of all environments of a replica."""
    return -(-count // envs) * envs
