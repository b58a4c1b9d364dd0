"""What may be done to a data set before training: pure functions from `Dataset` to `Dataset`, applied in a fixed order."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from offrl import registry
from offrl.data.dataset import Dataset
from offrl.data.memory import Memory, chunks
from offrl.data.text.dataset import refuse_settings, shared_strings
from offrl.errors import UserError
from offrl.settings.dataset import DatasetConfig

EPSILON = 1e-3  # added to the standard deviation of observations, as TD3+BC and CORL do


def apply_transforms(
    datasets: Sequence[Dataset],
    config: DatasetConfig,
    memory: Memory | None = None,
    owned: bool = False,
    device: str = "cpu",
    quiet: bool = False,
) -> Dataset:
    """Concatenate, subsample, label actions, append, label rewards, keep the best, weights, rewards, returns to go, action margin,
    observation normalisation: as far as `config` asks.

    `owned`: nobody else has the data, so that observations may be overwritten. `device`, `quiet`: for models that label data.
    """
    memory = memory or Memory()
    for text in (d for d in datasets if d.spec.text):
        refuse_settings(config, text.spec.name)
    dataset = concatenate(datasets, memory) if len(datasets) > 1 else datasets[0]
    if config.subsample < 1.0:
        dataset = subsample(dataset, config.subsample, config.subsample_seed, memory)
    if config.labelled_fraction < 1.0 or config.action_free:
        dataset = registry.get("transform", "label_actions")(dataset, config, memory, device, quiet)
    if config.expert is not None:
        from offrl.data.demonstrations import add_expert

        dataset = add_expert(dataset, config, memory)
    if config.imagined:
        from offrl.data.imagined import add_imagined

        dataset = add_imagined(dataset, config, memory)
    if config.reward_labels is not None:
        from offrl.data.reward_labels import label_rewards

        dataset = label_rewards(dataset, config.reward_labels)
    if config.terminated_only:
        dataset = terminated_only(dataset, memory)
    if config.top_fraction < 1.0:
        dataset = top_fraction(dataset, config.top_fraction, memory)
    if config.weighting != "none":
        from offrl.data.weights import weight_episodes

        dataset = weight_episodes(dataset, config.weighting, config.weighting_temperature, config.weighting_fraction)
    if config.imagined_share is not None:
        from offrl.data.imagined import share_draws

        dataset = share_draws(dataset, config.imagined_share)
    if config.reward_by_return_range:
        dataset = scale_by_return_range(dataset, config.reward_by_return_range)
    if config.reward_scale != 1.0 or config.reward_shift != 0.0:
        dataset = scale_rewards(dataset, config.reward_scale, config.reward_shift)
    if config.discount_returns is not None:
        dataset = add_returns_to_go(dataset, config.discount_returns)
    if config.action_margin:
        dataset = clip_to_margin(dataset, config.action_margin)
    if config.normalize_observations:
        dataset = normalize_observations(dataset, memory, owned)
    return dataset


def _with(dataset: Dataset, note: str, **columns: Tensor) -> Dataset:
    return replace(dataset, columns=dataset.columns | columns, transforms=(*dataset.transforms, note))


def concatenate(datasets: Sequence[Dataset], memory: Memory | None = None) -> Dataset:
    """One data set after the other. Raises UserError when shapes, action kinds or columns differ.

    Where the action ranges differ, because each was taken from the data, actions are rescaled to the range that covers all.
    """
    memory, first = memory or Memory(), datasets[0]
    kinds = {d.spec.text: d.spec.name for d in datasets}
    if len(kinds) > 1:
        raise UserError(f"cannot append data of numbers and of texts to each other: {kinds[True]} holds texts, {kinds[False]} does not")
    if first.spec.text:
        datasets = shared_strings(datasets)
        first = datasets[0]
    for other in datasets[1:]:
        for what, a, b in (
            ("observations of shape", list(first.spec.observation_shape), list(other.spec.observation_shape)),
            (
                "actions",
                "discrete" if first.spec.discrete else first.spec.action_dim,
                "discrete" if other.spec.discrete else other.spec.action_dim,
            ),
            ("the columns", sorted(first.columns), sorted(other.columns)),
        ):
            if a != b:
                raise UserError(f"cannot append {other.spec.name} to {first.spec.name}: {what} {b} instead of {a}")
    columns = {}
    for name, column in first.columns.items():
        out = memory.empty(name, (sum(len(d) for d in datasets), *column.shape[1:]), column.numpy().dtype)
        at = 0
        for dataset in datasets:
            for part in chunks(len(dataset)):
                out[at + part.start : at + part.stop] = dataset.columns[name][part].numpy()
            at += len(dataset)
        columns[name] = torch.from_numpy(out)
    spec = replace(first.spec, num_actions=max(d.spec.num_actions for d in datasets))
    if not spec.discrete:
        lows, highs = (np.array([getattr(d.spec, k) for d in datasets]) for k in ("action_low", "action_high"))
        low, high = lows.min(0), highs.max(0)
        at = 0
        for dataset, own_low, own_high in zip(datasets, lows, highs, strict=True):
            if (own_low != low).any() or (own_high != high).any():
                for part in chunks(len(dataset)):
                    actions = columns["actions"][at + part.start : at + part.stop].numpy()
                    raw = own_low + (actions + 1.0) * (own_high - own_low) / 2.0
                    actions[:] = np.clip(2.0 * (raw - low) / (high - low) - 1.0, -1.0, 1.0)
            at += len(dataset)
        spec = replace(spec, action_low=tuple(low.tolist()), action_high=tuple(high.tolist()))
    offsets = np.cumsum([0, *(len(d) for d in datasets[:-1])]).tolist()
    return replace(
        first,
        columns=columns,
        episode_start=torch.cat([d.episode_start + o for d, o in zip(datasets, offsets, strict=True)]),
        episode_end=torch.cat([d.episode_end + o for d, o in zip(datasets, offsets, strict=True)]),
        spec=spec,
        fingerprint=hashlib.sha256(" ".join(d.fingerprint for d in datasets).encode()).hexdigest(),
        raw_returns=torch.cat([d.raw_returns for d in datasets]),
        complete=torch.cat([d.complete for d in datasets]),
        transforms=(*first.transforms, *(f"concatenate {d.spec.name}" for d in datasets[1:])),
        notes=tuple(n for d in datasets for n in d.notes),
        mapped=False,
        weights=_joined_weights(datasets),
    )


def _joined_weights(datasets: Sequence[Dataset]) -> Tensor | None:
    """Each part keeps its share of the draws, which is that of its rows: weights have mean 1 over a part's rows."""
    if all(d.weights is None for d in datasets):
        return None
    return torch.cat([torch.ones(d.num_episodes, dtype=torch.float64) if d.weights is None else d.weights for d in datasets])


