"""From a source's columns, whatever they are, to a `Dataset`: episodes, successors, and actions scaled to [-1, 1]."""

from __future__ import annotations

import hashlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import torch

from offrl.data.dataset import Dataset
from offrl.data.memory import IN_MEMORY, Memory, chunks, next_rows
from offrl.data.raw import CORE, RawData, bounds_of
from offrl.data.raw.checks import find_faults, form_faults, refuse
from offrl.data.raw.infer import action_range, count_from_zero, find_ends, fitting_task, spec_of, starts_elsewhere
from offrl.data.raw.streams import RawImages, resized, size_of
from offrl.settings.dataset import DatasetConfig
from offrl.tasks.entries import PIXELS


def assemble(raw: RawData, config: DatasetConfig | None = None, memory: Memory = IN_MEMORY) -> Dataset:
    """Check the columns, find the episodes and the successors, scale the actions. Uses up `raw`: its arrays may be
    written to.

    Raises UserError for the first fault that would corrupt training (with `config.check`; faults in shape always).
    """
    config = config or DatasetConfig()
    raw.settle_kind()
    if raw.discrete and "actions" in raw.columns:
        count_from_zero(raw)
    if any(f.severity == "corrupting" for f in form_faults(raw)):
        refuse(raw, find_faults(raw))
    columns, rows = dict(raw.columns), raw.rows
    ends = find_ends(raw)
    # hashing lets go of the interpreter: values are checked and successors copied meanwhile
    with ThreadPoolExecutor(1) as pool:
        digest = pool.submit(fingerprint, without_pixels(raw), ends)
        refuse(raw, find_faults(raw, clip_actions=config.clip_actions), config.check)
        start, stop = bounds_of(ends)
        last = stop - 1
        terminations = columns.get("terminations", np.zeros(rows, bool))
        known = known_successors(raw, last, terminations)
        raw = without_pixels(raw)
        columns = dict(raw.columns)
        observations = columns["observations"]
        if "next_observations" in columns:
            successors = columns["next_observations"]
        else:
            successors = next_rows(observations, memory)
            if raw.final_observations is not None:
                successors[last] = raw.final_observations
        for name, images in raw.images.items():
            raw.streams[name] = images.stream(known[last], stop, memory, name, raw.where)
        for name, stream in raw.streams.items():
            if config.image_size:
                raw.streams[name] = resized(stream, size_of(config.image_size), memory, name)
            if stream.values.ndim == 4 and stream.final is not None:
                known[last[stream.final < 0]] = False
            elif stream.values.ndim == 4:
                known[last] = False
    unknown = np.flatnonzero(~known)
    successors[unknown] = observations[unknown]
    columns |= {"next_observations": successors, "terminations": terminations, "truncations": ends & ~terminations}
    if config.drop_timeout_rows:
        known &= ~columns["truncations"]
    columns["successor_known"] = known
    spec = spec_of(raw, fitting_task(raw))
    if raw.discrete:
        columns["actions"] = columns["actions"].astype(np.int64, copy=False)
    else:
        scale_actions(columns["actions"], *action_range(raw))
    returns = np.add.reduceat(columns["rewards"], start, dtype=np.float64)
    complete = np.ones(len(last), bool)
    complete[-1] = bool(raw.last_complete)
    for text in raw.notes:
        raw.warn(text)
    order = [k for k in (*CORE, "successor_known") if k in columns] + sorted(set(columns) - {*CORE, "successor_known"})
    return Dataset(
        columns={k: torch.from_numpy(np.ascontiguousarray(columns[k])) for k in order},
        episode_start=torch.from_numpy(start),
        episode_end=torch.from_numpy(stop),
        spec=spec,
        fingerprint=with_streams(digest.result(), raw),
        raw_returns=torch.from_numpy(returns),
        complete=torch.from_numpy(complete),
        transforms=("clip_actions",) if config.clip_actions else (),
        notes=tuple(raw.notes),
        stores={name: stream.store(start, stop) for name, stream in raw.streams.items()},
    )


def without_pixels(raw: RawData) -> RawData:
    """The data with the images [R, H, W, C] of a column of observations among the `images`; themselves where there are
    none.
    """
    if raw.columns["observations"].dtype != np.uint8:
        return raw
    columns = {k: v for k, v in raw.columns.items() if k != "next_observations"}
    columns["observations"] = np.zeros((raw.rows, 0), np.float32)
    pixels = RawImages(raw.columns["observations"], raw.columns.get("next_observations"), raw.final_observations)
    return replace(
        raw, columns=columns, images=raw.images | {PIXELS: pixels}, final_observations=None, final_known=None
    )


def known_successors(raw: RawData, last: np.ndarray, terminations: np.ndarray) -> np.ndarray:
    """The rows, of which `last` end the episodes, whose successors the data hold, bool [R]."""
    known = np.ones(raw.rows, bool)
    if "next_observations" in raw.columns:
        elsewhere = starts_elsewhere(raw, last)
        known[last[elsewhere]] = False
        if hidden := int((elsewhere & terminations[last]).sum()):
            raw.note(
                f"at {hidden:,} terminals next_observations hold the next episode's start: what they led to is not "
                "known"
            )
    elif raw.final_observations is not None:
        if raw.final_known is not None:
            known[last[~raw.final_known]] = False
    elif raw.columns["observations"].shape[1:] != (0,):  # else streams say it
        known[last] = False
    return known


def fingerprint(raw: RawData, ends: np.ndarray) -> str:
    """sha256 over the names, dtypes, shapes and little-endian bytes of the columns, and the episodes' ends."""
    digest = hashlib.sha256()
    finals = {"final_observations": raw.final_observations, "final_known": raw.final_known}
    extra = {name: values for name, values in finals.items() if values is not None}
    for name, column in sorted((raw.columns | extra | {"ends": ends}).items()):
        little = column.dtype.newbyteorder("<")
        digest.update(f"{name} {little.str} {column.shape} ".encode())
        for part in chunks(len(column)):
            digest.update(np.ascontiguousarray(column[part], little).data)
    return digest.hexdigest()


def identity(raw: RawData, ends: np.ndarray, memory: Memory = IN_MEMORY) -> str:
    """The fingerprint of the dataset that `assemble` makes of these columns."""
    stop = bounds_of(ends)[1]
    known = known_successors(raw, stop - 1, raw.columns.get("terminations", np.zeros(raw.rows, bool)))[stop - 1]
    plain = without_pixels(raw)
    images = {k: i.stream(known, stop, memory, k, raw.where) for k, i in plain.images.items()}
    return with_streams(fingerprint(plain, ends), replace(plain, streams=plain.streams | images))


def with_streams(digest: str, raw: RawData) -> str:
    """The fingerprint of columns and streams; that of the columns where there are no streams."""
    if not raw.streams:
        return digest
    both = hashlib.sha256(digest.encode())
    for name, stream in raw.streams.items():
        stream.update(both, name)
    return both.hexdigest()


def scale_actions(actions: np.ndarray, low: np.ndarray, high: np.ndarray) -> None:
    """In place, from [low, high] to [-1, 1]; what lies a rounding error outside, or was to be clipped, is clipped."""
    identity = bool((low == -1.0).all() and (high == 1.0).all())
    centre, half = (high.astype(np.float64) + low) / 2, (high.astype(np.float64) - low) / 2
    for part in chunks(len(actions)):
        values = actions[part]
        if not identity:
            values[:] = (values - centre) / half
        np.clip(values, -1.0, 1.0, out=values)
