"""Soft actor-critics that learn from imagined transitions as well: branched roll-outs from the data's states (MBPO, arXiv 1906.08253).

What algorithms differ in are a few named places: `judge` (what a roll-out is told: MOPO, MOReL), `critic_loss` and `target` (COMBO,
MOBILE), `refresh` (RAMBO).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from offrl import rng
from offrl.algorithm import Metrics, TrainState, Tree
from offrl.data.dataset import Dataset
from offrl.data.samplers.transitions import Batch, Packed, Sampler, Transitions, TransitionSampler
from offrl.errors import UserError
from offrl.families.sac import SoftActorCritic, SoftSettings
from offrl.optim import Adam
from offrl.pretrained import Requirement
from offrl.settings.field import setting
from offrl.world_models.model import Outcome, past_at, required
from offrl.world_models.rollout import CHUNK, Act, Imagined, Measure, branched, careful
from offrl.world_models.uncertainty import measure, names, prepare

if TYPE_CHECKING:
    from offrl.settings.train import TrainConfig

FEW = 2048  # rows whose uncertainty is measured at once


@dataclass
class ModelBasedSettings(SoftSettings):
    """Settings of model-based actor-critics; the defaults are those of OfflineRL-Kit for D4RL's locomotion tasks."""

    actor_learning_rate: float | None = setting(1e-4, "the actor's, where it is another; null: learning_rate", low=0.0)
    world_model: str = setting(
        "", "a trained model: a run of algo=dynamics, or a file in its models/; empty: one is trained first", place=True
    )
    world_model_id: str = setting("", "which model that is", filled=True)
    members: int = setting(7, "models in the ensemble that is trained where world_model= names none", low=1, place=True)
    horizon: int = setting(5, "steps of a roll-out", low=1)
    rollouts: int = setting(50_000, "roll-outs each time, from states of the data", low=1)
    rollout_every: int = setting(1_000, "updates between two times", low=1)
    retain: int = setting(5, "imagined transitions of so many times are kept", low=1)
    real_share: float = setting(0.05, "share of each batch that is the data's, not imagined", low=0.0, high=1.0, structural=True)
    uncertainty: str = setting("aleatoric", "how uncertain the model is of a step", choices=("none", *names()))
    penalty: float = setting(0.0, "times the uncertainty, is taken off each imagined reward (MOPO's lambda)", low=0.0)
    range_margin: float = setting(
        1.0, "imagined observations are cut off where they leave the data's range by so many times its width", low=0.0
    )
    candidates: int = setting(
        1,
        "actions of the policy that each step of a roll-out chooses from, by looking ahead in the model (COPlanner: 5); 1: no look-ahead",
        low=1,
    )
    lookahead: int = setting(5, "candidates: steps that each one is followed", low=1)
    lookahead_penalty: float = setting(2.0, "candidates: times the uncertainty, is taken off each reward of those steps", low=0.0)
    lookahead_discount: float = setting(0.97, "candidates: discount factor of those steps", low=0.0, high=1.0)
    lookahead_uncertainty: str = setting("ensemble_std", "candidates: how uncertain the model is of those steps", choices=names())
    sample_dropout: float = setting(
        0.0,
        "of the roll-outs from one state, the share with the highest returns that is left out (MBDP)",
        low=0.0,
        high=0.9,
        structural=True,
    )
    repeats: int = setting(10, "sample_dropout: roll-outs from each state", low=2)
    model_dropout: float = setting(
        0.0,
        "share of the members, those with the largest held-out errors, that roll-outs never ask; 0: all but the model's elites",
        low=0.0,
        high=0.9,
        shared=True,
    )
    actor_schedule: str = setting("constant", "the actor's learning rate over decay_steps", choices=("cosine", "constant"))
    decay_steps: int = setting(1_000_000, "length of the schedule in updates", low=1)


PENALTY_OF_NOTHING = "algo.penalty={:g} is times an uncertainty, and algo.uncertainty=none: choose one of {}"


