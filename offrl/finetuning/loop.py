"""The loop of `offrl finetune`: play, learn, look; stop and go on at any step."""

from __future__ import annotations

import contextlib
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch

from offrl.data.fit import settled
from offrl.errors import UserError, unsaid
from offrl.evaluation.evaluator import Evaluator
from offrl.finetuning import record as place
from offrl.finetuning.environments import Play
from offrl.finetuning.learner import Learner
from offrl.finetuning.replay_buffer import MixedBatches, Replay, Ring
from offrl.finetuning.residual.loop import ResidualLoop
from offrl.finetuning.session import OnlineLoop, busy
from offrl.finetuning.start import Start
from offrl.finetuning.transitions import Rows, columns_for, returns_of
from offrl.settings.presets import finetune_settings
from offrl.system import backend
from offrl.system.devices import pick_device
from offrl.system.locks import exclusive
from offrl.training.engine import Plan, first_state
from offrl.training.execution import choose_mode
from offrl.training.run.checkpoints import Saved, part
from offrl.training.updates import loss_limit, warn_of_rates

SLICE = 16  # updates between two looks at signals


def finetune(start: Start, run_dir: Path) -> None:
    """Play and learn to `start.config.steps` environment steps of each replica, going on from the newest checkpoint in
    `run_dir`.

    Raises UserError for what does not fit, or where the environment fails (what was learnt is saved then); Interrupted
    after Ctrl-C or SIGTERM, when all is saved.
    """
    config = start.config
    device = pick_device(config.device)
    arithmetic = backend.configure(device, config.threads, config.precision)
    with contextlib.ExitStack() as stack:
        evaluator = stack.enter_context(Evaluator(start.task, config.eval))
        seeds = [r.seed for r in start.replicas]
        margin = 0.0 if start.data is None else start.data.action_margin
        play = stack.enter_context(
            Play(start.task, start.spec, seeds, config.envs or 1, config.seed, config.eval.max_steps, margin)
        )
        start.spec = start.algorithm.spec = settled(start.spec, play.seats[0].env)
        kind = ResidualLoop if config.mode == "residual" else TransitionLoop
        stack.enter_context(exclusive(run_dir))
        mode = choose_mode(config.compile, device, kind.updates_of(start), start.algorithm)
        if not start.algorithm.traits.vectorized:
            mode = "eager"
        mode = place.claim(run_dir, start, mode, device.type)
        if mode.startswith("compiled"):
            backend.cache_compiled()
        kind(start, run_dir, device, mode, evaluator, play, arithmetic).run()


