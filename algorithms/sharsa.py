"""SHARSA: "Horizon Reduction Makes RL Scalable" (Park et al., 2025, arXiv 2506.04168), and Double SHARSA."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

from torch import Tensor, nn
from torch.nn import functional as F

from offrl import rng
from offrl.algorithm import Carry, Loss, Params, TrainState, Traits, Update
from offrl.data.samplers.goals import (
    HIGH_GOALS,
    HIGH_TARGETS,
    KNOWN,
    LOW_GOALS,
    LOW_SUCCESSES,
    LOW_VALUE_GOALS,
    SUCCESSES,
    VALUE_GOALS,
    VALUE_SUBGOALS,
    WINDOW_STATES,
    HorizonSampler,
)
from offrl.data.samplers.transitions import SPAN, Batch
from offrl.errors import UserError
from offrl.families.generative.settings import greedy_field
from offrl.families.goal_conditioned import (
    GoalActor,
    GoalConditioned,
    GoalTargetSettings,
    concatenate,
    make_net,
    make_values,
    required_goals,
)
from offrl.nn import flow
from offrl.registry import register
from offrl.settings.field import defaults, setting


@dataclass
@defaults(hidden=[1024, 1024, 1024, 1024], value_geometric=False)
class SHARSAConfig(GoalTargetSettings):
    """Settings of SHARSA; the defaults are the authors' for puzzle-4x5."""

    name: str = "sharsa"
    discount: float = setting(0.999, "discount factor; also of goals at geometric distances", high=1.0, shared=True)
    actor_layer_norm: bool = setting(True, "LayerNorm after each hidden layer of the flows")
    actor_trajectory: float = setting(
        0.5, "share that are later states of the trajectory (cubes, humanoidmaze: 1)", low=0.0, high=1.0, shared=True
    )
    actor_random: float = setting(
        0.5, "share that are any states of the data (cubes, humanoidmaze: 0)", low=0.0, high=1.0, shared=True
    )
    actor_geometric: bool = setting(
        True, "later states at geometric distances; else uniform over the rest (humanoidmaze)"
    )
    subgoal_steps: int = setting(
        25, "n: a subgoal is so many steps ahead, the horizon of the high level's values (cubes: 50)", low=1
    )
    pessimism: str = setting(
        "min", "what V learns of the target critics: their smallest value, or their mean", choices=("min", "mean")
    )
    value_loss: str = setting(
        "bce", "values are logits with cross-entropy (bce), or plain with squared errors", choices=("bce", "squared")
    )
    low_values: bool = setting(
        False, "Double SHARSA: the low level has values too, and plays the best of its candidates"
    )
    flow_steps: int = setting(10, "Euler steps from noise to a subgoal or an action", low=1, high=1000)
    greedy: str = greedy_field()
    candidates: int = setting(32, "subgoals that are drawn at each step, of which the best is pursued (low_values: "
                                  "actions too)", low=1,
                              acting=True)  # fmt: skip


class Level(NamedTuple):
    """Training data of a level's values: y = rewards + bootstrap_discount * V(s', g) of `actions_or_subgoals` on the
    way to `goals`."""

    goals: Tensor  # [B, G]
    actions_or_subgoals: Tensor  # subgoals [B, G] of the high level, actions [B, A] of the low one
    next_observations: Tensor  # [B, O]
    rewards: Tensor  # [B]
    bootstrap_discount: Tensor  # [B]
    weight: Tensor | float = 1.0  # of rows


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
            sample = flow.integrate(lambda x, t: self.apply(field, inputs, x, t), noise, c.flow_steps, None, None)
            if count == 1:
                return sample
            scores = algorithm.q(critic, self.state.params[critic], states, aims, sample).amin(0)
            return flow.best_of(scores.unflatten(0, (count, rows)), sample.unflatten(0, (count, rows)))

        subgoal = best("high", "critic", goals, algorithm.goal_dim, count, keys[0])
        action = best("actor", "low_critic", subgoal, algorithm.spec.action_dim, count if c.low_values else 1, keys[1])
        return action.clamp(-1.0, 1.0), carry


