"""Hierarchical policies over one representation of goals: the subgoal to be at k steps from now, and the actions
towards it.

A value V(s, phi(s, g)) trains phi, a high level chooses latents phi(s, w) of subgoals w, and a low level acts towards
them (HIQL and its descendants).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from offrl.algorithm import Adam, Carry, DataSpec, Params, TrainState
from offrl.data.samplers.adjacency import AdjacentSampler
from offrl.data.samplers.goals import GoalSampler
from offrl.errors import UserError
from offrl.families.adjacency import AdjacencyConstraint
from offrl.families.goal_conditioned import (
    GoalActor,
    GoalStepSettings,
    concatenate,
    make_net,
    make_values,
    required_goals,
)
from offrl.nn import MLP, EnsembleMLP
from offrl.nn.policies import UnitGaussian
from offrl.settings.field import setting

ADJACENCY_OPTIMIZER = Adam(2e-4)  # HRAC's rate


@dataclass
class SubgoalSettings(GoalStepSettings):
    """Settings of hierarchical policies; the defaults are OGBench's for mazes."""

    expectile: float = setting(
        0.7, "0.5 values the data's policy, 1.0 the best that happened in the data", low=0.0, high=1.0
    )
    low_temperature: float = setting(
        3.0, "of the low level: multiplies the advantage in the exponent (explore: 10)", low=0.0
    )
    high_temperature: float = setting(3.0, "of the high level (explore: 10)", low=0.0)
    subgoal_steps: int = setting(25, "k: a subgoal is so many steps ahead (humanoidmaze 100, manipulation 10)", low=1)
    representation: int = setting(10, "numbers that represent a subgoal", low=1)
    adjacency_weight: float = setting(
        0.0,
        "HRAC's penalty of subgoals that are not reached within k steps (HRAC: 20, beside Q); 0: none",
        low=0.0,
        structural=True,
    )
    adjacency_dims: int = setting(
        0,
        "so many first entries of an observation say where one is, which decides what is near (ant: 2); 0: all",
        low=0,
    )
    adjacency_cell: float = setting(
        1.0, "with adjacency_dims: places are told apart by cells of this width, in the units of normalised "
             "observations; 0: no cells",
        low=0.0, shared=True
    )  # fmt: skip


def on_sphere(x: Tensor) -> Tensor:
    """x scaled to length sqrt(its width)."""
    return x * (x.shape[-1] ** 0.5 / x.norm(dim=-1, keepdim=True).clamp(min=1e-12))


class GoalValue(nn.Module):
    """Twin V(s, phi(s, g)), and more such heads: phi, which is trained by the values alone, is the goal of both
    levels.
    """

    def __init__(self, represent: MLP, heads: dict[str, EnsembleMLP]) -> None:
        super().__init__()
        self.represent, self.heads = represent, nn.ModuleDict(heads)

    def forward(self, part: str, observations: Tensor, goals: Tensor) -> Tensor:
        """`part`: "represent", phi [B, D]; or a head's name, its values [2, B]."""
        goal = on_sphere(self.represent(concatenate(observations, goals)))
        return goal if part == "represent" else self.heads[part](concatenate(observations, goal)).squeeze(-1)


def make_goal_value(config: Any, spec: DataSpec, goal_dim: int, heads: Sequence[str]) -> GoalValue:
    """The module "value": phi and twin values for each of `heads`."""
    represent = make_net(config, spec.observation_dim + goal_dim, config.representation)
    return GoalValue(
        represent, {name: make_values(config, 2, spec.observation_dim + config.representation) for name in heads}
    )


def make_high_level(config: Any, spec: DataSpec, goal_dim: int) -> UnitGaussian:
    """The module "high": N(f(s, g), I) over the latents of subgoals."""
    return UnitGaussian(
        spec.observation_dim + goal_dim, config.representation, config.hidden, activation="gelu_tanh", init="xavier"
    )


def make_adjacency(config: Any, spec: DataSpec) -> AdjacencyConstraint | None:
    """HRAC's constraint, where `adjacency_weight` is above 0. Raises UserError."""
    if config.adjacency_dims > spec.observation_dim:
        raise UserError(
            f"algo.adjacency_dims={config.adjacency_dims} is more than the {spec.observation_dim} entries of an "
            "observation"
        )
    return AdjacencyConstraint(config, spec) if config.adjacency_weight else None


def subgoal_sampler(sampler: GoalSampler, config: Any) -> GoalSampler:
    """`sampler` with the subgoals that both levels learn from, and the pairs of states that the adjacency constraint
    learns from.
    """
    sampler = replace(sampler, subgoal_steps=config.subgoal_steps)
    if not config.adjacency_weight:
        return sampler
    return AdjacentSampler(
        **vars(sampler), near_steps=config.subgoal_steps, dims=config.adjacency_dims, cell=config.adjacency_cell
    )


def value_targets(state: TrainState) -> Params:
    """Parameters of V': the heads' Polyak copies over the online phi, for in OGBench's code V and its target share one
    phi.
    """
    representation = {k: p for k, p in state.params["value"].items() if k.startswith("represent.")}
    return {**state.target["value"], **representation}


class HierarchicalActor(GoalActor):
    """Policy towards the subgoal that the high level chooses at every step."""

    algorithm: Any  # with the method `subgoals`

    def act(self, carry: Carry, observations: Tensor, key: Tensor, *, explore: bool) -> tuple[Tensor, Carry]:
        subgoal = self.algorithm.subgoals(self.state, observations, required_goals(self.algorithm, carry))
        return self.choose(self.apply("actor", concatenate(observations, subgoal)), key, explore), carry
