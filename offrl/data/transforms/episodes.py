"""Datasets of other episodes: several joined, or some of them kept."""

from __future__ import annotations

import hashlib
import math
import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from offrl.data.costs import refuse_costless
from offrl.data.dataset import Dataset
from offrl.data.memory import IN_MEMORY, Memory, chunks
from offrl.data.raw.labels import joined_labels, listed_labels, refuse_other_columns
from offrl.data.store import Store
from offrl.data.text.dataset import shared_strings
from offrl.errors import UserError, nearest
from offrl.tasks.entries import OWN_ORDER


def concatenate(datasets: Sequence[Dataset], memory: Memory = IN_MEMORY) -> Dataset:
    """One dataset after the other. Raises UserError when shapes, action kinds or columns differ.

    Where the action ranges differ, because each was taken from the data, actions are rescaled to the range that covers
    all.
    """
    first = datasets[0]
    kinds = {d.spec.text: d.spec.name for d in datasets}
    if len(kinds) > 1:
        raise UserError(
            f"cannot append data of numbers and of texts to each other: {kinds[True]} holds texts, {kinds[False]} does "
            "not"
        )
    if first.spec.text:
        datasets = shared_strings(datasets)
        first = datasets[0]
    for other in datasets[1:]:
        for aspect, a in _form(first).items():
            if (b := _form(other)[aspect]) != a:
                raise UserError(f"cannot append {other.spec.name} to {first.spec.name}: {aspect} {b} instead of {a}")
        for key in ("observation_columns", "action_columns"):
            failure = f"cannot append {other.spec.name} to {first.spec.name}"
            refuse_other_columns(getattr(first.spec, key), getattr(other.spec, key), failure)
    notes = [n for d in datasets for n in d.notes]
    orders = {d.spec.name: d.spec.task.observation_keys if d.spec.task is not None else () for d in datasets}
    if len(known := {keys: name for name, keys in orders.items() if keys and keys != OWN_ORDER}) > 1:
        (keys, name), (other_keys, other_name) = list(known.items())[:2]
        raise UserError(
            f"cannot append {other_name} to {name}: its observations are joined of {','.join(other_keys)} instead of "
            f"{','.join(keys)}"
        )
    if known and (flat := [name for name, keys in orders.items() if keys not in known]):
        keys, name = next(iter(known.items()))
        notes.append(
            f"the observations of {', '.join(flat)} are taken to be joined of {','.join(keys)} in this order, as "
            f"{name} is"
        )
    labels, numbers = joined_labels([(d.spec.name, d.spec.action_labels) for d in datasets])
    columns = {}
    for name in first.columns:
        parts = [d.columns[name].numpy() for d in datasets]
        if labels and name == "actions":
            parts = [number[values] for number, values in zip(numbers, parts, strict=True)]
        columns[name] = torch.from_numpy(memory.joined(name, parts))
    offsets = np.cumsum([0, *(len(d) for d in datasets[:-1])]).tolist()
    spec = replace(
        first.spec, num_actions=len(labels) or max(d.spec.num_actions for d in datasets), action_labels=labels
    )
    if any(d.spec.action_labels != labels for d in datasets):
        notes.append(f"actions: the choices of all these data are numbered {listed_labels(labels)}")
    if not spec.discrete:
        lows, highs = (np.array([getattr(d.spec, k) for d in datasets]) for k in ("action_low", "action_high"))
        low, high = lows.min(0), highs.max(0)
        for at, dataset, own_low, own_high in zip(offsets, datasets, lows, highs, strict=True):
            if (own_low != low).any() or (own_high != high).any():
                for part in chunks(len(dataset)):
                    actions = columns["actions"][at + part.start : at + part.stop].numpy()
                    raw = own_low + (actions + 1.0) * (own_high - own_low) / 2.0
                    actions[:] = np.clip(2.0 * (raw - low) / (high - low) - 1.0, -1.0, 1.0)
        spec = replace(spec, action_low=tuple(low.tolist()), action_high=tuple(high.tolist()))
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
        notes=tuple(notes),
        mapped=False,
        weights=_joined_weights(datasets),
        stores={name: joined([d.stores[name] for d in datasets], memory, name) for name in first.stores},
    )


