"""From a command (or a Python call) to typed, checked settings: Hydra's config groups under `configs/`, then the caller's values."""

from __future__ import annotations

import dataclasses
import fnmatch
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from offrl import registry
from offrl.config import TrainConfig, seed_list
from offrl.errors import UserError, nearest
from offrl.settings import check

GROUPS = ("algo", "dataset", "experiment")


def parse(arguments: list[str]) -> dict[str, Any]:
    """`["algo=iql", "algo.temperature=5"]` as a dictionary, values read by Hydra's grammar. Raises UserError for what it cannot read."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import OverrideParseException

    parser, values = OverridesParser.create(), {}
    for argument in arguments:
        key, equals, text = argument.partition("=")
        if not equals or not key:
            raise UserError(f"'{argument}' is not a setting; write name=value, such as algo=iql or steps=50000")
        key = key.lstrip("+")
        if key in ("dataset", "resume", "config", "eval.env", "runs_dir", "name", "experiment", "dataset.name", "algo"):
            values[key] = text  # names and paths are taken as they stand, whatever characters they hold
            continue
        try:
            override = parser.parse_override(f"{key}={text}")
        except OverrideParseException:
            raise UserError(f"cannot read the value in '{argument}'; quote text that holds special characters, such as name=\"'a b'\"") from None
        if override.is_sweep_override():
            raise UserError(f"'{argument}' names several values; a list is written [a,b]")
        value = override.value()
        values[key] = text if value.__class__.__name__ == "QuotedString" else value
    return values


def compose(values: Mapping[str, Any]) -> TrainConfig:
    """Settings of a run from {name: value}, names as on the command line.

    In this order, later ones win: defaults of the dataclasses; configs/dataset, configs/algo and the experiment that belongs to the data
    set; the file named by `config`; `values`. `resume` starts from a run's own settings instead. Raises UserError.
    """
    from omegaconf import OmegaConf

    values = dict(values)
    if path := values.pop("config", None):
        values = {**_read_yaml(Path(path)), **values}
    if values.get("resume"):
        return _resume(values)
    # a group's choice and its fields are written alike in YAML (algo: {name: iql}) and on the command line (algo=iql)
    algo = str(values.pop("algo.name", None) or values.pop("algo", None) or "iql").replace("-", "_")
    values.pop("algo", None)
    dataset = values.pop("dataset.name", None) or values.pop("dataset", None) or "builtin"
    values.pop("dataset", None)
    experiment = values.pop("experiment", "auto")
    algo_group, groups = _algorithm_group(algo), _names("dataset")
    dataset_group = dataset if dataset in groups else "default"
    if experiment == "auto":
        experiment = find_experiment(algo, str(dataset))
    elif experiment not in ("none", *_names("experiment")):
        known = _names("experiment")
        raise UserError(f"unknown experiment '{experiment}'.{nearest(experiment, known)} Known: {', '.join(known)}")
    config = _hydra([f"dataset={dataset_group}", f"algo={algo_group}", f"experiment={experiment}"])
    OmegaConf.set_struct(config, True)
    if dataset_group == "default":
        config.dataset.name = str(dataset)
    config.experiment = experiment
    return _finish(config, values)


def _resume(values: dict[str, Any]) -> TrainConfig:
    """The settings of the run named by `resume`, with `values` on top; what must not change is checked later, against the run."""
    from omegaconf import OmegaConf

    from offrl.runs import CONFIG, read_record

    run_dir = Path(values.pop("resume"))
    read_record(run_dir)  # says what is wrong when this is no run
    saved = _read_yaml(run_dir / CONFIG, flat=False)
    algo, dataset = values.pop("algo", None), values.pop("dataset", None)
    if algo is not None and algo != saved["algo"]["name"]:
        raise UserError(f"{run_dir} was trained with algo={saved['algo']['name']}, not {algo}; a run continues with its own algorithm only")
    if dataset is not None:
        values["dataset.name"] = str(dataset)
    values.pop("experiment", None)
    algorithm = registry.get("algo", saved["algo"]["name"])
    schema = OmegaConf.structured(TrainConfig)
    schema.algo = OmegaConf.structured(algorithm.Config)
    known = {f.name for f in dataclasses.fields(TrainConfig)}
    config = OmegaConf.merge(schema, {k: v for k, v in saved.items() if k in known})
    return _finish(config, {**values, "runs_dir": str(run_dir.parent), "name": run_dir.name})


def _finish(config: Any, values: Mapping[str, Any]) -> TrainConfig:
    """Set `values`, convert to dataclasses, fill what depends on other settings, and check every range."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    for name, value in values.items():
        _set(config, name, value)
    try:
        result = OmegaConf.to_object(config)
    except OmegaConfBaseException as error:
        raise UserError(f"{error.full_key}: {str(error).splitlines()[0]}") from None
    assert isinstance(result, TrainConfig)
    seed_list(result.seeds)
    check(result)
    result.dataset.validate()
    for name in result.compare:
        registry.get("algo", _algorithm_group(name) and name)
    return result


