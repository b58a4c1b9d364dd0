"""CDT: "Constrained Decision Transformer for Offline Safe Reinforcement Learning" (Liu et al., 2023, arXiv
2302.07351).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from offrl.algorithm import Adam, Batch, Carry, Dataset, DataSpec, Grid, Loss, Params, Sampler, TrainState, Update
from offrl.data.costs import refuse_costless, refuse_unreached
from offrl.data.samplers.relabelled import RelabelledSampler
from offrl.data.samplers.sequences import COSTS, STEPS, VALID
from offrl.families.return_conditioned import TargetReturnSettings, round_digits
from offrl.families.sac import LogWeight
from offrl.families.sequence import (
    History,
    SequenceModel,
    SequenceSettings,
    StepPolicy,
    TargetReturnActor,
    masked_mean,
)
from offrl.nn.policies import Dist, Gaussian, Policy
from offrl.nn.transformer import Affine
from offrl.registry import register
from offrl.settings.field import defaults, setting

ORIGIN = 50.0  # the token of a cost to go is this less it (OSRL's)
HALF_LOG_2_PI_E = 0.5 + 0.5 * math.log(2.0 * math.pi)  # the entropy of N(0, 1)


@dataclass
@defaults(warmup_steps=500, batch_size=2048, context=10, heads=8, return_scale=10.0)
class CDTConfig(TargetReturnSettings, SequenceSettings):
    """Settings of CDT; the defaults are OSRL's for DSRL's tasks."""

    name: str = "cdt"
    cost_limit: float = setting(10.0, "what the policy is asked to cost in an episode, at most", low=0.0, acting=True)
    policy: str = setting(
        "gaussian",
        "gaussian: likelihood, with a learnt weight of the entropy; deterministic: squared error",
        choices=("deterministic", "gaussian"),
    )
    entropy_weight: float = setting(0.1, "policy=gaussian: weight of the entropy at the start", low=1e-8)
    cost_weight: float = setting(0.02, "weight of the prediction whether a step costs anything", low=0.0)
    relabelled_share: float = setting(
        0.2, "copies of episodes, as a share of all, whose return and cost are relabelled with better ones", low=0.0
    )
    drawn_cost: float = setting(
        70.0,
        "episodes are drawn in proportion to this less their cost, never where that is negative; 0: all alike",
        low=0.0,
    )


class StateGaussian(Gaussian):
    """N(f(s), diag(exp(2 log_std(s)))), clipped to [-1, 1] and not squashed."""

    outputs = 2

    def __init__(self, width: int, action_dim: int) -> None:
        Policy.__init__(self, width, action_dim, [], init="gpt")
        self.bounded = False

    def forward(self, observations: Tensor, key: Tensor | None = None) -> Dist:
        mean, log_std = self.net(observations, key).chunk(2, -1)
        return mean, log_std.clamp(-5.0, 2.0)


class CostPolicy(StepPolicy):
    """The action's distribution at the token of the observation, and at that of the action whether the step costs."""

    def __init__(self, sizes: Mapping[str, int], config: CDTConfig, spec: DataSpec) -> None:
        super().__init__(sizes, config, spec)
        if config.policy == "gaussian":
            self.head = StateGaussian(config.width, spec.action_dim)
        self.costs = Affine(config.width, 2)

    def forward(
        self,
        tokens: Mapping[str, Tensor],
        timesteps: Tensor,
        valid: Tensor | None = None,
        key: Tensor | None = None,
        with_costs: bool = False,
    ) -> Any:
        """Parameters of the actions' distribution [B, K, ...]; `with_costs` also logits [B, K, 2] of no cost and of
        any.
        """
        if not with_costs:
            return super().forward(tokens, timesteps, valid, key)
        outputs = self.steps(tokens, timesteps, valid, key)
        return self.head(outputs["observation"]), self.costs(outputs["action"])


@dataclass(frozen=True)
class CostHistory(History):
    """A `History` with what may still be spent."""

    budget: Tensor = dataclasses.field(default_factory=lambda: torch.zeros(0))  # [E] of the limit


pytree.register_dataclass(CostHistory)