@register("algo", "sharsa")
class SHARSA(GoalConditioned[SHARSAConfig]):
    """Two flows clone the data, subgoals n steps ahead and actions towards them; of many subgoals the one with the
    highest Q is pursued.

    Values are those of the data's own behaviour (SARSA) over windows of n steps, as logits of a probability: discount^d
    of a goal that is d steps away. Modules: critic (twin Q of a subgoal) and value, high and actor (the flows), with
    `low_values` low_critic and low_value."""

    traits = replace(
        GoalConditioned.traits,
        targets=("critic",),
        actions=("continuous",),
        policy_modules=("actor", "high", "critic"),
        n_step=False,
    )
    actor_class = SHARSAActor

    @classmethod
    def traits_for(cls, config: SHARSAConfig) -> Traits:
        if not config.low_values:
            return cls.traits
        return replace(
            cls.traits, targets=("critic", "low_critic"), policy_modules=(*cls.traits.policy_modules, "low_critic")
        )

    def modules(self) -> dict[str, nn.Module]:
        c, s, g = self.config, self.spec, self.goal_dim
        if c.low_values and c.subgoal_steps < 2:
            raise UserError(
                f"algo.subgoal_steps={c.subgoal_steps}: the low level's values (algo.low_values) need subgoals 2 or "
                "more ahead"
            )
        inputs = s.observation_dim + g
        field = partial(
            flow.Field, hidden=c.hidden, layer_norm=c.actor_layer_norm, layer_norm_epsilon=c.layer_norm_epsilon
        )
        modules = {
            "critic": make_values(c, 2, inputs + g),
            "value": make_net(c, inputs, 1),
            "high": field(inputs, g),
            "actor": field(inputs, s.action_dim),
        }
        if c.low_values:
            modules |= {"low_critic": make_values(c, 2, inputs + s.action_dim), "low_value": make_net(c, inputs, 1)}
        return modules

    def sampler(self) -> HorizonSampler:
        c, base = self.config, super().sampler()
        low = replace(c.value_mix, geometric=True, discount=self.low_discount) if c.low_values else None
        return HorizonSampler(base.value, base.actor, c.subgoal_steps, low=low)

    @property
    def low_discount(self) -> float:
        """1 - 1 / n, the low level's discount factor."""
        return 1.0 - 1.0 / int(self.config.subgoal_steps)

    # ---- values

    def levels(self, batch: Batch) -> dict[str, Level]:
        """By prefix of modules: windows of n steps, or fewer up to the goal; with `low_values` single steps."""
        success, after = batch[SUCCESSES], self.config.discount ** batch[SPAN]
        high = batch[VALUE_GOALS], batch[VALUE_SUBGOALS], batch[WINDOW_STATES]
        levels = {"": Level(*high, after * success, after * (1.0 - success), batch[KNOWN])}
        if self.config.low_values:
            low, success = (batch[LOW_VALUE_GOALS], batch["actions"], batch["next_observations"]), batch[LOW_SUCCESSES]
            levels["low_"] = Level(*low, success, self.low_discount * (1.0 - success))
        return levels

    def v(self, name: str, value: Params, observations: Tensor, goals: Tensor) -> Tensor:
        """The output of a V [B]: a logit, or with squared errors the value."""
        return self.apply(name, value, concatenate(observations, goals)).squeeze(-1)

    def q(self, name: str, critic: Params, observations: Tensor, goals: Tensor, actions_or_subgoals: Tensor) -> Tensor:
        """The outputs of a twin Q [2, B]."""
        return self.apply(name, critic, concatenate(observations, goals, actions_or_subgoals)).squeeze(-1)

    def values(self, outputs: Tensor) -> Tensor:
        """The values that outputs stand for."""
        return outputs.sigmoid() if self.config.value_loss == "bce" else outputs

    def objective(self, outputs: Tensor, target: Tensor) -> Tensor:
        """-(y log sigma(l) + (1 - y) log(1 - sigma(l))), or the squared error, of outputs [..., B] and their target
        [B].
        """
        if self.config.value_loss == "squared":
            return (outputs - target).square()
        return F.binary_cross_entropy_with_logits(outputs, target.expand_as(outputs), reduction="none")

    def value_loss(self, value: Params, state: TrainState, batch: Batch, level: Level, prefix: str) -> Loss:
        """E BCE(V(s, g), min_k sigma(Q'_k(s, u, g))), u the data's own subgoal (Double SHARSA's low level: action)."""
        name = f"{prefix}critic"
        target = self.values(
            self.q(name, state.target[name], batch["observations"], level.goals, level.actions_or_subgoals)
        )
        target = target.amin(0) if self.config.pessimism == "min" else target.mean(0)
        v = self.v(f"{prefix}value", value, batch["observations"], level.goals)
        loss = (level.weight * self.objective(v, target)).mean()
        return loss, {f"{prefix}value/loss": loss, f"{prefix}value/v": self.values(v).mean()}

    def critic_loss(self, critic: Params, state: TrainState, batch: Batch, level: Level, prefix: str) -> Loss:
        """E BCE(Q(s, u, g), gamma^m (success + (1 - success) sigma(V(s_m, g)))) of both Q, m <= n steps to the goal or
        the end.
        """
        next_v = self.values(
            self.v(f"{prefix}value", state.params[f"{prefix}value"], level.next_observations, level.goals)
        )
        target = level.rewards + level.bootstrap_discount * next_v
        q = self.q(f"{prefix}critic", critic, batch["observations"], level.goals, level.actions_or_subgoals)
        loss = (level.weight * self.objective(q, target)).mean(-1).sum()
        return loss, {f"{prefix}critic/loss": loss, f"{prefix}critic/q": self.values(q).mean()}

    # ---- flows

    def flow_loss(self, field: Params, state: TrainState, inputs: Tensor, data: Tensor, key: Tensor, name: str) -> Loss:
        """E |v(s, g, x_t, t) - (x_1 - x_0)|^2 / D, x_1 the data's subgoal n steps ahead (low level: its action, g that
        subgoal).
        """
        loss = flow.matching(lambda x, t: self.apply(name, field, inputs, x, t), data, key).mean()
        return loss, {f"{name}/loss": loss}

    def update(self, state: TrainState, batch: Batch, key: Tensor, *, phase: int) -> Update:
        keys, observations = rng.split(key), batch["observations"]
        high = concatenate(observations, batch[HIGH_GOALS]), batch[HIGH_TARGETS]
        low = concatenate(observations, batch[LOW_GOALS]), batch["actions"]
        after, metrics = self.descend(state, "high", self.flow_loss, *high, keys[0], "high")
        after, more = self.descend(after, "actor", self.flow_loss, *low, keys[1], "actor")
        metrics |= more
        for prefix, level in self.levels(batch).items():  # critics first: they read V of before the update
            after, more = self.descend(after, f"{prefix}critic", self.critic_loss, batch, level, prefix)
            after, other = self.descend(after, f"{prefix}value", self.value_loss, batch, level, prefix)
            metrics |= more | other
        for name in self.traits.targets:
            after = self.move_targets(state, after, name)
        return after, metrics

    def distances(self, state: TrainState, observations: Tensor, goals: Tensor) -> Tensor:
        return -self.v("value", state.params["value"], observations, goals)
