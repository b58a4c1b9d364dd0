"""Advantage-weighted matching for offline RL: cloning by flow matching whose rows count by their advantage, linearly,
as in "Advantage Weighted Matching" (arXiv 2509.25050), which trains image models on their own samples; on IQL's values
(arXiv 2110.06169)."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from offrl import losses
from offrl.algorithm import Algorithm, Batch, Dataset, Grid, Loss, Params, Sampler, TrainState, Traits, Update
from offrl.data.samplers.chunks import VALID, WHOLE, ChunkSampler
from offrl.errors import UserError
from offrl.families import in_sample
from offrl.families.critics import Critic, Target, Value, Values, WithCritic
from offrl.families.generative.best_of_n import BestFlowActor, candidates_field
from offrl.families.generative.chunks import action_steps_field, length_field
from offrl.families.generative.settings import FlowSettings, greedy_field, make_field
from offrl.nn import flow
from offrl.registry import register
from offrl.settings.field import setting

# added to sigma; below this share of Q's size advantages are rounding, and all rows count 1
SMALLEST_SPREAD, NO_SPREAD = (1e-4, 1e-3)


@dataclass
class AWMConfig(FlowSettings):
    """Settings of advantage-weighted matching; networks and optimiser are those of FQL's authors for OGBench."""

    name: str = "awm"
    expectile: float = setting(
        0.7, "tau: 0.5 values the data's policy, 1.0 the best action in the data", low=0.0, high=1.0
    )
    weights: str = setting(
        "linear",
        "a row's weight: linear: 1 + strength clip(A / sigma) / advantage_clip, at least 0; exp: min(exp(temperature "
        "A), 100); one: 1",
        choices=("linear", "exp", "one"),
    )
    strength: float = setting(
        5.0, "weights=linear: lambda; at 5 an advantage of one sigma doubles a row, and minus one drops it", low=0.0
    )
    advantage_clip: float = setting(
        5.0, "weights=linear: largest advantage in standard deviations of the batch (sigma)", low=1e-6
    )
    temperature: float = setting(
        3.0, "weights=exp: multiplies the advantage in the exponent; larger is greedier", low=0.0
    )
    length: int = length_field(1)
    action_steps: int = action_steps_field()
    candidates: int = candidates_field(
        1, "actions (or chunks) that are drawn for each decision; above 1 the one with the largest Q is played"
    )
    greedy: str = greedy_field()


