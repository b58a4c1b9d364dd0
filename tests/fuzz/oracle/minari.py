"""Minari datasets: a folder with metadata.json, and the episodes in one HDF5 file or in a folder each."""

from __future__ import annotations

import json
from decimal import Decimal
from math import isfinite, prod
from pathlib import Path
from typing import Any

import numpy as np

from tests.fuzz.oracle import columns
from tests.fuzz.oracle.minari_storage import ArrowEpisodes, Hdf5Episodes
from tests.fuzz.oracle.rollouts import alike
from tests.fuzz.oracle.verdict import LARGE, Doubts, Refused, Truth, Unknown

KEYS = ("observations", "actions", "rewards", "terminations", "truncations")


def read(path: Path, doubts: Doubts) -> list[Truth]:
    folder = next((p for p in (path / "data", path) if (p / "metadata.json").is_file()), None)
    if folder is None:
        raise Refused("no metadata.json")
    if outside := [p for p in folder.rglob("*") if p.is_symlink() and not p.resolve().is_relative_to(folder.resolve())]:
        doubts.add(f"{outside[0].name} leads out of the folder")
    try:
        meta = json.loads((folder / "metadata.json").read_bytes())
        spaces = [json.loads(meta["observation_space"]), json.loads(meta["action_space"])]
        if not all(isinstance(space, dict) for space in spaces):
            raise TypeError("a space is no object")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise Refused(f"metadata.json: {error!r}") from None
    _doubt_metadata(meta, doubts)
    for space in spaces:
        _doubt_space(space, doubts)
    if meta.get("data_format", "hdf5") == "hdf5":
        episodes: Any = Hdf5Episodes(folder, doubts)
    elif meta.get("data_format") in ("arrow", "parquet"):
        episodes = ArrowEpisodes(folder, str(meta["data_format"]), doubts)
    else:
        raise Refused(f"data_format is {meta.get('data_format')!r}")
    try:
        if all(space.get("type") == "Text" for space in spaces):
            truths = [_texts(episodes, name) for name in episodes.names]
        else:
            truths = [t for name in episodes.names if (t := _numbers(episodes, name, *spaces, doubts)) is not None]
    finally:
        episodes.close()
    if not truths:
        raise Refused("no episodes")
    if isinstance(truths[0].observations, np.ndarray):
        alike(truths)
    if meta.get("total_episodes") != len(episodes.names) or meta.get("total_steps") != sum(
        len(t.rewards) for t in truths
    ):
        doubts.add("metadata.json says another number of steps or episodes")
    return truths


def _doubt_metadata(meta: Any, doubts: Doubts) -> None:
    """What may be refused though the episodes do not depend on it."""
    kinds = {
        "dataset_id": str,
        "minari_version": str,
        "env_spec": str,
        "description": str,
        "data_format": str,
        "jpeg_encoding": bool,
    }
    for key, kind in kinds.items():
        if key in meta and not isinstance(meta[key], kind):
            doubts.add(f"{key} is no {kind.__name__}")
    for key in ("ref_min_score", "ref_max_score"):
        if meta.get(key) is not None and (isinstance(meta[key], bool) or not isinstance(meta[key], int | float)):
            doubts.add(f"{key} is no number")
        if isinstance(meta.get(key), float) and not isfinite(meta[key]):
            doubts.add(f"{key} is {meta[key]}")
    if any(isinstance(meta.get(key), bool) for key in ("total_episodes", "total_steps")):
        doubts.add("True for a number of episodes or steps")
    if "offrl" in meta:
        doubts.recorded = True
    if "author" in meta and not isinstance(meta["author"], str | list):
        doubts.add("an author of a wrong type")
    try:
        spec = json.loads(meta["env_spec"]) if meta.get("env_spec") else {}
        plain = (
            isinstance(spec, dict)
            and isinstance(spec.get("id", ""), str)
            and isinstance(spec.get("kwargs") or {}, dict)
        )
        limit = spec.get("max_episode_steps")
        if not plain or ("id" not in spec and spec) or not (limit is None or (type(limit) is int and limit > 0)):
            raise ValueError
        if not isinstance(spec.get("additional_wrappers", []), list):
            raise ValueError
    except (ValueError, TypeError, AttributeError):
        doubts.add("env_spec describes no environment")