def keep_episodes(dataset: Dataset, episodes: Tensor, note: str, memory: Memory | None = None) -> Dataset:
    """The episodes with the given numbers (int64), in that order."""
    memory = memory or Memory()
    lengths = dataset.episode_lengths()[episodes]
    ends = torch.cumsum(lengths, 0)
    starts = ends - lengths
    shift = dataset.episode_start[episodes] - starts
    rows = torch.arange(int(lengths.sum())) + torch.repeat_interleave(shift, lengths)
    index = rows.numpy()
    columns = {}
    for name, column in dataset.columns.items():
        source = column.numpy()
        out = memory.empty(name, (len(index), *source.shape[1:]), source.dtype)
        for part in chunks(len(index)):
            out[part] = source[index[part]]
        columns[name] = torch.from_numpy(out)
    return replace(
        dataset,
        columns=columns,
        episode_start=starts,
        episode_end=ends,
        raw_returns=dataset.raw_returns[episodes],
        complete=dataset.complete[episodes],
        transforms=(*dataset.transforms, note),
        mapped=False,
        weights=_kept_weights(dataset, episodes, lengths),
    )


def _kept_weights(dataset: Dataset, episodes: Tensor, lengths: Tensor) -> Tensor | None:
    """The weights of some episodes, of mean 1 over their rows again. Raises UserError where none of them would be drawn."""
    if dataset.weights is None:
        return None
    weights = dataset.weights[episodes]
    total = (weights * lengths).sum()
    if not float(total) > 0.0:
        raise UserError(f"{dataset.spec.name}: the weighting of these data draws none of the episodes that are to be kept")
    return weights * (lengths.sum() / total)


def subsample(dataset: Dataset, fraction: float, seed: int = 0, memory: Memory | None = None) -> Dataset:
    """max(1, floor(fraction * episodes)) episodes drawn at random, in their old order. The same on every machine."""
    count = max(1, int(fraction * dataset.num_episodes + 1e-9))
    chosen = np.sort(np.random.Generator(np.random.PCG64(seed)).permutation(dataset.num_episodes)[:count])
    return keep_episodes(dataset, torch.from_numpy(chosen), f"subsample {fraction:g} seed {seed}", memory)


def terminated_only(dataset: Dataset, memory: Memory | None = None) -> Dataset:
    """The episodes whose last step is terminal. Raises UserError where there is none."""
    kept = torch.nonzero(dataset.columns["terminations"].cpu()[dataset.episode_end.cpu() - 1]).squeeze(-1)
    if not len(kept):
        raise UserError(f"dataset.terminated_only=true: no episode of {dataset.spec.name} terminates; leave it out")
    return keep_episodes(dataset, kept, "terminated_only", memory)


