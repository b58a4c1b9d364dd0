"""Diffuser: "Planning with Diffusion for Flexible Behavior Synthesis" (Janner et al., 2022, arXiv 2205.09991)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import grad

from offrl import rng
from offrl.algorithm import Algorithm, Batch, Dataset, Loss, Params, TrainState, Traits, Tree, Update
from offrl.data.samplers.sequences import VALID, SequenceSampler
from offrl.families.generative.chunks import ChunkActor
from offrl.families.generative.plans import (
    RETURN,
    DiffusionPlanSettings,
    denoise,
    discounted_returns,
    followed,
    noisy_plans,
    with_first_state,
)
from offrl.nn import flow
from offrl.nn.meta_check import check_acting
from offrl.nn.temporal_unet import PlanValue, TemporalUnet
from offrl.registry import register
from offrl.settings.field import setting


@dataclass
class DiffuserConfig(DiffusionPlanSettings):
    """Settings of Diffuser; the defaults are the authors' for D4RL's locomotion tasks."""

    name: str = "diffuser"
    multiples: list[int] = setting([1, 2, 4, 8], "widths of the U-net's levels in multiples of `base`", low=1)
    action_weight: float = setting(10.0, "weight of the first action in the plan's loss", low=0.0)
    discount: float = setting(0.997, "discount factor of the returns that guide plans", low=0.0, high=1.0, shared=True)
    termination_penalty: float = setting(-100.0, "added to the reward of a termination in those returns", shared=True)
    guide_scale: float = setting(
        0.1, "size of a step along the value's gradient; 0: plans are what the data do", low=0.0, acting=True
    )
    guide_steps: int = setting(2, "such steps before each denoising step", low=0, acting=True)
    guide_stop: int = setting(2, "no such steps in the last denoising steps, so many", low=0, acting=True)
    candidates: int = setting(
        64, "plans that are drawn, of which the one of the largest value is followed", low=1, acting=True
    )


class DiffuserActor(ChunkActor):
    """Policy that follows the best of several plans for `action_steps` steps."""

    algorithm: Diffuser

    @property
    def length(self) -> int:
        return int(self.algorithm.config.plan_horizon)

    def chunk(self, observations: Tensor, key: Tensor, explore: bool) -> Tensor:
        c = self.algorithm.config
        noise, count = float(explore or c.greedy == "sample"), c.candidates
        # a state's candidates side by side: its noise depends on no other state
        states = observations.repeat_interleave(count, 0)
        plans, values = self.algorithm.guided(self.state.extra["average"], states, key, noise)
        best = flow.best_of(values.unflatten(0, (-1, count)).T, plans.unflatten(0, (-1, count)).transpose(0, 1))
        return best[..., : self.algorithm.spec.action_dim].clamp(-1.0, 1.0)


@register("algo", "diffuser")
class Diffuser(Algorithm[DiffuserConfig]):
    """A diffusion model of plans (actions and states), and a value of noisy plans whose gradient guides their
    denoising.

    Modules: plan, which predicts the clean plan; value, the return of the episode from the plan's first step on.
    """

    traits = Traits(policy_modules=("plan", "value"), actions=("continuous",), acts_on_device=True)
    actor_class = DiffuserActor

    @property
    def dim(self) -> int:
        """D: numbers of a step of a plan, its action first."""
        return self.spec.action_dim + self.spec.observation_dim

    def modules(self) -> dict[str, nn.Module]:
        c = self.config
        size = 1500.0 * c.candidates * c.plan_horizon * c.base  # as measured
        check_acting(c, ("candidates", "plan_horizon", "base"), size)
        value = PlanValue(c.plan_horizon, self.dim, c.base, c.multiples)
        return {"plan": TemporalUnet(self.dim, c.base, c.multiples), "value": value}

    def extra(self, params: dict[str, Params]) -> Tree:
        return {"average": {name: {k: v.clone() for k, v in p.items()} for name, p in params.items()}}

    def sampler(self) -> SequenceSampler:
        return SequenceSampler(self.config.plan_horizon, derived_columns=self.returns)

    def returns(self, dataset: Dataset) -> dict[str, Tensor]:
        """The discounted return from each row to the end of its episode, with the penalty of terminations: [R]."""
        c, rewards = self.config, dataset.columns["rewards"].cpu().double()
        return {RETURN: discounted_returns(dataset, rewards, c.discount, c.termination_penalty)}

    # ---- learning

    @staticmethod
    def plans(batch: Batch) -> Tensor:
        """[B, T, D]: actions and states side by side."""
        return torch.cat([batch["actions"], batch["observations"].flatten(2)], -1)

    def noisy(self, batch: Batch, key: Tensor) -> tuple[Tensor, Tensor]:
        """(plans with noise and with their true first states, steps [B])."""
        plans, keys, steps = self.plans(batch), rng.split(key), self.config.denoising_steps
        step = rng.randint(keys[0], (plans.shape[0],), steps)
        noisy = noisy_plans(plans, rng.normal(keys[1], tuple(plans.shape)), step, steps)
        return with_first_state(noisy, batch["observations"][:, 0].flatten(1)), step

    def plan_loss(self, plan: Params, state: TrainState, batch: Batch, key: Tensor) -> Loss:
        """E w |x_0 - f(sqrt(abar_t) x_0 + sqrt(1 - abar_t) e, t)|^2, w = `action_weight` for the first action (equation
        4, of x_0).
        """
        clean, (x, step) = self.plans(batch), self.noisy(batch, key)
        predicted = with_first_state(self.apply("plan", plan, x, step), batch["observations"][:, 0].flatten(1))
        error = torch.where(batch[VALID].unsqueeze(-1), (predicted - clean).square(), 0.0)
        action = error[:, 0, : self.spec.action_dim]
        loss = error.mean() + (self.config.action_weight - 1.0) * action.sum() / error.numel()
        return loss, {"plan/loss": loss, "plan/action": action.mean()}

    def value_loss(self, value: Params, state: TrainState, batch: Batch, key: Tensor) -> Loss:
        """E (J(x_t, t) - sum_k gamma^k r_k)^2, of plans with the same noise."""
        x, step = self.noisy(batch, key)
        predicted, target = self.apply("value", value, x, step), batch[RETURN][:, 0]
        loss = (predicted - target).square().mean()
        return loss, {"value/loss": loss, "value/mean": predicted.mean(), "value/target": target.mean()}

    def update(self, state: TrainState, batch: Batch, key: Tensor, *, phase: int) -> Update:
        state, plan = self.descend(state, "plan", self.plan_loss, batch, key)
        state, value = self.descend(state, "value", self.value_loss, batch, key)
        average = followed(state.extra["average"], state.params, state.step, self.config.polyak)
        return state.with_extra(average=average), {**plan, **value}

    # ---- acting

    def guided(
        self, average: dict[str, Params], observations: Tensor, key: Tensor, noise: float = 1.0
    ) -> tuple[Tensor, Tensor]:
        """Plans [B, T, D] from states [B, O], pushed along the gradient of their value (algorithm 1); and their values
        [B].

        noise: a factor of all noise.
        """
        c = self.config

        def at(x: Tensor, t: int) -> Tensor:
            return torch.full((x.shape[0],), t, device=x.device)

        def value(x: Tensor, t: int) -> Tensor:
            return self.apply("value", average["value"], x, at(x, t))

        def push(x: Tensor, t: int, variance: float) -> Tensor:
            for _ in range(c.guide_steps if t >= c.guide_stop and c.guide_scale > 0.0 else 0):
                slope = grad(lambda y: value(y, t).sum())(x)
                x = with_first_state(x + c.guide_scale * variance * slope, observations)
            return x

        plans = denoise(
            lambda x, t: self.apply("plan", average["plan"], x, at(x, t)),
            observations, self.dim, c.plan_horizon, c.denoising_steps, key, noise, push,
        )  # fmt: skip
        return plans, value(plans, 0)
