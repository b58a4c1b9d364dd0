"""Rollouts in a world model that an actor-critic learns from beside the data: they branch off its states (MBPO, arXiv
1906.08253).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from offrl import rng
from offrl.algorithm import (
    Dataset,
    DataSpec,
    Grid,
    Metrics,
    Params,
    Requirement,
    TrainConfig,
    TrainState,
    Tree,
    Update,
)
from offrl.data.samplers.transitions import Batch, Transitions, TransitionSampler
from offrl.errors import UserError
from offrl.families.critics import ActorScheduleSettings
from offrl.families.sac import SoftActorCritic, SoftSettings
from offrl.settings.field import defaults, setting
from offrl.world_models.model import Outcome, past_at, required
from offrl.world_models.rollout import CHUNK, Act, Imagined, ImaginedRing, Judge, branched, careful, describe
from offrl.world_models.uncertainty import measure, names, prepare


@dataclass
class RolloutSettings:
    """Settings of the rollouts that fill a ring of imagined transitions."""

    horizon: int = setting(5, "steps of a rollout", low=1)
    rollouts: int = setting(50_000, "rollouts each time, from real states", low=1)
    rollout_every: int = setting(1_000, "updates between two times", low=1)
    rollout_retain: int = setting(5, "imagined transitions of so many times are kept", low=1)
    real_share: float = setting(
        0.05, "share of each batch that is real, not imagined", low=0.0, high=1.0, structural=True
    )


@dataclass
@defaults(actor_learning_rate=1e-4, actor_schedule="constant")
class ModelBasedSettings(RolloutSettings, ActorScheduleSettings, SoftSettings):
    """Settings of model-based actor-critics; the defaults are those of OfflineRL-Kit for D4RL's locomotion tasks."""

    name: str = ""
    world_model: str = setting(
        "", "a trained model: a run of algo=dynamics, or a file in its models/; empty: one is trained first", place=True
    )
    world_model_id: str = setting("", "which model that is", filled=True)
    members: int = setting(7, "models in the ensemble that is trained where world_model= names none", low=1, place=True)
    uncertainty: str = setting("aleatoric", "how uncertain the model is of a step", choices=("none", *names()))
    penalty: float = setting(0.0, "times the uncertainty, is taken off each imagined reward (MOPO's lambda)", low=0.0)
    range_margin: float = setting(
        1.0, "imagined observations are cut off where they leave the data's range by so many times its width", low=0.0
    )
    candidates: int = setting(
        1,
        "actions of the policy that each step of a rollout chooses from, by looking ahead in the model (COPlanner: 5); "
        "1: no look-ahead",
        low=1,
    )
    lookahead: int = setting(5, "candidates>1: steps that each one is followed", low=1)
    lookahead_penalty: float = setting(
        2.0, "candidates>1: times the uncertainty, is taken off each reward of those steps", low=0.0
    )
    sample_dropout: float = setting(
        0.0,
        "of the rollouts from one state, the share with the highest returns that is left out (MBDP)",
        low=0.0,
        high=0.9,
        structural=True,
    )
    repeats: int = setting(10, "sample_dropout>0: rollouts from each state", low=2)
    model_dropout: float = setting(
        0.0,
        "share of the members, those with the largest held-out errors, that rollouts never ask; 0: all but the model's "
        "elites",
        low=0.0,
        high=0.9,
        shared=True,
    )


LOOKAHEAD_UNCERTAINTY, LOOKAHEAD_DISCOUNT = "ensemble_std", 0.97  # COPlanner's


def check(config: ModelBasedSettings, grid: Grid = None) -> None:
    """Raise UserError for settings that would change nothing."""
    values = grid or {}
    penalty = max(values.get("penalty", [config.penalty]))
    if config.uncertainty == "none" and penalty:
        raise UserError(
            f"algo.penalty={penalty:g} is times an uncertainty, and algo.uncertainty=none: choose one of "
            f"{', '.join(names())}"
        )
    for share in values.get("sample_dropout", [config.sample_dropout]):
        if 0.0 < share * config.repeats < 1.0:
            raise UserError(
                f"algo.sample_dropout={share:g} of algo.repeats={config.repeats} rollouts is none of them: raise one"
            )


