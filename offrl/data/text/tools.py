"""`offrl.data.tools.convert` for texts: another layout, several datasets as one, a part of one. Done on episodes in
their canonical form."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from offrl.data.dataset import Dataset
from offrl.data.loading.read import load_text
from offrl.data.loading.resolve import resolve
from offrl.data.text.dataset import from_episodes, to_episodes
from offrl.data.text.files import TextFile
from offrl.data.text.write import write_text
from offrl.data.tools.subset import Choice, numbers_of, range_of, share_of
from offrl.data.writing.write import Progress
from offrl.errors import UserError
from offrl.settings.dataset import DatasetConfig
from offrl.tasks.task import Task


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


def write(file: TextFile, out: str, form: str, steps: Sequence[str], force: bool, progress: Progress | None) -> Path:
    """Write what `convert`, `subset` or `merge` made, with what was done added to its history."""
    about = file.about | {"history": [*file.about.get("history", []), *steps]}
    return write_text(file.dataset, out, form, about, force=force, progress=progress)


def origin(dataset: Dataset, name: str) -> str:
    """The description of a dataset, for the history in the new one."""
    return f"{name} ({dataset.spec.source}, {len(dataset)} turns, fingerprint {dataset.fingerprint[:16]})"


def take(file: TextFile, choice: Choice, name: str) -> tuple[TextFile, str]:
    """The episodes that `choice` names, and what they are, in words. Raises UserError where none is left.

    An episode that `choice.rows` cuts ends in a time-out there, whose successor is known. Faulty episodes are left out
    in `read`."""
    dataset = file.dataset
    episodes: list[dict[str, Any]] = list(to_episodes(dataset))
    words: list[str] = []
    if choice.rows:
        first, last = range_of(choice.rows, len(dataset), "rows")
        pieces, at = [], 0
        for episode in episodes:
            piece = _cut(episode, first - at, last - at)
            pieces += [piece] if piece else []
            at += len(episode["turns"])
        episodes = pieces
        words.append(f"rows {first} to {last - 1}")
    if choice.episodes not in ("", None):
        numbers = numbers_of(choice.episodes, len(episodes))
        episodes = [episodes[k] for k in numbers]
        words.append(f"{len(numbers)} episodes by number")
    if choice.drop_faulty:
        words.append(f"without {len(file.faults)} faulty episodes")
    returns = np.array([sum(np.float32(t["reward"]).item() for t in e["turns"]) for e in episodes])
    for bound, word, keep in (
        (choice.min_return, "at least", lambda r, b: r >= b),
        (choice.max_return, "at most", lambda r, b: r <= b),
    ):
        if bound is not None:
            inside = np.flatnonzero(keep(returns, bound))
            episodes, returns = [episodes[k] for k in inside], returns[inside]
            words.append(f"returns of {word} {bound:g}")
    for key in ("top", "fraction"):
        if not 0.0 < getattr(choice, key) <= 1.0:
            raise UserError(f"{key}={getattr(choice, key):g} must be above 0 and at most 1")
    if choice.top < 1.0 and episodes:
        best = np.sort(np.argsort(-returns, kind="stable")[: share_of(choice.top, len(episodes))])
        episodes = [episodes[k] for k in best]
        words.append(f"the best {choice.top:g}")
    if choice.fraction < 1.0 and episodes:
        order = np.random.Generator(np.random.PCG64(choice.seed)).permutation(len(episodes))
        episodes = [episodes[k] for k in np.sort(order[: share_of(choice.fraction, len(episodes))])]
        words.append(f"a share of {choice.fraction:g} (seed {choice.seed})")
    if not words:
        raise UserError(
            "offrl data subset: say what to keep: rows, episodes, drop_faulty, min_return, max_return, top or fraction"
        )
    if not episodes:
        raise UserError(f"{name}: no episode is left ({', '.join(words)} of {dataset.num_episodes} episodes)")
    part = from_episodes(
        episodes, name=dataset.spec.name, task=dataset.spec.task, where=name, source=dataset.spec.source
    )
    about = {k: v for k, v in file.about.items() if k != "description"}
    return TextFile(part, about, file.faults), ", ".join(words)


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
        entries, before = list(to_episodes(file.dataset)), file.about.get("combined_datasets")
        inner = isinstance(before, list) and all(isinstance(e["meta"].get("source"), int) for e in entries)
        episodes += [
            {**e, "meta": {**e["meta"], "source": len(combined) + (e["meta"]["source"] if inner else 0)}}
            for e in entries
        ]
        combined += [str(b) for b in before] if inner and before else [file.dataset.spec.name or name]
    tasks = [f.dataset.spec.task for f in files if f.dataset.spec.task is not None]
    task = next((t for t in tasks if t.ref_min is not None), tasks[0] if tasks else None)
    about: dict[str, Any] = {
        k: v for k, v in files[0].about.items() if all(f.about.get(k) == v for f in files) and k != "description"
    }
    about["combined_datasets"] = combined
    return TextFile(from_episodes(episodes, name="merged", task=task, source="file"), about), _differences(tasks, task)


def _differences(tasks: Sequence[Task], chosen: Task | None) -> list[str]:
    notes = []
    environments = sorted({t.env_id or t.name for t in tasks})
    if len(environments) > 1:
        notes.append(
            f"recorded in {' and '.join(environments)}; scores will be measured in "
            f"{chosen and (chosen.env_id or chosen.name)}"
        )
    if len({(t.ref_min, t.ref_max) for t in tasks if t.ref_min is not None}) > 1:
        notes.append(f"reference scores differ; those of {chosen and chosen.name} are kept")
    return notes
