"""`offrl list`: lists of everything that can be chosen by name, printed for people."""

from __future__ import annotations

import dataclasses
import sys
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

from offrl import registry
from offrl.errors import UserError, nearest, say
from offrl.runs.tables import print_table
from offrl.settings import known
from offrl.settings.compose import compose
from offrl.settings.field import is_shown, marked, own_first, setting_line, shown_value
from offrl.settings.groups import CONTENT, by_group, grouped_name
from offrl.settings.presets import algorithm_group, base_algorithm, config_names, experiment_settings, find_experiment
from offrl.settings.replicas import varied
from offrl.settings.train import TrainConfig


def first_sentence(docstring: str) -> str:
    """The first sentence of a docstring, on one line."""
    return " ".join(docstring.split("\n\n")[0].split()).partition(". ")[0].rstrip(".")


def print_all() -> None:
    """Algorithms with their papers, and the experiments that belong to them."""
    builtin = {name: entry for name, entry in known.index()["algorithms"].items() if "base" not in entry}
    titles = {name: entry["title"] for name, entry in builtin.items()}
    if registry.has_plugins("algo"):  # plugins
        for name, algorithm in registry.names("algo").items():
            text = (sys.modules[algorithm.__module__].__doc__ or algorithm.__doc__ or "").strip()
            titles[name] = first_sentence(text)
    print_table(["algorithm", "what it is"], [[name, titles[name]] for name in sorted(titles)])
    variants = [f"{n} (of {base_algorithm(n)})" for n in config_names("algo") if n not in titles]
    if variants:
        say("", f"with other settings: {', '.join(variants)}")
    say(
        "",
        "experiments (published settings, found by the dataset's name; `tuned` and the like only with experiment=NAME):",  # noqa: E501
    )
    for name in sorted(titles):
        if experiments := [e for e in config_names("experiment") if e.startswith(f"{name}/")]:
            say(f"  {', '.join(experiments)}")
    say(
        "datasets: offrl data list; an algorithm's settings: offrl list algo=NAME, on a dataset: offrl list algo=NAME "
        "dataset=NAME"
    )


def algorithm_settings(name: str) -> list[str]:
    """Lines with an algorithm's settings, their defaults, and what it changes in the other settings.

    name: `iql` folds the groups of settings, `iql.critic` shows one of them, `iql.all` all. Raises UserError if
    unknown.
    """
    name, _, group = name.partition(".")
    name = algorithm_group(name)
    if known.is_known(name):
        entry = known.index()["algorithms"][name]
        config, vectorized, changed = known.schema(name), entry["vectorized"], entry["changes"]
    else:
        composed = compose({"algo": name, "experiment": "none", "dataset": "-"})
        standard = dict(settings_values(TrainConfig()))
        config, vectorized = composed.algo, registry.get("algo", base_algorithm(name)).traits.vectorized
        changed = [
            f"{k}={shown_value(v)}" for k, v in settings_values(composed) if k not in CHOSEN and v != standard[k]
        ]
    fields = {f.name: f for f in own_first(type(config)) if is_shown(f)}
    groups = by_group(fields)
    options = [*filter(None, groups), "all"]
    if group and group not in options:
        raise UserError(
            f"algo={name} has no group of settings '{group}'.{nearest(group, options)} Groups: {', '.join(options)}"
        )
    members = [n for names in groups.values() for n in names] if group == "all" else groups[group]
    lines = [setting_line(f"algo.{grouped_name(n)}", getattr(config, n), fields[n]) for n in members]
    if group and group != "all":
        return lines
    if not group:
        lines += [_group_line(name, title, names) for title, names in groups.items() if title]
    if vectorized:
        lines.append(f"  a grid (grid.NAME=a,b) varies {', '.join(map(grouped_name, varied(type(config))))}")
        if fixed := marked(config, "structural", "shared"):
            lines.append(
                f"  and cannot vary {', '.join(map(grouped_name, fixed))}, which decide networks, losses or what the "
                "replicas share"
            )
    return lines + ([f"  and it sets {' '.join(changed)}"] if changed else [])


def _group_line(algo: str, group: str, names: Sequence[str]) -> str:
    """The line that stands for a group of settings, and begins with the command that shows them."""
    text = ", ".join(grouped_name(name).partition(".")[2] for name in names)
    return f"  {f'offrl list algo={algo}.{group}':<40} algo.{group}.*, {CONTENT[group]}, {len(names)} settings: {text}"


CHOSEN = ("algo", "dataset.name", "experiment", "given", "label", "plugins")  # by what is asked here


def settings_values(config: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted name, value) of the settings of a run, its algorithm's own in one."""
    for name, value in vars(config).items():
        if dataclasses.is_dataclass(value) and name != "algo":
            yield from settings_values(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def experiment_text(name: str, dataset: str) -> str:
    """An algorithm's default settings on a dataset, which need not exist, and their origin. Raises UserError."""
    experiment = find_experiment(algorithm_group(name), dataset)
    row, values = experiment_settings(experiment, dataset)
    if experiment == "none":
        return f"{name} on {dataset}: no settings of its own, the defaults of `offrl list algo={name}`"
    where = f"{experiment}, row {row[0]}" if row else experiment
    return f"{name} on {dataset}: {where}: {' '.join(f'{k}={v}' for k, v in values.items()) or 'the defaults'}"


def data_sets() -> dict[str, list[str]]:
    """Names that `dataset=` takes without a path, by family."""
    from offrl.data.formats import minari

    families: dict[str, list[str]] = {family: list(names) for family, names in known.index()["datasets"].items()}
    if registry.has_plugins("dataset") or registry.has_plugins("task_names"):  # plugins
        families["registered"] = list(registry.names("dataset"))
        for table, listed in registry.names("task_names").items():
            for name in listed():
                if name not in (family := families.setdefault(f"{table} {name.partition('-')[0]}", [])):
                    family.append(name)
    families["minari, installed"] = minari.installed()
    return {family: names for family, names in families.items() if names}


def print_data_sets() -> None:
    """Print `data_sets`, and what else `dataset=` takes."""
    for family, names in data_sets().items():
        say(
            f"{family}:",
            *textwrap.wrap("  ".join(names), 118, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False),
        )
    say(
        "also: a path to a file or folder, any Minari id (D4RL/door/human-v2), OGBench names "
        "(pointmaze-medium-navigate-v0)"
    )


USAGE = (
    "usage: offrl list, or offrl list algo=NAME, or offrl list algo=NAME.GROUP (a group of its settings, such as "
    "iql.critic; iql.all shows all), or offrl list algo=NAME dataset=NAME (the published settings for it)"
)


def usage(arguments: list[str]) -> str:
    return USAGE


def run(arguments: list[str]) -> int:
    if not arguments:
        print_all()
        return 0
    requests = dict(a.partition("=")[::2] for a in arguments)
    if not requests.get("algo") or not set(requests) <= {"algo", "dataset"} or not requests.get("dataset", "-"):
        raise UserError(USAGE)
    if "dataset" in requests:
        say(experiment_text(requests["algo"], requests["dataset"]))
    else:
        say(*algorithm_settings(requests["algo"]))
    return 0
