"""Flow Q-learning: "Flow Q-Learning" (Park et al., 2025, arXiv 2502.02538)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from offrl import rng
from offrl.algorithm import Actor, Algorithm, Batch, Carry, Loss, Params, TrainState, Traits, Update
from offrl.families.critics import ConstraintSettings, Critic, Values, WithCritic
from offrl.families.generative.settings import FlowSettings, greedy_field, make_field, pessimism_field, rho_field
from offrl.nn import flow
from offrl.registry import register
from offrl.settings.field import setting


@dataclass
class FQLConfig(FlowSettings, ConstraintSettings):
    """Settings of FQL; the defaults are the authors' but for what they choose by environment: alpha, the discount and
    the pessimism.
    """

    name: str = "fql"
    alpha: float = setting(
        10.0, "weight of distillation, which holds the policy near the data (in units of Q unless normalize_q)", low=0.0
    )
    normalize_q: bool = setting(
        False, "divide the policy's Q by its mean size, so that alpha does not depend on the rewards' units"
    )
    pessimism: str = pessimism_field()
    rho: float = rho_field()
    greedy: str = greedy_field()


class OneStepActor(Actor):
    """The one-step policy, which draws noise at every step unless `greedy` is zero."""

    algorithm: FQL

    def act(self, carry: Carry, observations: Tensor, key: Tensor, *, explore: bool) -> tuple[Tensor, Carry]:
        z = self.algorithm.noise(observations, key)
        if not explore and self.algorithm.config.greedy == "zero":
            z = torch.zeros_like(z)
        return self.apply("actor", observations, z).clamp(-1.0, 1.0), carry


@register("algo", "fql")
class FQL(WithCritic, Algorithm[FQLConfig]):
    """A flow clones the data's actions; a one-step policy maps the same noise to nearly the same actions, and climbs Q.

    All losses of an update read the parameters of before it, as in the authors' code, where they are one loss; so does
    the target critic, which follows the critics of before the update. Modules: critic, flow, and actor, which maps
    noise to an action in one step."""

    traits = Traits(targets=("critic",), critic_modules=("critic",), observations="encoded", actions=("continuous",))
    actor_class = OneStepActor

    def modules(self) -> dict[str, nn.Module]:
        c, s = self.config, self.spec
        self.critic = Critic(c, s)
        fields = {"flow": make_field(c, s), "actor": make_field(c, s, timed=False)}
        return {"critic": self.critic.network, **fields, **self.cost_modules()}

    def noise(self, observations: Tensor, key: Tensor) -> Tensor:
        """Standard normal numbers [B, A]."""
        return rng.normal(key, (observations.shape[0], self.spec.action_dim))

    def next_value(self, state: TrainState, batch: Batch, key: Tensor) -> Values:
        """Q'(s', a') [B] of the target critics, a' = mu(s', z) of the one-step policy."""
        c, action = self.config, self.next_action(state, batch, key)
        logits = self.critic.logits(self.critic.target_critics(state, key), batch["next_observations"], action)
        return self.critic.aggregate(logits, c.pessimism, c.rho)

    def next_action(self, state: TrainState, batch: Batch, key: Tensor) -> Tensor:
        """mu(s', z) [B, A] of the one-step policy."""
        observations = batch["next_observations"]
        z = self.noise(observations, key)
        return self.apply("actor", state.params["actor"], observations, z).clamp(-1.0, 1.0)

    def critic_loss(self, critic: Params, state: TrainState, batch: Batch, key: Tensor) -> Loss:
        """E (r + gamma Q'(s', mu(s', z)) - Q_i(s, a))^2, the mean over critics i (equation 8)."""
        target = self.critic.td_target(batch, self.next_value(state, batch, key))
        return self.critic.loss(critic, batch, target, key, objective=self.critic.mean_objective)

    def flow_loss(self, field: Params, state: TrainState, batch: Batch, key: Tensor) -> Loss:
        """E |v(s, x_t, t) - (a - z)|^2 / A, x_t = (1 - t) z + t a (equation 4)."""
        observations = batch["observations"]
        loss = flow.matching(lambda x, t: self.apply("flow", field, observations, x, t), batch["actions"], key).mean()
        return loss, {"flow/loss": loss}

    def actor_loss(self, actor: Params, state: TrainState, batch: Batch, key: Tensor) -> Loss:
        """E [alpha |mu(s, z) - flow(s, z)|^2 / A - Q(s, mu(s, z))], Q the critics' mean (equation 9); Q sees actions
        cut to the range.
        """
        c, observations = self.config, batch["observations"]
        z = self.noise(observations, key)
        cloned = self.cloned(state, observations, z)
        action = self.apply("actor", actor, observations, z)
        distillation = (action - cloned).square().mean()
        legal = action.clamp(-1.0, 1.0)
        q = self.critic.q(state.params["critic"], observations, legal).mean(0)
        size = q.detach().abs().mean()
        scale = size if c.normalize_q else 1.0
        loss = c.alpha * distillation - q.mean() / scale
        metrics = {"actor/loss": loss, "actor/distillation": distillation, "actor/q": q.mean()}
        metrics["actor/clipped"] = (action.detach().abs() > 1.0).float().mean()
        return self.limited(loss, metrics, state, observations, legal, size / scale)

    def cloned(self, state: TrainState, observations: Tensor, z: Tensor) -> Tensor:
        """Actions [B, A] of the flow from noise z [B, A]; no gradient reaches them."""
        field = {k: v.detach() for k, v in state.params["flow"].items()}
        return flow.integrate(lambda x, t: self.apply("flow", field, observations, x, t), z, self.config.flow_steps)

    def update(self, state: TrainState, batch: Batch, key: Tensor, *, phase: int) -> Update:
        critic_key, flow_key, actor_key = rng.split(key, 3)
        after, metrics = self.simultaneous(
            state,
            self.descend(state, "critic", self.critic_loss, batch, critic_key),
            self.descend(state, "flow", self.flow_loss, batch, flow_key),
            self.descend(state, "actor", self.actor_loss, batch, actor_key),
        )
        after, costs = self.learn_costs(after, batch, lambda b: self.next_action(after, b, critic_key), metrics)
        return after, {**metrics, **costs}

    def q_value(self, state: TrainState, observations: Tensor, actions: Tensor) -> Tensor:
        return self.critic.q(state.params["critic"], observations, actions).mean(0)
