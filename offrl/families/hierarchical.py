"""Hierarchical policies over one representation of goals: the subgoal to be at k steps from now, and the actions
towards it.

A value V(s, phi(s, g)) trains phi, a high level chooses latents phi(s, w) of subgoals w, and a low level acts towards
them (HIQL and its descendants).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Generic, TypeVar

from torch import Tensor, nn

from offrl.algorithm import Actor, Adam, Batch, Carry, DataSpec, Loss, Metrics, Params, TrainState, Update
from offrl.data.samplers.adjacency import ANY_GOALS, NEAR_GOALS, AdjacentSampler
from offrl.data.samplers.goals import LOW_GOALS, GoalSampler
from offrl.errors import UserError
from offrl.families.adjacency import AdjacencyConstraint
from offrl.families.goal_conditioned import (
    GoalActor,
    GoalConditioned,
    GoalStepSettings,
    GoalTarget,
    awr_loss,
    concatenate,
    expectile_td_loss,
    make_net,
    make_values,
    required_goals,
)
from offrl.nn import MLP, EnsembleMLP
from offrl.nn.policies import UnitGaussian
from offrl.settings.field import setting


@dataclass
class SubgoalSettings(GoalStepSettings):
    """Settings of hierarchical policies; the defaults are OGBench's for mazes."""

    expectile: float = setting(
        0.7, "0.5 values the data's policy, 1.0 the best that happened in the data", low=0.0, high=1.0
    )
    low_temperature: float = setting(
        3.0, "beta of the low level: multiplies the advantage in the exponent (explore: 10)", low=0.0
    )
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


ConfigT = TypeVar("ConfigT", bound=SubgoalSettings)


