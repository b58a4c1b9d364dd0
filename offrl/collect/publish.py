"""Writing finished sets: as D4RL HDF5, as Minari datasets, with a card that says how they were made."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

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
class Made:
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
    rows: list[dict[str, Any]] = field(default_factory=list)

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
        places = {"d4rl": str(self.folder / f"{stem}-{name}.hdf5"), "minari": f"{space}/{name}-v0"}
        return {form: places[form] for form in forms}

    def path(self, form: str, target: str) -> Path:
        from offrl.data.formats.minari import root

        return root() / target if form == "minari" else Path(target)

    def written(self, name: str) -> bool:
        """True where the dataset exists in all forms of the settings."""
        done = self.record["written"].get(name, {})
        return all(
            done.get(form) == target and self.path(form, target).exists() for form, target in self.targets(name).items()
        )

    def made(self, place: Path) -> bool:
        """Whether the Minari dataset in `place` says that it is of this collection."""
        try:
            metadata = json.loads((place / "data" / "metadata.json").read_text(encoding="utf-8"))
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
                    recorded = recorded and self.made(self.path(form, target))
                if not recorded and self.path(form, target).exists():
                    cure = "another name=" if form == "minari" else "another out="
                    raise UserError(
                        f"{target} exists in {self.path(form, target).parent} and is not of this collection; choose "
                        f"{cure}"
                    )


def publish(place: Collection, made: Made, low: float | None, high: float | None) -> None:
    """Write one dataset in all forms of the settings, and its card. `low`, `high`: returns that score 0 and 100, None
    where unknown.

    Raises UserError when there is no whole episode, or it cannot be written.
    """
    from offrl.data.writing.write import write_data

    if not made.episodes:
        raise UserError(f"the set {made.name} has no whole episode; record more (steps=, rows=, episodes=)")
    numbers = statistics(made.episodes)
    card = _card(place, made, numbers, low, high)
    for form, target in place.targets(made.name).items():
        if place.record["written"].get(made.name, {}).get(form) == target and place.path(form, target).exists():
            continue
        place.record["writing"] = (
            target  # a kill between the writing and its note leaves our own data, which may be replaced
        )
        place.save()
        write_data(_raw(place, made, low, high), target, form, _about(place, made, card, target, low, high), force=True)
        place.record["written"].setdefault(made.name, {})[form] = target
        del place.record["writing"]
        place.save()
    cards = {**place.record.get("cards", {}), made.name: card}
    place.record["cards"] = {
        name: cards[name] for name in sorted(cards, key=lambda n: SETS.index(n) if n in SETS else -1)
    }
    place.save()
    checkpoint.write_text(
        place.folder / "card.json", json.dumps({"sets": place.record["cards"]}, indent=1) + "\n", KEPT
    )
    checkpoint.write_text(place.folder / "card.md", _markdown(place), KEPT)


def _raw(place: Collection, made: Made, low: float | None, high: float | None) -> Any:
    from offrl.data.raw import RawData

    world = place.world
    columns = columns_of(made.episodes)
    raw = RawData(
        columns,
        name=f"{world.env_id}-{made.name}".lower(),
        source="arrays",
        discrete=world.discrete,
        num_actions=world.choices,
    )
    raw.action_low, raw.action_high = world.low, world.high
    limit = place.config.max_steps
    raw.task = Task(name=raw.name, env_id=world.env_id, action_start=world.start or None, max_episode_steps=limit,
                    ref_min=low, ref_max=high,
                    ref_label="measured" if low is not None else "")  # fmt: skip
    return raw


def _about(
    place: Collection, made: Made, card: dict[str, Any], target: str, low: float | None, high: float | None
) -> dict[str, Any]:
    about: dict[str, Any] = {
        "env_id": place.world.env_id,
        "env_spec": place.world.spec or None,
        "dataset_id": target if not target.endswith(".hdf5") else Path(target).stem,
        "algorithm_name": card["policy"],
        "author": "offrl collect",
        "description": f"{made.text} {card['summary']}",
        "ref_label": "measured",
        "card": json.dumps(card),
    }
    if low is not None and high is not None:
        about |= {"ref_min_score": low, "ref_max_score": high}
    return {k: v for k, v in about.items() if v is not None}


def _card(
    place: Collection, made: Made, numbers: dict[str, Any], low: float | None, high: float | None
) -> dict[str, Any]:
    config, world = place.config, place.world
    score = None
    if low is not None and high is not None:
        score = Task(name="", ref_min=low, ref_max=high).normalise(numbers["return_mean"])
    return {
        "set": made.name,
        "how": made.text,
        "policy": config.policy or place.record["identity"].get("trained_by", "oracle"),
        **spec_fact(world),
        **numbers,
        "score_mean": score,
        "ref_min_score": low,
        "ref_max_score": high,
        "seed": config.seed,
        "settings": place.record["identity"],
        **made.facts,
        "packages": {name: version for name in PACKAGES if (version := installed(name))},
        "columns": sorted(columns_of(made.episodes[:1])),
        "summary": f"{numbers['rows']:,} rows in {numbers['episodes']:,} whole episodes of {world.env_id}, mean return "
                   f"{numbers['return_mean']:.1f}, seed {config.seed}.",
    }  # fmt: skip


def table(place: Collection) -> tuple[list[str], list[list[str]]]:
    """Headers and rows of what was recorded."""
    cards = list(place.record.get("cards", {}).values())
    headers = ["set", "rows", "episodes", "mean return", "std", "min", "max", "mean length", "score"]
    rows = [
        [
            c["set"],
            f"{c['rows']:,}",
            f"{c['episodes']:,}",
            *(f"{c[f'return_{k}']:.1f}" for k in ("mean", "std", "min", "max")),
            f"{c['length_mean']:.1f}",
            "" if c["score_mean"] is None else f"{c['score_mean']:.1f}",
        ]
        for c in cards
    ]
    keep = [i for i in range(len(headers)) if any(row[i] for row in rows)]  # no scores without reference returns
    return [headers[i] for i in keep], [[row[i] for i in keep] for row in rows]


def _markdown(place: Collection) -> str:
    """The card for people."""
    cards = list(place.record["cards"].values())
    first = cards[0]
    headers, rows = table(place)
    lines = [
        f"# {first['env_id']}: {', '.join(c['set'] for c in cards)}",
        "",
        f"Recorded by `offrl collect` in {first['versions']}.",
        "",
    ]
    lines += [
        "| " + " | ".join(headers) + " |",
        "|" + "---|" * len(headers),
        *("| " + " | ".join(r) + " |" for r in rows),
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
