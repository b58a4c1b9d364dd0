"""Two levels over one value: where to be k steps from now, and how to get there (HIQL and its descendants)."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor, nn

from offrl import losses
from offrl.actor import Actor, Carry
from offrl.algorithm import Metrics, TrainState
from offrl.data.samplers.adjacency import ADJACENT, ANY_GOALS, ANY_STATES, NEAR_GOALS, NEAR_STATES, AdjacentSampler
from offrl.data.samplers.goals import HIGH_GOALS, HIGH_TARGET_STATES, HIGH_TARGETS, LOW_GOALS, SUCCESSES, VALUE_GOALS
from offrl.data.samplers.transitions import Batch, Sampler
from offrl.errors import UserError
from offrl.families import adjacency
from offrl.families.goal_conditioned import GoalActor, GoalConditioned, GoalTargetSettings, required_goals, together, value_loss
from offrl.nn import MLP, EnsembleMLP
from offrl.nn.policies import UnitGaussian
from offrl.optim import Adam, Params
from offrl.settings.field import setting


@dataclass
class LevelSettings(GoalTargetSettings):
    """Settings of two levels; the defaults are OGBench's for mazes."""

    expectile: float = setting(0.7, "0.5 values the data's policy, 1.0 the best that happened in the data", low=0.0, high=1.0)
    low_temperature: float = setting(3.0, "of the low level: multiplies the advantage in the exponent (explore: 10)", low=0.0)
    high_temperature: float = setting(3.0, "of the high level (explore: 10)", low=0.0)
    subgoal_steps: int = setting(25, "k: a subgoal is so many steps ahead (humanoidmaze 100, manipulation 10)", low=1)
    representation: int = setting(10, "numbers that represent a subgoal", low=1)
    adjacency_weight: float = setting(
        0.0, "HRAC's penalty of subgoals that are not reached within k steps (HRAC: 20, beside Q); 0: none", low=0.0, structural=True
    )
    adjacency_dims: int = setting(
        0, "so many first entries of an observation say where one is, which decides what is near (ant: 2); 0: all", low=0
    )
    adjacency_cell: float = setting(
        1.0, "with adjacency_dims: places are told apart by cells of this width, in the units of normalised observations; 0: no cells",
        low=0.0, shared=True
    )  # fmt: skip
    adjacency_learning_rate: float = setting(2e-4, "the adjacency networks' learning rate", low=0.0)


def on_sphere(x: Tensor) -> Tensor:
    """x scaled to length sqrt(its width)."""
    return x * (x.shape[-1] ** 0.5 / x.norm(dim=-1, keepdim=True).clamp(min=1e-12))


class GoalValue(nn.Module):
    """Twin V(s, phi(s, g)), and more such heads: phi, which is trained by the values alone, is what the levels call a goal."""

    def __init__(self, represent: MLP, heads: dict[str, EnsembleMLP]) -> None:
        super().__init__()
        self.represent, self.heads = represent, nn.ModuleDict(heads)

    def forward(self, part: str, observations: Tensor, goals: Tensor) -> Tensor:
        """`part`: "represent", phi [B, D]; or a head's name, its values [2, B]."""
        goal = on_sphere(self.represent(together(observations, goals)))
        return goal if part == "represent" else self.heads[part](together(observations, goal)).squeeze(-1)


