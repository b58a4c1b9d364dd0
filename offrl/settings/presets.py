"""The YAML files under `configs/`: algorithms by name, and the published settings of an algorithm for a dataset."""

from __future__ import annotations

import copy
import fnmatch
import functools
import re
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from offrl import registry
from offrl.errors import UserError, few, nearest
from offrl.settings.aliases import algorithms
from offrl.settings.groups import flat_name

SUFFIX = re.compile(r"\.(hdf5|h5|hdf|npz|npy|parquet|pq)$")


def choose_experiment(algo: str, dataset: str, name: str) -> str:
    """The experiment to use: `name` with or without its algorithm, or the one that `auto` finds. Raises UserError for
    an unknown one.
    """
    if name == "auto":
        return find_experiment(algo, dataset)
    folder, known = base_algorithm(algo), config_names("experiment")
    name = f"{folder}/{name}" if f"{folder}/{name}" in known else name
    names = [e for e in known if e.startswith(f"{folder}/")]
    if name not in ("none", *known):
        raise UserError(
            f"unknown experiment '{name}'.{nearest(name, known)} Those of {folder}: {', '.join(names) or 'none'}"
        )
    if name in known and name not in names:
        raise UserError(
            f"experiment={name} is for another algorithm than {algo}; those of {folder}: {', '.join(names) or 'none'}"
        )
    return name


def find_experiment(algo: str, dataset: str) -> str:
    """The experiment of `algo` whose patterns fit the dataset's name best (the longest pattern), or "none".

    Those are the patterns under `match` in the experiment's file, or else those of its file's name in
    configs/experiment/match.yaml. A file configs/algo/NAME.yaml that says `experiment: none` takes none of its
    algorithm's.
    """
    if _algorithm_file(algo).get("experiment") == "none":
        return "none"
    best, length, folder = "none", 0, base_algorithm(algo)
    for experiment in config_names("experiment"):
        if experiment.startswith(f"{folder}/"):
            fitting = _fitting(dataset, _experiment_file(experiment)[0])
            if fitting is not None and len(fitting) > length:
                best, length = experiment, len(fitting)
    return best


def experiment_settings(experiment: str, dataset: str) -> tuple[list[str], dict[str, Any]]:
    """([the pattern of the row that is for the dataset] or [], {name: value}) of an experiment.

    A file's `per: {pattern: {name: value}}` has rows for single datasets: of those that fit, the one with the longest
    pattern goes on top of the file's other settings. Raises UserError where an experiment that is only used when named
    has rows and none for this dataset.
    """
    if experiment == "none":
        return [], {}
    patterns, values, rows = _experiment_file(experiment)
    row = _fitting(dataset, rows)
    if row is not None:
        return [row], {**dotted(values), **dotted(rows[row])}
    if rows and not patterns:
        raise UserError(f"experiment={experiment} has no settings for {dataset}; it has them for {', '.join(rows)}")
    return [], dotted(values)


@functools.cache  # a benchmark asks for each of its cells
def _experiment_file(experiment: str) -> tuple[list[str], dict[str, Any], dict[str, dict[str, Any]]]:
    """(patterns of the datasets that it is for by itself, settings, rows of settings for single datasets)."""
    values = read_yaml(config_folder() / "experiment" / f"{experiment}.yaml")
    shared = read_yaml(config_folder() / "experiment" / "match.yaml")
    patterns = values.pop("match", shared.get(experiment.partition("/")[2], []))
    return patterns, values, values.pop("per", {})


def _fitting(dataset: str, patterns: Iterable[str]) -> str | None:
    """The longest of the patterns that a dataset's name fits, without its path, suffix, source and spelling."""
    name = (
        SUFFIX.sub("", Path(dataset).name)
        if SUFFIX.search(dataset)
        else re.sub(r"(.*[/:])?(D4RL|mujoco|offrl)/", "", dataset)
    )
    name = re.sub(r"[/_]", "-", name.removeprefix("d4rl:").removeprefix("minari:")).lower()
    return max((p for p in patterns if fnmatch.fnmatchcase(name, p)), key=len, default=None)


