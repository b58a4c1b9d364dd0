"""Goal-conditioned algorithms: their settings, networks and policies, and the two losses of policy extraction.

Networks and losses are those of OGBench's reference implementations (arXiv 2410.20092; specification C.0): GELU,
LayerNorm after it in values and never in actors, a policy N(f(s, g), I), observations as they are. Their one optimiser
over the sum of all losses is, for Adam, one for each module: each loss reads the others' parameters from before the
update, so actors are updated before their critics."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from offrl import losses
from offrl.algorithm import Actor, Algorithm, Carry, Loss, Params, TrainState, Traits
from offrl.data.samplers.goals import ACTOR_GOALS, SUCCESSES, WINDOW_STATES, GoalSampler, Mix
from offrl.data.samplers.transitions import SPAN, Batch
from offrl.errors import UserError
from offrl.families.critics import epsilon_field
from offrl.nn import MLP, EnsembleMLP, make_policy
from offrl.settings.field import setting

LEARNERS = ("auto", "ddpg_bc", "awr")
STEPS = ("before", "after")


@dataclass
class GoalSettings:
    """Settings of goal-conditioned policies; the defaults are OGBench's."""

    learning_rate: float = setting(3e-4, "Adam's learning rate", low=0.0)
    batch_size: int = setting(1024, "transitions in a batch", low=1)
    discount: float = setting(
        0.99,
        "discount factor; also of goals at geometric distances (giant mazes and humanoidmaze: 0.995)",
        high=1.0,
        shared=True,
    )
    hidden: list[int] = setting([512, 512, 512], "widths of the hidden layers", low=1)
    actor_current: float = setting(
        0.0, "share of the policy's goals that are the present state", low=0.0, high=1.0, shared=True
    )
    actor_trajectory: float = setting(
        1.0, "share that are later states of the trajectory (stitch: 0.5, explore: 0)", low=0.0, high=1.0, shared=True
    )
    actor_random: float = setting(
        0.0, "share that are any states of the data (stitch: 0.5, explore: 1)", low=0.0, high=1.0, shared=True
    )
    actor_geometric: bool = setting(
        False, "later states at geometric distances; else uniform over the rest of the trajectory"
    )

    @property
    def actor_mix(self) -> Mix:
        """The distribution of the policy's goals."""
        return Mix(self.actor_current, self.actor_trajectory, self.actor_random, self.actor_geometric, self.discount)


@dataclass
class GoalValueSettings(GoalSettings):
    """Settings of those that learn values of goals as well."""

    layer_norm: bool = setting(True, "LayerNorm after each hidden layer of the values")
    layer_norm_epsilon: float = epsilon_field(1e-6)
    value_current: float = setting(
        0.2, "share of the values' goals that are the present state", low=0.0, high=1.0, shared=True
    )
    value_trajectory: float = setting(
        0.5, "share that are later states of the trajectory", low=0.0, high=1.0, shared=True
    )
    value_random: float = setting(0.3, "share that are any states of the data", low=0.0, high=1.0, shared=True)
    value_geometric: bool = setting(
        True, "later states at geometric distances; else uniform over the rest of the trajectory"
    )

    @property
    def value_mix(self) -> Mix:
        """The distribution of the values' goals."""
        return Mix(self.value_current, self.value_trajectory, self.value_random, self.value_geometric, self.discount)


@dataclass
class GoalTargetSettings(GoalValueSettings):
    """Settings of those whose values have targets that follow them."""

    polyak: float = setting(
        0.005, "share of the online parameters that enters the targets at each update", low=0.0, high=1.0
    )
    target_update: str = setting(
        "before",
        "the parameters that the targets move towards: those before the update (as OGBench's code) or after it",
        choices=STEPS,
    )


@dataclass
class GoalStepSettings(GoalTargetSettings):
    """Settings of those whose values learn from one step, or from `n_step`."""

    n_step: int = setting(
        1,
        "values' targets look so many steps of the data ahead before they bootstrap, or to the goal or the end",
        low=1,
    )


ConfigT = TypeVar("ConfigT", bound=GoalSettings)
TargetConfigT = TypeVar("TargetConfigT", bound=GoalTargetSettings)


