"""Transitions with goals: where a goal comes from, and when it counts as reached (OGBench, arXiv 2410.20092). Pure,
like all samplers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from offrl import rng
from offrl.data.dataset import Dataset
from offrl.data.samplers.stitches import Stitches, stitched, stitches
from offrl.data.samplers.tables import Streamed, Table, table_of
from offrl.data.samplers.transitions import (
    SPAN,
    Batch,
    Episodes,
    by_weight,
    check_order,
    column_of,
    draw_rows,
    is_single,
    last_of_episodes,
)
from offrl.errors import UserError

# columns of a batch
# for values: [B, G]; [B] float, 1 where the goal is the row's own state
VALUE_GOALS, SUCCESSES = ("value_goals", "successes")
ACTOR_GOALS = "actor_goals"
WINDOW_STATES = "window_states"  # with n_step: the observations after a window of the values' goals, of SPAN steps [B]
LOW_GOALS, HIGH_GOALS, HIGH_TARGETS, HIGH_TARGET_STATES = (
    "low_goals",
    "high_goals",
    "high_targets",
    "high_target_states",
)
OPTION_GOALS, OPTION_STATES, OPTION_SUCCESSES = "option_goals", "option_states", "option_successes"

# of windows of two levels
VALUE_SUBGOALS = "value_subgoals"  # where a window of the values' goals ends, as a goal [B, G]
KNOWN = "known"  # [B] float: 0 where nothing follows the row in its trajectory, and the goal is elsewhere
LOW_VALUE_GOALS, LOW_SUCCESSES = "low_value_goals", "low_successes"

ACHIEVED = "achieved_goals"


@dataclass(frozen=True)
class Mix:
    """The mixture of goals: shares of the row's own state, of a later one of its trajectory, of any state; they add up
    to 1.

    geometric: a later state is Geometric(1 - discount) steps ahead, the last one where the trajectory ends before; else
    it is uniform over the rest of the trajectory.
    """

    current: float
    trajectory: float
    random: float
    geometric: bool = True
    discount: float = 0.99

    def check(self, setting: str) -> None:
        """Raises UserError, naming the settings `setting`_current, ..., for shares that are no distribution."""
        shares = {"current": self.current, "trajectory": self.trajectory, "random": self.random}
        if not math.isclose(sum(shares.values()), 1.0, abs_tol=1e-6):
            text = " + ".join(f"algo.{setting}_{k}={v:g}" for k, v in shares.items())
            raise UserError(f"{text} is {sum(shares.values()):g}; the shares of goals must add up to 1")
        if self.geometric and not 0.0 <= self.discount < 1.0:
            raise UserError(
                f"algo.discount={self.discount:g}: goals at geometric distances need a discount factor below 1"
            )


@dataclass(frozen=True)
class DrawnGoals:
    """Goals [B] that were drawn: their rows, and where each comes from."""

    rows: Tensor
    current: Tensor  # bool
    ahead: Tensor  # bool: of the row's trajectory, and not the current one
    waypoints: Tensor  # the rows before the current ones took some of their places
    waypoint_ahead: Tensor  # bool: of these, the ones of the row's trajectory


@dataclass(frozen=True)
class GoalRows:
    """The source of GoalSampler. Rows are numbered among the R that hold a transition, which stand one after
    another.
    """

    count: int
    last: Tensor  # [R] int64: the last row of each row's trajectory
    goals: Tensor | Streamed  # [*, G] the column that goals are taken from, and
    states: Tensor | Streamed  # [*, O] the observations, of all rows of the data
    rows: Tensor | None  # [R] the indices of the rows in these; None: all
    table: Table  # of the transitions
    weighted: Episodes | None = None  # where some episodes are drawn more often than others
    stitches: Stitches | None = None  # where goals are also of other trajectories

    def at(self, rows: Tensor) -> Tensor:
        """The indices of `rows` in the data."""
        return rows if self.rows is None else self.rows[rows]

    def draw(self, key: Tensor, count: int) -> Tensor:
        """Rows [count]: uniform, or in proportion to the weights of their episodes."""
        return draw_rows(key, count, self.count, self.weighted)

    def goal(self, rows: Tensor) -> Any:
        """The goals that rows [B] reach: [B, G] float32, or the streams' dictionary."""
        at = self.at(rows)
        if isinstance(self.goals, Streamed):
            return self.goals.column("observations", at)
        return self.goals[at].flatten(1).float()

    def state(self, rows: Tensor) -> Any:
        """The observations of rows [B]."""
        at = self.at(rows)
        return self.states.column("observations", at) if isinstance(self.states, Streamed) else self.states[at]


