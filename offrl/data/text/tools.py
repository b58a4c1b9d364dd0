"""`offrl.data.tools.convert` for texts: another layout, several datasets as one, a part of one. Done on episodes in
their canonical form."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from offrl.data.dataset import Dataset
from offrl.data.loading.read import load_text
from offrl.data.loading.resolve import resolve
from offrl.data.raw.ranges import range_of
from offrl.data.text.dataset import from_episodes, to_episodes
from offrl.data.text.files import TextFile
from offrl.data.tools.merge import joined_task
from offrl.data.tools.subset import Choice, select
from offrl.settings.dataset import DatasetConfig


def read(config: DatasetConfig, faults: bool = False) -> TextFile | None:
    """The text dataset that `config` names, nothing done to it; None where it holds numbers. A registered loader is run
    to find out.

    faults: leave faulty episodes out, and say what is wrong with them. Raises UserError.
    """
    source = resolve(config.name, config)
    if source.loader is not None:
        loaded = source.loader(config)
        return TextFile(loaded) if isinstance(loaded, Dataset) and loaded.spec.text else None
    return load_text(source, config, faults) if source.text else None


def origin(dataset: Dataset, name: str) -> str:
    """The description of a dataset, for the history in the new one."""
    return f"{name} ({dataset.spec.source}, {len(dataset)} turns, fingerprint {dataset.fingerprint[:16]})"


def take(file: TextFile, choice: Choice, name: str) -> tuple[TextFile, str]:
    """The episodes that `choice` names, and what they are, in words. Raises UserError where none is left.

    An episode that `choice.rows` cuts ends in a time-out there, whose successor is known. Faulty episodes are left out
    in `read`."""
    dataset = file.dataset
    episodes: list[dict[str, Any]] = list(to_episodes(dataset))
    steps: list[str] = []
    if choice.rows:
        first, last = range_of(choice.rows, len(dataset), "rows")
        pieces, at = [], 0
        for episode in episodes:
            piece = _cut(episode, first - at, last - at)
            pieces += [piece] if piece else []
            at += len(episode["turns"])
        episodes = pieces
        steps.append(f"rows {first} to {last - 1}")
    if choice.drop_faulty:
        steps.append(f"without {len(file.faults)} faulty episodes")
    returns = np.array([sum(np.float32(t["reward"]).item() for t in e["turns"]) for e in episodes])
    numbers = select(choice, returns, steps, f"{name}: no episode is left", dataset.num_episodes)
    episodes = [episodes[k] for k in numbers]
    part = from_episodes(
        episodes, name=dataset.spec.name, task=dataset.spec.task, where=name, source=dataset.spec.source
    )
    metadata = {k: v for k, v in file.metadata.items() if k != "description"}
    return TextFile(part, metadata, file.faults), ", ".join(steps)


def _cut(episode: dict[str, Any], first: int, last: int) -> dict[str, Any] | None:
    """The turns `first` to `last` - 1 of an episode; None where it has none of them."""
    turns = episode["turns"]
    first = max(0, first)
    if first >= min(last, len(turns)):
        return None
    if last >= len(turns):
        return {**episode, "turns": turns[first:]}
    return {
        **episode,
        "turns": turns[first:last],
        "final_obs": turns[last]["obs"],
        "terminated": False,
        "truncated": True,
    }


def join(files: Sequence[TextFile], names: Sequence[str]) -> tuple[TextFile, list[str]]:
    """The datasets one after the other, and notes about what a person should know.

    `meta["source"]` says which of them an episode comes from, by its place in "combined_datasets"; those of one that
    was merged before are kept.
    """
    episodes: list[dict[str, Any]] = []
    combined: list[str] = []
    for file, name in zip(files, names, strict=True):
        entries, before = list(to_episodes(file.dataset)), file.metadata.get("combined_datasets")
        inner = isinstance(before, list) and all(isinstance(e["meta"].get("source"), int) for e in entries)
        episodes += [
            {**e, "meta": {**e["meta"], "source": len(combined) + (e["meta"]["source"] if inner else 0)}}
            for e in entries
        ]
        combined += [str(b) for b in before] if inner and before else [file.dataset.spec.name or name]
    task, notes = joined_task([f.dataset.spec.task for f in files])
    metadata: dict[str, Any] = {
        k: v for k, v in files[0].metadata.items() if all(f.metadata.get(k) == v for f in files) and k != "description"
    }
    metadata["combined_datasets"] = combined
    return TextFile(from_episodes(episodes, name="merged", task=task, source="file"), metadata), notes
