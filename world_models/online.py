"""Dynamics models that go on learning while policies play: before rollouts, from all transitions so far (MBPO, arXiv
1906.08253).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import Tensor, nn

from offrl import rng
from offrl.algorithm import Adam, Batch, Dataset, DataSpec, Grid, Loss, Params, TrainState, Tree, Update
from offrl.data.samplers.tables import Experience, Packed, split
from offrl.data.samplers.transitions import Transitions, TransitionSampler
from offrl.errors import UserError
from offrl.settings.field import setting
from offrl.world_models import ensemble
from offrl.world_models.dynamics import DynamicsSettings, member_losses
from offrl.world_models.known import terminations
from offrl.world_models.model import WorldModel

FOLD = 5  # every fifth row is held out
HELD_OUT = 1_000  # of those so many, evenly spread, rank the members
RANGE_MARGIN = 1.0  # imagined observations stay within the range of real ones, widened by so many times its width


@dataclass
class OnlineModelSettings:
    """Settings of an ensemble that learns beside the policy."""

    members: int = setting(7, "models in the ensemble", low=1)
    elites: int = setting(5, "how many of them, those with the smallest held-out error, rollouts draw from", low=1)
    model_hidden: list[int] = setting([200, 200, 200, 200], "widths of the models' hidden layers", low=1)
    model_learning_rate: float = setting(1e-3, "Adam's, for the models", low=0.0)
    model_steps: int = setting(400, "updates of the models each time, before the rollouts", low=1)
    termination: str = setting(
        "auto", "auto: the environment's own rule where it is known, else learned; never; or a rule's name"
    )


@dataclass(frozen=True)
class EndSampler(TransitionSampler):
    """Transitions and whether the next observation is "unknown", 1 or 0: data may lack a terminal's."""

    played: ClassVar[tuple[str, ...]] = ("unknown",)  # 0 there

    def prepare(self, dataset: Dataset) -> Transitions:
        unknown = (~dataset.columns["successor_known"]).float()
        marked = replace(dataset, columns={**dataset.columns, "unknown": unknown})
        return TransitionSampler(self.played).prepare(marked)


def experienced(source: Experience | Transitions) -> tuple[Batch, Tensor]:
    """All transitions (columns [R, ...]), and how many of them, the first ones, are there."""
    if isinstance(source, Transitions):
        assert isinstance(source.table, Packed)
        rows = split(source.table.table, source.table.layout)
        return rows, torch.tensor(source.count, device=source.table.device)
    if not source.data:
        return source.played, source.filled
    rows = {name: torch.cat([source.data[name], x]) for name, x in source.played.items()}
    return rows, source.filled + len(source.data["rewards"])


