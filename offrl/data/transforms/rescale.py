"""Observations in the scale that a run began with, where this version of offrl finds another in the same data."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from offrl.data.dataset import Dataset, DataSpec
from offrl.data.memory import chunks
from offrl.errors import UserError

SHOWN = 3  # dimensions that the note names
ALIKE = 1e-5  # relative: what rounding explains


def apart(a: DataSpec, b: DataSpec) -> np.ndarray:
    """The dimensions of observations [O] that two normalisations move or divide by other numbers, beyond rounding; [0]
    without either.
    """
    if (
        a.observation_mean is None
        or a.observation_std is None
        or b.observation_mean is None
        or b.observation_std is None
    ):
        return np.zeros(0, bool)
    (low, high), (other_low, other_high) = (
        np.array([s.observation_mean, s.observation_std], np.float64) for s in (a, b)
    )
    return (np.abs(high - other_high) > ALIKE * other_high) | (
        np.abs(low - other_low) > ALIKE * (other_high + np.abs(other_low))
    )


def in_scale_of(dataset: Dataset, spec: DataSpec) -> Dataset:
    """`dataset` with its normalised observations by the means and scales of `spec`, and a note where these are not
    nearly its own.

    spec: of a run on the same data, whose networks know that scale. What is not normalised, there or here, stays.
    Raises UserError for memory-mapped columns, which would have to be copied.
    """
    now, then = (
        (dataset.spec.observation_mean, dataset.spec.observation_std),
        (spec.observation_mean, spec.observation_std),
    )
    unlike = apart(dataset.spec, spec)
    if None in now or None in then or now == then or (dataset.mapped and not unlike.any()):
        return dataset
    (low, high), (first_low, first_high) = ([np.asarray(x, np.float32) for x in pair] for pair in (now, then))
    named = [
        f"dimension {d} by {first_high[d]:.6g}, where this version finds {high[d]:.6g}"
        for d in np.flatnonzero(unlike)[:SHOWN]
    ]
    more = f" and {unlike.sum() - SHOWN} more" if unlike.sum() > SHOWN else ""
    if dataset.mapped:
        raise UserError(
            f"{dataset.spec.name}: the run divided observations by other numbers ({', '.join(named)}{more}), and "
            "memory-mapped columns "
            "are not changed: continue with dataset.memory=device, or with the version that began it"
        )
    columns = {}
    for name in ("observations", "next_observations"):
        source = dataset.columns[name].numpy()
        out = np.empty_like(source)
        for part in chunks(len(source)):
            rows = source[part].reshape(len(source[part]), -1)
            recorded = (rows.astype(np.float64) * high + low).astype(np.float32)
            out[part] = ((recorded - first_low) / first_high).reshape(out[part].shape)
        columns[name] = torch.from_numpy(out)
    notes = (
        (f"observations keep the scale that the run began with: they are divided in {', '.join(named)}{more}",)
        if named
        else ()
    )
    return replace(
        dataset,
        columns=dataset.columns | columns,
        spec=replace(dataset.spec, observation_mean=spec.observation_mean, observation_std=spec.observation_std),
        notes=(*dataset.notes, *notes),
    )