def _doubt_space(space: Any, doubts: Doubts) -> None:
    """Parts of a space that nothing here depends on, but that a reader may check."""
    if not isinstance(space, dict):
        return
    for inside in (space.get("subspaces") or {}).values() if isinstance(space.get("subspaces"), dict) else ():
        _doubt_space(inside, doubts)
    if space.get("type") in ("Box", "Discrete"):
        try:
            np.dtype(str(space["dtype"]))
        except (TypeError, KeyError):
            doubts.add("a space without a type of numbers")
    if space.get("type") == "Box":
        for bound in ("low", "high"):
            try:
                if (
                    np.array(space.get(bound), np.float64).shape != tuple(space["shape"])
                    or np.isnan(np.array(space[bound], np.float64)).any()
                ):
                    doubts.add("a Box without bounds")
            except (TypeError, ValueError, KeyError, OverflowError):
                doubts.add("a Box without bounds")


def _numbers(episodes: Any, name: str, observations: Any, actions: Any, doubts: Doubts) -> Truth | None:
    """One episode of T steps and T + 1 observations; None where T is 0."""
    parts = {}
    for key in KEYS[1:]:
        parts[key] = episodes.get(name, key)
        if parts[key] is None:
            raise Refused(f"{name} has no {key}")
    steps = len(parts["rewards"])
    if all(len(parts[key]) == 0 for key in KEYS[1:]):
        doubts.add("an episode of no steps")
        return None
    seen = _observations(episodes, name, "observations", observations, doubts)
    if any(len(parts[key]) != steps for key in KEYS[1:]):
        raise Refused(f"{name}: columns of different lengths")
    if len(seen) != steps + 1:
        raise Refused(f"{name}: {len(seen)} observations for {steps} steps")
    acts = _space_of_actions(parts["actions"], actions, steps, doubts)
    rewards = columns.vector("rewards", columns.finite("rewards", parts["rewards"]), steps)
    ended = [columns.flags(key, parts[key], steps) for key in KEYS[3:]]
    if any(ended[0][:-1]) or any(ended[1][:-1]):
        doubts.lose("an end inside an episode")
    seen = columns.finite("observations", seen)
    return Truth(seen[:-1], acts, rewards.tolist(), ended[0][-1], list(seen[1:]))


def _numbers_in(shape: Any, what: str) -> int:
    """How many numbers a Box of this shape has."""
    if not isinstance(shape, list) or any(type(n) is not int or n < 0 for n in shape):
        raise Refused(f"the space of the {what} has no shape")
    size = prod(shape)
    if size > LARGE:
        raise Unknown(f"{what} of millions of numbers")
    return size


def _space_of_actions(values: np.ndarray, space: Any, steps: int, doubts: Doubts) -> np.ndarray:
    kind = space.get("type")
    if kind == "Discrete":
        count, start = space.get("n"), space.get("start", 0)
        if type(count) is not int or type(start) is not int or values.dtype.kind not in "biu" or values.size != steps:
            raise Refused("discrete actions that are no integers")
        if values.size and (int(values.min()) < start or int(values.max()) >= start + count):
            raise Refused("discrete actions that the space does not have")
        if values.ndim > 2:
            doubts.add("discrete actions that are neither [T] nor [T, 1]")
        if count > columns.FEW_ACTIONS:
            doubts.add("thousands of discrete actions")
        return values.reshape(-1).astype(np.int64) - start
    if kind != "Box":
        raise Refused(f"actions of a {kind} space")
    shape, low, high = space.get("shape"), space.get("low"), space.get("high")
    width = _numbers_in(shape, "actions")
    if values.size != steps * width:
        raise Refused("actions do not have the shape of their space")
    values = columns.finite("actions", values).reshape(steps, width).astype(np.float32)
    try:
        bounds = [np.broadcast_to(np.array(b, np.float64).reshape(-1), (width,)) for b in (low, high)]
        if any(np.array(b).shape != tuple(shape) for b in (low, high)) or not (bounds[0] < bounds[1]).all():
            doubts.add("bounds of actions that are none")
        if (values < bounds[0]).any() or (values > bounds[1]).any():
            doubts.add("actions outside their space")
    except (ValueError, TypeError, OverflowError):
        doubts.add("bounds of actions that are none")
    return values


