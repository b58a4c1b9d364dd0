"""MBRCSL: "Free from Bellman Completeness: Trajectory Stitching via Model-based Return-conditioned Supervised Learning"
(Zhou et al., 2023, arXiv 2310.19308)."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from offrl import registry, rng
from offrl.algorithm import Batch, Dataset, Grid, Loss, Params, Sampler, TrainConfig, TrainState, Traits, Update
from offrl.data.samplers.sequences import RETURNS, STEPS, Sequences, SequenceSampler, drawn_episodes
from offrl.errors import UserError, say
from offrl.families.return_conditioned import OutcomeConditioned, OutcomeSettings, round_digits
from offrl.pretrained import Pretrained, Requirement
from offrl.registry import register
from offrl.settings.field import defaults, setting
from offrl.system.devices import pick_device
from offrl.system.locks import once
from offrl.world_models import imagined
from offrl.world_models.model import Trained, required


@dataclass(frozen=True)
class RolloutSource:
    """Imagined episodes, and the data where they are drawn from too."""

    imagined: Sequences
    real: Sequences | None


@dataclass(frozen=True)
class RolloutSampler:
    """Steps of imagined episodes, and `real_share` of the data's."""

    algorithm: MBRCSL
    inner: SequenceSampler = SequenceSampler(1)  # noqa: RUF009 - frozen

    def prepare(self, dataset: Dataset) -> RolloutSource:
        c = self.algorithm.config
        episodes = imagined.read(c.imagined, dataset.spec)[0].to(dataset.device)
        return RolloutSource(self.inner.prepare(episodes), self.inner.prepare(dataset) if c.real_share else None)

    def __call__(self, source: RolloutSource, key: Tensor, batch_size: int) -> Batch:
        if source.real is None:
            return self.inner(source.imagined, key, batch_size)
        real_key, imagined_key = rng.split(key)
        count = int(batch_size * self.algorithm.config.real_share)
        batches = (
            self.inner(source.real, real_key, count),
            self.inner(source.imagined, imagined_key, batch_size - count),
        )
        return {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}


SEED = 0  # of the episodes: the same ones serve all seeds, as the model and the behaviour policy do


def check_behaviour(run: Pretrained) -> None:
    """Raise UserError for a run whose policy cannot play episodes side by side in the model."""
    acts = run.algorithm.traits.policy_modules
    if not acts or run.algorithm.actor(run.state).start(1) is not None:
        raise UserError(
            f"algo.behaviour: {run.algorithm.config.name} {'remembers' if acts else 'does not act'}; episodes are "
            "played by a policy without a memory, such as diffusion_bc or bc"
        )


def play(config: TrainConfig, dataset: Dataset, world_model: Trained, behaviour: Pretrained) -> Path:
    """The file of episodes that a behaviour policy plays in a model, made now unless it is there. Raises UserError."""
    c, spec = config.algo, dataset.spec
    horizon = c.horizon or int(dataset.episode_lengths().max())
    settings = {name: getattr(c, name) for name in ("rollouts", "rollout_batch", "accepted_episodes", "range_margin")}
    identity = [world_model.identity, behaviour.identity, dataset.fingerprint, horizon, settings]
    name = "".join(x if x.isalnum() or x in "-_." else "-" for x in spec.name)
    digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:10]
    path = Path(config.runs_dir) / f"imagined-{name}-{digest}.safetensors"
    device = pick_device(config.device)

    def make() -> tuple[Mapping[str, Tensor], Mapping[str, Any]]:
        model, data = world_model.to(device), dataset.to(device)
        margin = c.range_margin * (model.tree["high"] - model.tree["low"])
        tree = {**model.tree, "low": model.tree["low"] - margin, "high": model.tree["high"] + margin}
        actor = behaviour.algorithm.actor(pytree.tree_map(lambda x: x.to(device), behaviour.state))

        def act(observations: Tensor, past: Tensor, key: Tensor) -> Tensor:
            return actor.act(None, observations, key, explore=True)[0]

        with torch.no_grad():
            columns, description = imagined.collect(
                model.model,
                tree,
                act,
                data,
                rng.make_key(SEED, device),
                threshold=float(dataset.raw_returns[drawn_episodes(dataset).cpu()].max()),
                horizon=horizon,
                batch=c.rollout_batch,
                accepted=c.accepted_episodes,
                most=c.rollouts,
                tell=None if config.quiet else say,
            )
        origin = {"world_model": world_model.identity, "behaviour": behaviour.identity, "data": dataset.fingerprint}
        description |= {"kind": imagined.KIND, "format": imagined.FORMAT, "spec": spec.to_json(), **origin}
        return {name: column.cpu().contiguous() for name, column in columns.items()}, description

    _, description = once(path, make, f"the imagined episodes {path}", config.quiet)
    if not path.is_file():
        raise UserError(f"{path} could not be written; choose another runs_dir=")
    summary = imagined.say(description, c.name)
    if not config.quiet:
        say(summary)
    return path


# of the behaviour policy, for this number of updates of the policy that learns from its episodes
EPOCHS, PUBLISHED = (50, 8_000)


