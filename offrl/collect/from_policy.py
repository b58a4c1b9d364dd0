"""`offrl collect policy=...`: record from any agent in any environment."""

from __future__ import annotations

import hashlib
import math
from pathlib import Path
from typing import Any

from offrl.collect.config import CollectConfig
from offrl.collect.environment import World, look
from offrl.collect.episodes import Episode
from offrl.collect.publish import Collection, EpisodeSet, publish
from offrl.collect.record import Stop
from offrl.collect.recorder import record, seed_for
from offrl.data.raw.streams import size_of
from offrl.errors import UserError
from offrl.evaluation.result import Policy
from offrl.interop.policies import load_agents

ROWS = 100_000
SET = "data"


def agents(config: CollectConfig, world: World) -> dict[str, Policy]:
    size = 0 if world.low is None else world.low.size
    return load_agents(
        config.policy, observation_dim=world.dim, action_dim=size, discrete=world.discrete, images=world.images
    )


def prepare(config: CollectConfig) -> tuple[World, dict[str, Any]]:
    """Check environment and policy before anything is made; what the file holds is part of what the collection is."""
    for name in ("steps", "snapshot_every"):
        if getattr(config, name) is not None:
            raise UserError(f"{name}= belongs to recipe=d4rl; with policy= give rows= or episodes=")
    if config.datasets:
        raise UserError("datasets= belongs to recipe=d4rl; with policy= there is one set")
    if config.rows is not None and config.episodes is not None:
        raise UserError("rows= and episodes= are both given; leave one of them out")
    picture = size_of(config.size) if config.images else ()
    if config.camera and not config.images:
        raise UserError(f"camera={config.camera} is of rendered images: add images=true")
    world = look(config.env, config.max_steps, picture, config.camera)
    if world.images and config.format != "d4rl":
        raise UserError(f"format={config.format}: images are recorded as HDF5 files alone; leave it at d4rl")
    agents(config, world)
    path = Path(config.policy).expanduser()
    path = path if path.exists() else Path(config.policy.rpartition(":")[0] or "none").expanduser()
    digest = hashlib.sha256(path.read_bytes()).hexdigest()[:16] if path.is_file() else ""
    return world, {"policy_file": digest}


def collect(config: CollectConfig, folder: Path, collection: Collection, stop: Stop) -> None:
    """Record; several policies (a run's replicas, a dict) have equal shares, one after the other. `rows` and `episodes`
    are of all.
    """
    if collection.written(SET):
        return
    policies = agents(config, collection.world)
    share = 1.0 / len(policies)
    episodes: list[Episode] = []
    for i, (name, policy) in enumerate(policies.items()):
        new = record(
            collection.world,
            policy,
            folder / "episodes" / f"policy_{i:03d}",
            rows=None if config.episodes is not None else math.ceil((config.rows or ROWS) * share),
            episodes=None if config.episodes is None else math.ceil(config.episodes * share),
            seed=seed_for(config.seed, "policy", i),
            explore=config.explore,
            noise=config.noise,
            parallel=config.parallel,
            title=f"recording {name}",
            quiet=config.quiet,
            stop=stop,
        )
        episodes += [Episode(e.columns, e.final, i, e.images) for e in new]
    how = "with its own noise" if config.explore else "greedily"
    extra = ""
    if config.noise and collection.world.discrete:
        extra = f", and a random action with probability {config.noise}"
    elif config.noise:
        extra = f", and Gaussian noise of {config.noise} half widths of the range added"
    names = ", ".join(policies)
    text = f"Rows of {names} ({config.policy}), acting {how}{extra}." if len(policies) == 1 else (
        f"Rows of the policies {names} of {config.policy} in turn, equal shares, acting {how}{extra}.")  # fmt: skip
    publish(collection, EpisodeSet(SET, episodes, text, {"policies": list(policies)}))
