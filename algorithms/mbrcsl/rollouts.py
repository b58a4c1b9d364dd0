"""Rollouts of a behaviour policy in a learnt model, which several runs share."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from offrl import rng
from offrl.data.dataset import Dataset
from offrl.data.samplers.sequences import drawn_episodes
from offrl.errors import UserError, say
from offrl.pretrained import Pretrained
from offrl.system.devices import pick_device
from offrl.system.locks import once
from offrl.world_models import imagined
from offrl.world_models.model import Trained

if TYPE_CHECKING:
    from offrl.settings.train import TrainConfig

SEED = 0  # of the episodes: the same ones serve all seeds, as the model and the behaviour policy do


def check_behaviour(run: Pretrained) -> None:
    """Raise UserError for a run whose policy cannot play episodes side by side in the model."""
    acts = run.algorithm.traits.policy_modules
    if not acts or run.algorithm.actor(run.state).start(1) is not None:
        raise UserError(
            f"algo.behaviour: {run.algorithm.config.name} {'remembers' if acts else 'does not act'}; "
            "episodes are played by a policy without a memory, such as diffusion_bc or bc"
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
            columns, about = imagined.collect(
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
        about |= {"kind": imagined.KIND, "format": imagined.FORMAT, "spec": spec.to_json(), **origin}
        return {name: column.cpu().contiguous() for name, column in columns.items()}, about

    _, about = once(path, make, f"the imagined episodes {path}", config.quiet)
    if not path.is_file():
        raise UserError(f"{path} could not be written; choose another runs_dir=")
    summary = imagined.say(about, c.name)
    if not config.quiet:
        say(summary)
    return path
