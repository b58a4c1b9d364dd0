"""OGSRL: "Offline Guarded Safe Reinforcement Learning for Medical Treatment Optimization Strategies" (Yan et al., 2025,
arXiv 2505.16242), with a soft actor-critic.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from offrl.algorithm import Batch, Dataset, Loss, Metrics, Params, TrainState, Tree, Update
from offrl.data.samplers.transitions import FIRST, episode_of
from offrl.errors import UserError
from offrl.families.critics import Constraint, ConstraintSettings
from offrl.families.critics.costs import PolicyOf
from offrl.families.sac import SoftActorCritic
from offrl.nn import MLP
from offrl.registry import register
from offrl.settings.field import defaults, setting
from offrl.world_models.model import evenly_spread
from offrl.world_models.model_rollouts import LearnsInModel, ModelBasedSettings, ModelSampler, ModelSource
from offrl.world_models.rollout import Imagined, describe
from offrl.world_models.uncertainty import FIT_ROWS, measure, prepare, quantile

GUARDIAN = "density"  # the measure whose sublevel set is the region that data support
HELD_OUT = 5  # one episode in so many is for the guardian's threshold


@dataclass
@defaults(cost_limit=10.0, real_share=0.5, uncertainty="none")
class OGSRLConfig(ModelBasedSettings, ConstraintSettings):
    """Settings of OGSRL; the learner's defaults are MOPO's, the limits this library's."""

    name: str = "ogsrl"
    guardian_excluded: float = setting(0.05, "share of held-out rows that the guardian excludes", above=0.0, high=1.0)
    guardian_limit: float = setting(
        0.05, "limit of the share of the policy's steps that are outside the data, discounted", above=0.0, high=1.0
    )


class Guardian(Constraint):
    """Critics of the discounted number of steps outside the data, and a multiplier that weighs them."""

    config: Any  # OGSRLConfig
    label, multiplier = "guardian", "guardian_multiplier"

    @property
    def threshold(self) -> Any:
        """The share of steps, at every step for ever."""
        return self.config.guardian_limit / (1.0 - self.config.cost_discount)

    @property
    def unit(self) -> Any:
        return self.threshold


