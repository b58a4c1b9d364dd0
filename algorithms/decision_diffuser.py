"""Decision Diffuser: "Is Conditional Generative Modeling all you need for Decision-Making?" (Ajay et al., 2022, arXiv
2211.15657).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor, nn

from offrl import rng
from offrl.algorithm import Algorithm, Batch, Dataset, Grid, Loss, Params, TrainState, Traits, Tree, Update
from offrl.data.samplers.sequences import VALID, SequenceSampler, drawn_episodes
from offrl.errors import note
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
from offrl.families.return_conditioned import TargetReturnSettings, recorded, round_digits
from offrl.nn import MLP
from offrl.nn.diffusion import signal
from offrl.nn.temporal_unet import TemporalUnet
from offrl.registry import register
from offrl.settings.field import setting


@dataclass
class DecisionDiffuserConfig(DiffusionPlanSettings, TargetReturnSettings):
    """Settings of Decision Diffuser; the defaults are smaller than the authors', which
    `experiment=decision_diffuser/d4rl-gym` has.
    """

    name: str = "decision_diffuser"
    targets_ahead: ClassVar[bool] = True
    discount: float = setting(
        0.99, "discount factor of the return that plans are conditioned on", low=0.0, high=1.0, shared=True
    )
    termination_penalty: float = setting(
        0.0, "added to the reward of a termination in that return, in the units of the recorded rewards", shared=True
    )
    target_return: float | None = setting(
        None,
        "the discounted return of the rest of the episode that is asked for at every step, in the units of the "
        "recorded rewards; null: the largest of the data, less a tenth of its size",
        acting=True,
    )
    return_scale: float | None = setting(
        None,
        "such returns are divided by this before a network sees them; null: the largest absolute one of the data",
        low=1e-9,
    )
    multiples: list[int] = setting([1, 4, 8], "widths of the U-net's levels in multiples of `base`", low=1)
    hidden: list[int] = setting([256, 256], "widths of the hidden layers of the inverse model", low=1)
    condition_dropout: float = setting(
        0.25, "share of the windows whose return is hidden from the model", low=0.0, high=1.0
    )
    guidance: float = setting(
        1.2, "weight w of the return's influence; 0: plans are what the data do", low=0.0, acting=True
    )
    noise_scale: float = setting(
        0.5, "factor of all noise when acting (low-temperature sampling)", low=0.0, acting=True
    )
    clip: float = setting(
        5.0, "largest entry of a predicted plan, in units of the (normalised) observations", low=0.0, structural=True
    )


class DecisionDiffuserActor(ChunkActor):
    """Policy that follows the states of a plan for `action_steps` steps."""

    algorithm: DecisionDiffuser

    @property
    def length(self) -> int:
        return int(self.algorithm.config.plan_horizon) - 1

    def chunk(self, observations: Tensor, key: Tensor, explore: bool) -> Tensor:
        average = self.state.extra["average"]
        quiet = not explore and self.algorithm.config.greedy == "zero"
        states = self.algorithm.future(average, observations, key, 0.0 if quiet else None)
        return self.algorithm.act_between(average["inverse"], states).clamp(-1.0, 1.0)


@register("algo", "decision_diffuser")
class DecisionDiffuser(Algorithm[DecisionDiffuserConfig]):
    """A diffusion model of the states to come, given the return; an inverse model finds the action between two of them.

    Modules: plan, which predicts the noise; inverse. The return is the discounted one of the rest of the episode, as a
    share of `return_scale`; while acting the same is asked for at every step, as in the authors' code: rewards earned
    are not subtracted."""

    traits = Traits(policy_modules=("plan", "inverse"), actions=("continuous",), acts_on_device=True)
    actor_class = DecisionDiffuserActor

    @classmethod
    def fit_config(cls, config: DecisionDiffuserConfig, dataset: Dataset, grid: Grid = None) -> DecisionDiffuserConfig:
        if None not in (config.target_return, config.return_scale):
            return config
        mask = torch.zeros(dataset.num_episodes, dtype=torch.bool)
        mask[drawn_episodes(dataset).cpu()] = True
        returns = rows_ahead(config, dataset)[dataset.per_row(mask)]
        best, magnitude = float(returns.max()), float(returns.abs().max())
        fitted = replace(
            config,
            target_return=round_digits(best - 0.1 * abs(best))
            if config.target_return is None
            else config.target_return,
            return_scale=(round_digits(magnitude) or 1.0) if config.return_scale is None else config.return_scale,
        )
        note(
            f"decision_diffuser asks for a discounted return of {fitted.target_return:g} (algo.target_return) at every "
            f"step, in units of {fitted.return_scale:g} (algo.return_scale): the largest of the data is {best:.5g}"
        )
        return fitted

    def modules(self) -> dict[str, nn.Module]:
        c, s = self.config, self.spec
        plan = TemporalUnet(s.observation_dim, c.base, c.multiples, condition=1)
        return {"plan": plan, "inverse": MLP(2 * s.observation_dim, c.hidden, s.action_dim)}

    def extra(self, params: dict[str, Params]) -> Tree:
        return {"average": {name: {k: v.clone() for k, v in p.items()} for name, p in params.items()}}

    def sampler(self) -> SequenceSampler:
        return SequenceSampler(
            self.config.plan_horizon, derived_columns=lambda dataset: {RETURN: rows_ahead(self.config, dataset)}
        )

    # ---- learning

    def plan_loss(self, plan: Params, state: TrainState, batch: Batch, key: Tensor) -> Loss:
        """E |e - eps(x_t, t, R or nothing)|^2 / 2 over all states but the first, which is given (equation 8)."""
        c, states = self.config, batch["observations"].flatten(2)
        step_key, noise_key, keep_key = rng.split(key, 3)
        step = rng.randint(step_key, (states.shape[0],), c.denoising_steps)
        noise = rng.normal(noise_key, tuple(states.shape))
        x = with_first_state(noisy_plans(states, noise, step, c.denoising_steps), states[:, 0])
        keep = (rng.uniform(keep_key, (states.shape[0],)) >= c.condition_dropout).float()
        share = batch[RETURN][:, :1] / c.scale
        counted = batch[VALID] & (torch.arange(states.shape[1], device=states.device) > 0)
        error = (self.apply("plan", plan, x, step, share, keep) - noise).square()
        loss = 0.5 * torch.where(counted.unsqueeze(-1), error, 0.0).mean()
        return loss, {"plan/loss": loss, "plan/return": share.mean()}

    def inverse_loss(self, inverse: Params, state: TrainState, batch: Batch) -> Loss:
        """E |a_t - f(s_t, s_{t+1})|^2 / 2 over the steps that there are (equation 8)."""
        states, known = batch["observations"].flatten(2), batch[VALID][:, 1:].unsqueeze(-1)
        error = (self.act_between(inverse, states) - batch["actions"][:, :-1]).square()
        loss = 0.5 * torch.where(known, error, 0.0).mean()
        return loss, {"inverse/loss": loss}

    def act_between(self, inverse: Params, states: Tensor) -> Tensor:
        """Actions [B, T - 1, A] that lead from each of the states [B, T, O] to the next."""
        return self.apply("inverse", inverse, torch.cat([states[:, :-1], states[:, 1:]], -1))

    def update(self, state: TrainState, batch: Batch, key: Tensor, *, phase: int) -> Update:
        state, plan = self.descend(state, "plan", self.plan_loss, batch, key)
        state, inverse = self.descend(state, "inverse", self.inverse_loss, batch)
        average = followed(state.extra["average"], state.params, state.step, self.config.polyak)
        return state.with_extra(average=average), {**plan, **inverse}

    # ---- acting

    def expected(self, plan: Params, x: Tensor, t: int, share: Tensor) -> Tensor:
        """The clean states [B, T, O] that noisy ones are of, by eps_u + w (eps_R - eps_u) (equation 7)."""
        c, step = self.config, torch.full((x.shape[0],), t, device=x.device)
        keep = torch.ones_like(share[:, 0])
        free = self.apply("plan", plan, x, step, share, 0.0 * keep)
        noise = free + c.guidance * (self.apply("plan", plan, x, step, share, keep) - free)
        abar = signal(step[:1], c.denoising_steps)
        return ((x - (1.0 - abar).sqrt() * noise) / abar.sqrt()).clamp(-c.clip, c.clip)

    def future(
        self, average: dict[str, Params], observations: Tensor, key: Tensor, noise: float | None = None
    ) -> Tensor:
        """States [B, T, O] that begin with `observations` [B, O] and earn the target return. noise: in place of
        `noise_scale`.
        """
        c = self.config
        assert c.target_return is not None  # `fit_config` has found it
        share = torch.full_like(observations[:, :1], float(c.target_return) / c.scale)
        return denoise(
            lambda x, t: self.expected(average["plan"], x, t, share),
            observations,
            self.spec.observation_dim,
            c.plan_horizon,
            c.denoising_steps,
            key,
            c.noise_scale if noise is None else noise,
        )


def rows_ahead(config: DecisionDiffuserConfig, dataset: Dataset) -> Tensor:
    """sum_k discount^k r_{t+k} of the recorded rewards from each row to the end of its episode, with the penalty of a
    termination, [R].
    """
    rewards = recorded(dataset.columns["rewards"].cpu().double(), dataset.spec)
    return discounted_returns(dataset, rewards, config.discount, config.termination_penalty)
