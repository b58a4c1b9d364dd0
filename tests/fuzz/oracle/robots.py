"""Robot data by pyarrow, h5py, NumPy and Pillow alone. What more a reader compares (successors, ranges, the sizes that
info.json declares) is its own affair: it may refuse, and what it loads must be these rows.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from tests.fuzz.oracle.arrow import numbers
from tests.fuzz.oracle.columns import flags, vector
from tests.fuzz.oracle.verdict import Doubts, Refused, Truth, Unknown

USUAL = ("observation.state", "observation.environment_state")
DAMAGE = (OSError, ValueError, TypeError, LookupError, AttributeError, RecursionError)


@contextlib.contextmanager
def plainly() -> Iterator[None]:
    """Shapes that fit no row are as good as damage."""
    try:
        yield
    except DAMAGE as error:
        raise Refused(repr(error)) from None


def is_lerobot(path: Path) -> bool:
    return (path / "meta" / "info.json").is_file()


@plainly()
def lerobot(path: Path, keys: Sequence[str], doubts: Doubts) -> list[Truth]:
    """v2.1, with images in the data files: rows by frame_index; no end is known to have a successor."""
    doubts.add("robot data")
    try:
        features = json.loads((path / "meta" / "info.json").read_bytes())["features"]
        numeric = [k for k, f in features.items() if re.fullmatch(r"bool|u?int\d+|float\d+", f["dtype"])]
        flat = [k for k in numeric if k.startswith("observation.") and len(features[k]["shape"]) < 2]
        keys = keys or [*(k for k in USUAL if k in numeric), *(k for k in flat if k not in USUAL)]
        lines = [json.loads(line) for line in (path / "meta" / "episodes.jsonl").read_text().splitlines()]
        order = sorted((line["episode_index"], line["length"]) for line in lines)
    except DAMAGE as error:
        raise Refused(f"meta: {error!r}") from None
    reward = next((k for k in ("next.reward", "reward") if k in features), "")
    success = next((k for k in ("next.terminated", "next.success") if k in features), "")
    truths = []
    for number, length in order:
        file = path / f"data/chunk-000/episode_{number:06d}.parquet"
        try:
            table = pq.ParquetFile(file).read()
            columns = {k: table.column(k) for k in (*keys, "action", "episode_index", "frame_index")}
            columns |= {k: table.column(k) for k in (reward, success) if k}
        except Exception as error:  # pyarrow's own
            raise Refused(f"{file}: {error!r}"[:120]) from None
        images = {k: columns.pop(k).to_pylist() for k in keys if k not in numeric}
        values = {k: numbers(c.to_pylist(), c.type, k, doubts) for k, c in columns.items()}
        rows = np.flatnonzero(values["episode_index"].reshape(len(table)) == number)
        if values["frame_index"].reshape(len(table))[rows].tolist() != list(range(length)):
            raise Refused(f"{file}: the rows are not numbered 0 to {length - 1}")
        observed = [values[k].reshape(len(table), -1) for k in keys if k in numeric]
        truth = _truth(observed, values["action"], values.get(reward), values.get(success), rows)
        truth.streams = {k: np.stack([_picture(entries[row]) for row in rows]) for k, entries in images.items()}
        truths.append(truth)
    return truths


def _picture(entry: Any) -> np.ndarray:
    from PIL import Image

    try:
        return np.asarray(Image.open(io.BytesIO(entry["bytes"]), formats=("PNG",)))
    except (*DAMAGE, SyntaxError) as error:
        raise Refused(f"an image: {error!r}") from None


def _truth(observed: list[np.ndarray], actions: Any, rewards: Any, success: Any, rows: np.ndarray) -> Truth:
    """The rows as an episode whose last successor nobody knows; `success` ends it in the last row alone."""
    if len(actions) and actions.ndim == 1 and actions.dtype.kind in "biu":
        raise Unknown("actions that may be choices")
    numbers_of = np.concatenate([np.zeros((len(actions), 0)), *observed], 1)[rows].astype(np.float32)
    earned = np.zeros(len(rows)) if rewards is None else vector("rewards", rewards, len(rewards))[rows]
    ended = success is not None and bool(np.asarray(flags("success", success, len(success)))[rows[-1]])
    acted = np.asarray(actions, np.float64).reshape(len(actions), -1)[rows]
    return Truth(numbers_of, acted, earned.tolist(), ended, [*numbers_of[1:], None], None)


def of_robomimic(file: Any) -> bool:
    return file.kind == "hdf5" and any(re.fullmatch(r"data/demo_\d+", path) for path in file.paths)


@plainly()
def robomimic(file: Any, keys: Sequence[str], doubts: Doubts) -> list[Truth]:
    """Demonstrations by their numbers, of which successes end those with a reward in their last row."""
    doubts.add("robot data")
    demos = sorted({p.split("/")[1] for p in file.paths if re.fullmatch(r"data/demo_\d+", p)}, key=_number)
    parts: list[dict[str, Any]] = []
    shown: Sequence[str] = keys
    for demo in demos:
        observed = sorted(p.split("/")[-1] for p in file.paths if re.fullmatch(f"data/{demo}/obs/[^/]+", p))
        shown = shown or [k for k in observed if len(file.shape(f"data/{demo}/obs/{k}") or (0,)) < 3]
        names = [f"{group}/{k}" for group in ("obs", "next_obs") for k in shown]
        part = {k: file.get(f"data/{demo}/{k}") for k in ("actions", "rewards", "dones", *names)}
        if any(part[k] is None for k in ("actions", "rewards", "dones", *names[: len(shown)])):
            raise Refused(f"{demo} lacks an array")
        if len(part["actions"]):
            parts.append(part | {"keys": shown})
    if not parts:
        raise Refused("no demonstration")
    rewards = [vector("rewards", p["rewards"], len(p["actions"])) for p in parts]
    dones = [flags("dones", p["dones"], len(p["actions"])) for p in parts]
    positive = np.concatenate(rewards)
    dense = all(d[-1] for d in dones) and len(np.unique(positive[positive > 0])) > 1
    known = all(p[f"next_obs/{k}"] is not None for p in parts for k in p["keys"])
    truths = []
    for p, earned, done in zip(parts, rewards, dones, strict=True):
        rows, images = np.arange(len(earned)), [k for k in p["keys"] if p[f"obs/{k}"].ndim > 3]
        vectors = [k for k in p["keys"] if k not in images]
        observed = [p[f"obs/{k}"].reshape(len(rows), -1) for k in vectors]
        truth = _truth(observed, p["actions"], earned, None, rows)
        truth.terminated = bool(done[-1] and earned[-1] > 0 and not dense)
        truth.streams = {k: p[f"obs/{k}"] for k in images}
        if known:
            finals = [p[f"next_obs/{k}"][-1].reshape(-1) for k in vectors]
            truth.successors[-1] = np.concatenate([np.zeros(0), *finals]).astype(np.float32)
            truth.last = {k: p[f"next_obs/{k}"][-1] for k in images}
        truths.append(truth)
    if known and all(_same(t) for t in truths):  # the last observation again
        for truth in truths:
            truth.successors[-1], truth.last = None, {}
    return truths


def _number(demo: str) -> int:
    return int(demo.removeprefix("demo_"))


def _same(truth: Truth) -> bool:
    images = all(np.array_equal(image, truth.streams[k][-1]) for k, image in truth.last.items())
    return images and np.array_equal(truth.successors[-1], truth.observations[-1])


def of_vd4rl(file: Any) -> bool:
    image = "image" if file.kind == "npz" else "observation"
    marks = {"is_first", "discount"} if file.kind == "npz" else {"step_type"}
    return file.kind != "parquet" and {image, "action", "reward"} <= set(file.keys) and bool(marks & set(file.keys))


@plainly()
def vd4rl(file: Any, doubts: Doubts) -> list[Truth]:
    """States of one file, of which actions and rewards led to them."""
    doubts.add("robot data")
    names = ("image", "observation", "action", "reward", "discount", "is_first", "is_terminal", "step_type")
    part = {k: file.get(k) for k in names}
    if file.kind == "npz":
        images = part["image"]
        first = None if part["is_first"] is None else flags("is_first", part["is_first"], len(images))
        first = [True] + [False] * (len(images) - 1) if first is None else first
    else:
        if part["observation"] is None or part["step_type"] is None or part["observation"].ndim != 4:
            raise Refused("no images, or no step_type")
        images, first = np.moveaxis(part["observation"], 1, -1), (part["step_type"] == 0).reshape(-1).tolist()
    if len({len(v) for v in part.values() if v is not None}) > 1:
        raise Refused("arrays of different length")
    over = np.zeros(len(images), bool)
    if part["discount"] is not None:
        over |= part["discount"].reshape(len(images), -1)[:, 0] == 0
    if file.kind == "npz" and part["is_terminal"] is not None:
        over |= np.array(flags("is_terminal", part["is_terminal"], len(images)))
    starts = [i for i, begins in enumerate(first) if begins]
    truths = []
    for start, stop in zip(starts, [*starts[1:], len(images)], strict=True):
        if stop - start < 2:
            continue
        after = np.arange(start + 1, stop)
        empty = np.zeros((len(images), 0))
        truth = _truth([empty], part["action"], part["reward"], None, after)
        truth.terminated, truth.successors[-1] = bool(over[stop - 1]), truth.observations[-1]
        truth.streams, truth.last = {"pixels": images[start : stop - 1]}, {"pixels": images[stop - 1]}
        truths.append(truth)
    if not truths:
        raise Refused("no transition")
    return truths
