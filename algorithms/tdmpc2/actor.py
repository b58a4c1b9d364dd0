"""Acting by MPPI in the latent model, around the plans of the policy; what the model expects along recorded actions."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from offrl import losses, rng
from offrl.algorithm import Actor, Batch, Carry, Params
from offrl.algorithms.tdmpc2.networks import HEAD
from offrl.algorithms.tdmpc2.settings import check_settings
from offrl.data.samplers.states import steps_of
from offrl.errors import UserError
from offrl.world_models.open_loop import Expected
from offrl.world_models.planning import first_plan, mppi

if TYPE_CHECKING:
    from offrl.algorithms.tdmpc2.algorithm import TDMPC2


class LatentPlan(NamedTuple):
    """The memory of planning in E episodes."""

    mean: Tensor  # [E, H, A]: the previous plan, one step later


class LatentPlanner(Actor):
    """The first action of the plan that the search ends with, or with `planning` off the policy's own.

    Without `explore` its random numbers are the same in all steps, and depend on the seed alone: so one episode may
    begin anew while others go on.
    """

    algorithm: TDMPC2
    resettable = True

    def start(self, episodes: int) -> Carry:
        c = self.algorithm.config
        if not c.planning:
            return None
        check_settings(c, self.algorithm.spec.action_dim)  # `acting.` may have changed some
        return LatentPlan(first_plan(episodes, c.plan_horizon, *self._bounds()))

    def act(self, carry: Carry, observations: Tensor, key: Tensor, *, explore: bool) -> tuple[Tensor, Carry]:
        c, latents = self.algorithm.config, self.algorithm.encode(self.state.params, self.state.extra, observations)
        if carry is None:
            return self.choose(self.apply("actor", latents), key, explore), None
        if not explore:
            key = rng.fold_in(self.state.key, 211)
        search, draws = rng.split(key)
        mean = carry.mean
        if c.plan_start == "policy":
            mean = self.policy_plans(latents, torch.zeros_like(mean[:1]))[:, 0]
        noise = rng.normal(draws, (c.plan_proposals, *mean.shape[1:]))
        action, mean = mppi(
            self.returns,
            latents,
            mean,
            *self._bounds(latents),
            search,
            population=c.plan_population,
            elites=c.plan_elites,
            iterations=c.plan_iterations,
            temperature=c.plan_temperature,
            std_min=c.plan_std_min,
            std_max=c.plan_std_max,
            pick=c.plan_action,
            explore=explore,
            proposals=self.policy_plans(latents, noise),
        )
        return action, LatentPlan(mean)

    def graph(self, explore: bool) -> None:
        """None: the policy alone is exported. Raises UserError where it plans."""
        if self.algorithm.config.planning:
            raise UserError(
                "a policy of tdmpc2 that plans cannot be exported: offrl export RUN acting.planning=false (in Python "
                "policy.with_settings) exports its policy alone"
            )

    def _bounds(self, latents: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """[A], or of latents [B, L] of several tasks [B, A]: 0 for actions that a task lacks."""
        ones = torch.ones(self.algorithm.spec.action_dim, device=self.state.step.device)
        if self.algorithm.parts and latents is not None:
            ones = latents[:, -1 - len(ones) : -1]
        return -ones, ones

    def policy_plans(self, latents: Tensor, noise: Tensor) -> Tensor:
        """Plans [B, N, H, A] of the policy from latents [B, L], with standard normal noise [N, H, A]: zeros give its
        mean.
        """
        z, actions = _each(latents, len(noise)), []
        for t in range(noise.shape[1]):
            actions.append(self._policy(z, noise[:, t]))
            if t + 1 < noise.shape[1]:
                z = self.apply("model", z, actions[-1]).latent
        return torch.stack(actions, 2)

    def _policy(self, latents: Tensor, noise: Tensor) -> Tensor:
        """Actions [B, N, A] at latents [B, N, L], with standard normal noise [N, A] that all B share."""
        mean, log_std = self.apply("actor", latents)
        return (mean + log_std.exp() * noise).tanh()

    def returns(self, latents: Tensor, plans: Tensor, key: Tensor) -> Tensor:
        """R = sum_t gamma^t r_t + gamma^H Q(z_H, pi(z_H)) of plans [B, P, H, A] from latents [B, L]: [B, P], where Q is
        the mean of two critics and nothing counts after a terminal; ours: less plan_distance_weight mean_P |R| / 2.5
        sum_t gamma^t (a_t - tanh mu(z_t))^2.
        """
        pair, draws = rng.split(key)
        z, weight = _each(latents, plans.shape[1]), plans.new_ones(())
        total, discount = torch.zeros_like(plans[..., 0, 0]), self.algorithm.discount(z)
        distance, distance_weight = torch.zeros_like(total), self.algorithm.config.plan_distance_weight
        for t in range(plans.shape[2]):
            if distance_weight:
                mean, log_std = self.apply("actor", z)
                error = (plans[:, :, t] - mean.tanh()).square()
                distance = distance + weight * self.algorithm.per_action(error, log_std)
            step = self.apply("model", z, plans[:, :, t])
            z, total = step.latent, total + weight * HEAD.mean(step.reward)
            weight = weight * discount
            if step.termination is not None:
                weight = weight * (step.termination <= 0.0)
        action = self._policy(z, rng.normal(draws, (plans.shape[1], plans.shape[-1])))
        total = total + weight * self.algorithm.critics.mean_q(self.state.params["critic"], z, action, pair)
        if not distance_weight:
            return total
        size = total.abs().where(total.isfinite(), torch.nan).nanmean(1, keepdim=True) / losses.CLONING
        return total - distance_weight * size * distance


def _each(latents: Tensor, count: int) -> Tensor:
    """Latents [B, L] for `count` plans each: [B, count, L]."""
    return latents.unsqueeze(1).expand(-1, count, -1)


def open_loop(algorithm: TDMPC2, params: dict[str, Params], batch: Batch, context: int, key: Tensor) -> Expected:
    """See `offrl.world_models.open_loop.OpenLoopModel`: rewards alone, for latents are not decoded."""
    latent = algorithm.encode(params, algorithm.extra(params), steps_of(batch["observations"], context - 1))
    rewards = []
    for action in batch["actions"][context - 1 : -1]:
        step = algorithm.apply("model", params["model"], latent, action)
        latent = step.latent
        rewards.append(HEAD.mean(step.reward))
    return Expected(torch.stack(rewards))