@dataclass(frozen=True)
class ModelSource:
    """What all replicas share: the data's transitions, and the model."""

    real: Transitions
    model: Any
    tree: Tree
    past: Tensor | None  # [R, history - 1, O + A] of the rows that may be drawn, where the model looks back
    starts: Tensor | None  # [R, O] of the same rows
    extra: Tree = dataclasses.field(default_factory=dict)  # what an algorithm found out about the model on the data


@dataclass(frozen=True)
class ModelSampler:
    """The share of a batch that is the data's."""

    algorithm: ModelBased
    inner: TransitionSampler = TransitionSampler()  # noqa: RUF009 - frozen

    def prepare(self, dataset: Dataset) -> ModelSource:
        c = self.algorithm.config
        if dataset.mapped:
            raise UserError(f"{dataset.spec.name}: {c.name} needs the data in memory; raise dataset.memory_limit")
        device = dataset.columns["rewards"].device
        trained = self.algorithm.pretrained["world_model"].to(device)
        tree = dict(trained.tree)
        if c.uncertainty == "none" and c.penalty:
            raise UserError(PENALTY_OF_NOTHING.format(c.penalty, ", ".join(names())))
        for name in {c.uncertainty} - {"none"} | ({c.lookahead_uncertainty} if c.candidates > 1 else set()):
            tree = prepare(name, trained.model, tree, dataset)
        if c.model_dropout:
            keep = max(1, math.ceil((1.0 - c.model_dropout) * trained.model.members - 1e-9))
            order = torch.tensor(trained.meta["held_out"]).nan_to_num(torch.inf).argsort()
            tree["elites"] = order[:keep].to(device)
        rows = dataset.transition_rows()
        starts = past = None
        if trained.model.history > 1:
            starts = dataset.columns["observations"].reshape(len(dataset), -1)[rows]
            past = past_at(trained.model, dataset, rows)
        source = ModelSource(self.inner.prepare(dataset), trained.model, tree, past, starts)
        return dataclasses.replace(source, extra=self.algorithm.learn_of(source, dataset))

    def __call__(self, source: ModelSource, key: Tensor, batch_size: int) -> Batch:
        return self.inner(source.real, key, self.algorithm.real_rows)