def moments(table: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation [I] of the rows of table [R, I] where a mask [R] is True; 1 where nothing changes."""
    wide, mask, count = table.double(), mask.unsqueeze(-1), mask.sum().clamp(min=1)
    mean = torch.where(mask, wide, 0.0).sum(0) / count
    std = (torch.where(mask, wide - mean, 0.0).square().sum(0) / count).sqrt()
    return mean.float(), torch.where(std < 1e-12, 1.0, std).float()


class ScaledModel(WorldModel):
    """A model whose networks' outputs are in standard deviations of what is predicted: with Adam's small steps rewards
    of -16, say, would else take thousands of updates to learn.
    """

    def raw(self, params: Params, tree: Tree, x: Tensor) -> ensemble.Raw:
        mean, log_var, ending = super().raw(params, tree, x)
        unit = tree["unit"]
        return ensemble.Raw(mean * unit + tree["center"], log_var + 2.0 * unit.log(), ending)


ConfigT = TypeVar("ConfigT", bound=OnlineModelSettings)


class LearnsModel(Generic[ConfigT]):
    """The ensemble of an algorithm whose `refresh` trains it, module "dynamics"; named before the algorithm's family
    among a class's parents.
    """

    config: ConfigT
    spec: DataSpec
    apply: Any
    descend: Any

    @classmethod
    def fit_config(cls, config: Any, dataset: Dataset, grid: Grid = None) -> Any:
        """`config` with its termination rule named. Raises UserError for data on the disk."""
        if dataset.mapped:
            raise UserError(f"{dataset.spec.name}: {config.name} needs the data in memory; raise dataset.memory_limit")
        config = super().fit_config(config, dataset, grid)  # type: ignore[misc]
        return replace(config, termination=cls.rule(config, dataset.spec))

    @staticmethod
    def rule(config: OnlineModelSettings, spec: DataSpec) -> str:
        """The name of the termination rule."""
        return terminations.find(spec) or "learned" if config.termination == "auto" else config.termination

    def modules(self) -> dict[str, nn.Module]:
        c = self.config
        if c.elites > c.members:
            raise UserError(f"algo.elites={c.elites} is more than algo.members={c.members}")
        rule = self.rule(c, self.spec)
        settings = DynamicsSettings(members=c.members, elites=c.elites, hidden=c.model_hidden, termination=rule)
        self.model = ScaledModel(settings, self.spec)
        self.decay = ensemble.decay_of_layers(settings.weight_decay, len(c.model_hidden) + 1)
        self.bounds_weight = settings.bounds_weight
        return {**super().modules(), "dynamics": self.model.build()}  # type: ignore[misc]

    def optimizer(self, name: str) -> Adam:
        if name == "dynamics":
            return Adam(self.config.model_learning_rate)
        return super().optimizer(name)  # type: ignore[misc]

    def extra(self, params: dict[str, Params]) -> Tree:
        inputs, width = self.model.in_dim, self.spec.observation_dim
        model = {"mean": torch.zeros(inputs), "std": torch.ones(inputs)}
        model |= {"center": torch.zeros(width + 1), "unit": torch.ones(width + 1)}
        model |= {"low": torch.zeros(width), "high": torch.zeros(width), "elites": torch.arange(self.config.elites)}
        return {**super().extra(params), "model": model}  # type: ignore[misc]

    def sampler(self) -> EndSampler:
        return EndSampler()

    def tree(self, state: TrainState) -> Tree:
        """The model's tensors."""
        return {**state.extra["model"], "params": state.params["dynamics"]}

    def learn_model(self, state: TrainState, rows: Batch, count: Tensor, key: Tensor) -> Update:
        """`model_steps` updates of the ensemble on the first `count` of the rows, each member on rows of its own, and
        the elites by their errors on every fifth row, which none learns from.
        """
        c: Any = self.config  # with the settings of the algorithm's family
        state = state.with_extra(model={**state.extra["model"], **self.statistics(rows, count)})
        held_out = (count // FOLD).clamp(min=1)
        loss: dict[str, Tensor] = {}
        for i in range(c.model_steps):
            slot = rng.randint(rng.fold_in(key, i), (c.members, c.batch_size), count - count // FOLD)
            batch = self.targets(rows, slot + slot // (FOLD - 1))
            state, loss = self.descend(state, "dynamics", self.model_loss, batch)
        spread = torch.arange(HELD_OUT, device=count.device) * held_out // HELD_OUT
        batch = self.targets(rows, (FOLD * spread + FOLD - 1).clamp(max=count - 1))
        raw = self.model.raw(state.params["dynamics"], state.extra["model"], batch["inputs"])
        weights = state.extra["model"]["unit"] ** -2
        error = ensemble.squared_loss(raw.mean, batch["targets"], weights, batch["known"]).nan_to_num(torch.inf)
        best = error.topk(c.elites, largest=False)
        state = state.with_extra(model={**state.extra["model"], "elites": best.indices})
        return state, {**loss, "model/held-out error": best.values.mean()}

    def statistics(self, rows: Batch, count: Tensor) -> Tree:
        """The "mean" and "std" [O + A] of the model's inputs, "center" and "unit" [O + 1], the same of its targets, and
        the range "low" to "high" [O] of its observations.
        """
        table = self.targets(rows, torch.arange(len(rows["rewards"]), device=count.device))
        present = torch.arange(len(table["known"]), device=count.device) < count
        known = present & (table["known"] > 0.0)
        mean, std = moments(table["inputs"], present)
        center, unit = moments(table["targets"], known)
        pair, mask = torch.stack([rows["observations"], rows["next_observations"]]), torch.stack([present, known])
        low = torch.where(mask.unsqueeze(-1), pair, torch.inf).amin((0, 1))
        high = torch.where(mask.unsqueeze(-1), pair, -torch.inf).amax((0, 1))
        margin = RANGE_MARGIN * (high - low)
        edges = {"low": low - margin, "high": high + margin}
        return {"mean": mean, "std": std, "center": center, "unit": unit, **edges}

    def targets(self, rows: Batch, index: Tensor) -> Batch:
        """What the model learns at rows [...]: inputs [..., O + A], targets [..., O + 1], ending and known [...]."""
        r = {name: column[index] for name, column in rows.items()}
        observations, change = r["observations"], r["next_observations"] - r["observations"]
        inputs = self.model.inputs(observations, r["actions"], observations)
        return {
            "inputs": inputs,
            "targets": torch.cat([change, r["rewards"].unsqueeze(-1)], -1),
            "ending": 1.0 - r["masks"],
            "known": 1.0 - r["unknown"],
        }

    def model_loss(self, params: Params, state: TrainState, batch: Batch) -> Loss:
        """The Gaussian likelihood of (s' - s, r), summed over members, decay of the weights, and the bounds' distance
        (section 4.1; PETS, arXiv 1805.12114).
        """
        raw = self.model.raw(params, state.extra["model"], batch["inputs"])
        loss = member_losses(raw, batch).sum() + ensemble.weight_decay(params, self.decay)
        loss = loss + self.bounds_weight * ensemble.bounds_loss(params)
        return loss, {"model/loss": loss}
