"""SHARSA and Double SHARSA (seohongpark/horizon-reduction) in JAX. Both sides take their own defaults, and the same
draws (`parity.flows`).

Worked with jax 0.4.38, flax 0.10.4, distrax 0.1.5 and optax 0.2.4 on Python 3.11.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from parity.common import ACTION, BATCH, OBSERVATION, Arrays, Ours, Outcome, batches, case
from parity.flows import compare_agents
from parity.ogbench import GOALS, NEEDS, Tree, mlp

HORIZONS, COMMIT = "seohongpark/horizon-reduction", "c298aedcc505bc7a7b44b4d0c9318993f8b3f3fd"
STEPS = 25
REMAINS = f"windows that a trajectory's end cuts count as successes there and not here; {GOALS}; {{}}"
ORACLE = "subgoals and goals are the places of objects there, the column achieved_goals or observations here"
COLUMNS = {  # theirs -> ours
    "high_value_goals": "value_goals",
    "high_value_actions": "value_subgoals",
    "high_value_next_observations": "window_states",
    "high_actor_goals": "high_goals",
    "high_actor_actions": "high_targets",
    "low_actor_goals": "low_goals",
    "low_value_goals": "low_value_goals",
}
LOSSES = {
    "critic/loss": "high_critic/critic_loss",
    "value/loss": "high_value/value_loss",
    "high/loss": "high_actor/actor_loss",
    "actor/loss": "low_actor/actor_loss",
}
LOW_LOSSES = {"low_critic/loss": "low_critic/critic_loss", "low_value/loss": "low_value/value_loss"}


def window_batches() -> list[tuple[Arrays, Arrays]]:
    """The same batches as both sides take them, ours first: windows of 0 to 25 steps, of which the shorter ones end at
    their goal.
    """
    goals = dict.fromkeys(COLUMNS, lambda g: g.normal(size=(BATCH, OBSERVATION)))
    more = {
        "steps": lambda g: g.integers(0, STEPS + 8, BATCH).clip(max=STEPS),
        "low": lambda g: (g.random(BATCH) < 0.2).astype(np.float64),
    }
    pairs = []
    for columns in batches(**goals, **more):
        span, success = columns["steps"], (columns["steps"] < STEPS).astype(np.float64)
        ours = {**columns, **{b: columns[a] for a, b in COLUMNS.items()}, "span": span, "successes": success}
        ours |= {"known": np.ones(BATCH), "low_successes": columns["low"]}
        theirs = {**columns, "high_value_subgoal_steps": span, "high_value_masks": 1.0 - success}
        theirs |= {
            "high_value_rewards": 0.999**span * success,
            "low_value_rewards": columns["low"],
            "low_value_masks": 1.0 - columns["low"],
        }
        pairs.append((ours, theirs))
    return pairs


def trees(ours: Ours) -> Tree:
    p, target = ours.state.params, ours.state.target
    result: Tree = {
        f"{level}_actor_flow": {"mlp": mlp(p[name], "net.")} for level, name in (("high", "high"), ("low", "actor"))
    }
    for level, prefix in (("high", ""), ("low", "low_")):
        if f"{prefix}critic" in p:
            result |= {f"{level}_value": {"value_net": mlp(p[f"{prefix}value"])}}
            result |= {f"{level}_critic": {"value_net": mlp(p[f"{prefix}critic"])}}
            result |= {f"target_{level}_critic": {"value_net": mlp(target[f"{prefix}critic"])}}
    return result


def compare(checkout: Path, agent: str, config: Mapping[str, Any], **settings: Any) -> Outcome:
    losses = LOSSES | (LOW_LOSSES if agent == "dsharsa" else {})
    shapes = {"observations": OBSERVATION, "actions": ACTION, "high_actor_goals": OBSERVATION}
    example = {name: np.zeros((1, width)) for name, width in shapes.items()}
    return compare_agents(
        checkout, agent, Ours("sharsa", **settings), config, trees, losses, window_batches(), (example,)
    )


@case("sharsa", HORIZONS, COMMIT, needs=NEEDS, remains=REMAINS.format(ORACLE))
def sharsa(checkout: Path) -> Outcome:
    return compare(checkout, "sharsa", {})


@case("sharsa, two levels of values", HORIZONS, COMMIT, needs=NEEDS, remains=REMAINS.format(ORACLE))
def double_sharsa(checkout: Path) -> Outcome:
    return compare(checkout, "dsharsa", {"q_agg": "mean"}, low_values=True, pessimism="mean")


@case("sharsa, squared errors", HORIZONS, COMMIT, needs=NEEDS, remains=REMAINS.format(ORACLE))
def squared(checkout: Path) -> Outcome:
    return compare(checkout, "sharsa", {"value_loss_type": "squared"}, value_loss="squared")