def ahead(key: Tensor, rows: Tensor, last: Tensor, mix: Mix) -> Tensor:
    """Rows after `rows` [B] in their trajectories, of which `last` [B] are the last ones; a last row stays where it
    is.
    """
    if mix.geometric:
        u = 1.0 - rng.uniform(key, tuple(rows.shape))  # in (0, 1]
        offset = torch.zeros_like(rows)
        if mix.discount > 0.0:
            offset = (u.double().log() / math.log(mix.discount)).floor().long()
        return torch.minimum(rows + 1 + offset, last)
    # every one of the rows + 1, ..., last alike. OGBench rounds a uniform number instead, which draws the two ends half
    # as often
    return torch.minimum(rows + 1 + rng.randint(key, tuple(rows.shape), (last - rows).clamp(min=1)), last)


def choose(source: GoalRows, key: Tensor, rows: Tensor, mix: Mix) -> DrawnGoals:
    """A goal for each of rows [B]. First a later state or any, in proportion to their shares; then some are replaced by
    the current one.
    """
    keys = rng.split(key, 4)
    count, last = len(rows), source.last[rows]
    none = torch.zeros(count, dtype=torch.bool, device=rows.device)
    is_ahead = none if mix.trajectory <= 0.0 else ~none
    if mix.trajectory > 0.0 and mix.random > 0.0:
        is_ahead = rng.bernoulli(keys[0], (count,), mix.trajectory / (1.0 - mix.current))
    picked = source.draw(keys[1], count) if mix.random > 0.0 else rows
    if mix.trajectory > 0.0:
        picked = torch.where(is_ahead, ahead(keys[2], rows, last, mix), picked)
    current = rng.bernoulli(keys[3], (count,), mix.current) if mix.current > 0.0 else none
    return DrawnGoals(torch.where(current, rows, picked), current, is_ahead & ~current, picked, is_ahead)


def aim(source: GoalRows, key: Tensor, goal: DrawnGoals) -> Tensor:
    """The rows [B] of an actor's goals, of which some that are ahead are stitched, where the data ask for it."""
    return stitched(source.stitches, key, goal.rows, goal.ahead, source.last)


def cut(rows: Tensor, goals: Tensor, last: Tensor, steps: int, beyond: int = 0) -> tuple[Tensor, Tensor]:
    """(m [B] int64, reached [B] bool) of windows of `steps` steps from `rows` [B]: how many steps m there are up to the
    goal, whose row is one of `goals` [B], or to the trajectory's end; and whether they end at the goal.

    last: the last rows [B] of the trajectories. beyond: 1 where a window may take the last row's own step, to a state
    that no row holds. The code of SHARSA (arXiv 2506.04168) takes each window of fewer than `steps` steps for one that
    ends at its goal: those that the trajectory's end cuts too, above all a last row, from which any goal at all is then
    reached in 0 steps.
    """
    end = torch.minimum(rows + steps, last + beyond)
    reached = (rows <= goals) & (goals <= torch.minimum(end, last))
    return torch.where(reached, goals, end) - rows, reached


