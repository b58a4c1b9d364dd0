"""Training an ensemble of dynamics models on a dataset, with early stopping for each member (as PETS, MBPO and MOPO
do).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from offrl import registry, rng
from offrl.algorithm import (
    Algorithm,
    Batch,
    Dataset,
    DataSpec,
    Grid,
    Loss,
    Params,
    Requirement,
    Sampler,
    TrainConfig,
    TrainState,
    Traits,
    Tree,
    Update,
    select,
)
from offrl.errors import UserError, nearest
from offrl.registry import register
from offrl.settings.kinds import restored
from offrl.settings.replicas import Replica
from offrl.world_models import ensemble, quality, starts, value_gradient
from offrl.world_models.dynamics.data import DynamicsSampler, DynamicsSource, data_range, split, targets
from offrl.world_models.dynamics.settings import DynamicsSettings
from offrl.world_models.known import terminations
from offrl.world_models.model import FOLDER, WorldModel, input_table, load, save

EXPLODED = 1e3  # times the spread of what is predicted: no variance of a model that learns is as large
SHORTEST_EPOCH = 250  # updates: after fewer a model of few data is not yet to be judged


def member_losses(raw: ensemble.Raw, batch: Batch, loss: str = "likelihood") -> Tensor:
    """The loss of each member, without decay and bounds, [E].

    batch: "targets", "ending" and, where errors are weighted, "scale", and where some rows lack a next observation,
    "known".
    """
    if loss == "likelihood":
        each = ensemble.gaussian_loss(raw.mean, raw.log_var, batch["targets"], batch.get("known"))
    else:
        each = ensemble.squared_loss(raw.mean, batch["targets"], batch.get("scale"), batch.get("known"))
    if raw.ending is None:
        return each
    # cross-entropy of a logit
    return each + (nn.functional.softplus(raw.ending) - batch["ending"] * raw.ending).mean(-1)


class Dynamics(Algorithm[DynamicsSettings]):
    """An ensemble that predicts the next observation and the reward. Module "dynamics".

    Every member has a bootstrap sample of the training rows of its own, drawn once, and goes through it in a new order
    in each epoch. After an epoch the held-out error of each member is looked at: a member that got better is remembered
    as it is then.
    """

    traits = Traits(policy_modules=())

    @classmethod
    def requires(cls, config: TrainConfig, dataset: Dataset) -> dict[str, Requirement]:
        """The critics that weigh the errors, where some do."""
        algo = config.algo
        if algo.loss == "value_gradient":
            if not algo.value_run:
                raise UserError(
                    "loss=value_gradient weighs errors by the values of a trained agent: name its run, "
                    "algo.value_run=runs/..."
                )
            return {"value_run": value_gradient.required()}
        if algo.value_run:
            raise UserError(
                f"algo.value_run={algo.value_run} weighs errors where algo.loss=value_gradient, and it is {algo.loss}"
            )
        return {}

    @classmethod
    def fit_config(cls, config: Any, dataset: Dataset, grid: Grid = None) -> Any:
        """`config` with its termination and reward functions named, and the length of an epoch."""
        spec = dataset.spec
        known = terminations.find(spec)
        ends = dataset.columns["terminations"]
        termination, reward = config.termination, config.reward
        if termination == "auto":
            termination = known or ("learned" if bool(ends.any()) else "never")
        if reward == "auto":
            reward = terminations.find(spec, "reward") or "learned"
        for kind, name in (("termination", termination), ("reward", reward)):
            options = registry.names(kind)
            if name != "learned" and name not in options:
                raise UserError(
                    f"algo.{kind}={name} is not known.{nearest(name, ['learned', 'auto', *options])} Known: "
                    f"{', '.join(options)}"
                )
        epoch = config.epoch or max(SHORTEST_EPOCH, -(-len(split(dataset, config).train) // config.batch_size))
        elites = min(config.elites, config.members)
        return dataclasses.replace(config, termination=termination, reward=reward, epoch=epoch, elites=elites)

    def modules(self) -> dict[str, nn.Module]:
        if self.config.elites > self.config.members:  # `fit_config` has seen to it, and files need not
            raise UserError(f"algo.elites={self.config.elites} is more than algo.members={self.config.members}")
        self.model = WorldModel(self.config, self.spec)
        if self.config.termination == "learned":
            self.runtime.notes = (
                f"no rule for when {self.spec.name or 'this environment'} ends is known: the model learns it from the "
                "data",
            )
        self.decay = ensemble.decay_of_layers(self.config.weight_decay, len(self.config.hidden) + 1)
        return {"dynamics": self.model.build()}

    @staticmethod
    def _of(label: str, member: int) -> str:
        return f"dynamics/member {member}: {label}"

    def sampler(self) -> Sampler:
        return DynamicsSampler(self.config, self.columns)

    def columns(self, dataset: Dataset, rows: Tensor) -> dict[str, Tensor]:
        """Inputs, targets and weights at `rows`, by name, float32 [R, ...]."""
        columns = {
            "inputs": input_table(self.model, dataset, rows),
            "targets": targets(dataset, rows, self.config.delta),
            "ending": dataset.columns["terminations"][rows].float(),
        }
        if self.config.loss == "value_gradient":
            columns["scale"] = value_gradient.weights(self.pretrained["value_run"], dataset, rows)
        return columns

    def extra(self, params: dict[str, Params]) -> Tree:
        c, width = self.config, self.model.in_dim
        return {
            "mean": torch.zeros(width),
            "std": torch.ones(width),
            "best": {k: v.clone() for k, v in params["dynamics"].items()},
            "error": torch.full((c.members,), torch.inf),
            "stale": torch.zeros((), dtype=torch.int64),
            "epochs": torch.zeros((), dtype=torch.int64),
        }

    # ---- learning

    def draw(self, state: TrainState) -> Batch:
        """The next batch of every member: name -> [E, B, ...]."""
        source, c = self.runtime.source, self.config
        at = (state.step % self.every) * c.batch_size + torch.arange(c.batch_size, device=state.step.device)
        order = rng.fold_in(rng.fold_in(state.key, 201), state.step // self.every)
        slot = rng.permuted(order, at % source.count, source.count)
        keys = rng.fold_in(rng.fold_in(state.key, 202), torch.arange(c.members, device=state.step.device))
        rows = rng.randint_at(keys.unsqueeze(-1), slot.unsqueeze(0), source.count)  # [E, B]
        batch = source.table.take(rows.reshape(-1))
        return {name: column.reshape(c.members, c.batch_size, *column.shape[1:]) for name, column in batch.items()}

    def likelihood(self, params: Params, state: TrainState, batch: Batch) -> Tensor:
        """The loss of each member, without decay and bounds: [E]."""
        return member_losses(self.model.raw(params, state.extra, batch["inputs"]), batch, self.config.loss)

    def loss(self, params: Params, state: TrainState, batch: Batch) -> Loss:
        """Sum over members of the likelihood, decay of the weights, and the bounds' distance."""
        each = self.likelihood(params, state, batch)
        loss = each.sum() + ensemble.weight_decay(params, self.decay)
        if self.model.learns_variance:
            loss = loss + self.config.bounds_weight * ensemble.bounds_loss(params)
        return loss, {"dynamics/loss": loss, **{self._of("loss", e): x for e, x in enumerate(each.unbind())}}

    def update(self, state: TrainState, batch: Batch, key: Tensor, *, phase: int) -> Update:
        return self.descend(state, "dynamics", self.loss, self.draw(state))

    # ---- early stopping

    @property
    def every(self) -> int:
        assert self.config.epoch is not None, "fit_config finds the length of an epoch"
        return int(self.config.epoch)

    def refresh(self, state: TrainState, source: DynamicsSource, key: Tensor, *, step: int) -> Update:
        if step == 0:
            # clones: under vmap what comes out must not be what all replicas share
            return state.with_extra(mean=source.mean.clone(), std=source.std.clone()), {}
        return self.review(state, source)

    def review(self, state: TrainState, source: DynamicsSource) -> Update:
        """Look at the held-out error of every member; remember those that got better by more than `tolerance`."""
        c, extra, params, held_out = self.config, state.extra, state.params["dynamics"], source.held_out
        raw = self.model.raw(params, extra, held_out["inputs"])
        error = ensemble.squared_loss(raw.mean, held_out["targets"], held_out.get("scale"))  # [E]
        spread = (0.5 * raw.log_var).exp().mean((-2, -1)) / held_out["targets"].std(0, unbiased=False).mean().clamp(
            min=1e-12
        )
        error = torch.where((spread < EXPLODED) | (not self.model.learns_variance), error, torch.nan)
        old, going = extra["error"], ~self.finished(state)
        better = torch.isfinite(error) & (old.isinf() | ((old - error) / old > c.tolerance)) & going
        best = {}
        for name, value in params.items():
            # the bounds are those of the end
            keep = better.view(-1, *[1] * (value.ndim - 1)) if name.startswith("net.") else going
            best[name] = torch.where(keep, value, extra["best"][name])
        new = {
            **extra,
            "best": best,
            "error": torch.where(better, error, old),
            "stale": torch.where(going, torch.where(better.any(), 0, extra["stale"] + 1), extra["stale"]),
            "epochs": extra["epochs"] + going.long(),
        }
        metrics = {
            "dynamics/held-out error": new["error"].topk(c.elites, largest=False).values.mean(),
            "dynamics/epochs": new["epochs"].float(),
        }
        metrics["dynamics/held-out loss"] = self.likelihood(params, state, held_out).mean()
        return state._replace(extra=new), {
            **metrics,
            **{self._of("held-out error", e): x for e, x in enumerate(error.unbind())},
        }

    def finished(self, state: TrainState) -> Tensor:
        c, extra = self.config, state.extra
        done = extra["stale"] >= c.patience
        return done | (extra["epochs"] >= c.max_epochs) if c.max_epochs else done

    # ---- what a run leaves

    def tree(self, state: TrainState) -> Tree:
        """The model of one replica as `WorldModel` takes it, without what the data add; of the last epoch where none
        was looked at.
        """
        extra = state.extra
        looked = bool(torch.isfinite(extra["error"]).any())
        return {
            "params": extra["best"] if looked else state.params["dynamics"],
            "mean": extra["mean"],
            "std": extra["std"],
            "elites": extra["error"].topk(self.config.elites, largest=False).indices,
        }

    trains_model = True

    def save_models(
        self, run_dir: Path, replicas: Sequence[Replica], state: TrainState, dataset: Dataset, quiet: bool
    ) -> None:
        """See `offrl.world_models.model.ModelTrainer`."""
        parts = split(dataset, self.config)
        for i, replica in enumerate(replicas):
            path = run_dir / FOLDER / f"{replica.name}.safetensors"
            one = select(state, i)
            saved = load(path) if path.exists() else None
            # policies may have learnt in this very file
            if saved is not None and saved.meta["updates"] == int(one.step):
                continue
            if int(one.step) and not torch.isfinite(one.extra["error"]).any():  # shorter than an epoch
                source = self.sampler().prepare(dataset)
                one = self.review(one, source)[0]
            errors = one.extra["error"].tolist()
            meta = {"held_out": errors, "seed": replica.seed, "updates": int(one.step)}
            meta["epochs"] = int(one.extra["epochs"])
            save_calibrated(path, self.model, self.tree(one), dataset, parts.held_out, meta)


def save_calibrated(
    path: Path, model: Any, tree: Tree, dataset: Dataset, held_out: Tensor, meta: Mapping[str, Any]
) -> None:
    """Write a model's file. `tree` gets the data's range, states to start from, and what the intervals at the rows
    `held_out` say of its standard deviations; `meta` what it was trained on. Raises UserError (a full disk)."""
    tree = {**tree, **data_range(dataset), **starts.sample(model, dataset), "scale": torch.ones(model.out_dim)}
    tree["scale"] = quality.scales(model, tree, dataset, held_out)
    tree["levels"] = quality.levels(model, tree, dataset, held_out)
    data = {"name": dataset.spec.name, "fingerprint": dataset.fingerprint}
    save(path, model, tree, {"data": data, **meta, "longest": int(dataset.episode_lengths().max())})


@register("world_model", "ensemble")
def rebuilt(config: Mapping[str, Any], spec: DataSpec) -> WorldModel:
    """The model that a file describes. Raises UserError where its settings are another version's."""
    return WorldModel(restored(DynamicsSettings, config, "the model"), spec)
