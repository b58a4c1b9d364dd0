"""Datasets of other columns: rewards rescaled, returns to go added, actions clipped, observations normalised."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from offrl.data.dataset import Dataset, DataSpec
from offrl.data.memory import IN_MEMORY, Memory, chunks
from offrl.errors import UserError, some
from offrl.tasks.task import lookup

EPSILON = 1e-3  # added to the standard deviation of observations of published data, as TD3+BC and CORL do
# standard deviation, as a share of the largest number, up to which a dimension of other data counts as constant
CONSTANT = 1e-6


def scale_by_return_range(dataset: Dataset, size: float) -> Dataset:
    """r * size / (largest - smallest return over whole episodes) (IQL, arXiv 2110.06169, appendix). Raises UserError
    when all are equal.
    """
    returns = dataset.episode_returns()
    if dataset.complete.any():
        returns = returns[dataset.complete]
    span = float(returns.max() - returns.min())
    if span <= 0.0:
        raise UserError(
            f"{dataset.spec.name}: all episodes have the same return, so that dataset.reward_by_return_range has no "
            "range"
        )
    return _rescale(dataset, size / span, 0.0, f"reward_by_return_range {size:g} / {span:.9g}")


def normalize_rewards(dataset: Dataset) -> Dataset:
    """(r - mean) / std over all rows, std with the divisor n - 1 as torch's. Raises UserError when all are equal."""
    rewards = dataset.columns["rewards"].double()
    mean, std = float(rewards.mean()), float(rewards.std())
    if not std > 0.0:
        raise UserError(
            f"{dataset.spec.name}: all rewards are {mean:g}, so that dataset.normalize_rewards has nothing to divide by"
        )
    return _rescale(dataset, 1.0 / std, -mean / std, f"rewards * {1.0 / std:.9g} + {-mean / std:.9g}")


def scale_rewards(dataset: Dataset, scale: float, shift: float) -> Dataset:
    """r * scale + shift."""
    return _rescale(dataset, scale, shift, f"rewards * {scale:g} + {shift:g}")


def _rescale(dataset: Dataset, scale: float, shift: float, note: str) -> Dataset:
    rewards = (dataset.columns["rewards"].double() * scale + shift).float()
    spec = replace(
        dataset.spec,
        reward_scale=dataset.spec.reward_scale * scale,
        reward_shift=dataset.spec.reward_shift * scale + shift,
    )
    return dataset.changed(note, columns={"rewards": rewards}, spec=spec)


def returns_to_go(
    rewards: np.ndarray, terminations: np.ndarray, start: np.ndarray, end: np.ndarray, discount: float
) -> np.ndarray:
    """G_t = r_t + discount (1 - d_t) G_{t+1} inside each episode, float64 [R]: all episodes at once, step by step from
    their ends.
    """
    out = rewards.astype(np.float64)
    carry = discount * (1.0 - terminations)
    order = np.argsort(start - end, kind="stable")  # longest first, so that the episodes still running are a prefix
    last, lengths = end[order] - 1, (end - start)[order]
    # alive[k]: how many are longer than k steps
    alive = np.searchsorted(-lengths, -np.arange(int(lengths[0])), side="left")
    for back in range(1, int(lengths[0])):
        rows = last[: alive[back]] - back
        out[rows] += carry[rows] * out[rows + 1]
    return out


def add_returns_to_go(dataset: Dataset, discount: float) -> Dataset:
    """Adds the column returns_to_go, float32. A time-out cuts the sum: what would have followed is not in the data."""
    rewards, terminations = dataset.columns["rewards"].numpy(), dataset.columns["terminations"].numpy()
    values = returns_to_go(rewards, terminations, *dataset.bounds(), discount)
    columns = {"returns_to_go": torch.from_numpy(values.astype(np.float32))}
    return dataset.changed(f"returns_to_go {discount:g}", columns=columns)


def clip_to_margin(dataset: Dataset, margin: float) -> Dataset:
    """Actions in [-1 + margin, 1 - margin]. Discrete actions, which have no margin, stay: IQL's settings ask for one on
    any data.
    """
    if dataset.spec.discrete:
        return dataset
    actions = dataset.columns["actions"].clamp(-1.0 + margin, 1.0 - margin)
    return dataset.changed(f"action_margin {margin:g}", columns={"actions": actions})


def is_published(spec: DataSpec) -> bool:
    """Whether data are those that ship with offrl or that tables of tasks know: for them others published how they
    normalise.
    """
    names = [spec.name, *([spec.task.name] if spec.task is not None else [])]
    return spec.source == "builtin" or any(lookup(name) is not None for name in names)


def scales(std: np.ndarray, largest: np.ndarray, published: bool) -> np.ndarray:
    """What the dimensions of observations [O] are divided by, from their standard deviations and largest absolute
    numbers.

    std + 1e-3 for published data, whose units are large. Elsewhere std, in whatever unit; of a constant dimension the
    largest number, and 1 where all are zero.
    """
    if published:
        return np.asarray(std + EPSILON)
    return np.where(std > CONSTANT * largest, std, np.where(largest > 0.0, largest, 1.0))


def normalize_observations(dataset: Dataset, memory: Memory = IN_MEMORY, in_place: bool = False) -> Dataset:
    """(s - mean) / scale for observations and their successors, with mean and standard deviation over the rows'
    observations.

    scale: see `scales`. Images and tables stay as they are, which a note says.
    `in_place`: overwrite the columns of `dataset`, which then takes no second copy of them.
    """
    observations = dataset.columns["observations"].numpy()
    note = f"normalize_observations leaves {some(dataset.stores)} as recorded" if dataset.stores else ""
    if not observations[0].size:
        return replace(dataset, notes=(*dataset.notes, note))
    rows, flat = len(observations), observations.reshape(len(observations), -1)
    total, square, largest = np.zeros((3, flat.shape[1]))
    for part in chunks(rows):
        total += flat[part].sum(0, dtype=np.float64)
        largest = np.maximum(largest, np.abs(flat[part]).max(0))
    mean = total / rows
    for part in chunks(rows):
        square += ((flat[part] - mean) ** 2).sum(0)
    scale = scales(np.sqrt(square / rows), largest, is_published(dataset.spec))
    low, high = mean.astype(np.float32), scale.astype(np.float32)
    columns = {}
    for name in ("observations", "next_observations"):
        source = dataset.columns[name].numpy()
        out = source if in_place and source.flags.writeable else memory.empty(name, source.shape, np.float32)
        for part in chunks(rows):
            block = source[part].reshape(-1, flat.shape[1])
            out[part] = ((block - low) / high).reshape(source[part].shape)
        columns[name] = torch.from_numpy(out)
    spec = replace(dataset.spec, observation_mean=tuple(low.tolist()), observation_std=tuple(high.tolist()))
    return dataset.changed("normalize_observations", note, columns, spec=spec)