@dataclass(frozen=True)
class GoalSampler:
    """Transitions (observations, actions, next_observations) with goals of several kinds, each [B, G], drawn
    independently.

    value: VALUE_GOALS, and SUCCESSES: 1.0 where the goal is the row's own state. actor: ACTOR_GOALS.

    subgoal_steps: k > 0 adds the goals of hierarchical policies (HIQL, arXiv 2307.11949): LOW_GOALS, k steps ahead or
    at the trajectory's end; HIGH_GOALS, drawn as the actor's are; HIGH_TARGETS and HIGH_TARGET_STATES, k steps ahead
    but not beyond the goal, where it lies in the trajectory. option_steps: n > 0 adds the end of an option of n steps
    (OTA, arXiv 2505.12737), which ends where the goal is: OPTION_STATES, OPTION_GOALS, and OPTION_SUCCESSES: 1.0 where
    it ends at the goal. A "current" goal is where the option ends, which is that of the goal in whose place it is.

    n_step: above 1, windows of up to so many steps begin at each row, and end at the value goal or with the trajectory:
    WINDOW_STATES, the observations after the last of them; SPAN, how many there are, 0 where the goal is the row's own
    state; and SUCCESSES: 1.0 where they end at the goal. `goal_target` in offrl.families.goal_conditioned makes targets
    of them.

    Goals are the states of transitions: the column achieved_goals where the data have it, else the observations.

    Of data with clusters (`Dataset.stitch`) a share of the actor's goals that are ahead is replaced by goals of other
    trajectories (`stitches.stitched`): ACTOR_GOALS and HIGH_GOALS, of which subgoals go on as far as the goal of their
    own trajectory. The values' goals are not, for "reached" is a row of the trajectory.
    """

    stitching: ClassVar[bool] = True

    value: Mix | None = None
    actor: Mix | None = None
    subgoal_steps: int = 0
    option_steps: int = 0
    extra: tuple[str, ...] = ()
    n_step: int = 1

    def prepare(self, dataset: Dataset) -> GoalRows:
        """Raises UserError where no row holds a transition, and for a column that the data lack."""
        weighted, rows = by_weight(dataset, dataset.transition_rows())
        if not len(rows):
            raise UserError(f"{dataset.spec.name}: no transition to train on: no row has a successor in its episode")
        last = last_of_episodes(dataset, rows)
        check_order(dataset, last, self.n_step)
        columns = {
            name: column_of(dataset, name) for name in ("observations", "actions", "next_observations", *self.extra)
        }
        several = dataset.stores or dataset.spec.windowed
        states = table_of(dataset, {"observations": columns["observations"]}) if several else None
        observations = states if isinstance(states, Streamed) else columns["observations"]
        goals = dataset.columns[ACHIEVED] if dataset.spec.goal_dim else observations
        numbers = None if len(rows) == len(dataset) else rows
        known = stitches(dataset, numbers)
        if known is not None and self.actor is not None and self.actor.trajectory <= 0.0:
            raise UserError(
                f"{dataset.spec.name}: dataset.augment=stitch replaces the policy's goals that are ahead in the "
                f"trajectory, and algo.actor_trajectory={self.actor.trajectory:g} draws none; raise it, or "
                "dataset.augment=none"
            )
        table = table_of(dataset, columns, numbers)
        return GoalRows(len(rows), last, goals, observations, numbers, table, weighted, known)

    def __call__(self, source: GoalRows, key: Tensor, batch_size: int) -> Batch:
        keys = rng.split(key, 5)
        rows = source.draw(keys[0], batch_size)
        batch = source.table.take(rows)
        if self.value is not None:
            goals = choose(source, keys[1], rows, self.value)
            batch[VALUE_GOALS], batch[SUCCESSES] = source.goal(goals.rows), (goals.rows == rows).float()
            if self.n_step > 1:
                batch |= self._window(source, goals.rows, rows)
        if self.option_steps and self.value is not None:
            batch |= self._options(source, choose(source, keys[2], rows, self.value), rows)
        if self.actor is not None and not self.subgoal_steps:
            batch[ACTOR_GOALS] = source.goal(aim(source, keys[3], choose(source, keys[3], rows, self.actor)))
        if self.actor is not None and self.subgoal_steps:
            goal = choose(source, keys[4], rows, self.actor)
            batch |= {**self._subgoals(source, goal, rows), HIGH_GOALS: source.goal(aim(source, keys[4], goal))}
        return batch

    def _window(self, source: GoalRows, goals: Tensor, rows: Tensor) -> Batch:
        span, reached = cut(rows, goals, source.last[rows], self.n_step, beyond=1)
        states = source.table.column("next_observations", rows + (span - 1).clamp(min=0))
        return {SPAN: span, WINDOW_STATES: states, SUCCESSES: reached.float()}

    def _subgoals(self, source: GoalRows, goal: DrawnGoals, rows: Tensor) -> Batch:
        subgoal = torch.minimum(rows + self.subgoal_steps, source.last[rows])
        target = torch.where(goal.ahead | goal.current, torch.minimum(subgoal, goal.rows), subgoal)
        return {
            LOW_GOALS: source.goal(subgoal),
            HIGH_TARGETS: source.goal(target),
            HIGH_TARGET_STATES: source.state(target),
        }

    def _options(self, source: GoalRows, goal: DrawnGoals, rows: Tensor) -> Batch:
        end = torch.minimum(rows + self.option_steps, source.last[rows])
        end = torch.where(goal.waypoint_ahead, torch.minimum(end, goal.waypoints), end)
        aim = torch.where(goal.current, end, goal.rows)
        return {
            OPTION_STATES: source.state(end),
            OPTION_GOALS: source.goal(aim),
            OPTION_SUCCESSES: (end == aim).float(),
        }


