"""The settings in a run's config.yaml, which a stranger may have written: data, held against the rule of
`offrl.system.trust`.

No text in it is an interpolation; it says neither where offrl's own files lie nor what they are taken from, to which
services curves are sent, or how many threads and processes are more than this machine has cores for; code and
environments that it names need a person's word. What a person types beside it may be all of that. The file of a tune is
held against the same rule (`given_of`).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from offrl.errors import UserError, warn
from offrl.settings.dataset import DatasetConfig
from offrl.settings.evaluation import cores
from offrl.settings.field import marked
from offrl.settings.presets import as_settings, dotted, plain_names
from offrl.system import trust
from offrl.system.plugins.loading import of_file

DEFAULTS = DatasetConfig()
# the name says which data the run is of
PLACES = tuple(f"dataset.{name}" for name in marked(DEFAULTS, "place") if name != "name")
CODE = ("dataset.reward_labels", "dataset.cost_labels")
PLAY = ("interventions",)  # likewise code, of fine-tuning
ENVIRONMENTS = ("env", "eval.env")
PARTS = ("dataset", "eval", "play")
ASIDE = ("config", "resume", "trust", "runs_dir", "plugins")  # of a command: no settings of what it began
LOCAL = ("tensorboard", "none")  # loggers that write into the run; the others send it to a service
COUNTS = ("threads", "workers", "eval.workers")


def read_settings(path: Path, typed: Collection[str] = ()) -> dict[str, Any]:
    """A run's config.yaml, nested as in the file, less `PLACES`, with `typed` by dotted names.

    typed: names of the settings that the command has; a warning names the places that it has not. Raises UserError for
    a file that is none, for interpolations, and for groups of settings that are none.
    """
    try:
        text = trust.read_text(path)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not valid YAML: {error}") from None
    values = as_settings(text, path)
    user_values = values.pop("given", None) or {}
    for name in ("algo", "dataset", "encoder", "eval", "checkpoint", "grid"):
        if not isinstance(values.get(name) or {}, Mapping):
            raise UserError(f"{path}: '{name}' must hold settings, name: value")
    for name, part in _texts(values):
        if "${" in part:
            raise UserError(
                f"{path}: {name} has an interpolation ({part[:60]}), which a run's file may not have; write the value "
                "itself"
            )
    if not trust.granted():
        data = values.get("dataset") or {}
        dropped = {name: data.pop(key) for name in PLACES if (key := name.removeprefix("dataset.")) in data}
        reported = {k: v for k, v in dropped.items() if v != getattr(DEFAULTS, k.removeprefix("dataset."))}
        for name in ("logger", *COUNTS):
            group, key = (values.get("eval") or {}, "workers") if name == "eval.workers" else (values, name)
            if key in group and (least := bounded(name, group[key])) != group[key]:
                reported[name], group[key] = group[key], least
        _tell(path, {k: v for k, v in reported.items() if k not in typed})
    if values.get("plugins"):
        values["plugins"] = of_file(values["plugins"], str(path))
    return {**values, "given": _given(user_values, values, path)}


def bounded(name: str, value: Any) -> Any:
    """A setting as a file may say it: of `logger` those that send nothing, of `COUNTS` no more than this machine has
    cores.
    """
    if name == "logger" and isinstance(value, str | list | tuple):
        names = [value] if isinstance(value, str) else list(value)
        local_names = [n for n in names if n in LOCAL]
        return value if local_names == names else local_names or "none"
    if name in COUNTS and isinstance(value, int | float) and value > cores():
        return cores()
    return value


def given_of(
    path: Path, user_values: Mapping[str, Any], typed: Collection[str], location_fields: Collection[str]
) -> dict[str, Any]:
    """The settings that the file `path` of a tune says its command had, by their own dotted names, less places (also
    `location_fields`), services and what `bounded` does not let through.

    typed: names of the settings that the command has; a warning names what is left out and not among them. Raises
    UserError.
    """
    if name := next((name for name, text in _texts(user_values) if "${" in text), None):
        raise UserError(
            f"{path}: {name} has an interpolation, which a tune's file may not have; write the value itself"
        )
    result: dict[str, Any] = {}
    dropped: dict[str, Any] = {}
    for name, value in plain_names(user_values).items():
        free = trust.granted() or not (name in PLACES or name in location_fields)
        if name not in ASIDE and free:
            result[name] = value if trust.granted() else bounded(name, value)
        if name in ASIDE or not free or result[name] != value:
            dropped[name] = value
    _tell(path, {k: v for k, v in dropped.items() if k not in typed})
    return result


def _tell(path: Path, dropped: Mapping[str, Any]) -> None:
    if dropped:
        text = " ".join(f"{k}={str(v)[:60]}" for k, v in dropped.items())
        warn(
            f"{path}: {text} is not taken from a file of a run or tune; say it yourself where it is needed, or "
            "trust=true"
        )


def _given(user_values: Any, values: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """What a person gave when the run began, with the file's own values where that was an interpolation."""
    if not isinstance(user_values, Mapping):
        raise UserError(f"{path}: 'given' must hold settings, name: value")
    saved = {
        **dotted({k: v for k, v in values.items() if v is not None}),
        "dataset": (values.get("dataset") or {}).get("name"),
    }
    result: dict[str, Any] = {}
    for name, value in plain_names(user_values).items():
        if name in ASIDE or (name in PLACES and not trust.granted()):
            continue
        value = value if trust.granted() else bounded(name, value)
        plain = all("${" not in text for _, text in _texts(value))
        if plain or name in saved:
            result[name] = value if plain else saved[name]
    return result


def check_code(
    path: Path, settings: Mapping[str, Any], typed: Mapping[str, Any], parts: Collection[str] = PARTS
) -> None:
    """Raises UserError for Python code and environments that the settings of `read_settings` name, where no person
    does.

    typed: settings of the command. parts: of PARTS those that are put to use; what the others name is only text.
    """
    for values in (
        dotted({k: v for k, v in settings.items() if k != "given" and v is not None}),
        settings.get("given") or {},
    ):
        for name in (*(CODE if "dataset" in parts else ()), *(PLAY if "play" in parts else ())):
            text = values.get(name)
            if isinstance(text, str) and Path(text).suffix != ".safetensors" and typed.get(name, text) == text:
                trust.check_code(path, name, text, name in typed)
        for name in ENVIRONMENTS if "eval" in parts else ():
            if isinstance(text := values.get(name), str) and name not in typed:
                trust.check_environment(text)


def literal(text: str) -> str:
    """`text` as a setting's value that is no interpolation, whatever it holds: names of data come from their files."""
    return re.sub(r"(\\*)\$\{", lambda m: m[1] * 2 + "\\${", text)


def _texts(values: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """(name of the setting, text) of every text in nested values, keys too."""
    if isinstance(values, str):
        yield name, values
    elif isinstance(values, Mapping):
        for key, value in values.items():
            yield f"{name}.{key}".strip("."), str(key)
            yield from _texts(value, f"{name}.{key}".strip("."))
    elif isinstance(values, (list, tuple)):
        for i, value in enumerate(values):
            yield from _texts(value, f"{name}[{i}]")