class GoalActor(Actor):
    """Policy of the module "actor", which sees the observation and the goal. A carry is the goals [E, G]; None: none
    was set.
    """

    algorithm: GoalConditioned

    def set_goal(self, carry: Carry, goals: Tensor) -> Carry:
        return goals

    def act(self, carry: Carry, observations: Tensor, key: Tensor, *, explore: bool) -> tuple[Tensor, Carry]:
        dist = self.apply("actor", concatenate(observations, required_goals(self.algorithm, carry)))
        return self.choose(dist, key, explore), carry


def required_goals(algorithm: Algorithm, goals: Tensor | None) -> Tensor:
    """`goals`. Raises UserError where none was set."""
    if goals is None:
        raise UserError(
            f"a policy of {algorithm.config.name} acts towards a goal, and was told none: this use of a policy has no "
            "goals, or the environment gives none (info['goal'], or the observation's entry desired_goal)"
        )
    return goals


class GoalConditioned(Algorithm[ConfigT]):
    """Base of algorithms that learn from goals drawn in hindsight. Module "actor" sees the observation and the goal
    side by side.
    """

    traits = Traits(goal_conditioned=True, observations="encoded")
    subgoal_kind: ClassVar[str] = (
        ""  # subgoals that trained runs choose for others (`offrl.families.subgoals`): "latent", "state", or none
    )
    actor_class: ClassVar[type[Actor]] = GoalActor

    @property
    def goal_dim(self) -> int:
        """G: the dimension of a goal."""
        return int(self.spec.goal_dim or self.spec.observation_dim)

    def make_actor(self, inputs: int | None = None) -> nn.Module:
        """N(f(x), I) over actions, x the observation and the goal, or another input of that dimension."""
        c, s = self.config, self.spec
        inputs = s.observation_dim + self.goal_dim if inputs is None else inputs
        return make_policy(
            "unit_gaussian", inputs, s.action_dim, s.num_actions, c.hidden, activation="gelu_tanh", init="xavier"
        )

    def sampler(self) -> GoalSampler:
        actor, value = self.config.actor_mix, getattr(self.config, "value_mix", None)
        actor.check("actor")
        if value is not None:
            value.check("value")
        return GoalSampler(value, actor, n_step=getattr(self.config, "n_step", 1))

    def imitation(self, actor: Params, batch: Batch) -> tuple[tuple[Tensor, ...], Tensor]:
        """The policy's distribution at the actor's goals, and the log density [B] of the data's actions."""
        dist = self.apply("actor", actor, concatenate(batch["observations"], batch[ACTOR_GOALS]))
        return dist, self.policy.log_prob(dist, batch["actions"])

    def move_targets(
        self: GoalConditioned[TargetConfigT], before: TrainState, after: TrainState, name: str
    ) -> TrainState:
        """The state `after` an update with the targets of a module a step further. before: the state before that
        update.
        """
        towards = before if self.config.target_update == "before" else after
        return after._replace(target=self.polyak(after._replace(params=towards.params), name).target)

    def distances(self, state: TrainState, observations: Tensor, goals: Tensor) -> Tensor | None:
        """Distances [B] of goals [B, G], larger for farther ones, for pictures and tests. None: the algorithm learns no
        distance.
        """
        return None


# ---- networks


def make_values(config: GoalValueSettings, size: int, inputs: int, outputs: int = 1) -> EnsembleMLP:
    """`size` value networks."""
    return EnsembleMLP(size, inputs, config.hidden, outputs, **_value_network(config))


def make_net(config: GoalValueSettings, inputs: int, outputs: int) -> MLP:
    """A single network of that form, without an ensemble."""
    return MLP(inputs, config.hidden, outputs, **_value_network(config))


def _value_network(config: GoalValueSettings) -> dict[str, Any]:
    """The form of the values' networks."""
    norm = {"layer_norm": config.layer_norm, "layer_norm_epsilon": config.layer_norm_epsilon}
    return {"activation": "gelu_tanh", "init": "xavier", **norm}


# ---- losses of the policy


