"""The loop of algorithms that learn from a replay buffer of single transitions, or windows of them, and from data: a
step, its updates, a look; it stops and goes on at any step.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

from offrl.algorithm import Metrics, TrainState
from offrl.errors import UserError, warn
from offrl.evaluation.evaluator import Evaluator
from offrl.finetuning.learner import Learner
from offrl.finetuning.moving import Moving
from offrl.finetuning.play.turns import Turn
from offrl.finetuning.replay.making import make_batches, make_replays
from offrl.finetuning.replay.ring import Column
from offrl.finetuning.session import OnlineLoop
from offrl.finetuning.start import Start, online_lines
from offrl.finetuning.transitions import Rows, columns_for, normal, returns_of
from offrl.finetuning.windows import INTERVENTION
from offrl.system import files
from offrl.training.engine import Plan
from offrl.training.run.checkpoints import Saved, part
from offrl.training.updates import warn_saturated

SLICE = 16  # updates between two looks at signals


class TransitionLoop(OnlineLoop):
    """Off-policy algorithms, which learn from single transitions of data and play. `t` counts environment steps of each
    replica.
    """

    COUNTERS = (*OnlineLoop.COUNTERS, "first")
    learner: Learner

    @staticmethod
    def lengths(start: Start) -> tuple[int, int]:
        return start.config.envs or 1, math.ceil(start.config.steps * (start.config.utd or 1.0))

    def _prepare(self, state: TrainState) -> None:
        start, config, algorithm = self.start, self.config, self.start.algorithm
        self.saturated = False  # targets beyond the critics' range were warned of
        self.ended = np.zeros(self.many, bool)  # an episode has ended since the last updates
        self.warmup = config.warmup or 0
        sampler = algorithm.sampler()
        columns = self._columns(sampler)
        discount = start.data.discount_returns if start.data is not None else None
        discount = float(getattr(algorithm.config, "discount", 0.99)) if discount is None else discount
        self.moving = Moving(start, self.envs, self.device)
        following = returns_of(sampler, discount)
        self.rows = Rows(start.spec, columns, self.many, self.envs, following, sampler, self.moving.returns)
        self.replays = make_replays(start, self.rows.columns, self.steps, self.run_dir, self.device)
        self.intervened = torch.zeros(self.many, dtype=torch.float64)  # steps since the last line
        self.first = self.goal = self.updates = self.line_updates = int(state.step[0])
        self.batches = make_batches(start, self.replays, state.key, self.moving.of_batch)
        plan = Plan(algorithm, algorithm.config.batch_size, self.mode, config.precision, self.many)
        self.learner = Learner(plan, self.batches, self.replicas, self.device, start.fixed, start.anneal)

    def _columns(self, sampler: Any) -> dict[str, Column]:
        """The columns of a row of play."""
        return columns_for(self.start.spec, sampler, self.start.algorithm.config.name)

    def _shown(self, observations: np.ndarray) -> np.ndarray:
        """Observations [K, ...] of play as the policies see them."""
        return observations

    def _told(self, turn: Turn) -> Turn:
        """What came of a step as rows hold it."""
        return turn

    def _open(self, evaluator: Evaluator, saved: Saved | None, state: TrainState) -> None:
        super()._open(evaluator, saved, state)
        if saved is None:
            for replay in self.replays:
                replay.discard(0)
        self.learner.begin(self.envs, {} if saved is None else part(saved.tensors, "memory"))

    def _title(self) -> str:
        start, config = self.start, self.config
        came = "fresh parameters" if start.parent is None else f"step {start.parent['step']:,} of {start.parent['run']}"
        batch = "real rows" if hasattr(start.algorithm.config, "real_share") else "batches"
        union = "balanced between" if config.replay == "balanced" else "from the union of"
        without = "no data" if start.data is None else f"no row of {start.described['name']} (mixing=0)"
        mixing = {None: f"{batch} {union} data and play", 0.0: without}.get(
            config.mixing, f"{config.mixing} of {batch.replace('batches', 'each batch')} data"
        )
        return (
            f"{start.label} in {self.play.name} from {came}: {self.many} x {self.envs} environments, {self.steps:,} "
            f"steps each, {mixing}, {config.utd:g} updates a step"
            + (f" after the first {self.warmup:,} steps" if self.warmup else "")
        )

    def _online(self) -> list[str]:
        return online_lines(self.start, self.play.snapshots, self.steps)

    def run(self) -> None:
        super().run()
        if self.updates == self.first and self.t >= self.steps:
            warn(
                f"{self.start.label} has learnt nothing: no update was due in {self.t:,} steps, of which the first "
                f"{self.warmup:,} only play: more steps=, a larger utd= or a smaller warmup=; of windows of several "
                "steps, episodes that are longer than these"
            )

    # ---- play

    def _step(self) -> None:
        """One step of every environment; sets how many updates are then due."""
        config, started = self.config, self.t
        turn = self._told(self.play.step(self._actions()))
        self.moving.add(turn)
        owner, rows = self.rows.take(turn, self.learner.columns())
        self.replays[0].add(owner, rows)
        for replay in self.replays[1:]:
            flags = rows[INTERVENTION].astype(bool)
            replay.add(owner[flags], {name: column[flags] for name, column in rows.items()})
        self.intervened += torch.from_numpy(turn.interventions.reshape(self.many, -1).sum(1))
        self.t += self.envs
        for episode in turn.ended:
            self.ended[episode.replica] = True
        self._count(turn, self.t)
        self._report(self.t)
        if config.update_every == "episode":
            moment = bool(self.ended.all())
        else:
            moment = self.t // config.update_every != started // config.update_every
        ready = config.mixing == 1.0 or self.batches.ready
        if moment and ready and self.t > self.warmup:
            # a pure function of t; whole patterns only, because parts of one round differently when compiled
            goal = self.first + int((config.utd or 1.0) * (self.t - self.warmup) + 1e-9)
            goal -= goal % self.start.algorithm.traits.period
            self.goal = max(self.goal, goal)
            self.ended[:] = False

    def _played(self) -> dict[str, list[float]]:
        of_batches = self.batches.means(self.updates - self.line_updates)
        if self.play.interventions is None:
            return of_batches
        share = self.intervened / (self.t - self.lined)
        self.intervened = torch.zeros_like(self.intervened)
        return of_batches | {"online/interventions": share.tolist()}

    def _actions(self) -> np.ndarray:
        """One action for each environment: [K, A] or [K]."""
        if self.start.parent is None and self.t < self.warmup:
            actions = self.learner.anything(self.envs, self.t)
            return actions.reshape(-1, *actions.shape[2:])
        visible = self.rows.observed(self._shown(self.play.current))
        observations = pytree.tree_map(lambda x: x.reshape(self.many, self.envs, *x.shape[1:]), visible)
        if (statistics := self.moving.statistics) is not None:
            observations = statistics.normalised(torch.from_numpy(observations).float().to(self.device))
        begun = np.array([not seat.actions for seat in self.play.seats]).reshape(self.many, self.envs)
        goals = None
        if self.play.goal_dim:
            goals = normal(self.start.spec, self.play.goals).reshape(self.many, self.envs, -1)
        for _ in range(2):
            actions = self.learner.act(observations, self.t, self.config.noise, begun, goals)
            good = np.isfinite(actions.reshape(self.many, -1)).all(1)
            if good.all():
                return actions.reshape(-1, *actions.shape[2:])
            self._drop(good)
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

    # ---- look

    def _means(self, means: Metrics) -> Metrics:
        limits = getattr(self.start.algorithm.config, "value_range", None)
        self.saturated = self.saturated or (limits != [] and warn_saturated(means, limits, self.replicas))
        return means

    def _policies(self) -> list[Any]:
        if (statistics := self.moving.statistics) is None:
            return super()._policies()
        return statistics.policies(self.start.algorithm, self.learner.acting(), self.replicas)

    # ---- checkpoints

    def _holds(self) -> tuple[dict[str, Any], dict[str, Any]]:
        tensors = {"ended": torch.from_numpy(self.ended.copy()), "memory": self.learner.memory(self.t)}
        tensors["batches"] = self.batches.state()
        return tensors | self.moving.state() | {"intervened": self.intervened.clone()}, {
            "files": [replay.save() for replay in self.replays],
            "rows": [replay.ring.total.tolist() for replay in self.replays],
        }

    def _restore(self, saved: Saved) -> None:
        self.ended, self.intervened = saved.tensors["ended"].numpy().copy(), saved.tensors["intervened"]
        tree = files.unflatten({"batches": self.batches.state()}, saved.tensors, saved.where)
        self.batches.load(tree["batches"])
        self.moving.load(saved.tensors)
        for replay, count, rows in zip(self.replays, saved.meta["files"], saved.meta["rows"], strict=True):
            replay.load(count, rows)

    def _resume_play(self, saved: Saved, turns: list[Turn], restarted: list[int]) -> None:
        for turn in turns:
            self.rows.take(self._told(turn))
        for k in restarted:
            self.rows.drop(k)