def finetune_settings(algo: str, label: str = "") -> dict[str, Any] | None:
    """The block `finetune` of a registered algorithm's file: settings that change in `offrl finetune`, of the algorithm
    and of the command, and under `anneal` {setting: [its factor at first, at last, and from which share of the steps
    on]}. None: it cannot be fine-tuned.

    label: of a run; where it names a file of the same algorithm with a block, that one counts (rlpd, of sac_n).
    """
    files = [_algorithm_file(name) for name in (label, algo) if base_algorithm(name) == algo]
    return copy.deepcopy(next((file["finetune"] for file in files if "finetune" in file), {}))


def base_algorithm(algo: str) -> str:
    """The registered algorithm behind a name: its own, or that of the file configs/algo/NAME.yaml (bc for percent_bc).
    Imports no torch.
    """
    defaults = _algorithm_file(algo).get("defaults", [])
    return next(
        (d.split("/")[2].partition("@")[0] for d in defaults if isinstance(d, str) and d.startswith("/offrl_algo/")),
        algo,
    )


def algorithm_group(name: str) -> str:
    """The file under configs/algo, or the registered algorithm, called `name`, in any spelling (TD3+BC,
    decision-transformer).

    Raises UserError with the nearest names.
    """
    known = {*config_names("algo")}
    if name in known:
        return name
    if registry.has_plugins("algo"):
        known |= registry.names("algo").keys()
    if name in known:
        return name
    if spelled := algorithms.meant(name, known):
        return spelled
    raise UserError(
        f"unknown algorithm '{name}'.{algorithms.instead(name) or few(name, known)} All of them: offrl list"
    )


def config_folder() -> Path:
    """The folder configs; beside the package in a checkout whose links Windows has made into small files."""
    root = Path(str(resources.files("offrl")))
    return root / "configs" if (root / "configs").is_dir() else root.parent / "configs"


@functools.cache
def _algorithm_file(algo: str) -> dict[str, Any]:
    """The file of configs/algo about an algorithm; empty for a plugin's."""
    return read_yaml(config_folder() / "algo" / f"{algo}.yaml") if algo in config_names("algo") else {}


@functools.cache  # the files are the package's own
def config_names(group: str) -> tuple[str, ...]:
    """Names of the YAML files of a config group; files in sub-folders as folder/name."""
    root = config_folder() / group
    return tuple(
        sorted(
            str(p.relative_to(root).with_suffix(""))
            for p in root.rglob("*.yaml")
            if p.stem not in ("none", "default", "match")
        )
    )


def read_yaml(path: Path) -> dict[str, Any]:
    """A YAML file as a dictionary. Raises UserError."""
    try:
        return as_settings(path.read_text(encoding="utf-8"), path)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from None


def as_settings(text: str, path: Path) -> dict[str, Any]:
    """The text of the YAML file `path` as a dictionary. Raises UserError."""
    import yaml

    try:
        loader, tree = bounded_tree(text, yaml.SafeLoader)
        if tree is not None and (twice := _repeated(tree)):
            raise UserError(
                f"{path}: '{twice[0]}' is given twice, in lines {twice[1]} and {twice[2]}; leave one of them out"
            )
        values = (loader.construct_document(tree) if tree is not None else {}) or {}
    except (yaml.YAMLError, ValueError) as error:  # ValueError: a date that is none
        raise UserError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(values, dict):
        raise UserError(f"{path} must hold settings, name: value")
    return values


def check_entries(values: Mapping[str, Any], known: Sequence[str], where: str) -> None:
    """Raises UserError for an entry of a YAML file that is none of those `known`."""
    for key in values:
        if key not in known:
            raise UserError(
                f"{where} has an unknown entry '{key}'.{nearest(str(key), known)} Entries: {', '.join(known)}"
            )


