"""The environments that the replicas learn in: one action for each, what came of it, and how to come back to the middle
of an episode.

Where a run was stopped inside an episode it is played again from its start, with the actions that were recorded: an
environment that is decided by its seed is then where it was.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Sequence

import numpy as np
import torch

from offrl.data.dataset import DataSpec
from offrl.data.fit import check_fit
from offrl.errors import UserError, warn
from offrl.evaluation.arrays import finite_rows
from offrl.evaluation.steppers import Steps
from offrl.finetuning.play.actions import ActionScale
from offrl.finetuning.play.backends import Beginning, EnvFailed
from offrl.finetuning.play.choice import chosen
from offrl.finetuning.play.interventions import Interventions
from offrl.finetuning.play.snapshots import TASK, Snapshots
from offrl.finetuning.play.success import SuccessRewards
from offrl.finetuning.play.turns import Ended, Seat, Turn, blank, check_goal, first_row, running, start_seed
from offrl.tasks.environments import action_kind, episode_limit, flattener, make_env, to_space
from offrl.tasks.episodes import ENDLESS
from offrl.tasks.task import Task


class Play:
    """N x E environments. Use as a context manager, or call `close`."""

    def __init__(
        self,
        task: Task,
        spec: DataSpec,
        seeds: Sequence[int],
        envs: int,
        seed: int,
        max_steps: int | None,
        margin: float = 0.0,
        interventions: Interventions | None = None,
        backend: str = "sequential",
        device: str = "auto",
    ) -> None:
        """seeds: of the replicas. seed: of the start states. margin: actions stay in +-(1 - margin), as the data's.
        interventions: who may act in the policies' place. backend: who steps the environments, "sequential",
        "processes" or "threads", of which the same comes, or "warp", in float32. device: the setting; of "warp".

        Raises UserError where the environment cannot be made or does not fit `spec`.
        """
        self.task, self.spec, self.seed, self.scale = task, spec, seed, ActionScale(spec, margin)
        self.end_on_success = False  # whether a success ends its episode
        self.goal_dim = 0  # numbers of the goals that policies act towards; 0: they do not
        self.t = 0  # environment steps of each replica
        self.envs = envs
        self.snapshots: Snapshots | None = None  # in which episodes begin
        self.success: SuccessRewards | None = None  # whose rewards stand in place of the environment's
        self.interventions = interventions
        self.name = task.env_id or task.name
        self._stack = contextlib.ExitStack()
        self.env = make_env(task)  # to be looked at; it plays no episode
        self._stack.callback(self.env.close)
        try:
            check_fit(spec, task, self.env)
            self.flatten, self.shape, kind = flattener(self.env, task.observation_keys)
            self.discrete, self.choices = action_kind(self.env)
            self.kind = np.dtype(kind)
            limit = episode_limit(self.env, task, max_steps)
            self.limit = ENDLESS if limit is None else limit
            if limit is None:
                warn(
                    f"nothing limits the episodes of {self.name}: they are cut after {ENDLESS:,} steps; set max_steps="
                )
            self.seats = [Seat(n, s, e) for n, s in enumerate(seeds) for e in range(envs)]
            self.backend = chosen(backend, task, len(self.seats), device)
            self._stack.callback(self.backend.close)
        except BaseException:
            self.close()
            raise
        self.current = np.zeros((len(self.seats), *self.shape), self.kind)
        self.goals = np.zeros((len(self.seats), int(np.prod(self.shape))), np.float32)  # of the running episodes

    def __enter__(self) -> Play:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the environments."""
        self._stack.close()

    def begin_in(self, snapshots: Snapshots) -> None:
        """Let episodes begin in states of the data. Raises UserError where they are not the environment's."""
        snapshots.check(self.env, self.flatten, self.name)
        self.snapshots = snapshots

    def begin(self) -> None:
        """The first episode of every environment."""
        self._begin(range(len(self.seats)))

    def step(self, actions: np.ndarray) -> Turn:
        """One step of every environment, and a new episode where one is over. actions [K, A] in [-1, 1], finite, or [K]
        choices.

        Raises UserError where an environment fails, or gives what is not finite; nothing of the step counts then.
        """
        indices = range(len(self.seats))
        stored = self.scale.stored(actions)
        intervened = self._intervene(stored)
        rows, steps = self._advance(indices, stored)
        rewards, terminated, over = steps.rewards, steps.terminated, steps.over
        if self.end_on_success:
            terminated |= steps.successes >= 1.0
        valid = np.ones(len(indices), bool)
        for k, text in steps.unstable.items():
            seat = self.seats[k]
            warn(
                f"the physics of {self.name} became unstable {seat.where(len(seat.actions))}: {text}; the episode is "
                "cut before that step"
            )
            valid[k], over[k], terminated[k] = False, True, False
        good = np.isfinite(rewards) & finite_rows(rows) | ~valid
        if not good.all():
            seat = self.seats[int(np.flatnonzero(~good)[0])]
            raise UserError(
                f"{self.name} gave a reward or observation that is not finite {seat.where(len(seat.actions))}"
            )
        before, ended = self.current.copy(), []
        self.current[:] = rows
        self.t += self.envs
        for k, seat in enumerate(self.seats):
            if valid[k]:
                seat.actions.append(stored[k])
                seat.interventions.append(bool(intervened[k]))
                seat.total += float(rewards[k])
                seat.success = float(np.fmax(seat.success, steps.successes[k]))
            over[k] |= terminated[k] or len(seat.actions) >= self._limit(seat)
            if over[k]:
                success = None if np.isnan(seat.success) else seat.success
                ended.append(Ended(seat.replica, seat.total, len(seat.actions), seat.start, success))
        self._go_on(before, valid, over)
        amounts = steps.successes, steps.costs
        return Turn(before, stored, rewards, rows, terminated, over, valid, ended, *amounts, intervened)

    # ---- in the middle of an episode

    def state(self) -> dict[str, torch.Tensor]:
        """The state that `resume` needs: which episodes run, their actions so far, and the last observations."""
        empty = np.zeros((0,) if self.discrete else (0, self.choices), np.int64 if self.discrete else np.float32)
        current = torch.from_numpy(self.current.copy().view(np.uint8).reshape(len(self.seats), -1))
        return running(self.seats, empty) | {"current": current} | self.backend.save()

    def resume(self, state: dict[str, torch.Tensor]) -> tuple[list[Turn], list[int]]:
        """Play the running episodes again: (what came of each step, of all environments as `step` gives it but for rows
        whose episode was shorter, which are not `valid`; the environments that did not come back to where they were,
        and begin a new episode). `t` is to be that of the state."""
        lengths, starts = state["length"].tolist(), state.get("start", torch.full_like(state["length"], TASK))
        ends = np.cumsum(lengths)[:-1]
        parts = np.split(state["actions"].numpy(), ends)
        nobody = torch.zeros(sum(lengths), dtype=torch.bool)
        flags = np.split(state.get("interventions", nobody).numpy(), ends)
        for k, (seat, episode) in enumerate(zip(self.seats, state["episode"].tolist(), strict=True)):
            seat.episode, seat.start = episode, int(starts[k])
        self._reset(range(len(self.seats)))
        self.backend.load(state, ends)
        turns, restarted = [], set()
        for t in range(max(lengths)):
            at = [k for k, n in enumerate(lengths) if n > t and k not in restarted]
            turn = blank(self.current, state["actions"].numpy())
            turns.append(turn)
            if not at:
                continue
            rows, steps = self._advance(at, np.stack([parts[k][t] for k in at]))
            for i, k in enumerate(at):
                seat = self.seats[k]
                if i in steps.unstable or steps.over[i] or not finite_rows(rows[i : i + 1])[0]:
                    restarted.add(k)
                    continue
                seat.actions.append(parts[k][t])
                seat.interventions.append(bool(flags[k][t]))
                seat.total += float(steps.rewards[i])
                seat.success = float(np.fmax(seat.success, steps.successes[i]))
                turn.observations[k], turn.next_observations[k] = self.current[k], rows[i]
                turn.actions[k], turn.rewards[k], turn.valid[k] = parts[k][t], steps.rewards[i], True
                turn.interventions[k], turn.costs[k] = flags[k][t], steps.costs[i]
                self.current[k] = rows[i]
        saved = state["current"].numpy()
        restarted |= {k for k in range(len(self.seats)) if self.current[k].tobytes() != saved[k].tobytes()}
        self._begin(sorted(restarted))
        return turns, sorted(restarted)

    # ---- some environments

    def _limit(self, seat: Seat) -> int:
        return self.limit if self.snapshots is None or seat.start == TASK else min(self.limit, self.snapshots.limit)

    def _go_on(self, before: np.ndarray, valid: np.ndarray, over: np.ndarray) -> None:
        """Begin new episodes behind a step where one is over. Where one cannot begin, UserError is raised, and the step
        is taken back, so that what is saved then is before it. before: `current` at the step.
        """
        past = {k: copy.copy(self.seats[k]) for k in np.flatnonzero(over).tolist()}
        try:
            if past:
                self._begin(list(past))
        except UserError:
            self.t -= self.envs
            self.current[:] = before
            for k in past:
                self.seats[k] = past[k]
            for k in np.flatnonzero(valid).tolist():
                self.seats[k].actions.pop()
                self.seats[k].interventions.pop()
            raise

    def _begin(self, at: Sequence[int]) -> None:
        """The next episodes of the environments `at`."""
        for k in at:
            seat = self.seats[k]
            seat.episode += 1
            if self.snapshots is not None:
                seat.start = self.snapshots.draw(seat.seed, seat.number, seat.episode, self.t)
        self._reset(at)

    def _reset(self, at: Sequence[int]) -> None:
        """Begin the episodes of the seats of the environments `at`."""
        try:
            answers = self.backend.reset([self._beginning(k, self.seats[k]) for k in at])
        except EnvFailed as failure:
            where = self.seats[failure.k].where()
            raise UserError(f"{self.name} failed on reset {where}: {failure.text}") from failure.__cause__
        for k, (row, goal) in zip(at, answers, strict=True):
            seat, name = self.seats[k], f"{self.name}: reset"
            seat.total, seat.success, seat.actions, seat.interventions = 0.0, np.nan, [], []
            self.current[k] = first_row(row, self.shape, name, seat.where())
            if self.goal_dim:
                self.goals[k] = check_goal(goal, self.goal_dim, name, seat.where())

    def _beginning(self, k: int, seat: Seat) -> Beginning:
        starts = self.task.starts if self.goal_dim else ()  # tasks within the task, taken in turn as in evaluation
        enter = None
        if self.snapshots is not None and seat.start != TASK:
            enter = self.snapshots.entry(seat.start, self.name)
        return Beginning(
            k,
            start_seed(self.seed, seat.seed, seat.number, seat.episode),
            dict(starts[seat.episode % len(starts)]) if starts else None,
            enter,
            bool(self.goal_dim),
        )

    def _intervene(self, stored: np.ndarray) -> np.ndarray:
        """Put the actions of `interventions` in place of the policies' in `stored`; [K] bool: where."""
        intervened = np.zeros(len(stored), bool)
        if self.interventions is not None:
            for k, (seat, value) in enumerate(zip(self.seats, self.scale.values(stored), strict=True)):
                action = self.interventions(self.current[k], value, seat.where(len(seat.actions)))
                if action is not None:
                    stored[k], intervened[k] = self.scale.of_values(action), True
        return intervened

    def _advance(self, at: Sequence[int], stored: np.ndarray) -> tuple[np.ndarray, Steps]:
        """One step of the environments `at`: their observations [K, *O], and all else that they answered."""
        sent = to_space(self.env.action_space, self.scale.values(stored))
        try:
            rows, steps = self.backend.step(at, sent.tolist() if self.discrete else sent)
        except EnvFailed as failure:
            seat = self.seats[failure.k]
            raise UserError(
                f"{self.name} failed {seat.where(len(seat.actions))}: {failure.text}"
            ) from failure.__cause__
        if self.success:
            self.success.judge(rows, steps)
        return rows, steps