class TwoLevels(GoalConditioned):
    """Values V(s, g), and two policies by weighted imitation. Modules "value", "actor" (the low level), "high".

    The low level imitates actions by V(s', w) - V(s, w), w the state k steps ahead; the high level imitates phi(s, w) by V(w, g) - V(s, g).
    It acts towards a new subgoal in every step, scaled back to the sphere on which phi lies. With adjacency_weight a module "adjacency"
    learns what is near, and the high level pays for subgoals that are not (`offrl.families.adjacency`).
    """

    traits = replace(GoalConditioned.traits, targets=("value",), policy_modules=("actor", "high"))
    heads: ClassVar[tuple[str, ...]] = ("low",)

    def modules(self) -> dict[str, nn.Module]:
        c, s = self.config, self.spec
        represent = self.make_net(s.observation_dim + self.goal_dim, c.representation)
        heads = {name: self.make_values(2, s.observation_dim + c.representation) for name in self.heads}
        if c.adjacency_dims > s.observation_dim:
            raise UserError(f"algo.adjacency_dims={c.adjacency_dims} is more than the {s.observation_dim} entries of an observation")
        modules: dict[str, nn.Module] = {
            "actor": self.make_actor(s.observation_dim + c.representation),
            "high": UnitGaussian(s.observation_dim + self.goal_dim, c.representation, c.hidden, activation="gelu_tanh", init="xavier"),
            "value": GoalValue(represent, heads),
        }
        if c.adjacency_weight:  # last: the others' first parameters are the same without it
            modules["adjacency"] = adjacency.Adjacency(s.observation_dim, c.representation, c.adjacency_dims)
        return modules

    def sampler(self) -> Sampler:
        c, plain = self.config, super().sampler()
        if not c.adjacency_weight:
            return dataclasses.replace(plain, subgoal_steps=c.subgoal_steps)  # type: ignore[type-var]
        own = {**vars(plain), "subgoal_steps": c.subgoal_steps}
        return AdjacentSampler(**own, near_steps=c.subgoal_steps, dims=c.adjacency_dims, cell=c.adjacency_cell)

    def optimizer(self, name: str) -> Adam:
        return Adam(self.config.adjacency_learning_rate) if name == "adjacency" else super().optimizer(name)

    def v(self, value: Params, observations: Tensor, goals: Tensor, head: str = "low") -> Tensor:
        """Twin values [2, B]."""
        return self.apply("value", value, head, observations, goals)

    def represent(self, value: Params, observations: Tensor, goals: Tensor) -> Tensor:
        """phi(s, g) [B, D]."""
        return self.apply("value", value, "represent", observations, goals)

    def objective(
        self, value: Params, state: TrainState, head: str, now: Tensor, after: Tensor, goals: Tensor, successes: Tensor
    ) -> tuple[Tensor, Tensor]:
        """(the loss of a head over the step from `now` to `after`, its values [2, B]).

        Targets average the heads alone: in OGBench's code V and its target share one phi, as it is before the update.
        """
        c, shared = self.config, {k: p for k, p in state.params["value"].items() if k.startswith("represent.")}
        target = {**state.target["value"], **shared}
        v = self.v(value, now, goals, head)
        before, following = self.v(target, now, goals, head), self.v(target, after, goals, head)
        return value_loss(v, before, following, successes, c.discount, c.expectile), v

    def value_loss(self, value: Params, state: TrainState, batch: Batch) -> tuple[Tensor, Metrics]:
        now, after, goals = batch["observations"], batch["next_observations"], batch[VALUE_GOALS]
        loss, v = self.objective(value, state, "low", now, after, goals, batch[SUCCESSES])
        return loss, {"value/loss": loss, "value/v": v.mean()}

    def low_loss(self, actor: Params, state: TrainState, batch: Batch) -> tuple[Tensor, Metrics]:
        value, goals, observations = state.params["value"], batch[LOW_GOALS], batch["observations"]
        advantage = (self.v(value, batch["next_observations"], goals) - self.v(value, observations, goals)).mean(0)
        weight = losses.advantage_weight(advantage, self.config.low_temperature)
        dist = self.apply("actor", actor, together(observations, self.represent(value, observations, goals)))
        loss = -(weight * self.policy.log_prob(dist, batch["actions"])).mean()
        return loss, {"low/loss": loss, "low/advantage": advantage.mean(), "low/weight": weight.mean()}

    def high_advantage(self, state: TrainState, batch: Batch) -> Tensor:
        """V(w, g) - V(s, g) [B], w the subgoal."""
        return self.gain(state, batch, self.heads[-1])

    def gain(self, state: TrainState, batch: Batch, head: str) -> Tensor:
        value, goals = state.params["value"], batch[HIGH_GOALS]
        there, here = (self.v(value, batch[k], goals, head) for k in (HIGH_TARGET_STATES, "observations"))
        return (there - here).mean(0)

    def high_loss(self, high: Params, state: TrainState, batch: Batch) -> tuple[Tensor, Metrics]:
        advantage = self.high_advantage(state, batch)
        weight = losses.advantage_weight(advantage, self.config.high_temperature)
        observations = batch["observations"]
        subgoal = self.represent(state.params["value"], observations, batch[HIGH_TARGETS])
        dist = self.apply("high", high, together(observations, batch[HIGH_GOALS]))
        loss = -(weight * self.networks["high"].log_prob(dist, subgoal)).mean()  # type: ignore[operator]
        metrics = {"high/loss": loss, "high/advantage": advantage.mean(), "high/weight": weight.mean()}
        if not self.config.adjacency_weight:
            return loss, metrics
        far = adjacency.penalty(self.reach(state.params["adjacency"], observations, on_sphere(dist[0])))
        return loss + self.config.adjacency_weight * far, {**metrics, "high/far": far}

    # ---- what is near

    def reach(self, near: Params, observations: Tensor, subgoals: Tensor) -> Tensor:
        """How far states [B, O] are from what subgoals [B, D] stand for, as the adjacency networks see it: within 1 is near; [B]."""
        here, there = self.apply("adjacency", near, "psi", observations), self.apply("adjacency", near, "reads", observations, subgoals)
        return adjacency.length(here - there)

    def adjacency_loss(self, near: Params, state: TrainState, batch: Batch) -> tuple[Tensor, Metrics]:
        """The contrast of psi over both kinds of pairs, and the squared error of reading psi(w) out of (s, phi(s, w))."""
        observations, value = batch["observations"], state.params["value"]
        here = self.apply("adjacency", near, "psi", observations)
        found, missed = [], torch.zeros((), device=here.device)
        for states, goals in ((NEAR_STATES, NEAR_GOALS), (ANY_STATES, ANY_GOALS)):
            there = self.apply("adjacency", near, "psi", batch[states])
            read = self.apply("adjacency", near, "reads", observations, self.represent(value, observations, batch[goals]))
            found.append(adjacency.length(here - there))
            missed = missed + 0.5 * (read - there.detach()).square().sum(-1).mean()
        label = batch[ADJACENT]
        contrast = 0.5 * (adjacency.contrast(found[0], torch.ones_like(label)) + adjacency.contrast(found[1], label))
        loss = contrast + missed
        told = {"adjacency/loss": loss, "adjacency/contrast": contrast, "adjacency/missed": missed}
        return loss, {**told, **adjacency.metrics(found[0], found[1], label)}

    def update(self, state: TrainState, batch: Batch, key: Tensor, *, phase: int) -> tuple[TrainState, Metrics]:
        state, low = self.descend(state, "actor", self.low_loss, batch)
        state, high = self.descend(state, "high", self.high_loss, batch)
        if self.config.adjacency_weight:
            state, near = self.descend(state, "adjacency", self.adjacency_loss, batch)
            high = {**high, **near}
        state, value = self.descend(state, "value", self.value_loss, batch)
        return self.polyak(state, "value", self.config.polyak), {**value, **low, **high}

    def subgoals(self, state: TrainState, observations: Tensor, goals: Tensor) -> Tensor:
        """What the high level asks for, [B, D]."""
        return on_sphere(self.apply("high", state.params["high"], together(observations, goals))[0])

    def actor(self, state: TrainState) -> Actor:
        return HierarchicalActor(self, state)

    def distances(self, state: TrainState, observations: Tensor, goals: Tensor) -> Tensor | None:
        return -self.v(state.params["value"], observations, goals, self.heads[-1]).mean(0)


class HierarchicalActor(GoalActor):
    """Acts towards the subgoal that the high level chooses at every step."""

    algorithm: TwoLevels

    def act(self, carry: Carry, observations: Tensor, key: Tensor, *, explore: bool) -> tuple[Tensor, Carry]:
        subgoal = self.algorithm.subgoals(self.state, observations, required_goals(self.algorithm, carry))
        return self.choose(self.apply("actor", together(observations, subgoal)), key, explore), carry