def joined(stores: Sequence[Store], memory: Memory, name: str) -> Store:
    """One stream's stores of several datasets as one, in their order."""
    starts = np.cumsum([0, *(len(s.values) for s in stores[:-1])]).tolist()
    return Store(
        torch.from_numpy(memory.joined(name, [s.values.numpy() for s in stores])),
        *(
            torch.cat([getattr(s, numbers) + start for s, start in zip(stores, starts, strict=True)])
            for numbers in ("entries", "following", "first")
        ),
    )


def _form(dataset: Dataset) -> dict[str, Any]:
    """What must be the same in data that are appended to each other."""
    return {
        "observations of shape": list(dataset.spec.observation_shape),
        "actions": "discrete" if dataset.spec.discrete else dataset.spec.action_dim,
        "the columns": sorted(dataset.columns),
        "streams": [f"{s.name} {list(s.shape)}" for s in dataset.spec.streams],
    }


def _joined_weights(datasets: Sequence[Dataset]) -> Tensor | None:
    """Each part keeps its share of the draws, which is that of its rows: weights have mean 1 over a part's rows."""
    if all(d.weights is None for d in datasets):
        return None
    if any(d.weights is not None and len(d.weights) > d.num_episodes for d in datasets):
        return torch.cat([d.row_weights() for d in datasets])
    return torch.cat(
        [torch.ones(d.num_episodes, dtype=torch.float64) if d.weights is None else d.weights for d in datasets]
    )


def keep_episodes(dataset: Dataset, episodes: Tensor, note: str, memory: Memory = IN_MEMORY) -> Dataset:
    """The episodes with the given numbers (int64), in that order."""
    lengths, rows = dataset.episode_lengths()[episodes], dataset.rows_of(episodes)
    ends = torch.cumsum(lengths, 0)
    columns = {
        name: torch.from_numpy(memory.taken(name, column.numpy(), rows.numpy()))
        for name, column in dataset.columns.items()
    }
    return replace(
        dataset,
        columns=columns,
        episode_start=ends - lengths,
        episode_end=ends,
        raw_returns=dataset.raw_returns[episodes],
        complete=dataset.complete[episodes],
        transforms=(*dataset.transforms, note),
        mapped=False,
        weights=_kept_weights(dataset, episodes, lengths),
        stores={name: store.take(rows) for name, store in dataset.stores.items()},
    )


def _kept_weights(dataset: Dataset, episodes: Tensor, lengths: Tensor) -> Tensor | None:
    """The weights of some episodes, of mean 1 over their rows again. Raises UserError where none of them would be
    drawn.
    """
    if dataset.weights is None:
        return None
    if len(dataset.weights) > dataset.num_episodes:
        episodes = dataset.rows_of(episodes)
        lengths = torch.ones_like(episodes)
    weights = dataset.weights[episodes]
    total = (weights * lengths).sum()
    if not float(total) > 0.0:
        raise UserError(
            f"{dataset.spec.name}: the weighting of these data draws none of the episodes that are to be kept"
        )
    return weights * (lengths.sum() / total)


def share_of(share: float, count: int) -> int:
    """The number of `count` that a share is, one at least."""
    return max(1, int(share * count + 1e-9))


def best_share(returns: np.ndarray, share: float) -> np.ndarray:
    """The numbers of the share of episodes with the best returns [E], ascending; of equals the earlier one."""
    return np.sort(np.argsort(-returns, kind="stable")[: share_of(share, len(returns))])


def random_share(count: int, share: float, seed: int) -> np.ndarray:
    """The numbers of a share of `count` episodes drawn at random, ascending. The same on every machine."""
    return np.sort(np.random.Generator(np.random.PCG64(seed)).permutation(count)[: share_of(share, count)])


def subsample(dataset: Dataset, fraction: float, seed: int = 0, memory: Memory = IN_MEMORY) -> Dataset:
    """max(1, floor(fraction * episodes)) episodes drawn at random, in their old order. The same on every machine."""
    numbers = random_share(dataset.num_episodes, fraction, seed)
    return keep_episodes(dataset, torch.from_numpy(numbers), f"subsample {fraction:g} seed {seed}", memory)