def learner_field() -> Any:
    """The setting `learner`, which chooses between the two."""
    return setting(
        "auto",
        "how values improve the policy: ddpg_bc, by their gradient; awr, by weights of imitation; auto: ddpg_bc, for "
        "discrete actions awr",
        choices=LEARNERS,
    )


def chosen_learner(config: Any, discrete: bool) -> str:
    """`ddpg_bc` or `awr`. Raises UserError for the gradient with respect to discrete actions."""
    if config.learner == "ddpg_bc" and discrete:
        raise UserError(
            f"{config.name} with discrete actions has no gradient of Q with respect to them: algo.learner=awr"
        )
    return str(config.learner) if config.learner != "auto" else "awr" if discrete else "ddpg_bc"


def awr_loss(log_prob: Tensor, advantage: Tensor, temperature: float | Tensor, name: str = "actor") -> Loss:
    """-E min(exp(temperature A), 100) log pi(a | s, g) (OGBench's AWR), of log densities and advantages [B] of the
    data's actions.
    """
    weight = losses.advantage_weight(advantage, temperature)
    loss = -(weight * log_prob).mean()
    return loss, {f"{name}/loss": loss, f"{name}/advantage": advantage.mean(), f"{name}/weight": weight.mean()}


def expectile_td_loss(v: Tensor, old_v: Tensor, next_v: Tensor, step: GoalTarget, expectile: float | Tensor) -> Tensor:
    """E |tau - 1(A < 0)| (r + gamma V'(s', g) - V(s, g))^2 of both V, A = r + gamma min V'(s', g) - mean V'(s, g): of V
    and its targets V' [2, B] at s, and V' [2, B] at s'.
    """
    advantage = losses.td_target(step.rewards, step.masks, step.discount, next_v.amin(0)) - old_v.mean(0)
    error = losses.td_target(step.rewards, step.masks, step.discount, next_v) - v
    return (losses.expectile_weight(advantage, expectile) * error.square()).mean(-1).sum()


def ddpg_bc_loss(q: Tensor, log_prob: Tensor, bc_weight: float | Tensor) -> Loss:
    """-E Q / mean |Q| - bc_weight E log pi(a | s, g) (OGBench's DDPG+BC), of Q [B] at the policy's mean actions.

    The scale mean |Q| is a constant: no gradient goes through it.
    """
    loss = -q.mean() / (q.detach().abs().mean() + 1e-6) - bc_weight * log_prob.mean()
    return loss, {"actor/loss": loss, "actor/q": q.mean(), "actor/log_prob": log_prob.mean()}


def concatenate(*parts: Tensor) -> Tensor:
    """Tensors side by side as one network input: [B, ...] each -> [B, sum of widths]."""
    return torch.cat([p.flatten(1) for p in parts], -1)


class GoalTarget(NamedTuple):
    """What a target of values of goals is made of: `rewards` + `discount` * `masks` * V(`observations`, g)."""

    rewards: Tensor  # [B]
    masks: Tensor  # [B]
    discount: float | Tensor  # of what follows, [B] of windows
    observations: Tensor  # [B, O] after the step, or after the window


def goal_target(config: GoalStepSettings, batch: Batch) -> GoalTarget:
    """Of a reward of -1 for each step until the goal is reached. Windows of m steps (`n_step`) sum -1 + ... -
    discount^(m - 1); one that ends at the goal has nothing after it, and one of 0 steps is there already."""
    if SPAN not in batch:
        return GoalTarget(*goal_rewards(batch[SUCCESSES]), config.discount, batch["next_observations"])
    steps, span = torch.arange(config.n_step, device=batch[SPAN].device), batch[SPAN]
    rewards = -torch.where(steps < span.unsqueeze(-1), config.discount**steps, 0.0).sum(-1)
    return GoalTarget(rewards, 1.0 - batch[SUCCESSES], config.discount**span, batch[WINDOW_STATES])


def goal_rewards(successes: Tensor) -> tuple[Tensor, Tensor]:
    """(rewards, masks) [B]: -1 until the goal is reached, then 0 and the end."""
    return successes - 1.0, 1.0 - successes
