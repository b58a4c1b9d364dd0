"""Verbs of a run that score its policies again."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from offrl.errors import UserError
from offrl.evaluation import frequency as frequencies
from offrl.evaluation.frequency import FrequencyScores, HeldPolicy
from offrl.evaluation.policy import TrainedPolicy
from offrl.evaluation.pool.host import evaluate_parallel
from offrl.evaluation.result import Evaluation
from offrl.evaluation.target_returns import AchievedReturns, data_range, spread_targets, sweep
from offrl.runs.run import SavedRun
from offrl.settings.evaluation import EvalConfig
from offrl.tasks.task import Task

LONGEST = 10_000  # steps between decisions


class ScoredRun(SavedRun):
    """A run directory whose policies are scored again, otherwise than in training too."""

    def evaluate(
        self,
        episodes: int = 10,
        seed: int = 0,
        env: str | Callable[[], Any] | None = None,
        parallel: int = 64,
        max_steps: int | None = None,
        acting: Mapping[str, Any] | None = None,
        device: str = "auto",
    ) -> Evaluation:
        """Score the final policies of all replicas again, in the order of `replicas`.

        env: see `task`. acting: see `TrainedPolicy.with_settings`. device: where policies act whose actions take long,
        such as language models. Raises UserError where there is no environment, or it does not fit the data.
        """
        policies = [self.load_policy(r, device) for r in self.replicas]
        policies = [p.with_settings(acting) for p in policies] if acting else policies
        return self._score(
            policies, env, EvalConfig(episodes=episodes, seed=seed, parallel=parallel, max_steps=max_steps)
        )

    def evaluate_target_returns(
        self,
        target_returns: Sequence[float] | None = None,
        episodes: int = 10,
        seed: int = 0,
        env: str | Callable[[], Any] | None = None,
        parallel: int = 64,
        max_steps: int | None = None,
    ) -> AchievedReturns:
        """Score return-conditioned policies with several target returns, in the units of the recorded rewards.

        target_returns: None spreads them over the data's. The other arguments as in `evaluate`. Raises UserError for
        policies that are not conditioned on a return.
        """
        config = EvalConfig(episodes=episodes, seed=seed, parallel=parallel, max_steps=max_steps)
        policies = [self.load_policy(r) for r in self.replicas]
        low, high = data_range(policies[0].algorithm.config, self.record["data"])
        targets = spread_targets(low, high) if target_returns is None else [float(t) for t in target_returns]
        return sweep(policies, targets, self.replicas, lambda conditioned: self._score(conditioned, env, config))

    def evaluate_frequency(
        self,
        frequency: Sequence[int] = (1, 2, 4, 8),
        episodes: int = 10,
        seed: int = 0,
        env: str | Callable[[], Any] | None = None,
        parallel: int = 64,
        max_steps: int | None = None,
        acting: Mapping[str, Any] | None = None,
    ) -> FrequencyScores:
        """Score the policies where they may decide only once in D steps of the environment, for each D of `frequency`,
        ascending.

        Policies that draw several actions at a time play D of them; of the others, and where D is more than they draw,
        the last action is held. The start states are the same for all D. The other arguments as in `evaluate`. Raises
        UserError for policies of texts."""
        steps = checked(frequency)
        config = EvalConfig(episodes=episodes, seed=seed, parallel=parallel, max_steps=max_steps)
        policies = [self.load_policy(r) for r in self.replicas]
        if acting:
            if acting.get("execute") and policies[0].actor.planned(2) > 1:
                raise UserError(
                    "frequency= decides how many actions are played of each decision: leave acting.execute out"
                )
            policies = [p.with_settings(acting) for p in policies]
        return frequencies.sweep(policies, steps, self.replicas, lambda held: self._score(held, env, config))

    def _score(
        self, policies: Sequence[TrainedPolicy | HeldPolicy], env: str | Callable[[], Any] | None, config: EvalConfig
    ) -> Evaluation:
        on_gpu = any(
            isinstance(p, TrainedPolicy) and p.device.type != "cpu" for p in policies
        )  # other processes would act on the CPU
        return evaluate_parallel(
            policies, [p.seed for p in policies], self._task(env), config, workers=0 if on_gpu else None
        )

    def _task(self, env: str | Callable[[], Any] | None, goals: bool | None = None) -> Task:
        task = self.task(env, goals)
        if task is None:
            own = self.spec.task
            note = (
                own.note
                if own is not None and own.env_id is None and own.note
                else f"name one: offrl evaluate {self.dir} env=ID"
            )
            raise UserError(f"{self.dir}: there is no environment to score in; {note[0].lower()}{note[1:]}")
        return task


def checked(frequency: Sequence[int]) -> list[int]:
    """The numbers of steps between decisions. Raises UserError unless they are ascending whole numbers from 1 on."""
    steps = list(frequency) if isinstance(frequency, Sequence) and not isinstance(frequency, str) else []
    if not steps or not all(isinstance(d, int) and not isinstance(d, bool) and 1 <= d <= LONGEST for d in steps):
        raise UserError(
            f"frequency={frequency}: steps of the environment between decisions are whole numbers from 1 to "
            f"{LONGEST:,}: [1,2,4,8]"
        )
    if sorted(set(steps)) != steps:
        raise UserError(
            f"frequency={steps}: the numbers of steps between decisions ascend, each once: {sorted(set(steps))}"
        )
    return steps
