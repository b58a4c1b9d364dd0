"""Transitions with goals for two levels, of which the high one looks n steps ahead (SHARSA, arXiv 2506.04168). Pure,
like all samplers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from offrl import rng
from offrl.data.dataset import Dataset
from offrl.data.samplers.goals import (
    HIGH_GOALS,
    HIGH_TARGETS,
    LOW_GOALS,
    SUCCESSES,
    VALUE_GOALS,
    WINDOW_STATES,
    GoalRows,
    GoalSampler,
    Mix,
    aim,
    choose,
    cut,
)
from offrl.data.samplers.transitions import SPAN, Batch, is_single
from offrl.errors import UserError

VALUE_SUBGOALS = "value_subgoals"  # where a window of the values' goals ends, as a goal [B, G]
KNOWN = "known"  # [B] float: 0 where nothing follows the row in its trajectory, and the goal is elsewhere
LOW_VALUE_GOALS, LOW_SUCCESSES = "low_value_goals", "low_successes"


@dataclass(frozen=True)
class HorizonSampler(GoalSampler):
    """Transitions, each with windows of up to `subgoal_steps` steps that end at the goal or at the trajectory's last
    row.

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
