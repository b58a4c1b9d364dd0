"""What goal-conditioned algorithms share: their settings, networks, policies and the two ways to improve a policy on the data's.

Networks and losses are those of OGBench's reference implementations (arXiv 2410.20092; specification C.0): GELU, LayerNorm after it in
values and never in actors, a policy N(f(s, g), I), observations as they are. Their one optimiser over the sum of all losses is, for Adam,
one for each module: each loss looks at the others' parameters of before the update, so actors are updated before what judges them.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from offrl import losses
from offrl.actor import Actor, Carry
from offrl.algorithm import Algorithm, Metrics, TrainState, Traits
from offrl.data.samplers.goals import ACTOR_GOALS, GoalSampler, Mix
from offrl.data.samplers.transitions import Batch, Sampler
from offrl.errors import UserError
from offrl.nn import MLP, EnsembleMLP, make_policy
from offrl.optim import Params
from offrl.settings.field import setting

if TYPE_CHECKING:
    pass

LEARNERS = ("auto", "ddpg_bc", "awr")


@dataclass
class GoalSettings:
    """Settings of goal-conditioned policies; the defaults are OGBench's."""

    learning_rate: float = setting(3e-4, "Adam's learning rate", low=0.0)
    batch_size: int = setting(1024, "transitions in a batch", low=1)
    discount: float = setting(
        0.99, "discount factor; also of goals at geometric distances (giant mazes and humanoidmaze: 0.995)", high=1.0, shared=True
    )
    hidden: list[int] = setting([512, 512, 512], "widths of the hidden layers", low=1)
    actor_current: float = setting(0.0, "share of the policy's goals that are the present state", low=0.0, high=1.0, shared=True)
    actor_trajectory: float = setting(
        1.0, "share that are later states of the trajectory (stitch: 0.5, explore: 0)", low=0.0, high=1.0, shared=True
    )
    actor_random: float = setting(0.0, "share that are any states of the data (stitch: 0.5, explore: 1)", low=0.0, high=1.0, shared=True)
    actor_geometric: bool = setting(False, "later states at geometric distances; else uniform over the rest of the trajectory")

    @property
    def actor_mix(self) -> Mix:
        """Where the policy's goals come from."""
        return Mix(self.actor_current, self.actor_trajectory, self.actor_random, self.actor_geometric, self.discount)


@dataclass
class GoalValueSettings(GoalSettings):
    """Settings of those that learn values of goals as well."""

    layer_norm: bool = setting(True, "LayerNorm after each hidden layer of the values")
    value_current: float = setting(0.2, "share of the values' goals that are the present state", low=0.0, high=1.0, shared=True)
    value_trajectory: float = setting(0.5, "share that are later states of the trajectory", low=0.0, high=1.0, shared=True)
    value_random: float = setting(0.3, "share that are any states of the data", low=0.0, high=1.0, shared=True)
    value_geometric: bool = setting(True, "later states at geometric distances; else uniform over the rest of the trajectory")

    @property
    def value_mix(self) -> Mix:
        """Where the values' goals come from."""
        return Mix(self.value_current, self.value_trajectory, self.value_random, self.value_geometric, self.discount)


@dataclass
class GoalTargetSettings(GoalValueSettings):
    """Settings of those whose values have targets that follow them."""

    polyak: float = setting(0.005, "share of the online parameters that enters the targets at each update", low=0.0, high=1.0)


class GoalActor(Actor):
    """Acts by the module "actor", which sees the observation and the goal. A carry is the goals [E, G]; None: none was set."""

    algorithm: GoalConditioned

    def set_goal(self, carry: Carry, goals: Tensor) -> Carry:
        return goals

    def act(self, carry: Carry, observations: Tensor, key: Tensor, *, explore: bool) -> tuple[Tensor, Carry]:
        dist = self.apply("actor", together(observations, required_goals(self.algorithm, carry)))
        return self.choose(dist, key, explore), carry


def required_goals(algorithm: Algorithm, goals: Tensor | None) -> Tensor:
    """`goals`. Raises UserError where none was set."""
    if goals is None:
        raise UserError(
            f"a policy of {algorithm.config.name} acts towards a goal, and was told none: this use of a policy has no goals, or the "
            "environment gives none (info['goal'], or the observation's entry desired_goal)"
        )
    return goals