def split(dataset: Dataset, fraction: float, second: bool, seed: int = 0, memory: Memory = IN_MEMORY) -> Dataset:
    """The first of two parts of the episodes, a share `fraction` of each third of them by return, or the second; in
    their old order.

    The same on every machine. Raises UserError where a part would be empty.
    """
    count = dataset.num_episodes
    ranks = np.argsort(dataset.raw_returns.double().cpu().numpy(), kind="stable")
    generator = np.random.Generator(np.random.PCG64(seed))
    permutations = [generator.permutation(third) for third in np.array_split(ranks, 3)]
    # the first `n` of a sequence that goes through the thirds in turn: each gives its share, rounded by less than one
    # episode
    order = sorted(
        (position / len(third), t, episode)
        for t, third in enumerate(permutations)
        for position, episode in enumerate(third.tolist())
    )
    first = [episode for _, _, episode in order[: round(fraction * count)]]
    if not 0 < len(first) < count:
        raise UserError(
            f"dataset.split={fraction:g} leaves a part of the {count} episodes of {dataset.spec.name} empty"
        )
    chosen = sorted(set(range(count)) - set(first)) if second else sorted(first)
    note = f"split {fraction:g} seed {seed} {'second' if second else 'first'}"
    return keep_episodes(dataset, torch.tensor(chosen), note, memory)


def terminated_only(dataset: Dataset, memory: Memory = IN_MEMORY) -> Dataset:
    """The episodes whose last step is terminal. Raises UserError where there is none."""
    terminal = torch.nonzero(dataset.columns["terminations"].cpu()[dataset.episode_end.cpu() - 1]).squeeze(-1)
    if not len(terminal):
        raise UserError(f"dataset.terminated_only=true: no episode of {dataset.spec.name} terminates; leave it out")
    return keep_episodes(dataset, terminal, "terminated_only", memory)


QUANTITIES: dict[str, Callable[[Dataset], Tensor]] = {
    "cost": Dataset.episode_costs,
    "return": Dataset.episode_returns,
    "length": lambda dataset: dataset.episode_lengths().double().cpu(),
}
COMPARISONS = {"<=": operator.le, ">=": operator.ge, "<": operator.lt, ">": operator.gt}


def keep(dataset: Dataset, condition: str, memory: Memory = IN_MEMORY) -> Dataset:
    """The episodes of which `condition` holds: "cost <= 20", or several joined by " and ", of undiscounted sums.
    BC-Safe imitates these (arXiv 2306.09303).

    Raises UserError for another form, data without costs, and where no episode is left.
    """
    mask = torch.ones(dataset.num_episodes, dtype=torch.bool)
    for part in condition.split(" and "):
        match = re.fullmatch(r"\s*([a-z]+)\s*(<=|>=|<|>)\s*(\S+)\s*", part)
        name, sign, text = match.groups() if match else ("", "", "")
        try:
            number = float(text)
        except ValueError:
            number = math.nan
        if name not in QUANTITIES or math.isnan(number):
            hint = nearest(name, QUANTITIES) if name and name not in QUANTITIES else ""
            raise UserError(f'dataset.keep={condition}: "{part.strip()}" is no condition such as "cost <= 20".{hint}')
        if name == "cost":
            refuse_costless(dataset, f"dataset.keep={condition}")
        values = QUANTITIES[name](dataset)
        mask &= COMPARISONS[sign](values, number)
        if not mask.any():
            raise UserError(
                f"dataset.keep={condition} leaves no episode of {dataset.spec.name}: the {name}s of its episodes lie "
                f"between {values.min():.6g} and {values.max():.6g}"
            )
    return keep_episodes(dataset, torch.nonzero(mask).squeeze(-1), f"keep {condition}", memory)


def top_fraction(dataset: Dataset, fraction: float, memory: Memory = IN_MEMORY) -> Dataset:
    """The best max(1, floor(fraction * episodes)) episodes by undiscounted return, in their old order; of equals the
    earlier one.
    """
    numbers = best_share(dataset.episode_returns().numpy(), fraction)
    return keep_episodes(dataset, torch.from_numpy(numbers), f"top_fraction {fraction:g}", memory)