class CDTActor(TargetReturnActor):
    """Policy given the target return and the limit, less what the episode has earned and cost."""

    def start(self, episodes: int) -> Carry:
        carry = super().start(episodes)
        window = {**carry.window, COSTS: torch.zeros(episodes, 0)}
        return CostHistory(window, carry.remaining, budget=torch.full((episodes,), self.algorithm.config.cost_limit))

    def current_step(self, carry: History, observations: Tensor) -> Batch:
        assert isinstance(carry, CostHistory)
        return {**super().current_step(carry, observations), COSTS: carry.budget}

    def observe_cost(self, carry: CostHistory, costs: Tensor) -> CostHistory:
        return dataclasses.replace(carry, budget=carry.budget - costs)


@register("algo", "cdt")
class CDT(SequenceModel[CDTConfig]):
    """DT with a second prompt, the cost to go: imitate the data's actions given the last K steps, their returns and
    costs to go; act with a target return and a limit.

    Modules: actor; with policy=gaussian temperature, the weight of its entropy.
    """

    traits = dataclasses.replace(SequenceModel.traits, actions=("continuous",))
    actor_class = CDTActor

    @classmethod
    def fit_config(cls, config: CDTConfig, dataset: Dataset, grid: Grid = None) -> CDTConfig:
        """The target return is the best of the data's episodes that keep the limit, where none is given."""
        refuse_costless(dataset, "algo=cdt")
        refuse_unreached(dataset, config.cost_limit)
        if config.target_return is None:
            safe = dataset.raw_returns[dataset.episode_costs() <= config.cost_limit]
            config = dataclasses.replace(config, target_return=round_digits(float(safe.max())))
        return super().fit_config(config, dataset, grid)

    def modules(self) -> dict[str, nn.Module]:
        modules: dict[str, nn.Module] = {"actor": CostPolicy(self.sizes(), self.config, self.spec)}
        if self.config.policy == "gaussian":
            modules["temperature"] = LogWeight(self.config.entropy_weight)
        return modules

    def optimizer(self, name: str) -> Adam:
        return super().optimizer(name) if name == "actor" else Adam(self.config.learning_rate)

    def sampler(self) -> Sampler:
        c = self.config
        return RelabelledSampler(
            c.context, ("costs", COSTS), c.padding == "left", share=c.relabelled_share, drawn_cost=c.drawn_cost
        )

    def sizes(self) -> dict[str, int]:
        sizes = super().sizes()
        return {"return": sizes.pop("return"), "cost": 1, **sizes}

    def tokens(self, batch: Batch) -> dict[str, Tensor]:
        return {**super().tokens(batch), "cost": (ORIGIN - batch[COSTS]).unsqueeze(-1)}

    def actor_loss(self, actor: Params, state: TrainState, batch: Batch, key: Tensor) -> Loss:
        """-E [log pi(a_t | ...) + T H(pi)], means over dimensions as well, or the squared error; and `cost_weight`
        times the cross-entropy of whether c_t > 0, a mean over the padding too (OSRL).
        """
        c, valid = self.config, batch[VALID]
        dist, logits = self.apply("actor", actor, self.tokens(batch), batch[STEPS], valid, key, True)
        log_p = logits.log_softmax(-1).gather(-1, (batch["costs"] > 0.0).long().unsqueeze(-1)).squeeze(-1)
        cost_loss = torch.where(valid, -log_p, 0.0).mean()
        loss = masked_mean(self.policy.bc_loss(dist, batch["actions"]), valid)
        metrics = {"actor/cost_loss": cost_loss}
        if c.policy == "gaussian":
            entropy = masked_mean(dist[1].mean(-1), valid) + HALF_LOG_2_PI_E
            temperature = self.apply("temperature", state.params["temperature"])
            loss = loss / self.spec.action_dim - temperature * entropy
            metrics["actor/entropy"] = entropy
        return loss + c.cost_weight * cost_loss, {"actor/loss": loss, **metrics}

    def temperature_loss(self, temperature: Params, state: TrainState, entropy: Tensor) -> Loss:
        """T (H - target), the target minus the number of dimensions."""
        weight = self.apply("temperature", temperature)
        return weight * (entropy + self.spec.action_dim), {"actor/temperature": weight}

    def update(self, state: TrainState, batch: Batch, key: Tensor, *, phase: int) -> Update:
        state, metrics = super().update(state, batch, key, phase=phase)
        if self.config.policy == "deterministic":
            return state, metrics
        state, temperature = self.descend(state, "temperature", self.temperature_loss, metrics["actor/entropy"])
        return state, {**metrics, **temperature}
