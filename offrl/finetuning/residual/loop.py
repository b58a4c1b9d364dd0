"""The loop of `offrl finetune mode=residual`: an iteration of play, the passes over it, a look; it stops and goes on
between iterations.
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
from offrl.families.on_policy.residual import Residual
from offrl.finetuning.play.turns import Turn
from offrl.finetuning.residual.learner import Passes, ResidualLearner, minibatches
from offrl.finetuning.residual.rollout import Bases, batch_of, play_on
from offrl.finetuning.session import OnlineLoop
from offrl.finetuning.start import Start
from offrl.training.engine import Plan
from offrl.training.run.checkpoints import Saved, part

LARGEST = 5.0  # of rewards over their running standard deviation


class ResidualLoop(OnlineLoop):
    """PPO on a residual over frozen policies. A round is an iteration: `horizon` steps of each environment."""

    learner: ResidualLearner

    @staticmethod
    def lengths(start: Start) -> tuple[int, int]:
        c, envs = start.algorithm.config, start.config.envs or 1
        iteration = c.horizon * envs
        return iteration, math.ceil(start.config.steps / iteration) * c.passes * minibatches(c, envs)

    def _prepare(self, state: TrainState) -> None:
        start, c = self.start, self.start.algorithm.config
        assert isinstance(start.algorithm, Residual)
        parts = minibatches(c, self.envs)
        self.c, self.each = c, c.passes * parts  # updates of an iteration, at most
        self.play.end_on_success = c.end_on_success and c.rewards == "success"
        self.keys = state.key.to(self.device)
        self.bases = Bases(start.algorithm, state, self.envs, self.device)
        plan = Plan(start.algorithm, self.round // parts, self.mode, start.config.precision, self.many)
        self.learner = ResidualLearner(plan, Passes(self.keys, parts), self.replicas, self.device)
        self.batch: Batch | None = None  # what was played and not yet learnt of
        self.mark: dict[str, Any] | None = None  # what a checkpoint holds of the beginning of the iteration that runs
        self.moments = ppo.Moments.begin(self.many)  # of rewards
        # since the last line: episodes that reported it, those that had it
        self.successes = torch.zeros(2, self.many, dtype=torch.float64)

    def _title(self) -> str:
        parent = self.start.parent or {}
        return (
            f"a residual on {self.start.label} in {self.play.name}, on the policies of step {parent['step']:,} of "
            f"{parent['run']}: {self.many} x {self.envs} environments, {self.steps:,} steps each in iterations of "
            f"{self.round:,}, rewards: {'success' if self.c.rewards == 'success' else 'of the environment'}"
        )

    # ---- play

    def _step(self) -> None:
        """Play an iteration; what came before it is what a stop leaves."""
        self.mark = self._boundary()
        rows = play_on(self.play, self.bases, self.learner, self.keys, self.t, self.c.horizon, self._earn, self._check)
        if self.t == 0 and self.start.spec.observation_mean is None:
            self._standardise(torch.cat([r.observations for r in rows], 1))
        self.batch = batch_of(rows, self.learner)
        if self.t == 0 and not any(bool(r.rewards.any()) for r in rows):
            warn(f"nothing was earned in the first {self.round:,} steps: there is nothing to learn from yet")
        self.t += self.round
        self.goal += self.each
        self.mark = None

    def _standardise(self, observations: Tensor) -> None:
        """Fix the statistics of the residuals' inputs, where the data gave none: those of the first iteration [N, R,
        O], in which the residual's mean is 0 whatever it sees."""
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
            elif self.c.rewards == "success" and turn.valid[k]:
                raise UserError(
                    f"algo.rewards=success: {self.play.name} ended an episode without `success` or `is_success` in its "
                    "infos; algo.rewards=env learns from its rewards"
                )
        self._count(turn, t)
        self._report(t)
        values = np.nan_to_num(turn.successes >= 1.0) if self.c.rewards == "success" else turn.rewards
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
        c, iterations = self.c, self.steps // self.round
        number, factors = self.updates // self.each, (1.0, 1.0)
        if c.schedule == "cosine":
            factors = ppo.rate_factor(number, iterations, c.warmup_iterations), ppo.rate_factor(number, iterations)
        elif number < c.warmup_iterations:
            factors = number / c.warmup_iterations, 1.0
        self.learner.rates(*factors)
        self.learner.learn(self.batch, self.updates, self.each)
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
            "bases": self.bases.state(),
            "moments": dict(self.moments._asdict()),
            "successes": self.successes.clone(),
        }

    def _holds(self) -> tuple[dict[str, Any], dict[str, Any]]:
        return self.mark or self._boundary(), {}

    def _restore(self, saved: Saved) -> None:
        self.moments = ppo.Moments(**part(saved.tensors, "moments"))
        self.successes = saved.tensors["successes"]

    def _resume_play(self, saved: Saved, turns: list[Turn], restarted: list[int]) -> None:
        self.bases.load(part(saved.tensors, "bases"))
        anew = torch.zeros(self.many * self.envs, dtype=torch.bool)
        anew[restarted] = True
        self.bases.go_on(self.bases.carries, anew.reshape(self.many, self.envs).to(self.device))
