"""Semi-supervised data (SS-ORL, arXiv 2210.06518): actions that nobody recorded are labelled by an inverse-dynamics
model.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from offrl.data.arrays import from_arrays
from offrl.data.dataset import Dataset, DataSpec
from offrl.data.loading.assemble import assemble
from offrl.data.loading.read import read_raw
from offrl.data.loading.resolve import resolve
from offrl.data.memory import IN_MEMORY, Memory, chunks
from offrl.data.raw import RawData
from offrl.data.transforms.episodes import concatenate, keep_episodes, share_of
from offrl.errors import UserError, some
from offrl.registry import register
from offrl.relabel.inverse_dynamics import InverseSettings, learn
from offrl.settings.dataset import DatasetConfig
from offrl.settings.field import check
from offrl.system.files import cache_dir
from offrl.system.locks import once

LAYOUT = 1  # raise it when the same data and settings give other labels
ACTION = ("action_dim", "discrete", "num_actions", "action_low", "action_high")


@register("transform", "label_actions")
def complete(
    dataset: Dataset, config: DatasetConfig, memory: Memory = IN_MEMORY, device: str = "cpu", quiet: bool = False
) -> Dataset:
    """Label and append the episodes without actions that `dataset.labelled_fraction` and `dataset.action_free` ask
    for.
    """
    action_free = []
    if config.labelled_fraction < 1.0:
        dataset, hidden = split_labelled(
            dataset, config.labelled_fraction, config.labelled_quantile, config.labelled_seed
        )
        action_free.append(hidden)
    action_free += [read_action_free(name, config, dataset.spec, memory) for name in config.action_free]
    settings = InverseSettings(
        members=config.action_free_members,
        updates=config.action_free_updates,
        hidden=list(config.action_free_hidden),
        seed=config.action_free_seed,
    )
    cache = cache_dir(config.cache_dir) / "actions"
    return label_actions(dataset, action_free, settings, cache=cache, device=device, quiet=quiet, memory=memory)


def read_action_free(name: str, config: DatasetConfig, like: DataSpec, memory: Memory = IN_MEMORY) -> Dataset:
    """A dataset whose actions are missing, or are not looked at: zeros stand for them. like: of the labelled data.

    Raises UserError for what cannot be read, and where rewards are missing and nothing labels them.
    """
    config = config.of_any_layout("actions")
    source = resolve(name, config)
    if source.loader is not None:
        raw = source.loader(config)
        if isinstance(raw, Dataset):
            return replace(raw, columns={**raw.columns, "actions": torch.from_numpy(_no_actions(len(raw), like))})
    else:
        raw = read_raw(source.name, config, memory, source, ("actions", "rewards"))
    if not isinstance(raw, RawData):
        raise UserError(
            f"the registered dataset '{source.name}' returned {type(raw).__name__}, not a Dataset or RawData"
        )
    if "rewards" not in raw.columns:
        if config.reward_labels is None:
            raise UserError(
                f"{raw.where} has no rewards: say which key they have with dataset.fields.rewards=, or which function "
                "gives them with dataset.reward_labels=file.py:function"
            )
        raw.columns["rewards"] = np.zeros(raw.rows, np.float32)
    raw.columns["actions"] = _no_actions(raw.rows, like)
    raw.discrete, raw.num_actions = like.discrete, like.num_actions
    raw.action_low, raw.action_high = (None, None) if like.discrete else (-1.0, 1.0)
    return assemble(raw, config, memory)


def _no_actions(rows: int, like: DataSpec) -> np.ndarray:
    return np.zeros(rows, np.int64) if like.discrete else np.zeros((rows, like.action_dim), np.float32)


def split_labelled(dataset: Dataset, fraction: float, quantile: float = 1.0, seed: int = 0) -> tuple[Dataset, Dataset]:
    """(labelled, action-free): SS-ORL's protocol for making semi-supervised data of labelled ones.

    max(1, floor(fraction * episodes)) episodes are labelled, drawn at random from the share `quantile` of all with the
    lowest returns; the others, whose actions are to be ignored, are action-free. Both keep the order of the episodes.
    Raises UserError for shares that do not fit, or when no episode is left for one side.
    """
    total = dataset.num_episodes
    count, low = share_of(fraction, total), int(quantile * total + 1e-9)
    if not 0.0 < fraction < 1.0 or count > low or count == total:
        raise UserError(
            f"{dataset.spec.name}: {count} of {total} episodes are to be labelled "
            f"(dataset.labelled_fraction={fraction}), drawn from the {low} with the lowest returns "
            f"(dataset.labelled_quantile={quantile}): choose shares that leave episodes on both sides"
        )
    order = np.argsort(dataset.raw_returns.numpy(), kind="stable")[:low]
    numbers = np.sort(np.random.Generator(np.random.PCG64(seed)).permutation(order)[:count])
    remaining = np.setdiff1d(np.arange(total), numbers)
    description = f"labelled {fraction:g} of the lowest {quantile:g} seed {seed}"
    return keep_episodes(dataset, torch.from_numpy(numbers), description), keep_episodes(
        dataset, torch.from_numpy(remaining), f"not {description}"
    )


def label_actions(
    dataset: Dataset,
    unlabelled: Dataset | Sequence[Dataset],
    settings: InverseSettings | None = None,
    *,
    cache: Path | None = None,
    device: str = "cpu",
    quiet: bool = False,
    memory: Memory = IN_MEMORY,
) -> Dataset:
    """`dataset` with the episodes of `unlabelled` appended, whose actions are replaced by an inverse-dynamics
    ensemble's.

    dataset: before observations are normalised; its actions are what the ensemble learns from. unlabelled: of the same
    spaces; see `action_free_dataset` for arrays without actions. cache: a folder that keeps the labels under a key of
    everything they depend on, so that the next call finds the same ones. Raises UserError for spaces that differ and
    for image observations.
    """
    settings, action_free = (
        settings or InverseSettings(),
        [unlabelled] if isinstance(unlabelled, Dataset) else list(unlabelled),
    )
    check(settings, "")
    for other in action_free:
        _check_fit(dataset, other)
    if settings.members == 0 or not action_free:
        count = sum(d.num_episodes for d in action_free)
        return (
            replace(dataset, notes=(*dataset.notes, f"{count:,} action-free episodes are left out"))
            if count
            else dataset
        )
    key = _key(dataset, action_free, settings)

    def make() -> tuple[dict[str, Tensor], dict[str, str]]:
        predicted, note = learn(dataset, action_free, settings, torch.device(device), quiet)
        return {"actions": predicted}, {"note": note}

    path = None if cache is None else cache / f"{key[:24]}.safetensors"
    tensors, meta = once(path, make, "the labels of the action-free data", quiet)
    shared = set(dataset.columns).intersection(*(d.columns for d in action_free))
    lacking = sorted(set(dataset.columns) - shared)
    actions = {name: getattr(dataset.spec, name) for name in ACTION}
    parts = [replace(dataset, columns={k: v for k, v in dataset.columns.items() if k in shared})]
    for other, labels in zip(action_free, tensors["actions"].split([len(d) for d in action_free]), strict=True):
        columns = {k: labels if k == "actions" else other.columns[k] for k in parts[0].columns}
        parts.append(replace(other, columns=columns, spec=replace(other.spec, **actions), weights=None))
    prints = [
        *(d.fingerprint for d in (dataset, *action_free)),
        *(t for d in (dataset, *action_free) for t in d.transforms),
        _plain(settings),
    ]
    names = ", ".join(dict.fromkeys(d.spec.name for d in action_free))
    joined = concatenate(parts, memory)
    return replace(
        joined,
        fingerprint=hashlib.sha256(" ".join(prints).encode()).hexdigest(),
        transforms=(
            *dataset.transforms,
            f"actions of {sum(d.num_episodes for d in action_free)} episodes of {names} labelled",
        ),
        notes=(
            *joined.notes,
            meta["note"],
            *(f"the action-free data lack the column '{c}', which is left out" for c in lacking),
        ),
    )


def action_free_dataset(like: DataSpec, **arrays: Any) -> Dataset:
    """A dataset for `label_actions` from arrays without actions: observations, rewards, ... as `from_arrays` takes
    them.

    like: the spec of the labelled data.
    """
    ranges: dict[str, Any] = (
        {"num_actions": like.num_actions} if like.discrete else {"action_low": -1.0, "action_high": 1.0}
    )
    values: dict[str, Any] = {"name": "action-free", **ranges, **arrays}
    return from_arrays(actions=_no_actions(len(arrays["observations"]), like), **values)


def _check_fit(dataset: Dataset, other: Dataset) -> None:
    for data in (dataset, other):
        if not data.spec.observation_dim:
            raise UserError(
                f"{data.spec.name}: actions can be labelled from observations of numbers only; these are "
                f"{some(data.stores)}: leave out dataset.labelled_fraction and dataset.action_free, or name numbers as "
                "well, dataset.observation_keys=[...]"
            )
        if data.spec.observation_mean is not None:
            raise UserError(f"{data.spec.name}: label actions before observations are normalised")
    shape, other_shape = list(dataset.spec.observation_shape), list(other.spec.observation_shape)
    if shape != other_shape:
        raise UserError(
            f"cannot label {other.spec.name} by {dataset.spec.name}: its observations have shape {other_shape} instead "
            f"of {shape}"
        )


def _plain(settings: InverseSettings) -> str:
    return json.dumps([LAYOUT, asdict(settings)], sort_keys=True)


def _key(dataset: Dataset, action_free: Sequence[Dataset], settings: InverseSettings) -> str:
    """A hash of everything that the labels depend on: the columns' bytes, the episodes and the settings."""
    digest = hashlib.sha256(_plain(settings).encode())
    digest.update(repr([getattr(dataset.spec, name) for name in ACTION]).encode())
    for data in (dataset, *action_free):
        names = ["observations", "next_observations", "successor_known"] + (["actions"] if data is dataset else [])
        for column in (*(data.columns[name] for name in names), data.episode_start):
            values = column.numpy()
            digest.update(f"{values.dtype.str} {values.shape} ".encode())
            for part in chunks(len(values)):
                digest.update(np.ascontiguousarray(values[part]).data)
    return digest.hexdigest()