def top_fraction(dataset: Dataset, fraction: float, memory: Memory | None = None) -> Dataset:
    """The best max(1, floor(fraction * episodes)) episodes by undiscounted return, in their old order; of equals the earlier one."""
    count = max(1, int(fraction * dataset.num_episodes + 1e-9))
    order = torch.argsort(dataset.episode_returns(), descending=True, stable=True)
    return keep_episodes(dataset, torch.sort(order[:count]).values, f"top_fraction {fraction:g}", memory)


def scale_by_return_range(dataset: Dataset, size: float) -> Dataset:
    """r * size / (largest - smallest return over whole episodes) (IQL, arXiv 2110.06169, appendix). Raises UserError when all are equal."""
    returns = dataset.episode_returns()
    if dataset.complete.any():
        returns = returns[dataset.complete]
    span = float(returns.max() - returns.min())
    if span <= 0.0:
        raise UserError(f"{dataset.spec.name}: all episodes have the same return, so that dataset.reward_by_return_range has no range")
    return _rescale(dataset, size / span, 0.0, f"reward_by_return_range {size:g} / {span:.9g}")


def scale_rewards(dataset: Dataset, scale: float, shift: float) -> Dataset:
    """r * scale + shift."""
    return _rescale(dataset, scale, shift, f"rewards * {scale:g} + {shift:g}")


def _rescale(dataset: Dataset, scale: float, shift: float, note: str) -> Dataset:
    rewards = (dataset.columns["rewards"].double() * scale + shift).float()
    spec = replace(dataset.spec, reward_scale=dataset.spec.reward_scale * scale, reward_shift=dataset.spec.reward_shift * scale + shift)
    return replace(_with(dataset, note, rewards=rewards), spec=spec)


def returns_to_go(rewards: np.ndarray, terminations: np.ndarray, start: np.ndarray, end: np.ndarray, discount: float) -> np.ndarray:
    """G_t = r_t + discount (1 - d_t) G_{t+1} inside each episode, float64 [R]: all episodes at once, step by step from their ends."""
    out = rewards.astype(np.float64)
    carry = discount * (1.0 - terminations)
    order = np.argsort(start - end, kind="stable")  # longest first, so that the episodes still running are a prefix
    last, lengths = end[order] - 1, (end - start)[order]
    alive = np.searchsorted(-lengths, -np.arange(int(lengths[0])), side="left")  # alive[k]: how many are longer than k steps
    for back in range(1, int(lengths[0])):
        rows = last[: alive[back]] - back
        out[rows] += carry[rows] * out[rows + 1]
    return out


def add_returns_to_go(dataset: Dataset, discount: float) -> Dataset:
    """Adds the column returns_to_go, float32. A time-out cuts the sum: what would have followed is not in the data."""
    rewards, terminations = dataset.columns["rewards"].numpy(), dataset.columns["terminations"].numpy()
    values = returns_to_go(rewards, terminations, dataset.episode_start.numpy(), dataset.episode_end.numpy(), discount)
    return _with(dataset, f"returns_to_go {discount:g}", returns_to_go=torch.from_numpy(values.astype(np.float32)))


def clip_to_margin(dataset: Dataset, margin: float) -> Dataset:
    """Actions in [-1 + margin, 1 - margin]. Discrete actions, which have no margin, stay: IQL's settings ask for one on any data."""
    if dataset.spec.discrete:
        return dataset
    return _with(dataset, f"action_margin {margin:g}", actions=dataset.columns["actions"].clamp(-1.0 + margin, 1.0 - margin))


def normalize_observations(dataset: Dataset, memory: Memory | None = None, in_place: bool = False) -> Dataset:
    """(s - mean) / (std + 1e-3) for observations and their successors, with mean and standard deviation over the rows' observations.

    `in_place`: overwrite the columns of `dataset`, which then takes no second copy of them.
    """
    memory = memory or Memory()
    observations = dataset.columns["observations"].numpy()
    if observations.dtype != np.float32:
        raise UserError(f"dataset.normalize_observations applies to float observations; these are {observations.dtype}")
    rows, flat = len(observations), observations.reshape(len(observations), -1)
    mean = sum((flat[p].sum(0, dtype=np.float64) for p in chunks(rows)), np.zeros(flat.shape[1])) / rows
    square = sum((((flat[p] - mean) ** 2).sum(0) for p in chunks(rows)), np.zeros(flat.shape[1])) / rows
    low, high = mean.astype(np.float32), (np.sqrt(square) + EPSILON).astype(np.float32)
    columns = {}
    for name in ("observations", "next_observations"):
        source = dataset.columns[name].numpy()
        out = source if in_place and source.flags.writeable else memory.empty(name, source.shape, np.float32)
        for part in chunks(rows):
            block = source[part].reshape(-1, flat.shape[1])
            out[part] = ((block - low) / high).reshape(source[part].shape)
        columns[name] = torch.from_numpy(out)
    spec = replace(dataset.spec, observation_mean=tuple(low.tolist()), observation_std=tuple(high.tolist()))
    return replace(_with(dataset, "normalize_observations", **columns), spec=spec)