@register("algo", "ogsrl")
class OGSRL(LearnsInModel[OGSRLConfig], SoftActorCritic[OGSRLConfig]):
    """SAC in a model with two limits: of the steps outside the region of states and actions that data support, and of
    the costs, which are learnt from the data.

    Modules: SAC's and guardian_critic; with `cost_limit` cost_critic and cost_model.
    """

    traits = replace(LearnsInModel.traits, targets=("critic", "guardian_critic"))

    def modules(self) -> dict[str, nn.Module]:
        c, s = self.config, self.spec
        self.guardian = Guardian(c, s)
        modules = {**super().modules(), **self.guardian.modules}
        if self.constraint is None:
            return modules
        if not self.rollouts.real_rows:
            raise UserError(
                f"algo.real_share={c.real_share:g} of algo.batch_size={c.batch_size} is no row: OGSRL learns costs "
                "from the data's"
            )
        return {**modules, "cost_model": MLP(s.observation_dim + s.action_dim, c.hidden, 1)}

    def sampler(self) -> ModelSampler:
        first = () if self.config.cost_states == "all" else (FIRST,)
        return replace(super().sampler(), extra=first if self.constraint is None else self.constraint.extra)

    # ---- the guardian

    def derived(self, source: ModelSource, dataset: Dataset) -> Tree:
        """The guardian: a measure that is fitted to four episodes in five, and its values at the others' rows, in
        order. Raises UserError for a single episode.
        """
        if dataset.num_episodes < 2:
            raise UserError(
                f"{dataset.spec.name} has one episode, and algo=ogsrl finds its threshold on others than it is fitted "
                "to: divide it by a column of truncations"
            )
        order = torch.from_numpy(np.random.Generator(np.random.PCG64(0)).permutation(dataset.num_episodes))
        rows = dataset.transition_rows()
        held_out = torch.isin(episode_of(dataset, rows), order[: -(-len(order) // HELD_OUT)].to(rows.device))
        tree = prepare(GUARDIAN, source.model, {"low": source.tree["low"]}, dataset, rows[~held_out])
        rows = evenly_spread(rows[held_out], FIT_ROWS)
        fitted = replace(source, extra=tree)
        values = self.strangeness(fitted, dataset.flat("observations")[rows].float(), dataset.columns["actions"][rows])
        return {**tree, "values": values.sort().values}

    def strangeness(self, source: ModelSource, observations: Tensor, actions: Tensor) -> Tensor:
        """The measure [B] at observations [B, O] and actions [B, A]."""
        nothing: Any = None  # the density asks for no prediction
        with torch.autocast(observations.device.type, enabled=False):
            return measure(GUARDIAN)(source.model, source.extra, nothing, observations.float(), actions.float())

    def outside(self, source: ModelSource, observations: Tensor, actions: Tensor) -> Tensor:
        """1 [B] where (s, a) is stranger than all held-out rows but the share `guardian_excluded`, else 0."""
        threshold = quantile(source.extra["values"], 1.0 - self.config.guardian_excluded)
        return (self.strangeness(source, observations, actions) > threshold).float()

    def describe(self, source: ModelSource, imagined: Imagined) -> Metrics:
        """Metrics of rollouts, with the share of their steps that are outside."""
        outside = self.outside(source, imagined.observations.flatten(0, 1), imagined.actions.flatten(0, 1))
        valid = imagined.valid.flatten().float()
        share = (outside * valid).sum() / valid.sum().clamp(min=1.0)
        return {**describe(imagined), "rollout/outside": share}

    # ---- costs

    def cost_model_loss(self, params: Params, state: TrainState, batch: Batch) -> Loss:
        """E (c(s, a) - c)^2 over the data's rows."""
        loss = (self.modelled_cost(params, batch) - batch["costs"]).square().mean()
        return loss, {"cost/model_loss": loss}

    def modelled_cost(self, params: Params, batch: Batch) -> Tensor:
        """c(s, a) [B]."""
        return self.apply("cost_model", params, torch.cat([batch["observations"], batch["actions"]], -1)).squeeze(-1)

    def mixed(self, state: TrainState, batch: Batch, key: Tensor) -> Batch:
        """The data's rows with their costs, then imagined ones with modelled costs; "outside" says which are outside
        the data.
        """
        rows = super().mixed(state, batch, key)
        rows["outside"] = self.outside(self.runtime.source, rows["observations"], rows["actions"])
        if self.constraint is not None:
            imagined = self.modelled_cost(state.params["cost_model"], rows).clamp(min=0.0)
            rows["costs"] = torch.cat([batch["costs"], imagined[self.rollouts.real_rows :]])
        return {**batch, **rows}

    def limits(self) -> tuple[Constraint, ...]:
        return (self.guardian, *super().limits())

    def learn_costs(self, state: TrainState, batch: Batch, policy: PolicyOf, actor: Metrics) -> Update:
        """Steps of both kinds of critics of costs and of both multipliers."""
        state, costs = super().learn_costs(state, batch, policy, actor)
        steps = {**batch, "costs": batch["outside"]}
        state, guardian = self.guardian.learn(self, state, steps, policy)
        state = self.guardian.adjusted(state, steps, policy, actor["guardian/excess"])
        return state, {**costs, **guardian}

    def update(self, state: TrainState, batch: Batch, key: Tensor, *, phase: int) -> Update:
        metrics: Metrics = {}
        if self.constraint is not None:
            state, metrics = self.descend(state, "cost_model", self.cost_model_loss, batch)
        state, learnt = super().update(state, batch, key, phase=phase)
        return state, {**metrics, **learnt}