@dataclass
@defaults(learning_rate=5e-5, weight_decay=0.1)
class MBRCSLConfig(OutcomeSettings):
    """Settings of MBRCSL; the defaults are the authors' for their point maze, but for fewer episodes at most (theirs:
    200,000).
    """

    name: str = "mbrcsl"
    policy: str = setting(
        "deterministic",
        "deterministic: squared error; gaussian, tanh_gaussian: negative log-likelihood",
        choices=("deterministic", "gaussian", "tanh_gaussian"),
    )
    world_model: str = setting(
        "", "a trained model: a run of algo=dynamics, or a file in its models/; empty: one is trained first", place=True
    )
    members: int = setting(7, "models in the ensemble that is trained where world_model= names none", low=1, place=True)
    behaviour: str = setting(
        "", "a trained run whose policy plays in the model; empty: diffusion_bc is trained first", place=True
    )
    behaviour_steps: int | None = setting(
        None,
        "updates of the behaviour policy that is trained first; null: 50 times through the data, or as much less as "
        "this run has fewer than 8,000 updates",
        low=1,
        place=True,
    )
    behaviour_hidden: list[int] = setting([512, 512, 512], "widths of its hidden layers", low=1, place=True)
    rollouts: int = setting(10_000, "episodes played in the model at most", low=1, place=True)
    rollout_batch: int = setting(200, "episodes played at a time", low=1, place=True)
    accepted_episodes: int = setting(
        100, "no more are played once so many promise more than the data's best return", low=1, place=True
    )
    horizon: int | None = setting(
        None, "steps of such an episode at most; null: the data's longest episode", low=1, place=True
    )
    range_margin: float = setting(
        0.05,
        "an episode that leaves the data's range by more than so many times its width does not count",
        low=0.0,
        place=True,
        shared=True,
    )
    target_quantile: float = setting(
        0.9, "target_return=null: of what the imagined episodes promise so much is asked for; 1: the largest, as the "
             "authors do",
        low=0.0, high=1.0, shared=True
    )  # fmt: skip
    imagined: str = setting(
        "", "a file of such episodes that an earlier run kept; empty: they are played first", place=True
    )
    imagined_id: str = setting("", "which episodes those are", filled=True)
    real_share: float = setting(
        0.0, "share of each batch that is the data's, not imagined", low=0.0, high=1.0, structural=True
    )


@register("algo", "mbrcsl")
class MBRCSL(OutcomeConditioned[MBRCSLConfig]):
    """Return-conditioned learning from complete rollouts of a clone of the data's behaviour in a learnt model, those
    with a larger return than any in the data; acts with their return as target (algorithm 1). Where the data's episodes
    cross, rollouts change over.

    A run needs three results, each used again by runs with the same settings: a model, a behaviour policy, and the
    rollouts.
    """

    traits = Traits(actions=("continuous",))

    @classmethod
    def requires(cls, config: TrainConfig, dataset: Dataset) -> dict[str, Requirement]:
        """A model and a behaviour policy, where no episodes are named."""
        c = config.algo
        if c.imagined:
            return {}
        if dataset.spec.discrete:
            raise UserError(f"{c.name} needs continuous actions and {dataset.spec.name} has discrete ones")
        settings = {"hidden": list(c.behaviour_hidden), "learning_rate": 1e-4}
        batch = registry.get("algo", "diffusion_bc").Config().batch_size
        steps = c.behaviour_steps or math.ceil(EPOCHS * len(dataset) / batch * min(1.0, config.steps / PUBLISHED))
        behaviour = Requirement(
            "diffusion_bc", settings, steps=steps, label="behaviour-diffusion_bc", check=check_behaviour
        )
        return {"world_model": required({"members": c.members}), "behaviour": behaviour}

    @classmethod
    def adopt(cls, config: TrainConfig, dataset: Dataset, pretrained: Mapping[str, Any]) -> TrainConfig:
        """The imagined episodes, played now where none are named."""
        c = config.algo
        path = c.imagined or str(play(config, dataset, pretrained["world_model"], pretrained["behaviour"]))
        description = imagined.about_file(path, dataset.spec)
        return dataclasses.replace(
            config, algo=dataclasses.replace(c, imagined=path, imagined_id=description["sha256"][:16])
        )

    @classmethod
    def fit_config(cls, config: MBRCSLConfig, dataset: Dataset, grid: Grid = None) -> MBRCSLConfig:
        """`config` with a quantile of the imagined episodes' returns as target: the largest may be an error of the
        model.
        """
        if config.imagined and config.target_return is None:
            returns = imagined.read(config.imagined, dataset.spec)[0].raw_returns
            target = float(returns.quantile(config.target_quantile))
            config = dataclasses.replace(config, target_return=round_digits(target))
        return super().fit_config(config, dataset, grid)

    def modules(self) -> dict[str, nn.Module]:
        c = self.config
        if 0.0 < c.real_share * c.batch_size < 1.0:
            raise UserError(
                f"algo.real_share={c.real_share:g} of algo.batch_size={c.batch_size} rows is none of them: raise it, "
                "or take 0"
            )
        return super().modules()

    def sampler(self) -> Sampler:
        return RolloutSampler(self)

    def actor_loss(self, actor: Params, state: TrainState, batch: Batch, key: Tensor) -> Loss:
        """E |pi(s, R) - a|^2, or -E log pi(a | s, R), R the return to go of (s, a) in an imagined episode."""
        x = self.inputs(batch["observations"], self.outcome(batch[RETURNS], batch[STEPS]))
        loss = self.policy.bc_loss(self.apply("actor", actor, x, key), batch["actions"]).mean()
        return loss, {"actor/loss": loss}

    def update(self, state: TrainState, batch: Batch, key: Tensor, *, phase: int) -> Update:
        steps = {name: column[:, 0] for name, column in batch.items()}  # windows of one step
        return self.descend(state, "actor", self.actor_loss, steps, key)
