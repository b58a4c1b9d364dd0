"""The loop of algorithms that learn from what their present policy played: an iteration of play, the passes over it, a
look; it stops and goes on between iterations.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from offrl.algorithm import Metrics, TrainState
from offrl.data.samplers.transitions import Batch
from offrl.errors import UserError, warn
from offrl.families.on_policy import ppo
from offrl.families.on_policy.algorithm import OnPolicy
from offrl.finetuning.moving import MovingStatistics
from offrl.finetuning.on_policy.learner import OnPolicyLearner, Passes, minibatches
from offrl.finetuning.on_policy.rollout import Observers, batch_of, play_on
from offrl.finetuning.play.turns import Turn
from offrl.finetuning.session import OnlineLoop
from offrl.finetuning.start import Start
from offrl.training.engine import Plan
from offrl.training.run.checkpoints import Saved, part

LARGEST = 5.0  # of rewards over their running standard deviation


class OnPolicyLoop(OnlineLoop):
    """An `OnPolicy` algorithm. A round is an iteration: `horizon` steps of each environment."""

    learner: OnPolicyLearner

    @staticmethod
    def lengths(start: Start) -> tuple[int, int]:
        c, envs = start.algorithm.config, start.config.envs or 1
        iteration = c.horizon * envs
        return iteration, math.ceil(start.config.steps / iteration) * c.passes * minibatches(c, envs)

    def _prepare(self, state: TrainState) -> None:
        start, c = self.start, self.start.algorithm.config
        assert isinstance(start.algorithm, OnPolicy)
        self.algorithm = start.algorithm
        parts = minibatches(c, self.envs)
        self.c, self.each = c, c.passes * parts  # updates of an iteration, at most
        self.play.end_on_success = self.algorithm.ends_on_success
        self.keys = state.key.to(self.device)
        self.observers = Observers(self.algorithm, state, self.envs, self.device)
        plan = Plan(start.algorithm, self.round // parts, self.mode, start.config.precision, self.many)
        self.learner = OnPolicyLearner(plan, Passes(self.keys, parts), self.replicas, self.device)
        self.batch: Batch | None = None  # what was played and not yet learnt of
        self.mark: dict[str, Any] | None = None  # what a checkpoint holds of the beginning of the iteration that runs
        self.moments = ppo.Moments.begin(self.many)  # of rewards
        self.statistics = None  # of what was observed, where they move
        if self.algorithm.statistics == "running":
            self.statistics = MovingStatistics(start.spec, self.many, self.device)
        # since the last line: episodes that reported it, those that had it
        self.successes = torch.zeros(2, self.many, dtype=torch.float64)

    def _title(self) -> str:
        parent, name = self.start.parent, self.start.algorithm.config.name
        title = f"{self.start.label} in {self.play.name}, from fresh parameters"
        if parent is not None:
            title = (
                f"{'a residual' if name == 'residual' else name} on {self.start.label} in {self.play.name}, on the "
                f"policies of step {parent['step']:,} of {parent['run']}"
            )
        return (
            f"{title}: {self.many} x {self.envs} environments, {self.steps:,} steps each in iterations of "
            f"{self.round:,}, rewards: {'success' if self.algorithm.learns_from_success else 'of the environment'}"
        )

    # ---- play

    def _step(self) -> None:
        """Play an iteration; what came before it is what a stop leaves."""
        self.mark = self._boundary()
        rows = play_on(
            self.play, self.observers, self.learner, self.keys, self.t, self.c.horizon, self._earn, self._check
        )
        if self.t == 0 and self.algorithm.statistics == "first":
            self._standardise(torch.cat([r.sights["observations"] for r in rows], 1))
        self.batch = batch_of(rows, self.learner)
        if self.t == 0 and not any(bool(r.rewards.any()) for r in rows):
            warn(f"nothing was earned in the first {self.round:,} steps: there is nothing to learn from yet")
        self.t += self.round
        self.goal += self.each
        self.mark = None

    def _standardise(self, observations: Tensor) -> None:
        """Fix the statistics of the observations, where the data gave none: those of the first iteration [N, R, O]."""
        spread = observations.std(1)
        self.learner.put("mean", observations.mean(1))
        self.learner.put("std", torch.where(spread > 1e-6, spread, 1.0))

    def _check(self, actions: np.ndarray, last: bool) -> bool:
        """Between two steps: stop where a signal came. Whether actions [N, E, A] are finite; if not, their replicas are
        frozen as they were before, and it is an error at the `last` try."""
        if self.signals.count:
            self._interrupt()
        good = np.isfinite(actions.reshape(self.many, -1)).all(1)
        if not good.all():
            if last:
                raise UserError(self._hopeless(good))
            self._drop(good)
        return bool(good.all())

    def _earn(self, turn: Turn, t: int) -> Tensor:
        """The rewards [N, E], that are learnt of, of a step that ended at environment step t; counts its episodes
        too.
        """
        for k, episode in zip(np.flatnonzero(turn.over).tolist(), turn.ended, strict=True):
            if episode.success is not None:
                self.successes[:, episode.replica] += torch.tensor(
                    [1.0, float(episode.success >= 1.0)], dtype=torch.float64
                )
            elif self.algorithm.learns_from_success and turn.valid[k]:
                raise UserError(
                    f"algo.rewards=success: {self.play.name} ended an episode without `success` or `is_success` in its "
                    "infos; algo.rewards=env learns from its rewards"
                )
        self._count(turn, t)
        self._report(t)
        values = np.nan_to_num(turn.successes >= 1.0) if self.algorithm.learns_from_success else turn.rewards
        rewards = torch.from_numpy(np.where(turn.valid, values, 0.0)).reshape(self.many, self.envs)
        if self.c.scale_rewards:
            self.moments = self.moments.add(rewards)
            rewards = self.moments.scaled(rewards, LARGEST)
        return rewards.float()

    # ---- learn

    def _learn(self) -> None:
        """The passes over what was played."""
        if self.batch is None:
            return
        number = self.updates // self.each
        self.learner.rates(number, self.steps // self.round)
        self.learner.learn(self.batch, number, self.updates, self.each)
        if self.statistics is not None:  # once nothing more is learnt of the iteration: play and passes see the same
            self.statistics.add(self.batch["observations"].cpu().numpy())
            self.learner.put("mean", self.statistics.mean)
            self.learner.put("std", self.statistics.std)
        self.updates, self.batch = self.goal, None

    # ---- look

    def _means(self, means: Metrics) -> Metrics:
        """Over the passes that were made."""
        share = means.pop("learning")
        passes = share * self.c.passes
        return {**{name: value / share for name, value in means.items()}, "online/passes": passes}

    def _played(self) -> dict[str, list[float]]:
        reported, had = self.successes
        rates = (had / reported).tolist()
        self.successes = torch.zeros_like(self.successes)
        return {"online/success": rates} if bool((reported > 0.0).any()) else {}

    # ---- checkpoints

    def _boundary(self) -> dict[str, Any]:
        """What a checkpoint holds between two iterations besides the learner; copies."""
        return {
            "play": self.play.state(),
            "episodes": self.episodes.clone(),
            "bases": self.observers.state(),
            "moments": dict(self.moments._asdict()),
            **({} if self.statistics is None else {"statistics": self.statistics.state()}),
            "successes": self.successes.clone(),
        }

    def _holds(self) -> tuple[dict[str, Any], dict[str, Any]]:
        return self.mark or self._boundary(), {}

    def _restore(self, saved: Saved) -> None:
        self.moments = ppo.Moments(**part(saved.tensors, "moments"))
        if self.statistics is not None:
            self.statistics.load(part(saved.tensors, "statistics"))
        self.successes = saved.tensors["successes"]

    def _resume_play(self, saved: Saved, turns: list[Turn], restarted: list[int]) -> None:
        self.observers.load(part(saved.tensors, "bases"))
        anew = torch.zeros(self.many * self.envs, dtype=torch.bool)
        anew[restarted] = True
        self.observers.go_on(self.observers.carries, anew.reshape(self.many, self.envs).to(self.device))