@dataclass(frozen=True)
class HorizonSampler(GoalSampler):
    """Transitions with goals for two levels, of which the high one looks n steps ahead (SHARSA, arXiv 2506.04168): each
    with windows of up to `subgoal_steps` steps that end at the goal or at the trajectory's last row.

    values' goals: VALUE_GOALS, SPAN and SUCCESSES (see `goals.cut`), VALUE_SUBGOALS, WINDOW_STATES, KNOWN. The
    policy's: HIGH_GOALS and where their windows end, HIGH_TARGETS. LOW_GOALS: subgoal_steps ahead, whatever the goal.
    low: the mixture of LOW_VALUE_GOALS, which LOW_SUCCESSES says are the row's own state.
    """

    low: Mix | None = None

    def prepare(self, dataset: Dataset) -> GoalRows:
        """Prepare as GoalSampler does. Raises UserError where no row has another one behind it in its trajectory."""
        source = super().prepare(dataset)
        if is_single(source.last):
            raise UserError(
                f"{dataset.spec.name}: algo.subgoal_steps={self.subgoal_steps} looks ahead in the data, each of whose "
                "episodes has one transition: say where episodes end (dataset.fields.truncations or episode_ends)"
            )
        return source

    def __call__(self, source: GoalRows, key: Tensor, batch_size: int) -> Batch:
        assert self.value is not None and self.actor is not None
        keys = rng.split(key, 4)
        rows = source.draw(keys[0], batch_size)
        batch, last = source.table.take(rows), source.last[rows]
        goals = choose(source, keys[1], rows, self.value).rows
        span, reached = cut(rows, goals, last, self.subgoal_steps)
        batch |= {
            VALUE_GOALS: source.goal(goals),
            SPAN: span,
            SUCCESSES: reached.float(),
            KNOWN: ((span > 0) | reached).float(),
        }
        batch |= {VALUE_SUBGOALS: source.goal(rows + span), WINDOW_STATES: source.state(rows + span)}
        goal = choose(source, keys[2], rows, self.actor)
        target = rows + cut(rows, goal.rows, last, self.subgoal_steps)[0]
        batch |= {HIGH_GOALS: source.goal(aim(source, keys[2], goal)), HIGH_TARGETS: source.goal(target)}
        batch[LOW_GOALS] = source.goal(torch.minimum(rows + self.subgoal_steps, last))
        if self.low is not None:
            goals = choose(source, keys[3], rows, self.low).rows
            batch |= {LOW_VALUE_GOALS: source.goal(goals), LOW_SUCCESSES: (goals == rows).float()}
        return batch