@register("algo", "awm")
class AWM(WithCritic, Algorithm[AWMConfig]):
    """V by expectiles, a flow of the data's actions weighted by their advantage, Q by TD towards V: no target sees the
    flow.

    With `length` above 1 chunks stand for actions everywhere. Modules: value, critic, and actor, the flow.
    """

    traits = Traits(
        targets=("critic",), policy_modules=("actor", "critic"), critic_modules=("critic",), actions=("continuous",)
    )
    actor_class = BestFlowActor

    @classmethod
    def traits_for(cls, config: AWMConfig) -> Traits:
        # Q of chunks says nothing of a single action
        return cls.traits if config.length == 1 else dataclasses.replace(cls.traits, critic_modules=(), n_step=False)

    @classmethod
    def fit_config(cls, config: AWMConfig, dataset: Dataset, grid: Grid = None) -> AWMConfig:
        if config.n_step > 1 and config.length > 1:
            raise UserError(
                f"algo.n_step={config.n_step}: a target of algo.length={config.length} sums a chunk's rewards; leave "
                "n_step at 1"
            )
        return super().fit_config(config, dataset, grid)

    @property
    def width(self) -> int:
        """D: numbers in an action, or in a chunk of them."""
        return int(self.config.length) * self.spec.action_dim

    def modules(self) -> dict[str, nn.Module]:
        c, s = self.config, self.spec
        self.value, self.critic = Value(c, s), Critic(c, dataclasses.replace(s, action_dim=self.width))
        return {"value": self.value.network, "critic": self.critic.network, "actor": make_field(c, s, self.width)}

    def sampler(self) -> Sampler:
        return super().sampler() if self.config.length == 1 else ChunkSampler(self.config.length)

    def value_loss(self, value: Params, state: TrainState, batch: Batch, q: Values) -> Loss:
        """E |tau - 1(Q' - V < 0)| (Q' - V)^2 (arXiv 2110.06169, equation 5); chunks that a time-out cut count 0, for Q
        is not of them.
        """
        return in_sample.expectile_loss(self.value, value, batch, q, self.config.expectile, batch.get(WHOLE, 1.0))

    def critic_loss(self, critic: Params, state: TrainState, batch: Batch, key: Tensor) -> Loss:
        """E (r + gamma V(s') - Q_i(s, a))^2, summed over critics i, after a chunk of m steps with its rewards and
        gamma^m; a chunk that a time-out cut counts 0 (arXiv 2110.06169, equation 6)."""
        target = self.critic.td_target(batch, self.value(state.params["value"], batch["next_observations"]))

        def objective(logits: Tensor, target: Target) -> Tensor:
            return batch.get(WHOLE, 1.0) * self.critic.objective(logits, target)

        return self.critic.loss(critic, batch, target, key, objective=objective)

    def weigh(self, advantage: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
        """(weights [B], sigma []) of advantages A [B] beside values Q [B]; sigma is the standard deviation of A in this
        batch.
        """
        c = self.config
        sigma = (advantage - advantage.mean()).square().mean().sqrt() + SMALLEST_SPREAD
        if c.weights == "exp":
            return losses.advantage_weight(advantage, c.temperature), sigma
        if c.weights == "one":
            return torch.ones_like(advantage), sigma
        scaled = (advantage / sigma).clamp(-c.advantage_clip, c.advantage_clip) / c.advantage_clip
        weight = (1.0 + c.strength * scaled).clamp(min=0.0)
        return torch.where(sigma < NO_SPREAD * q.abs().mean().clamp(min=1.0), 1.0, weight), sigma

    def actor_loss(self, actor: Params, state: TrainState, batch: Batch, q: Tensor, key: Tensor) -> Loss:
        """E w |v(s, x_t, t) - (a - z)|^2 / D, x_t = (1 - t) z + t a, w = max(0, 1 + lambda clip(A / sigma, -c, c) / c),
        A = Q' - V(s).
        """
        observations, actions = batch["observations"], batch["actions"]
        advantage = q - self.value(state.params["value"], observations).mean
        weight, sigma = self.weigh(advantage, q)
        error = flow.matching(lambda x, t: self.apply("actor", actor, observations, x, t), actions, key)
        if WHOLE in batch:  # steps after an episode's end count 0
            error = torch.where(batch[VALID].unsqueeze(-1), error.unflatten(1, (self.config.length, -1)), 0.0).flatten(
                1
            )
        loss = (weight * error.mean(-1)).mean()
        share = weight.sum().square() / (weight.square().sum() * weight.shape[0]).clamp(min=1e-12)
        return loss, {
            "actor/loss": loss, "actor/flow_loss": error.mean(), "actor/weight": weight.mean(),
            "actor/dropped": (weight == 0.0).float().mean(), "actor/effective_share": share,
            "actor/advantage": advantage.mean(), "actor/sigma": sigma,
        }  # fmt: skip

    def update(self, state: TrainState, batch: Batch, key: Tensor, *, phase: int) -> Update:
        batch = {**batch, "actions": batch["actions"].flatten(1)}
        q = self.critic.min_q(self.critic.target_critics(state, key), batch["observations"], batch["actions"])
        state, value = self.descend(state, "value", self.value_loss, batch, q)
        # with the new V, and so the critics
        state, actor = self.descend(state, "actor", self.actor_loss, batch, q.mean, key)
        state, critic = self.descend(state, "critic", self.critic_loss, batch, key)
        state = self.critic.regularised(state)
        return self.polyak(state, "critic"), {**value, **actor, **critic}
