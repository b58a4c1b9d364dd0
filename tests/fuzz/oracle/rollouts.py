"""Rollouts padded to one length, and d3rlpy's files of both versions."""

from __future__ import annotations

from typing import Any

import h5py
import numpy as np

from tests.fuzz.oracle import columns
from tests.fuzz.oracle.verdict import LARGE, Doubts, Refused, Truth, Unknown

FLAGS = {"terminations": ("terminations", "terminals"), "truncations": ("truncations", "timeouts")}


def fits(file: Any) -> bool:
    """Whether the arrays are padded rollouts."""
    if file.kind == "parquet":
        return {"row_index", "observations_data", "observations_shape", "observations_dtype"} <= set(file.keys)
    mask = next((file.shape(k) for k in ("masks", "action_masks") if file.shape(k) is not None), None) or ()
    shape = file.shape("observations") or ()
    return len(shape) >= 3 and len(mask) >= 2 and mask[:2] == shape[:2] and mask[2:] in ((), (1,))


def _array(file: Any, name: str) -> np.ndarray | None:
    """[N, T, ...], from a Parquet file too."""
    if file.kind != "parquet":
        return file.get(name)
    if f"{name}_data" not in file.keys:
        return None
    try:
        order = file.values("row_index")
        if any(type(v) is not int for v in order):
            file.doubts.add("row_index of other numbers")
        order = [int(v) for v in order]
        shapes, types, data = (file.values(f"{name}_{part}") for part in ("shape", "dtype", "data"))
        shape = [int(v) for v in shapes[0].strip("() ").split(",") if v.strip()]
        dtype = np.dtype(types[0])
        different = len(set(shapes)) > 1 or len(set(types)) > 1 or shape[0] != len(data)
    except (KeyError, ValueError, TypeError, AttributeError, IndexError) as error:
        raise Refused(f"'{name}' cannot be put together: {error!r}") from None
    if sorted(order) != list(range(len(data))):
        raise Refused("row_index does not number the rollouts")
    if different:
        file.doubts.add(f"'{name}' says different shapes")
    if dtype.kind not in "biuf":
        raise Refused(f"'{name}' holds {dtype}, no numbers")
    size = dtype.itemsize
    for n in shape[1:]:
        size *= n
    if size > LARGE:
        raise Unknown(f"'{name}' has {size} bytes")
    rollouts: list[Any] = [None] * len(data)
    for place, value in zip(order, data, strict=True):
        if not isinstance(value, bytes) or len(value) != size:
            raise Refused(f"'{name}' has a rollout of another size")
        rollouts[place] = np.frombuffer(value, dtype).reshape(shape[1:])
    return np.stack(rollouts)


def read(file: Any, doubts: Doubts) -> list[Truth]:
    """The steps that the masks mark. A rollout shorter than the padding ended by itself, unless there are flags."""
    arrays = {name: _array(file, name) for name in ("observations", "actions", "rewards", "masks", "action_masks")}
    arrays |= {n: _array(file, n) for names in FLAGS.values() for n in names}
    arrays = {name: values for name, values in arrays.items() if values is not None}
    if any(name in file.paths for name in ("instruction_encodings", "encodings")):
        doubts.lose("encodings of instructions")
    for name in ("observations", "actions", "rewards"):
        if name not in arrays:
            raise Refused(f"there are no {name}")
    mask = arrays.get("masks", arrays.get("action_masks"))
    if mask is None:
        raise Refused("there are no masks")
    count, steps = arrays["observations"].shape[:2]
    for name, values in arrays.items():
        if values.ndim < 2 or values.shape[:2] != (count, steps):
            raise Refused(f"'{name}' has shape {values.shape}")
    if mask.size != count * steps:
        raise Refused("masks of several numbers")
    mask = mask.reshape(count, steps)
    if mask.dtype.kind == "f" and not np.isfinite(mask).all():
        raise Refused("masks with NaN")
    if not np.isin(mask, (0, 1)).all():
        doubts.add("masks that are neither 0 nor 1")
    if "masks" in arrays and "action_masks" in arrays:
        doubts.lose("two masks")
    table: dict[str, list[Any]] = {"observations": [], "actions": [], "rewards": [], "episode_ends": []}
    given = {column: next((arrays[n] for n in names if n in arrays), None) for column, names in FLAGS.items()}
    if any(all(n in arrays for n in names) for names in FLAGS.values()):
        doubts.lose("flags by two names")
    unflagged = all(values is None for values in given.values())
    for column, values in given.items():
        if values is not None or (unflagged and column == "terminations"):
            table[column] = []
    for n in range(count):
        length = 0
        while length < steps and mask[n, length] != 0:
            length += 1
        if (mask[n, length:] != 0).any():
            raise Refused(f"the mask of rollout {n} has gaps")
        for t in range(length):
            for name in ("observations", "actions", "rewards"):
                table[name].append(arrays[name][n, t])
            table["episode_ends"].append(t == length - 1)
            if unflagged:
                table["terminations"].append(t == length - 1 and length < steps)
            for column, values in given.items():
                if values is not None:
                    table[column].append(values[n, t].reshape(-1)[0] if values[n, t].size == 1 else values[n, t])
    if not table["episode_ends"]:
        raise Refused("no step is valid")
    plain = {name: np.array(values) for name, values in table.items()}
    for name in ("observations", "actions", "rewards"):
        plain[name] = plain[name].astype(arrays[name].dtype, copy=False)
    for column in ("terminations", "truncations"):
        if column in plain and any(
            f and not e for f, e in zip(plain[column].reshape(-1), plain["episode_ends"], strict=False)
        ):
            doubts.add("flags inside a rollout")
    return columns.episodes(plain, doubts)


