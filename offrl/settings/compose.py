"""From a command (or a Python call) to typed, checked settings: Hydra's config groups under `configs/`, then the
caller's values.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar, cast

from offrl import registry
from offrl.errors import UserError, nearest
from offrl.settings import known
from offrl.settings.aliases.names import FORMER, understood
from offrl.settings.assign import all_names, assign, grid_hint, shown
from offrl.settings.field import check, check_read, plain_name
from offrl.settings.groups import flat_name
from offrl.settings.presets import (
    algorithm_group,
    base_algorithm,
    choose_experiment,
    config_folder,
    config_names,
    experiment_settings,
    plain_names,
    read_yaml,
)
from offrl.settings.replicas import checked, grid_text
from offrl.settings.train import TrainConfig, logger_names, seed_list
from offrl.settings.untrusted import check_code, read_settings
from offrl.system import trust
from offrl.system.plugins.loading import load_named, typed

# names, paths and conditions: taken as they stand on the command line, whatever characters they hold
PLAIN = (
    "algo",
    "dataset",
    "dataset.name",
    "dataset.cache_dir",
    "dataset.episodes",
    "dataset.keep",
    "dataset.mirror",
    "robust",
    "shield",
    "constraint",
    "world_model",
    "experiment",
    "eval.env",
    "runs_dir",
    "name",
    "label",
    "resume",
    "config",
    "suite",
    "launcher",
    "env",
    "policy",
    "out",
    "returns",
    "world_model",
    "algo.world_model",
    "algo.value_run",
    "algo.actor_network",
    "algo.critic_network",
)
NETWORKS = ("algo.actor_network", "algo.critic_network", "actor_network", "critic_network")
OPTIONAL = ("name", "label", "resume", "config", "dataset.cache_dir", "dataset.keep", "dataset.mirror")


def parse(arguments: list[str]) -> dict[str, Any]:
    """`["algo=iql", "algo.temperature=5"]` as a dictionary, values read by Hydra's grammar. Raises UserError for what
    it cannot read.
    """
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.core.override_parser.types import ChoiceSweep
    from hydra.errors import HydraException

    parser = OverridesParser.create()
    values: dict[str, Any] = {}
    for argument in arguments:
        key, equals, text = argument.partition("=")
        if not equals or not re.fullmatch(r"\+{0,2}[A-Za-z_][\w.-]*", key):
            hint = f"; settings have no dashes: {key.lstrip('-')}={text or 'VALUE'}" if key.startswith("-") else ""
            raise UserError(f"'{argument}' is not a setting; write name=value, such as algo=iql or steps=50000{hint}")
        key = key.lstrip("+")
        if not text:
            raise UserError(f"'{argument}' has no value; write {key}=VALUE")
        if flat_name(key) in PLAIN:
            quoted = len(text) > 1 and text[0] == text[-1] and text[0] in "'\""
            values[key] = None if text == "null" and key in OPTIONAL else text[1:-1] if quoted else text
            continue
        try:
            # `text` alone: columns' names may hold anything
            override = parser.parse_override(f"key={text.removesuffix(',')}")
            if isinstance(choices := override.value(), ChoiceSweep) and choices.simple_form:
                values[key] = [getattr(item, "text", item) for item in choices.list]  # seeds=3,7
                continue
            if override.is_sweep_override():
                raise UserError(
                    f"'{argument}' names several values; a list is written {key}=a,b or [a,b]{grid_hint(key)}"
                )
            values[key] = [override.value()] if text.endswith(",") else override.value()
        except HydraException:
            cure = f"a list is written a,b or [a,b], text with special characters {key}=\"'a b'\""
            raise UserError(f"cannot read the value in '{argument}'; {cure}") from None
    return values


def flatten(values: Mapping[str, Any]) -> dict[str, Any]:
    """{name: value} with dotted names only, the file named by `config` read in below the other values.

    A group's choice is `algo` or `dataset` however it was written: `algo=iql`, `algo.name=iql`, or in YAML
    `algo: {name: iql}`. A grid's fields are `grid.FIELD`, also where they were written `grid.algo.FIELD`; `train.NAME`
    is NAME, `world_model` is `algo.world_model`, `algo.critic.hidden` is `algo.critic_hidden`. A grid of `values` is
    taken over one value in the file.
    """
    flat = {name: _plain(value) for name, value in plain_names(values).items()}
    typed(flat.pop("plugins", None))
    for name in NETWORKS:
        file, colon, object_name = str(flat.get(name) or "").rpartition(":")
        if colon and file.endswith(".py"):
            flat[name] = f"{Path(typed(file)[0]).name}:{object_name}"  # where it lies is no part of what a run is
    if isinstance(flat.get("encoder"), str):
        flat["encoder.name"] = flat.pop("encoder")
    path = flat.pop("config", None)
    if path is None:
        return flat
    below = _file(Path(path), flat)
    for name in flat:
        if name.startswith("grid."):
            below.pop(f"algo.{name.removeprefix('grid.')}", None)
    return {**below, **flat}


def _file(path: Path, typed: Mapping[str, Any]) -> dict[str, Any]:
    """The settings in the file that `config` names: the user's own, or a run's, which may be a stranger's. Raises
    UserError.
    """
    if (path.parent / "run.json").exists():
        saved = read_settings(path, typed)
        check_code(path, saved, typed)
        below = plain_names({k: v for k, v in saved.items() if k != "config" and (k != "runs_dir" or trust.granted())})
    else:
        below = flatten(read_yaml(path))
    # of a run's config.yaml, or a copy
    return {k: v for k, v in below.items() if k not in ("given", "match", "resume")}


def compose(values: Mapping[str, Any]) -> TrainConfig:
    """Settings of a run from {name: value}, names as on the command line.

    In this order, later ones win: defaults of the dataclasses; configs/algo, configs/dataset and the experiment that
    belongs to the data set; the file named by `config`; `values`. Raises UserError.
    """
    from omegaconf import OmegaConf

    typed_only = "config" not in values  # a file may be a run's, with values that its experiment gave
    values = flatten(values)
    plugins = load_named()
    values = understood(values)
    trust.typed(values.get("eval.env"))
    user_values = dict(values)
    values.pop("resume", None)
    algo = algorithm_group(str(values.pop("algo", "iql")))
    dataset = str(values.pop("dataset", "builtin"))
    dataset_group = dataset if dataset in config_names("dataset") else "default"
    experiment = choose_experiment(algo, dataset, str(values.pop("experiment", None) or "auto"))
    config = _defaults(dataset_group, algo)
    OmegaConf.set_struct(config, True)
    if dataset_group == "default":
        config.dataset.name = dataset
    config.experiment, config.algo.name = experiment, base_algorithm(algo)
    config.match, defaults = experiment_settings(experiment, dataset)
    for name, value in defaults.items():
        assign(config, name, value)
    return finish(config, {**values, "plugins": plugins} if plugins else values, user_values, typed_only=typed_only)


def rehearse(values: Mapping[str, Any]) -> dict[str, Any]:
    """`values` by offrl's own names. Raises the UserErrors of `compose` that need neither torch nor the algorithm's
    code: unknown names, values of a wrong kind or out of range."""
    from omegaconf import OmegaConf

    settings = understood(flatten(values))
    remaining = {k: v for k, v in settings.items() if k not in ("algo", "dataset", "experiment", "resume")}
    group = algorithm_group(str(settings.get("algo") or "iql"))
    if settings.get("resume") is None and known.is_known(group):
        dataset = str(settings.get("dataset", "builtin"))
        choose_experiment(group, dataset, str(settings.get("experiment") or "auto"))
        finish(
            OmegaConf.structured(TrainConfig(algo=known.schema(group))),
            remaining,
            {},
            bool(known.index()["algorithms"][group]["vectorized"]),
            "config" not in values,
        )
    return settings


Settings = TypeVar("Settings")


def fill(settings: Settings, values: Mapping[str, Any], command: str) -> Settings:
    """A copy of `settings`, a dataclass of `setting` fields, with `values` {name: value} set and every range checked.

    For the settings of a command that trains nothing. Raises UserError, naming `command`, for an unknown name or a
    value that does not fit."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    config = OmegaConf.structured(settings)
    names = all_names(config)
    for name, value in values.items():
        name = name if name in names else FORMER.get(name, name)
        if name.partition(".")[0] not in names:
            raise UserError(
                f"offrl {command} has no setting '{name}'.{nearest(name, names)} All of them: offrl {command} --help"
            )
        assign(config, name, value)
    try:
        result = OmegaConf.to_object(config)
    except OmegaConfBaseException as error:
        raise UserError(f"{error.full_key}: {str(error).splitlines()[0]}") from None
    check(result)
    return cast(Settings, result)


