"""The metadata of Minari datasets, with every type checked: files are edited, damaged, and made by other programs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from offrl.data.containers.guard import FREE, from_json, reading
from offrl.data.raw import FLAGS, MOST_VALUES, canonical
from offrl.errors import UserError

FILE = "metadata.json"
FORMATS = ("hdf5", "arrow", "parquet")


@dataclass(frozen=True)
class Metadata:
    """What metadata.json says, with the types of what offrl uses checked."""

    values: dict[str, Any]
    actions: dict[str, Any]  # the two spaces
    observations: dict[str, Any]
    env_spec: dict[str, Any]  # Gymnasium's specification of the environment; {} where there is none

    @property
    def rows(self) -> int:
        return int(self.values["total_steps"])

    @property
    def format(self) -> str:
        return str(self.values.get("data_format", FORMATS[0]))


def load_metadata(folder: Path) -> Metadata:
    """Raises UserError for a file that cannot be read, or holds what Minari would not write."""
    path = folder / FILE
    with reading(path):
        if path.stat().st_size > FREE:
            raise UserError(f"{path} has {path.stat().st_size:,} bytes, which no metadata have")
        meta = from_json(path.read_text(encoding="utf-8"))
    if not isinstance(meta, dict):
        raise UserError(f"{path} is damaged: it holds no JSON object")
    for key in ("action_space", "observation_space", "total_steps"):
        if key not in meta:
            raise UserError(f"{path} is damaged: it has no '{key}'")
    for key in ("total_steps", "total_episodes"):
        value = meta.get(key, 0)
        if type(value) not in (int, float) or value != value // 1 or not 0 <= value < 2**63:
            raise UserError(f"{path} is damaged: '{key}' is {str(value)[:40]}, not a number of them")
    if meta.get("data_format", "hdf5") not in FORMATS:
        raise UserError(f"{path}: 'data_format' is {str(meta['data_format'])[:40]}; {', '.join(FORMATS)} are known")
    form, other = meta.get("data_format", "hdf5"), folder / "main_data.hdf5"
    if form != "hdf5" and other.is_file() and not any(p.is_dir() and p.name.isdecimal() for p in folder.iterdir()):
        raise UserError(
            f"{path}: 'data_format' is {form}, and the episodes are in {other.name}, which is hdf5; write hdf5 there"
        )
    for key in ("ref_min_score", "ref_max_score"):
        value = meta.get(key)
        number = type(value) is float or (type(value) is int and abs(value) < 2**63)
        if value is not None and not (number and math.isfinite(value)):
            raise UserError(f"{path}: '{key}' is {str(value)[:40]}, not a number")
    spaces = {key: _json(meta[key], f"{path}: '{key}'") for key in ("action_space", "observation_space")}
    for key, space in spaces.items():
        _check(space, f"{path}: '{key}'")
    return Metadata(meta, spaces["action_space"], spaces["observation_space"], _env_spec(meta.get("env_spec"), path))


def _json(text: Any, where: str) -> dict[str, Any]:
    if not isinstance(text, str):
        raise UserError(f"{where} is no JSON text; the metadata are damaged")
    with reading(where, " as JSON"):
        value = from_json(text)
    if not isinstance(value, dict):
        raise UserError(f"{where} describes no space; the metadata are damaged")
    return value


def _env_spec(text: Any, path: Path) -> dict[str, Any]:
    if not text:
        return {}
    spec = _json(text, f"{path}: 'env_spec'")
    types = {"id": str, "kwargs": dict, "max_episode_steps": int, "additional_wrappers": list}
    for key, kind in types.items():
        if spec.get(key) is not None and type(spec[key]) is not kind:
            raise UserError(f"{path}: 'env_spec' has {str(spec[key])[:40]} for '{key}'; the metadata are damaged")
    if (spec.get("max_episode_steps") or 1) < 1:
        raise UserError(
            f"{path}: 'env_spec' has {spec['max_episode_steps']} for 'max_episode_steps'; the metadata are damaged"
        )
    return spec


def _check(space: Any, where: str) -> None:
    """Raises UserError unless the parts of a space that offrl uses have the types that Minari writes."""
    if not isinstance(space, dict) or not isinstance(kind := space.get("type"), str):
        raise UserError(f"{where} describes no space; the metadata are damaged")
    damaged = f"{where} is no {kind} space as Minari writes it"
    if kind in ("Dict", "Tuple"):
        parts = space.get("subspaces")
        if not parts or not isinstance(parts, dict if kind == "Dict" else list):
            raise UserError(f"{damaged}: it has no subspaces")
        for name, part in parts.items() if isinstance(parts, dict) else enumerate(parts):
            _check(part, f"{where}, '{name}'")
    elif kind == "Box":
        if not _lengths(space.get("shape")):
            raise UserError(f"{damaged}: its shape is {str(space.get('shape'))[:60]}")
        with reading(f"{where}", cure=f"{damaged}"):
            if np.dtype(space.get("dtype", "float32")).kind not in "biuf":
                raise UserError(f"{damaged}: its type is {str(space['dtype'])[:40]}")
            for bound in ("low", "high"):
                values = np.asarray(space.get(bound, math.nan), np.float64)
                if np.isnan(values).any():
                    raise UserError(f"{damaged}: '{bound}' is missing, or no number")
                if values.size not in (1, math.prod(space["shape"])):
                    raise UserError(f"{damaged}: '{bound}' has {values.size} values")
    elif kind in ("Discrete", "MultiBinary"):
        number, start = space.get("n"), space.get("start", 0)
        fits = type(number) is int and 1 <= number <= MOST_VALUES
        fits = fits or (kind == "MultiBinary" and bool(number) and _lengths(number))
        if not fits or type(start) is not int:
            raise UserError(
                f"{damaged}: it has {str(number)[:40]} values from {str(start)[:40]} (1 to {MOST_VALUES:,} are read)"
            )


def _lengths(value: Any) -> bool:
    return isinstance(value, list) and all(type(n) is int and 0 <= n < 2**31 for n in value)


def width_of(space: dict[str, Any]) -> int:
    """The numbers that a value of the space becomes in a flat observation."""
    if space["type"] == "Discrete":
        return int(space["n"])  # one-hot, as gymnasium.spaces.flatten does it
    return math.prod(space["shape"]) if space["type"] == "Box" else int(np.prod(space["n"]))


def one_hot(values: np.ndarray, width: int, start: int, where: str) -> np.ndarray:
    """float32 [R, width] of whole numbers [R] from `start`. Raises UserError for others."""
    with np.errstate(invalid="ignore"):  # of what is no number
        indices = values.astype(np.int64) - start
    wrong = np.flatnonzero((indices < 0) | (indices >= width) | (values != indices + start))
    if len(wrong):
        raise UserError(f"{where} holds {values[wrong[0]]}, which is no number from {start} to {start + width - 1}")
    return np.eye(width, dtype=np.float32)[indices]


def fill(values: np.ndarray, out: np.ndarray, where: str) -> None:
    """Write the numbers of an episode into `out`, a part of a column. Raises UserError for other shapes, numbers with
    fractions where whole ones are due, and what is no flag."""
    if values.shape[:1] != out.shape[:1] or values.size != out.size or (out.ndim == 1 and values.ndim > 2):
        raise UserError(f"{where} has shape {list(values.shape)}, expected {list(out.shape)}")
    if out.dtype.kind == "i" and values.dtype.kind == "f":
        raise UserError(f"{where} holds {values.dtype} values, where whole numbers are due")
    out[:] = (canonical(FLAGS[0], values, where) if out.dtype == bool else values).reshape(out.shape)