class GoalConditioned(Algorithm):
    """Base of algorithms that learn from goals drawn in hindsight. Module "actor" sees the observation and the goal side by side."""

    traits = Traits(goal_conditioned=True)
    states_as_goals: ClassVar[str] = ""  # why goals have to be observations; "": they need not

    def __init__(self, config: Any, spec: Any, pretrained: Mapping[str, Any] | None = None) -> None:
        name = spec.task.name if spec.task is not None and not spec.name else spec.name
        if self.states_as_goals and spec.goal_dim:
            raise UserError(
                f"{config.name} cannot learn from {name}, whose goals are no observations but have {spec.goal_dim} numbers of their own "
                f"(achieved_goals): {self.states_as_goals}; take gcivl, gciql, crl or hiql"
            )
        super().__init__(config, spec, pretrained)

    # ---- networks

    @property
    def goal_dim(self) -> int:
        """G: how many numbers a goal has."""
        return int(self.spec.goal_dim or self.spec.observation_dim)

    def make_actor(self, inputs: int | None = None, outputs: int | None = None) -> nn.Module:
        """N(f(x), I) over actions, with x the observation and the goal; or from so many inputs to so many outputs."""
        c, s = self.config, self.spec
        inputs = s.observation_dim + self.goal_dim if inputs is None else inputs
        discrete = s.num_actions if outputs is None else 0
        return make_policy("unit_gaussian", inputs, outputs or s.action_dim, discrete, c.hidden, activation="gelu_tanh", init="xavier")

    def make_values(self, size: int, inputs: int, outputs: int = 1) -> EnsembleMLP:
        """`size` value networks."""
        c = self.config
        return EnsembleMLP(size, inputs, c.hidden, outputs, activation="gelu_tanh", layer_norm=c.layer_norm, init="xavier")

    def make_net(self, inputs: int, outputs: int) -> MLP:
        """One such network."""
        c = self.config
        return MLP(inputs, c.hidden, outputs, activation="gelu_tanh", layer_norm=c.layer_norm, init="xavier")

    def sampler(self) -> Sampler:
        actor = self.config.actor_mix
        actor.check("actor")
        return GoalSampler(self.value_goals(), actor)

    def value_goals(self) -> Mix | None:
        """Where the values' goals come from; None: there are no values."""
        if not hasattr(self.config, "value_mix"):
            return None
        self.config.value_mix.check("value")
        return self.config.value_mix

    def actor(self, state: TrainState) -> Actor:
        return GoalActor(self, state)

    # ---- what policies learn from

    def imitation(self, actor: Params, batch: Batch) -> tuple[tuple[Tensor, ...], Tensor]:
        """The policy's distribution at the actor's goals, and the log density [B] of the data's actions."""
        dist = self.apply("actor", actor, together(batch["observations"], batch[ACTOR_GOALS]))
        return dist, self.policy.log_prob(dist, batch["actions"])

    def weighted_loss(self, actor: Params, batch: Batch, advantage: Tensor) -> tuple[Tensor, Metrics]:
        """-min(exp(temperature A), 100) log pi(a | s, g), A [B] of the data's actions at the actor's goals."""
        weight = losses.advantage_weight(advantage, self.config.temperature)
        loss = -(weight * self.imitation(actor, batch)[1]).mean()
        return loss, {"actor/loss": loss, "actor/advantage": advantage.mean(), "actor/weight": weight.mean()}

    def distances(self, state: TrainState, observations: Tensor, goals: Tensor) -> Tensor | None:
        """How far goals [B, G] are, the larger the farther, [B]: for pictures and tests. None: it learns no such thing."""
        return None


class GoalValued(GoalConditioned):
    """With values, which improve the policy: by their gradient (ddpg_bc) or by weighting what is imitated (awr)."""

    def __init__(self, config: Any, spec: Any, pretrained: Mapping[str, Any] | None = None) -> None:
        self.learner = chosen_learner(config, spec.discrete)
        super().__init__(config, spec, pretrained)

    def actor_loss(self, actor: Params, state: TrainState, batch: Batch) -> tuple[Tensor, Metrics]:
        if self.learner == "awr":
            return self.weighted_loss(actor, batch, self.advantage(state, batch))
        return self.gradient_loss(actor, state, batch)

    def gradient_loss(self, actor: Params, state: TrainState, batch: Batch) -> tuple[Tensor, Metrics]:
        """-mean Q / mean |Q| - bc_weight log pi(a | s, g), Q at the policy's mean action, clipped."""
        dist, density = self.imitation(actor, batch)
        q = self.q(state, batch["observations"], batch[ACTOR_GOALS], self.policy.mode(dist))
        loss = -q.mean() / (q.detach().abs().mean() + 1e-6) - self.config.bc_weight * density.mean()
        return loss, {"actor/loss": loss, "actor/q": q.mean(), "actor/log_prob": density.mean()}

    @abstractmethod
    def q(self, state: TrainState, observations: Tensor, goals: Tensor, actions: Tensor) -> Tensor:
        """Q(s, g, a) [B]."""

    @abstractmethod
    def advantage(self, state: TrainState, batch: Batch) -> Tensor:
        """A(s, g, a) [B] of the data's actions at the actor's goals."""


def learner_field() -> Any:
    """The setting that chooses between the two."""
    return setting(
        "auto",
        "how values improve the policy: ddpg_bc, by their gradient; awr, by weights of imitation; auto: ddpg_bc, for discrete actions awr",
        choices=LEARNERS,
    )


def chosen_learner(config: Any, discrete: bool) -> str:
    """`ddpg_bc` or `awr`. Raises UserError for the gradient with respect to discrete actions."""
    if config.learner == "ddpg_bc" and discrete:
        raise UserError(f"{config.name} with discrete actions has no gradient of Q with respect to them: algo.learner=awr")
    return str(config.learner) if config.learner != "auto" else "awr" if discrete else "ddpg_bc"


def together(*parts: Tensor) -> Tensor:
    """Side by side as one network input: [B, ...] each -> [B, sum of widths]."""
    return torch.cat([p.flatten(1) for p in parts], -1)


def value_loss(
    now: Tensor, target_now: Tensor, target_next: Tensor, successes: Tensor, discount: float | Tensor, expectile: float | Tensor
) -> Tensor:
    """GCIVL's loss of twin values V [2, B], with their targets V' at s and at s' [2, B] (specification C.2).

    Each regresses on r + discount V'(s') of its own target, with the expectile's weight for whether r + discount min V'(s') is above the
    mean of V'(s).
    """
    rewards, masks = goal_rewards(successes)
    advantage = losses.td_target(rewards, masks, discount, target_next.amin(0)) - target_now.mean(0)
    error = losses.td_target(rewards, masks, discount, target_next) - now
    return (losses.expectile_weight(advantage, expectile) * error.square()).mean(-1).sum()


def goal_rewards(successes: Tensor) -> tuple[Tensor, Tensor]:
    """(rewards, masks) [B]: -1 until the goal is reached, then 0 and the end."""
    return successes - 1.0, 1.0 - successes