MOST_VALUES, DEEPEST = 200_000, 50  # in a YAML file, an alias being all that it stands for


def bounded_tree(text: str, kind: Any) -> tuple[Any, Any]:
    """(a loader of class `kind`, the tree of the YAML `text`), before any value is made of it. Raises yaml.YAMLError,
    also for a text that unfolds to too many values, for in place of one value it may say "ten of the one before" over
    and over."""
    import yaml

    known: dict[int, tuple[int, int]] = {}

    def measure(node: Any, above: int) -> tuple[int, int]:
        """(values, levels) of a node; levels 0: it is being measured, and stands in itself."""
        if id(node) in known:
            return known[id(node)]
        known[id(node)] = (MOST_VALUES + 1, 0)
        items = (
            []
            if isinstance(node.value, str)
            else [n for item in node.value for n in (item if isinstance(item, tuple) else (item,))]
        )
        sizes = [measure(n, above + 1) for n in items] if above < DEEPEST else [(1, DEEPEST)]
        known[id(node)] = size = (1 + sum(n for n, _ in sizes), 1 + max((levels for _, levels in sizes), default=0))
        if size[0] > MOST_VALUES or size[1] > DEEPEST:
            raise yaml.YAMLError(f"it unfolds to more than {MOST_VALUES:,} values, or to more than {DEEPEST} levels")
        return size

    loader = kind(text)
    try:
        tree = loader.get_single_node()
        if tree is not None:
            measure(tree, 0)
    except RecursionError:
        raise yaml.YAMLError(f"it has more than {DEEPEST} levels") from None
    return loader, tree


def _repeated(root: Any) -> tuple[str, int, int] | None:
    """(name, line, line) of a name that a mapping of this YAML tree has twice, where PyYAML would take the later one
    without a word.
    """
    nodes, visited = [root], set()
    for node in nodes:  # which grows meanwhile
        if id(node) in visited or isinstance(node.value, str):
            continue
        visited.add(id(node))  # an alias is the node itself
        lines: dict[tuple[str, str], int] = {}
        for item in node.value:
            nodes += item if isinstance(item, tuple) else [item]
            key = item[0] if isinstance(item, tuple) else None
            if key is not None and isinstance(key.value, str):
                name, line = (key.tag, key.value), key.start_mark.line + 1
                if name in lines:
                    return key.value, lines[name], line
                lines[name] = line
    return None


def dotted(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as one of dotted names. Raises UserError for a name that is given in both ways."""
    result: dict[str, Any] = {}
    for key, value in values.items():
        nested = isinstance(value, Mapping) and f"{prefix}{key}" not in ("dataset.fields", "given")
        for name, item in (dotted(value, f"{prefix}{key}.") if nested else {f"{prefix}{key}": value}).items():
            if name in result:
                raise UserError(f"{name} is given twice")
            result[name] = item
    return result


def plain_names(values: Mapping[str, Any]) -> dict[str, Any]:
    """{name: value} with dotted names, each setting by its own name, in whichever way it was written; see
    `compose.flatten`.

    Raises UserError for a name that is given twice, and for `trust`, which is no setting.
    """
    flat: dict[str, Any] = {}
    for k, v in dotted(values).items():
        name = str(k).removeprefix("train.")
        name = name.replace("grid.algo.", "grid.", 1) if name.startswith("grid.algo.") else name
        name = f"algo.{name}" if name == "world_model" else flat_name(name)
        if name in flat:
            raise UserError(f"{name} is given twice")
        flat[name] = v
    if "trust" in flat:
        raise UserError(
            "trust is no setting of a file or a run: say trust=true in the command itself, in Python `with "
            "offrl.trusted():`"
        )
    for group in ("algo", "dataset"):
        chosen = flat.pop(f"{group}.name", None)
        if flat.get(group) is None:
            flat.pop(group, None)
            if chosen is not None:
                flat[group] = chosen
    return flat
