"""Acting by subgoals that are drawn anew at every step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from offrl import rng
from offrl.actor import Carry
from offrl.families.goal_conditioned import GoalActor, concatenate, required_goals
from offrl.nn import flow

if TYPE_CHECKING:
    from offrl.algorithms.sharsa.algorithm import SHARSA


class SHARSAActor(GoalActor):
    """At every step: the best of `candidates` subgoals, and an action towards it, or the best of as many. `greedy`
    zero: one of each, from noise of 0."""

    algorithm: SHARSA

    def act(self, carry: Carry, observations: Tensor, key: Tensor, *, explore: bool) -> tuple[Tensor, Carry]:
        algorithm, keys, goals = self.algorithm, rng.split(key), required_goals(self.algorithm, carry)
        c, scale = algorithm.config, float(explore or algorithm.config.greedy == "sample")
        count = c.candidates if scale else 1

        def best(field: str, critic: str, goals: Tensor, dim: int, count: int, key: Tensor) -> Tensor:
            """The draw [B, D] of a flow, of `count`, whose smaller Q is the largest."""
            rows = observations.shape[0]
            noise = scale * rng.normal(key, (rows, count, dim)).transpose(0, 1).flatten(0, 1)  # candidate by candidate
            states, aims = flow.repeated(observations, count), flow.repeated(goals, count)
            inputs = concatenate(states, aims)
            drawn = flow.integrate(lambda x, t: self.apply(field, inputs, x, t), noise, c.flow_steps, None, None)
            if count == 1:
                return drawn
            scores = algorithm.q(critic, self.state.params[critic], states, aims, drawn).amin(0)
            return flow.best_of(scores.unflatten(0, (count, rows)), drawn.unflatten(0, (count, rows)))

        subgoal = best("high", "critic", goals, algorithm.goal_dim, count, keys[0])
        action = best("actor", "low_critic", subgoal, algorithm.spec.action_dim, count if c.low_values else 1, keys[1])
        return action.clamp(-1.0, 1.0), carry