def finish(
    config: Any,
    values: Mapping[str, Any],
    user_values: Mapping[str, Any],
    vectorized: bool | None = None,
    typed_only: bool = True,
) -> TrainConfig:
    """Set `values`, convert to dataclasses, fill what depends on other settings, and check every range.

    vectorized: whether the algorithm trains several replicas at once; None: as it says itself. typed_only: somebody
    wrote each of the values, so that one that does nothing is an error.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    grid = {k.removeprefix("grid."): v for k, v in values.items() if k.startswith("grid.")}
    for name, value in values.items():
        if name == "grid" and value is not None:
            raise UserError(f"grid={shown(value)}: a grid names its fields, such as grid.learning_rate=1e-4,3e-4")
        if name.partition(".")[0] != "grid":
            assign(config, name, value)
    try:
        result = OmegaConf.to_object(config)
    except OmegaConfBaseException as error:
        raise UserError(f"{error.full_key}: {str(error).splitlines()[0]}") from None
    assert isinstance(result, TrainConfig)
    seeds = seed_list(result.seeds)
    logger_names(result.logger)
    check(result)
    if result.grid or grid:
        vectorized = registry.get("algo", result.algo.name).traits.vectorized if vectorized is None else vectorized
        result.grid = checked({**result.grid, **grid}, result.algo, len(seeds), vectorized, result.paired)
    for name in result.grid:
        if f"algo.{name}" in values:
            raise UserError(
                f"algo.{name} and {grid_text({name: result.grid[name]})} are both given; leave one of them out"
            )
    names = [name.removeprefix("algo.") for name in values if typed_only and name.startswith("algo.")]
    check_read(result.algo, names, result.grid)
    result.dataset.validate()
    for name in ("name", "label"):
        text = getattr(result, name)
        if text is not None and not plain_name(text):
            raise UserError(f"{name}={text} must be a plain name; where run directories are made is runs_dir=")
    for name in result.compare:
        algorithm_group(name)
    result.label = result.label or result.algo.name
    result.given = {k: v for k, v in user_values.items() if k not in ("resume", "name", "label", "compare", "given")}
    return result


def _defaults(dataset: str, algo: str) -> Any:
    """configs/train.yaml with a file of configs/dataset and one of configs/algo, or a plugin's algorithm, over the
    typed schemas.
    """
    kind = registry.get("algo", base_algorithm(algo))
    if missing := {"name", "batch_size"} - {f.name for f in dataclasses.fields(kind.Config)}:
        raise UserError(
            f"algorithm '{algo}' ({kind.__module__}): its Config has no field '{min(missing)}', which all must have"
        )
    return copy.deepcopy(_hydra(dataset, algo, kind.Config))


@functools.cache  # a composition takes half a second
def _hydra(dataset: str, algo: str, schema: type) -> Any:
    """See `_defaults`. schema: the algorithm's Config."""
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir
    from hydra.core.config_store import ConfigStore
    from hydra.core.global_hydra import GlobalHydra
    from omegaconf import OmegaConf

    store = ConfigStore.instance()
    schema_of_run = OmegaConf.structured(TrainConfig)
    OmegaConf.set_struct(schema_of_run, False)  # a file's `finetune`, which is no setting of a run
    store.store(name="offrl_schema", node=schema_of_run)
    store.store(group="offrl_algo", name=base_algorithm(algo), node=schema)
    if algo not in config_names("algo"):  # a plugin's algorithm has no YAML file
        store.store(group="algo", name=algo, node={"algo": schema}, package="_global_")
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(config_folder().resolve()), version_base="1.3", job_name="offrl"):
        config = hydra_compose("train", overrides=[f"dataset={dataset}", f"algo={algo}"])
    OmegaConf.set_struct(config, False)
    config.pop("finetune", None)
    return config


def _plain(value: Any) -> Any:
    """The YAML value of an object that Python callers pass: NumPy numbers and arrays, ranges, tuples, paths."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, (list, tuple, range)):
        return [_plain(v) for v in value]
    return str(value) if isinstance(value, Path) else value