class TransitionLoop(OnlineLoop):
    """Off-policy algorithms, which learn from single transitions of data and play. `t` counts environment steps of each
    replica.
    """

    COUNTERS = (*OnlineLoop.COUNTERS, "first")
    learner: Learner

    @staticmethod
    def updates_of(start: Start) -> int:
        """The updates of a run."""
        return math.ceil(start.config.steps * start.config.utd)

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
        super().__init__(start, run_dir, play, start.config.envs or 1, loss_limit(start.dataset))
        config, algorithm = start.config, start.algorithm
        self.ended = np.zeros(self.many, bool)  # an episode has ended since the last updates
        self.warmup = config.warmup or 0
        sampler = algorithm.sampler()
        image = start.spec.observation_mean is None and play.kind == np.uint8
        columns = columns_for(start.spec, sampler, torch.uint8 if image else torch.float32, algorithm.config.name)
        discount = start.data.discount_returns if start.data is not None else None
        discount = float(getattr(algorithm.config, "discount", 0.99)) if discount is None else discount
        self.rows = Rows(start.spec, columns, self.many, self.envs, returns_of(sampler, discount), sampler)
        capacity = min(config.capacity or self.steps, self.steps)
        self.ring = Ring(self.rows.columns, self.many, capacity, device)
        self.replay = Replay(run_dir, self.ring)
        state = first_state(algorithm, self.replicas) if start.state is None else start.state
        saved = self.checkpoints.load(state)
        self.first = self.goal = self.updates = self.line_updates = int(state.step[0])
        restarted: list[int] = []
        if saved is None:
            self.replay.discard(0)
            play.begin()
        else:
            restarted = self._return_to(saved)
        source = None
        if start.dataset is not None:
            data = start.dataset if start.dataset.mapped else start.dataset.to(device)
            source = sampler.prepare(data)
        self.batches = MixedBatches(self.ring, sampler, source, state.key, algorithm.config.batch_size, config.mixing)
        plan = Plan(algorithm, algorithm.config.batch_size, mode, config.precision, self.many)
        self.learner = Learner(plan, self.batches, self.replicas, device, start.fixed, start.anneal)
        self._open(evaluator, saved, state, busy(self.steps * config.utd))
        self.learner.begin(self.envs, {} if saved is None else part(saved.tensors, "memory"))
        self._introduce(saved is not None, mode, arithmetic, restarted)

    def _introduce(self, resumed: bool, mode: str, arithmetic: str, restarted: list[int]) -> None:
        """The first lines for the reader."""
        start, config, spec = self.start, self.config, self.start.spec
        came = "fresh parameters" if start.parent is None else f"step {start.parent['step']:,} of {start.parent['run']}"
        mixing = {None: "batches from the union of data and play", 0.0: "no data"}.get(
            config.mixing, f"{config.mixing} of each batch data"
        )
        say = self.bar.say
        say(
            f"{start.label} in {self.play.name} from {came}: {self.many} x {self.envs} environments, {self.steps:,} "
            f"steps each, {mixing}, {config.utd:g} updates a step"
        )
        say(f"{arithmetic}; step {mode}; {self.run_dir}")
        algo = start.algorithm.config
        changed = [f"{k}={v}" for k, v in (finetune_settings(algo.name) or {}).items() if hasattr(algo, k)]
        changed += [
            f"{k} from {a:g} to {b:g} times its value by {c:.0%} of the steps" for k, (a, b, c) in start.anneal.items()
        ]
        if changed:
            say(f"online: {', '.join(changed)}")
        if spec.reward_scale != 1.0 or spec.reward_shift != 0.0:
            say(
                f"learning from rewards as the data's were transformed: {spec.reward_scale:g} x reward + "
                f"{spec.reward_shift:g}"
            )
        warn_of_rates(algo, start.grid)
        for note in unsaid((*start.notes, *(start.dataset.notes if start.dataset is not None else ()))):
            say(note)
        self._continued(resumed, restarted)

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
        for replica, _, _ in turn.ended:
            self.ended[replica] = True
        self._count(turn)
        self._report(self.t)
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
        begun = np.array([not seat.actions for seat in self.play.seats]).reshape(self.many, self.envs)
        for _ in range(2):
            actions = self.learner.act(observations, self.t, self.config.noise, begun)
            good = np.isfinite(actions.reshape(self.many, -1)).all(1)
            if good.all():
                return actions.reshape(-1, *actions.shape[2:])
            self._drop(good)
        self._save()
        raise UserError(self._hopeless(good))

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

    # ---- checkpoints

    def _holds(self) -> tuple[dict[str, Any], dict[str, Any]]:
        tensors = {"ended": torch.from_numpy(self.ended.copy()), "memory": self.learner.memory()}
        return tensors, {"files": self.replay.save(), "rows": self.ring.total.tolist()}

    def _return_to(self, saved: Saved) -> list[int]:
        """Go on from a checkpoint; the environments that did not come back to where they were."""
        self._restore(saved)
        self.ended = saved.tensors["ended"].numpy().copy()
        self.replay.load(saved.meta["files"], saved.meta["rows"])
        if self.t >= self.steps:  # nothing more is played
            return []
        turns, restarted = self.play.resume(part(saved.tensors, "play"))
        for turn in turns:
            self.rows.take(turn)
        for k in restarted:
            self.rows.drop(k)
        return restarted