@dataclass(frozen=True)
class ModelSource:
    """The data's transitions and the model, which all replicas share."""

    real: Transitions
    model: Any
    tree: Tree
    # where the model looks back: [R, O] of the rows that may be drawn, and [R, history - 1, O + A] before them
    starts: tuple[Tensor, Tensor] | None
    extra: Tree = field(default_factory=dict)  # what an algorithm derived from the model and the data


class ModelRollouts(ImaginedRing):
    """The rollouts that fill the ring.

    Every `rollout_every` updates new ones begin in states of the data and follow the policy as it is then. The model is
    shared.
    """

    config: ModelBasedSettings

    def tree(self, source: ModelSource, params: Params | None = None) -> Tree:
        """The model's tensors with the range that imagined observations are kept in: the data's, with a margin on both
        sides.

        params: of the model's networks, in place of the shared ones.
        """
        low, high = source.tree["low"], source.tree["high"]
        margin = self.config.range_margin * (high - low)
        tree = {**source.tree, "low": low - margin, "high": high + margin}
        return tree if params is None else {**tree, "params": params}

    def starts(self, source: ModelSource, key: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """States of the data [count, O], and what came before them."""
        if source.starts is not None:
            states, past = source.starts
            rows = rng.randint(key, (count,), len(states))
            return states[rows], past[rows]
        observations = TransitionSampler()(source.real, key, count)["observations"]
        return observations, source.model.first_past(observations)

    def roll(
        self, source: ModelSource, policy: Act, judge: Judge, key: Tensor, params: Params | None = None
    ) -> Imagined:
        """New rollouts. judge: the rewards and terminations that the agent learns from. params: see `tree`.

        With `candidates` each action is the best of several of the policy (COPlanner, arXiv 2310.07220).
        """
        c = self.config
        tree = self.tree(source, params)
        begin, go = rng.split(key)
        repeats = c.repeats if c.sample_dropout else 1
        observations, past = self.starts(source, begin, -(-c.rollouts // repeats))
        observations, past = (x.repeat_interleave(repeats, 0)[: c.rollouts] for x in (observations, past))

        look_ahead = partial(
            careful,
            source.model,
            tree,
            policy,
            horizon=c.lookahead,
            candidates=c.candidates,
            measure=measure(LOOKAHEAD_UNCERTAINTY),
            penalty=c.lookahead_penalty,
            discount=LOOKAHEAD_DISCOUNT,
        )
        imagined = branched(
            source.model,
            tree,
            policy if c.candidates == 1 else look_ahead,
            observations,
            past,
            c.horizon,
            go,
            measure=None if c.uncertainty == "none" else measure(c.uncertainty),
            judge=judge,
            chunk=max(1, CHUNK // c.candidates),
        )
        return self.without_best(imagined, repeats) if repeats > 1 else imagined

    def without_best(self, imagined: Imagined, repeats: int) -> Imagined:
        """Without the `sample_dropout` share of rollouts from each state that has the highest returns (arXiv
        2108.11645, 2108.01295).
        """
        returns = (imagined.rewards * imagined.valid).sum(0)
        missing = -returns.shape[0] % repeats
        padded = torch.cat([returns, returns.new_full((missing,), -torch.inf)]).reshape(-1, repeats)
        rank = padded.sort(dim=1, descending=True, stable=True).indices.argsort(1)
        valid = (rank >= int(self.config.sample_dropout * repeats + 1e-9)).reshape(-1)[: returns.shape[0]]
        return imagined._replace(valid=imagined.valid & valid)


@dataclass(frozen=True)
class ModelSampler:
    """The share of a batch that is the data's."""

    rollouts: ModelRollouts
    pretrained: Mapping[str, Any]  # "world_model"
    derive: Callable[[ModelSource, Dataset], Tree]  # `ModelSource.extra`, such as a threshold; may raise UserError
    extra: tuple[str, ...] = ()  # more columns of the data's rows: see `TransitionSampler`

    def prepare(self, dataset: Dataset) -> ModelSource:
        c = self.rollouts.config
        if dataset.mapped:
            raise UserError(f"{dataset.spec.name}: {c.name} needs the data in memory; raise dataset.memory_limit")
        device = dataset.columns["rewards"].device
        trained = self.pretrained["world_model"].to(device)
        tree = dict(trained.tree)
        for name in {c.uncertainty} - {"none"} | ({LOOKAHEAD_UNCERTAINTY} if c.candidates > 1 else set()):
            tree = prepare(name, trained.model, tree, dataset)
        if c.model_dropout:
            members = max(1, math.ceil((1.0 - c.model_dropout) * trained.model.members - 1e-9))
            order = torch.tensor(trained.meta["held_out"]).nan_to_num(torch.inf).argsort()
            tree["elites"] = order[:members].to(device)
        rows, starts = dataset.transition_rows(), None
        if trained.model.history > 1:
            starts = dataset.flat("observations")[rows], past_at(trained.model, dataset, rows)
        source = ModelSource(TransitionSampler(self.extra).prepare(dataset), trained.model, tree, starts)
        return replace(source, extra=self.derive(source, dataset))

    def __call__(self, source: ModelSource, key: Tensor, batch_size: int) -> Batch:
        return TransitionSampler()(source.real, key, self.rollouts.real_rows)


ConfigT = TypeVar("ConfigT", bound=ModelBasedSettings)


class LearnsInModel(Generic[ConfigT]):
    """What soft actor-critics share that learn from the data's transitions and rollouts in a model (algorithm 1 of
    MOPO, arXiv 2005.13239); named before `SoftActorCritic` among a class's parents.
    """

    config: ConfigT
    spec: DataSpec
    pretrained: Any
    sample: Any
    traits = replace(SoftActorCritic.traits, actions=("continuous",), n_step=False, observations="vector")

    @classmethod
    def requires(cls, config: TrainConfig, dataset: Dataset) -> dict[str, Requirement]:
        return {"world_model": required({"members": config.algo.members})}

    @classmethod
    def fit_config(cls, config: Any, dataset: Dataset, grid: Grid = None) -> Any:
        check(config, grid)
        return super().fit_config(config, dataset, grid)  # type: ignore[misc]

    def modules(self) -> dict[str, nn.Module]:
        self.rollouts = ModelRollouts(self.config, self.spec)
        return super().modules()  # type: ignore[misc]

    def sampler(self) -> ModelSampler:
        return ModelSampler(self.rollouts, self.pretrained, self.derived)

    def derived(self, source: ModelSource, dataset: Dataset) -> Tree:
        """`ModelSource.extra`. Raises UserError for a model that this algorithm cannot use."""
        return {}

    def buffers(self) -> Tree:
        return self.rollouts.buffers()

    @property
    def every(self) -> int:
        return self.config.rollout_every

    def judged(self, source: ModelSource, outcome: Outcome, uncertainty: Tensor) -> tuple[Tensor, Tensor]:
        """The rewards [B] and terminations [B] that the agent learns from: less `penalty` times the uncertainty."""
        return outcome.rewards - self.config.penalty * uncertainty, outcome.terminations

    def roll(self, state: TrainState, source: ModelSource, key: Tensor) -> Imagined:
        """New rollouts of the policy."""
        return self.rollouts.roll(source, self.policy_of(state), partial(self.judged, source), key)

    def policy_of(self, state: TrainState) -> Act:
        """Rollouts that follow samples of the policy."""
        return lambda observations, past, key: self.sample(state.params["actor"], observations, key)[0]

    def describe(self, source: ModelSource, imagined: Imagined) -> Metrics:
        """Metrics of rollouts."""
        return describe(imagined)

    def refresh(self, state: TrainState, source: ModelSource, key: Tensor, *, step: int) -> Update:
        imagined = self.roll(state, source, key)
        ring = self.rollouts.push(state.buffers["ring"], imagined)
        return state._replace(buffers={**state.buffers, "ring": ring}), self.describe(source, imagined)

    def mixed(self, state: TrainState, batch: Batch, key: Tensor) -> Batch:
        """The rows that an update learns from: the data's, then imagined ones."""
        return self.rollouts.mixed(state, batch, key)

    def update(self, state: TrainState, batch: Batch, key: Tensor, *, phase: int) -> Update:
        batch = self.mixed(state, batch, rng.fold_in(key, 301))
        return super().update(state, batch, key, phase=phase)  # type: ignore[misc]
