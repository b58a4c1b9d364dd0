"""Quasimetric RL: "Optimal Goal-Reaching Reinforcement Learning via Quasimetric Learning" (Wang et al., 2023, arXiv
2304.01203), with OGBench's constants (arXiv 2410.20092)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn import functional as F

from offrl.algorithm import Batch, Loss, Params, TrainState, Update
from offrl.data.samplers.goals import ACTOR_GOALS, VALUE_GOALS
from offrl.errors import UserError
from offrl.families.goal_conditioned import (
    GoalConditioned,
    GoalValueSettings,
    awr_loss,
    chosen_learner,
    ddpg_bc_loss,
    learner_field,
    make_net,
)
from offrl.nn.representations.quasimetric import QUASIMETRICS, Quasimetric, QuasimetricModel
from offrl.registry import register
from offrl.settings.field import defaults, setting

SPREAD_SCALE = 100.0  # beta: distances beyond about `softplus_offset` times this are pushed no further


@dataclass
@defaults(value_current=0.0, value_trajectory=0.0, value_random=1.0)
class QRLConfig(GoalValueSettings):
    """Settings of QRL; the defaults are OGBench's for antmaze. It uses no discount factor and no target networks."""

    name: str = "qrl"
    quasimetric: str = setting(
        "iqe", "iqe: interval quasimetric embeddings; mrn: metric residual networks", choices=QUASIMETRICS
    )
    latent: int = setting(512, "width of the latent; iqe: a multiple of 8", low=2)
    slack: float = setting(
        0.05, "epsilon: how much the mean square excess of one step's distance over 1 may be", low=0.0
    )
    softplus_offset: float = setting(5.0, "offset of the softplus that pushes states apart", low=0.0)
    learner: str = learner_field()
    bc_weight: float = setting(
        0.003, "ddpg_bc: weight of imitation (pointmaze 0.0003, humanoidmaze 0.001, manipulation 0.3)", low=0.0
    )
    temperature: float = setting(3.0, "awr: multiplies the advantage in the exponent; larger is greedier", low=0.0)


@register("algo", "qrl")
class QRL(GoalConditioned[QRLConfig]):
    """The largest quasimetric under which no step of the data is longer than 1 is the number of steps to the goal.

    States and goals are pushed apart, one step's distance is held at 1 by a multiplier that rises while the constraint
    is violated, and, with learner=ddpg_bc, a model of what actions do to the latent lets the distance judge them.
    Assumes that dynamics are deterministic."""

    def modules(self) -> dict[str, nn.Module]:
        c, s = self.config, self.spec
        if s.goal_dim:
            name = s.task.name if s.task is not None and not s.name else s.name
            raise UserError(
                f"{c.name} cannot learn from {name}, whose goals are no observations but have {s.goal_dim} numbers of "
                "their own (achieved_goals): it measures distances between states; take gcivl, gciql, crl or hiql"
            )
        self.learner = chosen_learner(c, s.discrete)
        if c.latent % (8 if c.quasimetric == "iqe" else 2):
            raise UserError(
                f"algo.latent={c.latent} must be a multiple of {8 if c.quasimetric == 'iqe' else 2} for {c.quasimetric}"
            )
        encoder = make_net(c, s.observation_dim, c.latent)
        # awr needs the distance alone: dynamics that nothing uses would only shape phi
        moves = None if self.learner == "awr" else make_net(c, c.latent + self.spec.encoded_action_dim, c.latent)
        return {
            "actor": self.make_actor(),
            "value": QuasimetricModel(encoder, moves, Quasimetric(c.quasimetric, c.latent)),
        }

    def distance(self, value: Params, observations: Tensor, goals: Tensor) -> Tensor:
        """d(s, g) [B], in steps."""
        x, y = (self.apply("value", value, "encode", z.flatten(1)) for z in (observations, goals))
        return self.apply("value", value, "between", x, y)

    def value_loss(self, value: Params, state: TrainState, batch: Batch) -> Loss:
        """beta E softplus(spread - d(s, g) / beta) + lambda (E relu(d(s, s') - 1)^2 - slack), which lambda maximises;
        and for the latent dynamics T, E (d(T(s, a), s') + d(s', T(s, a))) / 2."""
        c = self.config
        x, next_x, goal = (
            self.apply("value", value, "encode", batch[k].flatten(1))
            for k in ("observations", "next_observations", VALUE_GOALS)
        )
        distance = self.apply("value", value, "between", x, goal)
        step = self.apply("value", value, "between", x, next_x)
        repulsion = SPREAD_SCALE * F.softplus(c.softplus_offset - distance / SPREAD_SCALE).mean()
        excess = (step - 1.0).clamp(min=0.0).square().mean()
        multiplier = self.apply("value", value, "multiplier")
        loss = repulsion + multiplier.detach() * excess + multiplier * (c.slack - excess.detach())
        metrics = {
            "value/loss": loss,
            "value/distance": distance.mean(),
            "value/step": step.mean(),
            "value/multiplier": multiplier,
        }
        if self.learner == "awr":
            return loss, metrics
        prediction = self.apply("value", value, "move", x, self.spec.encode(batch["actions"]))
        total = self.apply("value", value, "between", prediction, next_x) + self.apply(
            "value", value, "between", next_x, prediction
        )
        dynamics = 0.5 * total.mean()
        return loss + dynamics, {**metrics, "value/dynamics": dynamics}

    def q(self, state: TrainState, observations: Tensor, goals: Tensor, actions: Tensor) -> Tensor:
        """-d(T(s, a), g) [B]."""
        value = state.params["value"]
        x, goal = (self.apply("value", value, "encode", z.flatten(1)) for z in (observations, goals))
        return -self.apply(
            "value", value, "between", self.apply("value", value, "move", x, self.spec.encode(actions)), goal
        )

    def advantage(self, state: TrainState, batch: Batch) -> Tensor:
        """d(s, g) - d(s', g) [B] at the actor's goals."""
        value, goals = state.params["value"], batch[ACTOR_GOALS]
        return self.distance(value, batch["observations"], goals) - self.distance(
            value, batch["next_observations"], goals
        )

    def actor_loss(self, actor: Params, state: TrainState, batch: Batch) -> Loss:
        """ddpg_bc: E d(T(s, pi(s, g)), g) / E |d| - bc_weight E log pi(a | s, g);
        awr: -E min(exp(temperature (d(s, g) - d(s', g))), 100) log pi(a | s, g)."""
        dist, log_prob = self.imitation(actor, batch)
        if self.learner == "awr":
            return awr_loss(log_prob, self.advantage(state, batch), self.config.temperature)
        q = self.q(state, batch["observations"], batch[ACTOR_GOALS], self.policy.mode(dist))
        return ddpg_bc_loss(q, log_prob, self.config.bc_weight)

    def update(self, state: TrainState, batch: Batch, key: Tensor, *, phase: int) -> Update:
        state, actor = self.descend(state, "actor", self.actor_loss, batch)
        state, value = self.descend(state, "value", self.value_loss, batch)
        return state, {**value, **actor}

    def distances(self, state: TrainState, observations: Tensor, goals: Tensor) -> Tensor:
        return self.distance(state.params["value"], observations, goals)
