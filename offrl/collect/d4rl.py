"""D4RL's recipe (arXiv 2004.07219, section 5 and appendix): one online training gives the sets random to
full-replay.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from offrl.collect.config import SETS, CollectConfig
from offrl.collect.environment import World, look
from offrl.collect.episodes import Episode
from offrl.collect.publish import Collection, EpisodeSet, publish
from offrl.collect.record import Stop
from offrl.collect.recorder import measure, record, seed_for
from offrl.collect.train import Snapshot, algorithm_of, library, snapshots, stream, train
from offrl.errors import UserError, nearest, warn

FAR = 0.15  # a medium policy further than this from the configured level is reported
REFERENCE_EPISODES = 20
PARTS = {"random": ("random",), "medium": ("medium",), "expert": ("expert",), "medium-expert": ("medium", "expert"),
         "medium-replay": (), "full-replay": ()}  # policies whose rows a set holds  # fmt: skip
STEPS, DISCRETE_STEPS = 1_000_000, 100_000


@dataclass(frozen=True)
class Choice:
    """The snapshots that stand for D4RL's policies."""

    random: Snapshot
    medium: Snapshot
    expert: Snapshot
    level: float  # of medium: 0 random, 1 expert; NaN where training gained nothing


def choose(candidates: list[Snapshot], medium: float, expert: str) -> Choice:
    """Random is the untrained policy, expert the last (or best) snapshot, medium the one between them that is nearest
    to the return `medium` of the way from random to expert, among those up to the first that reaches it: where D4RL
    stops training early.
    """
    first, last = candidates[0], candidates[-1]
    top = max(candidates, key=lambda s: s.mean) if expert == "best" else last
    gain = top.mean - first.mean
    if gain <= 0:
        return Choice(first, candidates[len(candidates) // 2], top, float("nan"))
    aim = first.mean + medium * gain
    between = [s for s in candidates if first.step < s.step < top.step] or [top]
    crossing = next((i for i, s in enumerate(between) if s.mean >= aim), len(between) - 1)
    chosen = min(between[: crossing + 1], key=lambda s: abs(s.mean - aim))
    return Choice(first, chosen, top, (chosen.mean - first.mean) / gain)


def collect(config: CollectConfig, folder: Path, collection: Collection, stop: Stop) -> None:
    """Train, record the sets, and write them. Goes on where an earlier call was stopped."""
    world = collection.world
    steps = config.steps or (DISCRETE_STEPS if world.discrete else STEPS)
    interval = min(steps, config.snapshot_every or max(250, steps // 100))
    sets = _sets(config)
    train(world, config, folder / "train", steps, interval, stop)
    stop.check()
    choice = choose(snapshots(folder / "train"), config.medium, config.expert)
    collection.say(_words(choice, interval))
    _warn(choice, config, interval)
    if config.episodes is None and config.rows is None:
        config.rows = steps
    recorded: dict[str, list[Episode]] = {}
    for name in ("random", "medium", "expert"):
        if any(name in PARTS[w] and not collection.written(w) for w in sets):
            recorded[name] = record(
                world,
                getattr(choice, name).actor(world),
                folder / "episodes" / name,
                rows=config.rows if config.episodes is None else None,
                episodes=config.episodes,
                seed=seed_for(config.seed, name),
                explore=True,
                noise=0.0,
                parallel=config.parallel,
                title=f"recording {name}",
                quiet=config.quiet,
                stop=stop,
            )
    collection.references = _references(config, world, choice, folder, collection)
    for name in sets:
        if not collection.written(name):
            publish(collection, _make(name, choice, recorded, folder, world, config))


def _sets(config: CollectConfig) -> list[str]:
    for name in config.datasets:
        if name not in SETS:
            raise UserError(
                f"datasets=[{name}]: D4RL's recipe has no such set.{nearest(name, SETS)} It has: {', '.join(SETS)}"
            )
    return [s for s in SETS if not config.datasets or s in config.datasets]


def _make(
    name: str, choice: Choice, recorded: dict[str, list[Episode]], folder: Path, world: World, config: CollectConfig
) -> EpisodeSet:
    """The episodes of one set, and how they came to be."""
    kind = algorithm_of(world, config).upper()
    if name in recorded:
        snapshot = getattr(choice, name)
        source = {
            "random": f"the untrained policy of {kind}",
            "medium": f"one policy of {kind}, stopped early after {snapshot.step:,} steps at {choice.level:.0%} of the "
            "expert's gain",
            "expert": f"one policy of {kind} after {snapshot.step:,} steps of training",
        }[name]
        return EpisodeSet(
            name, recorded[name], f"Rows of {source}, acting with its own noise.", {"snapshot_step": snapshot.step}
        )
    if name == "medium-expert":
        both = [*recorded["medium"], *recorded["expert"]]
        facts = {"snapshot_step": [choice.medium.step, choice.expert.step]}
        return EpisodeSet(
            name, both, "The rows of the set medium, then those of the set expert: half of the rows each.", facts
        )
    episodes = stream(folder / "train")
    if name == "full-replay":
        text = f"Every whole episode of the training of {kind}, in order: what the policies on the way did."
        return EpisodeSet(name, episodes, text, {"training_steps": episodes[-1].mark if episodes else 0})
    early = [e for e in episodes if e.mark <= choice.medium.step] or episodes[:1]
    text = (
        f"Every whole episode of the training of {kind} until the policy was the medium one, after "
        f"{choice.medium.step:,} steps."
    )
    return EpisodeSet(name, early, text, {"training_steps": choice.medium.step})


def _references(
    config: CollectConfig, world: World, choice: Choice, folder: Path, collection: Collection
) -> tuple[float | None, float | None]:
    """The returns that score 0 and 100: of the untrained policy with its noise, and of the expert acting greedily."""
    if "references" not in collection.record:
        ends = [
            measure(
                world, snapshot.actor(world), explore, REFERENCE_EPISODES, seed_for(config.seed, "reference", name)
            ).mean()
            for name, snapshot, explore in (("random", choice.random, True), ("expert", choice.expert, False))
        ]
        collection.record["references"] = [float(x) for x in ends]
        collection.save()
    low, high = collection.record["references"]
    if not high > low:
        warn(
            f"the expert's return {high:.1f} is not above the untrained policy's {low:.1f}: the sets get no reference "
            "scores; train longer"
        )
        return None, None
    return low, high


def _words(choice: Choice, interval: int) -> str:
    parts = [
        f"{n} {s.mean:.1f} (step {s.step:,})"
        for n, s in (("random", choice.random), ("medium", choice.medium), ("expert", choice.expert))
    ]
    return f"mean returns of the policies: {', '.join(parts)}; snapshots every {interval:,} steps"


def _warn(choice: Choice, config: CollectConfig, interval: int) -> None:
    if np.isnan(choice.level):
        warn("training has gained nothing over the untrained policy: the sets are not ordered; more steps= are needed")
    elif abs(choice.level - config.medium) > FAR:
        warn(
            f"the medium policy is at {choice.level:.0%} of the expert's gain, not at {config.medium:.0%}: the return "
            f"jumped between snapshots {interval:,} steps apart; a smaller snapshot_every= finds a nearer one"
        )


def prepare(config: CollectConfig) -> tuple[World, dict[str, Any]]:
    """Check what can be checked before anything is made."""
    _sets(config)
    world = look(config.env, config.max_steps)
    if config.images or world.images:
        raise UserError(
            f"recipe=d4rl trains on numbers, and images of {config.env} are recorded from a policy: "
            "policy=FILE.py:NAME, or a run on images"
        )
    library()
    return world, {"trained_by": algorithm_of(world, config)}