def of_d3rlpy(file: Any) -> bool:
    keys = set(file.keys)
    return "observations_0" in keys or {"observations", "episode_terminals"} <= keys


def d3rlpy(file: Any, doubts: Doubts) -> list[Truth]:
    doubts.amounts = True
    return _second(file, doubts) if "observations_0" in file.keys else _first(file, doubts)


def _first(file: Any, doubts: Doubts) -> list[Truth]:
    """MDPDataset of d3rlpy 1: `terminals` are terminations, `episode_terminals` all ends."""
    if "version" not in file.keys:
        raise Refused("written by d3rlpy before 1.0")
    if not isinstance(file.item("version"), h5py.Dataset):
        doubts.add("version is no column")
    table = {}
    for column, key in {
        "observations": "observations",
        "actions": "actions",
        "rewards": "rewards",
        "terminations": "terminals",
        "episode_ends": "episode_terminals",
    }.items():
        table[column] = file.get(key)
        if table[column] is None:
            raise Refused(f"there is no '{key}'")
    rows = len(table["observations"])
    ends = table["episode_ends"]
    if ends.shape not in ((rows,), (rows, 1)) or not np.isin(ends, (0, 1)).all():
        raise Refused("episode_terminals are no flags")
    table["episode_ends"] = ends.reshape(-1).astype(bool)
    if file.item("discrete_action") is not None:
        single = np.asarray(file.single("discrete_action"))
        if single.shape != () or single.dtype.kind not in "biuf" or single not in (0, 1):
            doubts.lose("discrete_action is no flag")
        elif bool(single):
            acts = table["actions"]
            if acts.size != len(acts) or acts.dtype.kind not in "biuf" or (acts != np.floor(acts)).any():
                raise Refused("discrete actions that are no single integers")
            table["actions"] = acts.reshape(-1).astype(np.int64)
        elif table["actions"].dtype.kind in "biu":
            doubts.add("continuous actions that are integers")
            table["actions"] = table["actions"].astype(np.float32).reshape(len(table["actions"]), -1)
    return columns.episodes(table, doubts)


def _second(file: Any, doubts: Doubts) -> list[Truth]:
    """ReplayBuffer of d3rlpy 2: arrays for each episode."""
    numbers = sorted(int(k[13:]) for k in file.keys if k.startswith("observations_") and k[13:].isdigit())
    if numbers != list(range(len(numbers))):
        raise Refused("episodes are missing")
    if any(k.startswith("observations_") and not k[13:].isdigit() for k in file.keys):
        doubts.add("other observations")
    try:
        total = file.single("total_size") if file.item("total_size") is not None else None
    except Refused as error:
        total = str(error)
    if total is None:
        doubts.add("no total_size")
    elif np.shape(total) != () or not isinstance(total, int | float | np.number) or total != len(numbers):
        doubts.add("total_size is another number")
    truths: list[Truth] = []
    for i in numbers:
        parts = {name: file.get(f"{name}_{i}") for name in ("observations", "actions", "rewards")}
        missing = [name for name, value in parts.items() if value is None]
        if missing or file.item(f"terminated_{i}") is None:
            raise Refused(f"episode {i} is not all there")
        ended = np.asarray(file.single(f"terminated_{i}"))
        if ended.size != 1 or ended.dtype.kind not in "biuf" or ended.reshape(-1)[0] not in (0, 1):
            raise Refused(f"terminated_{i} is no flag")
        steps = len(parts["rewards"])
        if steps == 0 and all(len(v) == 0 for v in parts.values()):
            doubts.lose("an episode of no steps")
            continue
        ends = np.arange(steps) == steps - 1
        parts["terminations"], parts["episode_ends"] = ends & bool(ended.reshape(-1)[0]), ends
        truths += columns.episodes({k: v for k, v in parts.items() if v is not None}, doubts)
    if not truths:
        raise Refused("no episodes")
    alike(truths)
    for name in ("observations", "actions", "rewards"):
        _of_one_type(file, name, len(numbers), doubts)
    return truths


def alike(truths: list[Truth]) -> None:
    """Refuses episodes that do not fit together."""
    for truth in truths[1:]:
        if (
            truth.observations.shape[1:] != truths[0].observations.shape[1:]
            or truth.actions.shape[1:] != truths[0].actions.shape[1:]
        ):
            raise Refused("episodes of different shapes")
        if (truth.actions.dtype.kind == "i") != (truths[0].actions.dtype.kind == "i"):
            raise Refused("actions of different kinds")


def _of_one_type(file: Any, name: str, count: int, doubts: Doubts) -> None:
    """Doubts episodes whose numbers are of different types."""
    items = [file.item(f"{name}_{i}") for i in range(count)]
    if len({(item.dtype, item.ndim) for item in items if item is not None}) > 1:
        doubts.add(f"{name} of different types or ranks")