def _set(config: Any, name: str, value: Any) -> None:
    from omegaconf import DictConfig, OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    if isinstance(value, Mapping) and isinstance(OmegaConf.select(config, name), DictConfig) and name != "dataset.fields":
        for key, inner in value.items():
            _set(config, f"{name}.{key}", inner)
        return
    parts, node = name.split("."), config
    for i, part in enumerate(parts):
        free = i > 0 and parts[i - 1] == "fields"  # dataset.fields holds names of the user's own
        if not isinstance(node, DictConfig) or (part not in node and not free):
            prefix = ".".join(parts[:i])
            options = [f"{prefix}.{k}" if prefix else str(k) for k in node] if isinstance(node, DictConfig) else []
            everything = options or _all_names(config)
            raise UserError(f"unknown setting '{name}'.{nearest('.'.join(parts[: i + 1]), everything) or nearest(name, _all_names(config))}")
        node = node._get_node(part) if part in node else None
    try:
        OmegaConf.update(config, name, value, force_add="fields" in parts)
    except OmegaConfBaseException as error:
        text = str(error).splitlines()[0]
        kind = next((w for t, w in (("Float", "a number"), ("Integer", "a whole number"), ("Boolean", "true or false")) if t in text), "")
        raise UserError(f"{name}={value}: must be {kind}" if kind else f"{name}={value}: {text}") from None


def _all_names(config: Any, prefix: str = "") -> list[str]:
    names: list[str] = []
    for key in config:
        names.append(f"{prefix}{key}")
        node = config._get_node(key)
        if hasattr(node, "keys") and not node._is_none():
            names += _all_names(node, f"{prefix}{key}.")
    return names


def find_experiment(algo: str, dataset: str) -> str:
    """The experiment of `algo` whose `match` patterns fit the data set's name best (the longest pattern), or "none"."""
    name = Path(dataset).name if dataset.endswith((".hdf5", ".h5", ".npz", ".parquet")) or "\\" in dataset else dataset
    name = name.rsplit(".", 1)[0] if name != dataset or name.endswith((".hdf5", ".h5", ".npz", ".parquet")) else name
    name = name.removeprefix("minari:").removeprefix("D4RL/").removeprefix("mujoco/").replace("/", "-").replace("_", "-").lower()
    best, length = "none", 0
    for experiment in _names("experiment"):
        if not experiment.startswith(f"{algo}/"):
            continue
        for pattern in _read_yaml(_folder() / "experiment" / f"{experiment}.yaml", flat=False).get("match", []):
            if fnmatch.fnmatchcase(name, pattern) and len(pattern) > length:
                best, length = experiment, len(pattern)
    return best


def _algorithm_group(name: str) -> str:
    """The file under configs/algo, or the registered algorithm, called `name`. Raises UserError with the nearest name."""
    known = {*_names("algo"), *registry.names("algo")}
    if name not in known:
        raise UserError(f"unknown algorithm '{name}'.{nearest(name, known)} Known: {', '.join(sorted(known))}")
    return name


def _folder() -> Path:
    return Path(str(resources.files("offrl"))) / "configs"


def _names(group: str) -> list[str]:
    """Names of the YAML files of a config group; files in sub-folders as folder/name."""
    root = _folder() / group
    return sorted(str(p.relative_to(root).with_suffix("")) for p in root.rglob("*.yaml") if p.stem not in ("none", "default"))


def _hydra(overrides: list[str]) -> Any:
    """Compose configs/train.yaml with the chosen groups over the typed schemas."""
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir
    from hydra.core.config_store import ConfigStore
    from hydra.core.global_hydra import GlobalHydra

    store = ConfigStore.instance()
    store.store(name="offrl_schema", node=TrainConfig)
    files = _names("algo")
    for name, algorithm in registry.names("algo").items():
        store.store(group="offrl_algo", name=name, node=algorithm.Config)
        if name not in files:  # a plugin's algorithm has no YAML file
            store.store(group="algo", name=name, node={"algo": algorithm.Config}, package="_global_")
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(_folder().resolve()), version_base="1.3", job_name="offrl"):
        return hydra_compose("train", overrides=overrides)


def _read_yaml(path: Path, flat: bool = True) -> dict[str, Any]:
    """A YAML file as a dictionary; `flat`: with dotted names for nested settings. Raises UserError."""
    import yaml

    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(values, dict):
        raise UserError(f"{path} must hold settings, name: value")
    return _dotted(values) if flat else values


def _dotted(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping) and f"{prefix}{key}" != "dataset.fields":
            result.update(_dotted(value, f"{prefix}{key}."))
        else:
            result[f"{prefix}{key}"] = value
    return result
