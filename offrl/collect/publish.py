"""Writing finished sets: as D4RL HDF5, as Minari datasets, with a card that says how they were made."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from offrl import errors
from offrl.collect.config import SETS, CollectConfig
from offrl.collect.environment import World, spec_fact
from offrl.collect.episodes import Episode, columns_of, statistics
from offrl.collect.record import KEPT, save_record
from offrl.errors import UserError
from offrl.runs.record import installed
from offrl.system import files as checkpoint
from offrl.tasks.task import Task

PACKAGES = ("offrl", "gymnasium", "mujoco", "stable-baselines3", "torch", "numpy", "ogbench")


@dataclass
class EpisodeSet:
    """A set that is ready to be written."""

    name: str
    episodes: list[Episode]
    text: str  # one sentence: how it was made
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass
class Collection:
    """The folder, what it is for, and what was written of it so far."""

    folder: Path
    config: CollectConfig
    world: World
    record: dict[str, Any]
    references: tuple[float | None, float | None] = (None, None)  # returns that score 0 and 100, where known

    def say(self, text: str) -> None:
        if not self.config.quiet:
            errors.say(text)

    def save(self) -> None:
        save_record(self.folder, self.record)

    def targets(self, name: str) -> dict[str, str]:
        """Form -> where the set goes in that form: a path, or a Minari id."""
        stem = re.sub(r"[^\w-]+", "-", self.config.env.rpartition("/")[2]).lower()
        forms = ("d4rl", "minari") if self.config.format == "both" else (self.config.format,)
        space = self.config.name or f"offrl/{stem}"
        targets_by_form = {"d4rl": str(self.folder / f"{stem}-{name}.hdf5"), "minari": f"{space}/{name}-v0"}
        return {form: targets_by_form[form] for form in forms}

    def path(self, form: str, target: str) -> Path:
        from offrl.data.formats.minari import root

        return root() / target if form == "minari" else Path(target)

    def written(self, name: str) -> bool:
        """True where the dataset exists in all forms of the settings."""
        done = self.record["written"].get(name, {})
        return all(
            done.get(form) == target and self.path(form, target).exists() for form, target in self.targets(name).items()
        )

    def holds_collection(self, folder: Path) -> bool:
        """Whether the Minari dataset in `folder` says that it is of this collection."""
        try:
            metadata = json.loads((folder / "data" / "metadata.json").read_text(encoding="utf-8"))
            settings: Any = json.loads(metadata["card"])["settings"]
        except (OSError, ValueError, KeyError, TypeError):
            return False
        return bool(settings == self.record["identity"])

    def check_free(self, names: list[str]) -> None:
        """Raises UserError where a target holds data of someone else."""
        from offrl.data.formats.minari import ID

        for name in names:
            for form, target in self.targets(name).items():
                if form == "minari" and not ID.fullmatch(target):
                    raise UserError(
                        f"name={self.config.name} makes no Minari id ({target}); use letters, digits, - and _, parts "
                        "joined by /"
                    )
                recorded = (
                    self.record["written"].get(name, {}).get(form) == target or self.record.get("writing") == target
                )
                if form == "minari":  # outside the folder, whose record may be a stranger's
                    recorded = recorded and self.holds_collection(self.path(form, target))
                if not recorded and self.path(form, target).exists():
                    cure = "another name=" if form == "minari" else "another out="
                    raise UserError(
                        f"{target} exists in {self.path(form, target).parent} and is not of this collection; choose "
                        f"{cure}"
                    )


def publish(collection: Collection, episode_set: EpisodeSet) -> None:
    """Write one dataset in all forms of the settings, and its card.

    Raises UserError when there is no whole episode, or it cannot be written.
    """
    from offrl.data.writing.write import write_data

    if not episode_set.episodes:
        raise UserError(f"the set {episode_set.name} has no whole episode; record more (steps=, rows=, episodes=)")
    card = _card(collection, episode_set, statistics(episode_set.episodes))
    for form, target in collection.targets(episode_set.name).items():
        if (
            collection.record["written"].get(episode_set.name, {}).get(form) == target
            and collection.path(form, target).exists()
        ):
            continue
        collection.record["writing"] = (
            target  # a kill between the writing and its note leaves our own data, which may be replaced
        )
        collection.save()
        write_data(_raw(collection, episode_set), target, form, _about(collection, card, target), force=True)
        collection.record["written"].setdefault(episode_set.name, {})[form] = target
        del collection.record["writing"]
        collection.save()
    cards = {**collection.record.get("cards", {}), episode_set.name: card}
    collection.record["cards"] = {
        name: cards[name] for name in sorted(cards, key=lambda n: SETS.index(n) if n in SETS else -1)
    }
    collection.save()
    checkpoint.write_text(
        collection.folder / "card.json", json.dumps({"sets": collection.record["cards"]}, indent=1) + "\n", KEPT
    )
    checkpoint.write_text(collection.folder / "card.md", _markdown(collection), KEPT)


def _raw(collection: Collection, episode_set: EpisodeSet) -> Any:
    from offrl.data.raw import RawData

    world = collection.world
    columns = columns_of(episode_set.episodes)
    raw = RawData(
        columns,
        name=f"{world.env_id}-{episode_set.name}".lower(),
        source="arrays",
        discrete=world.discrete,
        num_actions=world.choices,
    )
    raw.action_low, raw.action_high = world.low, world.high
    first = episode_set.episodes[0].images
    raw.final_columns = {name: np.stack([e.images[name] for e in episode_set.episodes]) for name in first}
    limit, (low, high) = collection.config.max_steps, collection.references
    raw.task = Task(name=raw.name, env_id=world.env_id, action_start=world.start or None, max_episode_steps=limit,
                    observation_keys=world.keys,
                    ref_min=low, ref_max=high,
                    ref_label="measured" if low is not None else "")  # fmt: skip
    return raw


def _about(collection: Collection, card: dict[str, Any], target: str) -> dict[str, Any]:
    metadata: dict[str, Any] = {
        "env_id": collection.world.env_id,
        "env_spec": collection.world.spec or None,
        "dataset_id": target if not target.endswith(".hdf5") else Path(target).stem,
        "algorithm_name": card["policy"],
        "author": "offrl collect",
        "description": f"{card['how']} {card['summary']}",
        "ref_label": "measured",
        "card": json.dumps(card),
        "ref_min_score": card["ref_min_score"],
        "ref_max_score": card["ref_max_score"],
    }
    return {k: v for k, v in metadata.items() if v is not None}


def _card(collection: Collection, episode_set: EpisodeSet, numbers: dict[str, Any]) -> dict[str, Any]:
    config, world, (low, high) = collection.config, collection.world, collection.references
    score = None
    if low is not None and high is not None:
        score = Task(name="", ref_min=low, ref_max=high).normalise(numbers["return_mean"])
    return {
        "set": episode_set.name,
        "how": episode_set.text,
        "policy": config.policy or collection.record["identity"].get("trained_by", "oracle"),
        **spec_fact(world),
        **numbers,
        "score_mean": score,
        "ref_min_score": low,
        "ref_max_score": high,
        "seed": config.seed,
        "settings": collection.record["identity"],
        **episode_set.facts,
        "packages": {name: version for name in PACKAGES if (version := installed(name))},
        "columns": sorted(columns_of(episode_set.episodes[:1])),
        "summary": f"{numbers['rows']:,} rows in {numbers['episodes']:,} whole episodes of {world.env_id}, mean return "
                   f"{numbers['return_mean']:.1f}, seed {config.seed}.",
    }  # fmt: skip


def table(collection: Collection) -> dict[str, list[str]]:
    """{header: texts} of what was recorded; no scores without reference returns."""
    cards = list(collection.record.get("cards", {}).values())
    columns = {
        "set": [c["set"] for c in cards],
        "rows": [f"{c['rows']:,}" for c in cards],
        "episodes": [f"{c['episodes']:,}" for c in cards],
    }
    numbers = {"mean return": "return_mean", "std": "return_std", "min": "return_min", "max": "return_max"}
    costs = {"mean cost": "cost_mean", "largest cost": "cost_max"}
    for header, key in {**numbers, "mean length": "length_mean", "score": "score_mean", **costs}.items():
        columns[header] = ["" if c.get(key) is None else f"{c[key]:.1f}" for c in cards]
    return {header: column for header, column in columns.items() if any(column)}


def _markdown(collection: Collection) -> str:
    """The card for people."""
    cards = list(collection.record["cards"].values())
    first = cards[0]
    columns = table(collection)
    lines = [
        f"# {first['env_id']}: {', '.join(c['set'] for c in cards)}",
        "",
        f"Recorded by `offrl collect` in {first['versions']}.",
        "",
    ]
    lines += [
        "| " + " | ".join(columns) + " |",
        "|" + "---|" * len(columns),
        *("| " + " | ".join(row) + " |" for row in zip(*columns.values(), strict=True)),
        "",
    ]
    if first["ref_min_score"] is not None:
        low, high = (f"{first[k]:.2f}" for k in ("ref_min_score", "ref_max_score"))
        lines += [f"Score 0 is a return of {low} (the untrained policy with its noise), score 100 one of {high} (the "
                  "expert acting greedily); both measured here, in 20 episodes each.", ""]  # fmt: skip
    for card in cards:
        ends = f"{card['terminations']:,} episodes end with a termination, {card['truncations']:,} with a time-out"
        lines += [f"## {card['set']}", "", f"{card['how']} {ends}. Columns: {', '.join(card['columns'])}.", ""]
    settings = {k: v for k, v in first["settings"].items() if v not in (None, "", [])}
    lines += ["## How it was made", "", f"Policy: {first['policy']}. Seed: {first['seed']}.", ""]
    lines += [f"- {k}: {v}" for k, v in settings.items()] + [
        "",
        "Packages: " + ", ".join(f"{k} {v}" for k, v in first["packages"].items()),
    ]
    return "\n".join([*lines, ""])
