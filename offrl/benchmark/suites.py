"""Suites: datasets, the number of updates, the evaluation of policies, and published scores. Read from
configs/suite/*.yaml or a file.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from offrl.errors import UserError, nearest
from offrl.settings.compose import flatten
from offrl.settings.field import plain_name
from offrl.settings.kinds import misfit
from offrl.settings.presets import SUFFIX, check_entries, config_folder, config_names, read_yaml

KEYS = ("name", "note", "steps", "eval", "settings", "datasets", "references", "reference_source")
ENTRY_KEYS = ("name", "label", "env", "eval", "settings")


@dataclass(frozen=True)
class Entry:
    """One dataset of a suite."""

    name: str  # what `dataset=` takes
    label: str  # what tables and run directories call it
    settings: dict[str, Any] = field(default_factory=dict)  # of `offrl train`, for this dataset only


@dataclass(frozen=True)
class Suite:
    """A list of datasets and how they are trained and scored."""

    name: str
    entries: list[Entry]
    steps: int | None = None
    settings: dict[str, Any] = field(default_factory=dict)  # of `offrl train`, for every cell
    references: dict[str, dict[str, float]] = field(default_factory=dict)  # dataset -> algorithm -> published score
    reference_source: str = ""
    note: str = ""  # for the reader of the command's output


def load(name: str, datasets: Sequence[str] = ()) -> Suite:
    """The suite `name`, one of configs/suite or the path of a YAML file.

    datasets: for a suite that lists none (`own`) its datasets; for any other those of its datasets to keep. Relative
    paths in a suite file are looked for beside that file first. Raises UserError for an unknown suite or dataset, or a
    file that is no suite.
    """
    known = config_names("suite")
    path = Path(name).expanduser()
    if name in known:
        path = config_folder() / "suite" / f"{name}.yaml"
    elif path.suffix not in (".yaml", ".yml"):
        raise UserError(f"unknown suite '{name}'.{nearest(name, known)} Known: {', '.join(known)}; or suite=FILE.yaml")
    suite = _parse(read_yaml(path), path, Path() if name in known else path.parent)
    if not suite.entries:
        if not datasets:
            raise UserError(f"suite={name} has no datasets of its own: name them, datasets=a.hdf5,b.hdf5")
        return replace(suite, entries=_labelled([_entry(d, Path(), "datasets") for d in datasets], "datasets"))
    if not datasets:
        return suite
    selection = []
    for dataset in datasets:
        matches = [e for e in suite.entries if dataset in (e.label, e.name)]
        if not matches:
            labels = [e.label for e in suite.entries]
            raise UserError(
                f"suite {suite.name} has no dataset '{dataset}'.{nearest(dataset, labels)} It has: {', '.join(labels)}"
            )
        selection += [e for e in matches if e not in selection]
    return replace(suite, entries=selection)


def _parse(values: Mapping[str, Any], path: Path, folder: Path) -> Suite:
    """A suite from its YAML. `folder`: where relative paths are looked for first."""
    check_entries(values, KEYS, str(path))
    listed = values.get("datasets") or []
    if not isinstance(listed, list):
        raise UserError(f"{path}: datasets must be a list of names, or of maps with a name")
    steps = _whole_number(values.get("steps"), str(path))
    entries = _labelled([_entry(item, folder, str(path)) for item in listed], str(path))
    references = _references(values.get("references"), str(path))
    labels = [e.label for e in entries]
    for name in references:
        if entries and name not in labels:
            raise UserError(
                f"{path}: references are given for '{name}', which is no dataset of it.{nearest(name, labels)}"
            )
    name = str(values.get("name") or path.stem)
    if not plain_name(name):
        raise UserError(f"{path}: name: {name} must be a plain name; where the benchmark's folder is made is runs_dir=")
    return Suite(
        name=name,
        entries=entries,
        steps=steps,
        settings=_settings(values, str(path)),
        references=references,
        reference_source=str(values.get("reference_source") or ""),
        note=str(values.get("note") or ""),
    )


def _entry(item: Any, folder: Path, where: str) -> Entry:
    """A dataset: its name, or a map with `name` and settings. The label is left empty where none is given."""
    values = {"name": item} if isinstance(item, str) else item
    if not isinstance(values, Mapping) or not isinstance(values.get("name"), str) or not values["name"]:
        raise UserError(f"{where}: a dataset is a name, or a map with a name, not {item!r}")
    check_entries(values, ENTRY_KEYS, f"{where}: dataset {values['name']}")
    settings = _settings(values, f"{where}: dataset {values['name']}")
    if values.get("env") is not None:
        settings["eval.env"] = str(values["env"])
    name = str(values["name"])
    for path in (folder / Path(name).expanduser(), Path(name).expanduser()):
        if path.exists():
            name = str(path.resolve())
            break
    return Entry(name, str(values.get("label") or ""), settings)


def _settings(values: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The `settings` and `eval` of a suite or a dataset as dotted names."""
    for key in ("settings", "eval"):
        if not isinstance(values.get(key) or {}, Mapping):
            raise UserError(f"{where}: {key} must hold settings, name: value")
    return flatten(
        {**(values.get("settings") or {}), **{f"eval.{k}": v for k, v in (values.get("eval") or {}).items()}}
    )


def _labelled(entries: Sequence[Entry], where: str) -> list[Entry]:
    """Entries with labels that differ: files are called by their stem, and where that is not enough by the folders
    above it as well.
    """
    parts = [
        list(reversed(Path(SUFFIX.sub("", e.name)).parts))
        if SUFFIX.search(e.name) or Path(e.name).is_absolute()
        else [e.name]
        for e in entries
    ]
    used = [1] * len(entries)

    def label(i: int) -> str:
        return entries[i].label or "-".join(p.strip("/") for p in reversed(parts[i][: used[i]]))

    while clash := {name for name, n in Counter(label(i) for i in range(len(entries))).items() if n > 1}:
        for i in [i for i in range(len(entries)) if label(i) in clash]:
            used[i] += 1
            if entries[i].label or used[i] > len(parts[i]):
                raise UserError(f"{where}: dataset '{entries[i].label or entries[i].name}' is named twice")
    return [Entry(e.name, label(i), e.settings) for i, e in enumerate(entries)]


def _whole_number(steps: Any, where: str) -> int | None:
    """A number of updates, also as YAML reads 1e6: a string. Raises UserError."""
    if steps is None:
        return None
    try:
        number = float("nan" if isinstance(steps, bool) else steps)
    except (TypeError, ValueError):
        number = float("nan")
    if not number.is_integer() or number < 1:
        raise UserError(f"{where}: steps={steps!r} must be a whole number of updates, at least 1")
    return int(number)


def _references(values: Any, where: str) -> dict[str, dict[str, float]]:
    """Published scores, dataset -> algorithm -> number."""
    if text := misfit(values or {}, dict[str, dict[str, float]], "references"):
        raise UserError(f"{where}: {text} (dataset: algorithm: score)")
    return {str(d): {str(a): float(s) for a, s in row.items()} for d, row in (values or {}).items()}
