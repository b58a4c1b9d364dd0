"""PETS: model-predictive control in a learned ensemble (Chua et al., 2018, arXiv 1805.12114), here from data alone.

Training is that of `algo=dynamics`; the policy is a search for the best plan in the model, made anew before every
action. Nothing keeps plans near the data by itself: `penalty` takes the model's uncertainty off its rewards.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from offrl.algorithm import (
    Batch,
    Dataset,
    Grid,
    Params,
    Requirement,
    Sampler,
    TrainConfig,
    TrainState,
    Tree,
    Update,
)
from offrl.algorithms.pets.actor import PETSActor
from offrl.algorithms.pets.returns import PlanReturns
from offrl.algorithms.pets.settings import MODEL, PETSConfig, with_model
from offrl.errors import UserError
from offrl.nn.meta_check import check_acting
from offrl.registry import register
from offrl.world_models import uncertainty
from offrl.world_models.dynamics import Dynamics, DynamicsSampler, DynamicsSettings, DynamicsSource, data_range
from offrl.world_models.model import WorldModel, required
from offrl.world_models.planning import check_plan, check_plan_memory


@dataclass(frozen=True)
class PlanSource(DynamicsSource):
    """A `DynamicsSource` with the statistics of the data that acting needs."""

    statistics: Tree


@dataclass(frozen=True)
class FinishedModelSource:
    """A finished model."""

    params: Params
    extra: Tree


@dataclass(frozen=True)
class PlanSampler(DynamicsSampler):
    """Sampler over a `PlanSource`."""

    algorithm: PETS

    def prepare(self, dataset: Dataset) -> PlanSource:
        source = super().prepare(dataset)
        statistics = {
            **data_range(dataset),
            "scale": torch.ones(self.algorithm.model.out_dim, device=source.mean.device),
        }
        return PlanSource(**vars(source), statistics=self.algorithm.prepared(statistics, dataset))


@dataclass(frozen=True)
class FinishedModelSampler:
    """Sampler over a `FinishedModelSource`."""

    algorithm: PETS

    def prepare(self, dataset: Dataset) -> FinishedModelSource:
        c = self.algorithm.config
        world_model = self.algorithm.pretrained["world_model"].to(dataset.columns["rewards"].device)
        tree = self.algorithm.prepared(world_model.tree, dataset)
        extra = {name: tree[name] for name in ("mean", "std", *self.algorithm.about)}
        # as it would be at the end of its training; only the errors' order counts
        extra["error"] = torch.tensor(world_model.meta["held_out"], device=tree["mean"].device).nan_to_num(torch.inf)
        extra["stale"] = torch.tensor(c.patience, device=tree["mean"].device)
        return FinishedModelSource(tree["params"], extra)

    def __call__(self, source: FinishedModelSource, key: Tensor, batch_size: int) -> Batch:
        return {}


@register("algo", "pets")
class PETS(Dynamics):
    """Act by the first action of the best plan that a search finds in the ensemble; module "dynamics"."""

    Config = PETSConfig
    config: PETSConfig
    traits = replace(Dynamics.traits, policy_modules=("dynamics",), acts_on_device=True, actions=("continuous",))
    actor_class = PETSActor

    @classmethod
    def requires(cls, config: TrainConfig, dataset: Dataset) -> dict[str, Requirement]:
        """The model that is named; none where its own training makes one."""
        c = config.algo
        if c.world_model:
            return {"world_model": required()}
        if c.calibrated:
            raise UserError(
                "algo.calibrated=true needs a finished model: train one with algo=dynamics, then algo.world_model=RUN "
                "takes it"
            )
        return super().requires(config, dataset)

    @classmethod
    def adopt(cls, config: TrainConfig, dataset: Dataset, pretrained: Mapping[str, Any]) -> TrainConfig:
        """The settings of the model that is named."""
        if "world_model" not in pretrained:
            return config
        return dataclasses.replace(config, algo=with_model(config.algo, pretrained["world_model"]))

    def modules(self) -> dict[str, Any]:
        c = self.config
        check_plan(c)
        check_plan_memory(c, self.spec.action_dim)
        self.runtime.notes = ()
        modules = super().modules()
        # without what is the planner's: this is what the model's file describes
        self.model = WorldModel(DynamicsSettings(**{n: vars(c)[n] for n in MODEL}), self.spec)
        self.returns = PlanReturns(c, self.spec, self.model)
        member = sum(p[0].numel() for p in self.model.network.net.parameters())
        check_acting(c, ("plan_particles",), 8.0 * c.plan_particles * member)  # each has a copy of the member it asks
        evaluations = c.plan_population * c.plan_iterations * c.plan_particles * c.plan_horizon
        self.runtime.notes = (
            *self.runtime.notes,
            f"planning asks the model {evaluations:,} times before each action (algo.plan_*)",
        )
        return modules

    @classmethod
    def fit_config(cls, config: Any, dataset: Dataset, grid: Grid = None) -> PETSConfig:
        config = super().fit_config(config, dataset, grid)
        if max([config.penalty, *(grid or {}).get("penalty", [])]) > 0.0:
            shape = SimpleNamespace(config=config, members=config.members)
            if problem := uncertainty.fault(config.uncertainty, shape):
                raise UserError(f"algo.{problem}; choose another, or leave algo.penalty at 0")
        return config

    # ---- learning, or taking a model that has learnt

    @property
    def about(self) -> tuple[str, ...]:
        """Names, in a model's tree, of the statistics of the data that acting needs."""
        return ("low", "high", "scale", *(["density"] if self.config.uncertainty == "density" else []))

    def prepared(self, tree: Tree, dataset: Dataset) -> Tree:
        """`tree` with what the measure of uncertainty needs."""
        return uncertainty.prepare("density", self.model, tree, dataset) if "density" in self.about else tree

    def sampler(self) -> Sampler:
        return FinishedModelSampler(self) if self.config.world_model else PlanSampler(self.config, self.columns, self)

    def extra(self, params: dict[str, Params]) -> Tree:
        s, extra = self.spec, super().extra(params)
        extra |= {
            "low": torch.zeros(s.observation_dim),
            "high": torch.zeros(s.observation_dim),
            "scale": torch.ones(self.model.out_dim),
        }
        if "density" in self.about:
            # of the right shapes
            extra["density"] = uncertainty.fit_density(torch.zeros(1, s.observation_dim + s.action_dim))
        return extra

    def update(self, state: TrainState, batch: Batch, key: Tensor, *, phase: int) -> Update:
        if self.config.world_model:
            return state, {"dynamics/loss": torch.zeros((), device=state.step.device)}
        return super().update(state, batch, key, phase=phase)

    def refresh(self, state: TrainState, source: Any, key: Tensor, *, step: int) -> Update:
        if self.config.world_model:
            return (self.finished_state(state, source), {}) if step == 0 else (state, {})
        state, metrics = super().refresh(state, source, key, step=step)
        if step == 0:
            state = state._replace(extra=filled(state.extra, source.statistics))
        return state, metrics

    def review(self, state: TrainState, source: DynamicsSource) -> Update:
        state, metrics = super().review(state, source)
        if not self.model.learns_variance:  # a standard deviation for each output: that of the held-out errors
            extra, held_out = state.extra, source.held_out
            elites = extra["error"].topk(self.config.elites, largest=False).indices
            mean = self.model.raw(extra["best"], extra, held_out["inputs"]).mean[elites]
            scale = (mean - held_out["targets"]).square().mean((0, 1)).sqrt()
            state = state._replace(extra={**extra, "scale": scale})
        return state, metrics

    def finished_state(self, state: TrainState, source: FinishedModelSource) -> TrainState:
        """The state at the end of the training of a finished model."""
        params = {"dynamics": filled(state.params["dynamics"], source.params)}
        return state._replace(params=params, extra=filled(state.extra, {**source.extra, "best": source.params}))

    @property
    def trains_model(self) -> bool:  # type: ignore[override]
        return not self.config.world_model

    # ---- acting

    def acting_tree(self, state: TrainState) -> Tree:
        """The model as plans see it."""
        tree = {**{n: state.extra[n] for n in self.about}, **self.tree(state)}
        margin = self.config.range_margin * (tree["high"] - tree["low"])
        return {**tree, "low": tree["low"] - margin, "high": tree["high"] + margin}


def filled(tree: Tree, values: Tree) -> Tree:
    """`tree`, its names in their order, with what `news` has under the same ones."""
    # clones: under vmap what comes out must not be what all replicas share
    return {
        k: v if k not in values else filled(v, values[k]) if isinstance(v, dict) else values[k].clone()
        for k, v in tree.items()
    }