class Hierarchical(Generic[ConfigT]):
    """What HIQL and its descendants share beside their losses; named before `GoalConditioned` among a class's parents.

    Modules "value" (V and phi), "actor" (the low level pi_l), "high" (pi_h), and "adjacency" with adjacency_weight.
    """

    config: ConfigT
    spec: DataSpec
    goal_dim: Any
    networks: Any
    make_actor: Any
    apply: Any
    descend: Any
    move_targets: Any
    value_loss: Any
    high_loss: Any
    traits = replace(GoalConditioned.traits, targets=("value",), policy_modules=("actor", "high"))
    subgoal_kind = "latent"
    heads: ClassVar[tuple[str, ...]] = ("low",)  # of V; the last one's are the high level's
    actor_class: ClassVar[type[Actor]] = HierarchicalActor

    def modules(self) -> dict[str, nn.Module]:
        c, width, latent = self.config, self.spec.observation_dim, self.config.representation
        if c.adjacency_dims > width:
            raise UserError(
                f"algo.adjacency_dims={c.adjacency_dims} is more than the {width} entries of an observation"
            )
        represent = make_net(c, width + self.goal_dim, latent)
        value = GoalValue(represent, {name: make_values(c, 2, width + latent) for name in self.heads})
        actor = self.make_actor(width + latent)
        high = UnitGaussian(width + self.goal_dim, latent, c.hidden, activation="gelu_tanh", init="xavier")
        modules = {"actor": actor, "high": high, "value": value}
        self.adjacency = AdjacencyConstraint(c, self.spec) if c.adjacency_weight else None
        # last: the others' first parameters are the same without it
        return modules if self.adjacency is None else {**modules, "adjacency": self.adjacency.network}

    def sampler(self) -> GoalSampler:
        c = self.config
        sampler = replace(super().sampler(), subgoal_steps=c.subgoal_steps)  # type: ignore[misc]
        if not c.adjacency_weight:
            return sampler
        return AdjacentSampler(
            **vars(sampler), near_steps=c.subgoal_steps, dims=c.adjacency_dims, cell=c.adjacency_cell
        )

    def optimizer(self, name: str) -> Adam:
        return Adam(2e-4 if name == "adjacency" else self.config.learning_rate)  # HRAC's rate

    def v(self, value: Params, observations: Tensor, goals: Tensor, head: str = "low") -> Tensor:
        """Twin V(s, phi(s, g)) of a head: [2, B]."""
        return self.apply("value", value, head, observations, goals)

    def represent(self, value: Params, observations: Tensor, goals: Tensor) -> Tensor:
        """phi(s, g) [B, D]."""
        return self.apply("value", value, "represent", observations, goals)

    def td_loss(
        self, value: Params, state: TrainState, batch: Batch, head: str, step: GoalTarget, goals: Tensor
    ) -> tuple[Tensor, Tensor]:
        """E |tau - 1(A < 0)| (r + gamma V'(s', g) - V(s, g))^2 of both V, A = r + gamma min V'(s', g) - mean V'(s, g);
        and V [2, B] (HIQL, arXiv 2307.11949, equation 4).
        """
        c, target, observations = self.config, value_targets(state), batch["observations"]
        v, target_v = self.v(value, observations, goals, head), self.v(target, observations, goals, head)
        next_v = self.v(target, step.observations, goals, head)
        return expectile_td_loss(v, target_v, next_v, step, c.expectile), v

    def low_loss(self, actor: Params, state: TrainState, batch: Batch) -> Loss:
        """-E min(exp(beta A), 100) log pi_l(a | s, phi(s, w)), A = V(s', w) - V(s, w), w the state k steps
        ahead (HIQL, equation 7).
        """
        value, observations, subgoals = state.params["value"], batch["observations"], batch[LOW_GOALS]
        advantage = (self.v(value, batch["next_observations"], subgoals) - self.v(value, observations, subgoals)).mean(
            0
        )
        dist = self.apply("actor", actor, concatenate(observations, self.represent(value, observations, subgoals)))
        log_prob = self.networks["actor"].log_prob(dist, batch["actions"])
        return awr_loss(log_prob, advantage, self.config.low_temperature, "low")

    def adjacency_loss(self, adjacency: Params, state: TrainState, batch: Batch) -> Loss:
        """HRAC's contrastive loss of which states are near, read from latents too (`offrl.families.adjacency`)."""
        assert self.adjacency is not None
        value, observations = state.params["value"], batch["observations"]
        near, other = (self.represent(value, observations, batch[goals]) for goals in (NEAR_GOALS, ANY_GOALS))
        return self.adjacency.loss(adjacency, batch, near, other)

    def penalised(self, loss: Tensor, metrics: Metrics, state: TrainState, batch: Batch, latents: Tensor) -> Loss:
        """The high level's loss with HRAC's penalty of the subgoals that it chose, latents [B, D]."""
        if self.adjacency is None:
            return loss, metrics
        penalty = self.adjacency.penalty(state.params["adjacency"], batch["observations"], on_sphere(latents))
        return loss + self.config.adjacency_weight * penalty, {**metrics, "high/adjacency_penalty": penalty}

    def update(self, state: TrainState, batch: Batch, key: Tensor, *, phase: int) -> Update:
        after, low = self.descend(state, "actor", self.low_loss, batch)
        after, high = self.descend(after, "high", self.high_loss, batch)
        if self.adjacency is not None:
            after, adjacency = self.descend(after, "adjacency", self.adjacency_loss, batch)
            high = {**high, **adjacency}
        after, value = self.descend(after, "value", self.value_loss, batch)
        return self.move_targets(state, after, "value"), {**value, **low, **high}

    def subgoals(self, state: TrainState, observations: Tensor, goals: Tensor) -> Tensor:
        """The latents [B, D] of the subgoals that the high level chooses, scaled back to the sphere on which phi
        lies.
        """
        return on_sphere(self.apply("high", state.params["high"], concatenate(observations, goals))[0])

    def distances(self, state: TrainState, observations: Tensor, goals: Tensor) -> Tensor:
        return -self.v(state.params["value"], observations, goals, self.heads[-1]).mean(0)