def _observations(episodes: Any, name: str, key: str, space: Any, doubts: Doubts) -> np.ndarray:
    """[T + 1, ...] in the form of the space: images as they are, numbers one-hot, dictionaries joined in sorted
    order.
    """
    kind = space.get("type") if isinstance(space, dict) else None
    if kind == "Dict":
        inside = space.get("subspaces")
        if not isinstance(inside, dict) or not inside:
            raise Refused("a Dict space without entries")
        parts = [_observations(episodes, name, f"{key}/{k}", inside[k], doubts) for k in sorted(inside)]
        if len({len(p) for p in parts}) > 1:
            raise Refused("entries of different lengths")
        return np.concatenate([p.reshape(len(p), int(np.prod(p.shape[1:]))).astype(np.float32) for p in parts], 1)
    if kind not in ("Box", "Discrete"):
        if kind == "MultiBinary":
            raise Unknown("MultiBinary")
        raise Refused(f"observations of a {kind} space")
    values = episodes.get(name, key)
    if values is None:
        raise Refused(f"{name} has no {key}")
    rows = len(values)
    if kind == "Discrete":
        n, start = space.get("n"), space.get("start", 0)
        if type(n) is not int or type(start) is not int or values.size != rows or not np.isfinite(values).all():
            raise Refused("a Discrete space without a number")
        if values.dtype.kind == "f":
            doubts.add("numbers of a Discrete space as floats")
            if (values != np.floor(values)).any():
                raise Refused("parts of numbers of a Discrete space")
        if n > 10**5:
            raise Unknown("one-hot of millions")
        if values.size and (int(values.min()) < start or int(values.max()) >= start + n):
            raise Refused("a number outside the Discrete space")
        hot = np.zeros((rows, n), np.float32)
        for i, v in enumerate(values.reshape(-1).tolist()):
            hot[i, int(v) - start] = 1
        return hot
    shape = space.get("shape")
    size = _numbers_in(shape, "observations")
    if values.size != rows * size:
        raise Refused("observations do not have the shape of their space")
    if list(values.shape[1:]) != shape:
        doubts.lose("observations in another shape than their space")
    if space.get("dtype") == "uint8" and key == "observations" and len(shape) > 1:
        if values.dtype != np.uint8:
            doubts.lose("observations of another type than their space")
        return values
    if values.dtype == np.uint8:
        doubts.lose("observations of another type than their space")
    return values.astype(np.float32) if len(shape) > 1 else values.reshape(rows, size).astype(np.float32)


def _texts(episodes: Any, name: str) -> Truth:
    """An episode of texts."""
    parts = {key: episodes.texts(name, key) for key in KEYS}
    steps = len(parts["rewards"])
    if steps == 0 or len(parts["observations"]) != steps + 1 or any(len(parts[k]) != steps for k in KEYS[1:]):
        raise Refused(f"{name}: columns of different lengths")
    if any(not isinstance(t, str) for k in KEYS[:2] for t in parts[k]):
        raise Refused(f"{name}: no texts")
    if any(not isinstance(v, bool | int | float) for k in KEYS[3:] for v in parts[k]):
        raise Refused(f"{name}: flags that are none")
    ended = [columns.flags(k, np.array(parts[k]), steps) for k in KEYS[3:]]
    if any(ended[0][:-1]) or any(ended[1][:-1]):
        raise Refused(f"{name}: an end inside")
    if any(isinstance(r, Decimal) for r in parts["rewards"]):
        raise Unknown("decimals")
    if any(not isinstance(r, int | float) or isinstance(r, bool) for r in parts["rewards"]):
        raise Refused(f"{name}: rewards are no numbers")
    rewards = columns.finite("rewards", np.array(parts["rewards"], np.float64)).tolist()
    seen = parts["observations"]
    complete = ended[0][-1] or ended[1][-1]
    return Truth(seen[:-1], parts["actions"], rewards, ended[0][-1], seen[1:], complete)
