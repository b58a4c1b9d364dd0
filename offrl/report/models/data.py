"""Data that world models are measured on besides their own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from offrl.data.dataset import Dataset, DataSpec
from offrl.ope.candidates import recorded
from offrl.settings.compose import compose
from offrl.settings.dataset import DatasetConfig


def reading_of(name: str, values: Mapping[str, Any]) -> DatasetConfig:
    """The settings that read a dataset as recorded. values: dataset.SETTING=value. Raises UserError."""
    plain = {"dataset.normalize_observations": False, **values}  # which bc's defaults are not
    return recorded(compose({**plain, "dataset": name, "algo": "bc", "experiment": "none"}).dataset)


def in_units_of(dataset: Dataset, spec: DataSpec) -> Dataset:
    """Data as recorded, with rewards and observations scaled as `spec`'s data were: what a model of those can be
    measured on.
    """
    columns, data_spec = dict(dataset.columns), dataset.spec
    if (
        data_spec.observation_mean is None
        and spec.observation_mean is not None
        and data_spec.observation_shape == spec.observation_shape
    ):
        mean, std = (
            torch.tensor(x).reshape(spec.observation_shape) for x in (spec.observation_mean, spec.observation_std)
        )
        for name in ("observations", "next_observations"):
            columns[name] = (columns[name] - mean) / std
        data_spec = replace(data_spec, observation_mean=spec.observation_mean, observation_std=spec.observation_std)
    if (data_spec.reward_scale, data_spec.reward_shift) == (1.0, 0.0) != (spec.reward_scale, spec.reward_shift):
        columns["rewards"] = (columns["rewards"].double() * spec.reward_scale + spec.reward_shift).float()
        data_spec = replace(data_spec, reward_scale=spec.reward_scale, reward_shift=spec.reward_shift)
    return replace(dataset, columns=columns, spec=data_spec)