class ModelBased(SoftActorCritic):
    """SAC on batches that are partly the data's and partly imagined.

    Every `rollout_every` updates new roll-outs begin in states of the data, follow the policy as it is then, and go into a ring of
    transitions, which each replica has for itself. The model is shared.
    """

    traits = replace(SoftActorCritic.traits, actions=("continuous",))
    dynamics: ClassVar[dict[str, Any]] = {}  # settings of the model that is trained where none is given

    @classmethod
    def requires(cls, config: TrainConfig, dataset: Dataset) -> dict[str, Requirement]:
        return {"world_model": required({**cls.dynamics, "members": config.algo.members})}

    @classmethod
    def fit_config(cls, config: Any, dataset: Dataset, grid: Mapping[str, Sequence[float]] | None = None) -> Any:
        """Raises UserError for settings that would change nothing."""
        own = grid or {}
        if config.uncertainty == "none" and any(own.get("penalty", [])):
            raise UserError(PENALTY_OF_NOTHING.format(max(own["penalty"]), ", ".join(names())))
        for share in own.get("sample_dropout", [config.sample_dropout]):
            if 0.0 < share * config.repeats < 1.0:
                raise UserError(f"algo.sample_dropout={share:g} of algo.repeats={config.repeats} roll-outs is none of them: raise one")
        return super().fit_config(config, dataset, grid)

    @property
    def real_rows(self) -> int:
        """Rows of a batch that are the data's."""
        return int(self.config.batch_size * self.config.real_share)

    @property
    def measure(self) -> Measure | None:
        """How uncertain the model is, or None where nothing asks."""
        return None if self.config.uncertainty == "none" else measure(self.config.uncertainty)

    def sampler(self) -> Sampler:
        return ModelSampler(self)

    def learn_of(self, source: ModelSource, dataset: Dataset) -> Tree:
        """What an algorithm has to know about the model on the data before it begins, such as a threshold."""
        return {}

    def optimizer(self, name: str) -> Adam:
        adam, c = super().optimizer(name), self.config
        if name == "actor" and c.actor_schedule != "constant":
            return dataclasses.replace(adam, schedule=c.actor_schedule, decay_steps=c.decay_steps)
        return adam

    # ---- the ring of imagined transitions

    @property
    def capacity(self) -> int:
        """Rows of the ring."""
        c = self.config
        return c.retain * c.rollouts * c.horizon

    def modules(self) -> dict[str, nn.Module]:
        self.layout = self.columns()  # once: what is compiled cannot read it off the spec
        return super().modules()

    def columns(self) -> dict[str, tuple[int, int, tuple[int, ...], torch.dtype]]:
        """Where the columns of an imagined transition stand in a row of the ring, as in `Packed`."""
        s, at = self.spec, 0
        found: dict[str, tuple[int, int, tuple[int, ...], torch.dtype]] = {}
        shapes = {
            "observations": (s.observation_dim,),
            "actions": (s.action_dim,),
            "rewards": (),
            "next_observations": (s.observation_dim,),
            "masks": (),
        }
        for name, shape in shapes.items():
            found[name] = (at, at + math.prod(shape), shape, torch.float32)
            at += math.prod(shape)
        return found

    def buffers(self) -> Tree:
        width = max(end for _, end, _, _ in self.layout.values())
        none = torch.zeros((), dtype=torch.int64)
        # one row more, for what is thrown away
        return {"ring": {"rows": torch.zeros(self.capacity + 1, width), "at": none, "count": none.clone()}}

    def push(self, ring: Tree, imagined: Imagined) -> Tree:
        """The ring with the valid rows of roll-outs [H, B] added, the oldest ones overwritten."""
        columns = {**imagined._asdict(), "masks": 1.0 - imagined.terminations.float()}
        flat = [columns[name].reshape(imagined.valid.numel(), -1) for name in self.layout]
        rows, valid = torch.cat(flat, -1), imagined.valid.reshape(-1)
        rows = torch.where(valid.unsqueeze(-1), rows, 0.0)  # where several rows go to one place, they are the same
        order = valid.long().cumsum(0)
        slots = torch.where(valid, (ring["at"] + order - 1) % self.capacity, self.capacity)
        return {
            "rows": ring["rows"].index_put((slots,), rows),
            "at": (ring["at"] + order[-1]) % self.capacity,
            "count": (ring["count"] + order[-1]).clamp(max=self.capacity),
        }

    def imagined(self, state: TrainState, key: Tensor, count: int) -> Batch:
        """`count` rows of the ring."""
        ring = state.buffers["ring"]
        return Packed(ring["rows"], self.layout).take(rng.randint(key, (count,), ring["count"].clamp(min=1)))

    # ---- roll-outs

    @property
    def every(self) -> int:
        return self.config.rollout_every

    def model_tree(self, state: TrainState, source: ModelSource) -> Tree:
        """The model's tensors: shared ones, unless an algorithm trains the model; with the range that imagined observations are kept in."""
        return {**source.tree, **self.allowed(source)}

    def allowed(self, source: ModelSource) -> Tree:
        """The data's range, "low" and "high" [O], with a margin on both sides."""
        low, high = source.tree["low"], source.tree["high"]
        margin = self.config.range_margin * (high - low)
        return {"low": low - margin, "high": high + margin}

    def judge(self, source: ModelSource, outcome: Outcome, uncertainty: Tensor) -> tuple[Tensor, Tensor]:
        """The rewards [B] and terminations [B] that the agent is told."""
        return outcome.rewards - self.config.penalty * uncertainty, outcome.terminations

    def explore(self, state: TrainState, source: ModelSource) -> Act:
        """How roll-outs choose actions: samples of the policy, or with `candidates` the best of several (COPlanner, arXiv 2310.07220)."""
        c = self.config

        def policy(observations: Tensor, past: Tensor, key: Tensor) -> Tensor:
            return self.sample(state.params["actor"], observations, key)[0]

        if c.candidates == 1:
            return policy
        tree, doubt = self.model_tree(state, source), measure(c.lookahead_uncertainty)
        return lambda observations, past, key: careful(
            source.model, tree, policy, observations, past, c.lookahead, key, candidates=c.candidates, measure=doubt,
            penalty=c.lookahead_penalty, discount=c.lookahead_discount,
        )  # fmt: skip

    def starts(self, source: ModelSource, key: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """States of the data [count, O], and what came before them."""
        if source.starts is not None and source.past is not None:
            rows = rng.randint(key, (count,), len(source.starts))
            return source.starts[rows], source.past[rows]
        observations = TransitionSampler()(source.real, key, count)["observations"]
        return observations, source.model.first_past(observations)

    def roll(self, state: TrainState, source: ModelSource, key: Tensor) -> Imagined:
        """New roll-outs."""
        c = self.config
        begin, go = rng.split(key)
        repeats = c.repeats if c.sample_dropout else 1
        observations, past = self.starts(source, begin, -(-c.rollouts // repeats))
        if repeats > 1:
            observations, past = (x.repeat_interleave(repeats, 0)[: c.rollouts] for x in (observations, past))
        imagined = branched(
            source.model, self.model_tree(state, source), self.explore(state, source), observations, past, c.horizon, go,
            measure=self.measure, judge=lambda outcome, u: self.judge(source, outcome, u), chunk=max(1, CHUNK // c.candidates),
        )  # fmt: skip
        return self.without_best(imagined, repeats) if repeats > 1 else imagined

    def without_best(self, imagined: Imagined, repeats: int) -> Imagined:
        """Without the `sample_dropout` share of roll-outs from each state that has the highest returns (arXiv 2108.11645, 2108.01295)."""
        returns = (imagined.rewards * imagined.valid).sum(0)
        missing = -returns.shape[0] % repeats
        padded = torch.cat([returns, returns.new_full((missing,), -torch.inf)]).reshape(-1, repeats)
        rank = padded.sort(dim=1, descending=True, stable=True).indices.argsort(1)
        keep = (rank >= int(self.config.sample_dropout * repeats + 1e-9)).reshape(-1)[: returns.shape[0]]
        return imagined._replace(valid=imagined.valid & keep)

    def refresh(self, state: TrainState, source: ModelSource, key: Tensor, *, step: int) -> tuple[TrainState, Metrics]:
        imagined = self.roll(state, source, key)
        ring = self.push(state.buffers["ring"], imagined)
        return state._replace(buffers={**state.buffers, "ring": ring}), self.describe(source, imagined)

    def describe(self, source: ModelSource, imagined: Imagined) -> Metrics:
        """What roll-outs look like."""
        valid = imagined.valid.float()
        count = valid.sum().clamp(min=1.0)

        def mean(x: Tensor) -> Tensor:
            return (x.float() * valid).sum() / count

        return {
            "rollout/reward": mean(imagined.rewards),
            "rollout/uncertainty": mean(imagined.uncertainty),
            "rollout/ended": mean(imagined.terminations),
            "rollout/clipped": mean(imagined.clipped),
            "rollout/steps": valid.sum(0).mean(),
        }

    # ---- learning

    def mixed(self, state: TrainState, batch: Batch, key: Tensor) -> Batch:
        """The data's rows first, then imagined ones."""
        fake = self.imagined(state, key, self.config.batch_size - self.real_rows)
        return {name: torch.cat([batch[name], fake[name]]) for name in self.layout}

    def update(self, state: TrainState, batch: Batch, key: Tensor, *, phase: int) -> tuple[TrainState, Metrics]:
        return super().update(state, self.mixed(state, batch, rng.fold_in(key, 301)), key, phase=phase)


def in_chunks(source: ModelSource, dataset: Dataset, what: Measure, most: int = 100_000) -> Tensor:
    """A measure of uncertainty at the data's rows, or at `most` of them evenly spread: [n] on the CPU."""
    rows = dataset.transition_rows()
    if len(rows) > most:
        rows = rows[torch.linspace(0, len(rows) - 1, most, device=rows.device).long()]
    observations, actions = dataset.columns["observations"].reshape(len(dataset), -1), dataset.columns["actions"]
    found = []
    with torch.no_grad():
        for part in rows.split(FEW):
            o, a = observations[part].float(), actions[part]
            prediction = source.model.predict(source.tree, o, a, past_at(source.model, dataset, part))
            found.append(what(source.model, source.tree, prediction, o, a).cpu())
    return torch.cat(found)
