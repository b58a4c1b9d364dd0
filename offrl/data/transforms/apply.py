"""The transforms that a dataset's settings ask for, in their fixed order: pure functions from `Dataset` to
`Dataset`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from offrl import registry
from offrl.data.dataset import Dataset
from offrl.data.fit import with_entries, without_streams
from offrl.data.memory import IN_MEMORY, Memory
from offrl.data.text.dataset import refuse_settings
from offrl.data.transforms.columns import (
    add_returns_to_go,
    clip_to_margin,
    normalize_observations,
    normalize_rewards,
    scale_by_return_range,
    scale_rewards,
)
from offrl.data.transforms.demonstrations import add_expert
from offrl.data.transforms.episodes import concatenate, keep, split, subsample, terminated_only, top_fraction
from offrl.data.transforms.history import with_history
from offrl.data.transforms.imagined import IMAGINED, add_imagined
from offrl.data.transforms.multitask import as_tasks
from offrl.data.transforms.reward_labels import label_costs, label_rewards
from offrl.data.transforms.sources import share_draws
from offrl.data.transforms.stitch import add_clusters
from offrl.data.transforms.weights import weight_episodes
from offrl.errors import UserError
from offrl.settings.dataset import DatasetConfig


def apply_transforms(
    datasets: Sequence[Dataset],
    config: DatasetConfig,
    memory: Memory = IN_MEMORY,
    owned: bool = False,
    device: str = "cpu",
    quiet: bool = False,
) -> Dataset:
    """Concatenate, split, subsample, label actions, append, label rewards and costs, keep some, weights, rewards,
    returns to go, action margin, observation normalisation: as far as `config` asks.

    `owned`: nobody else has the data, so that observations may be overwritten. `device`, `quiet`: for models that label
    data.
    """
    for text in (d for d in datasets if d.spec.text):
        refuse_settings(config, text.spec.name)
    if config.multitask:
        datasets = as_tasks(datasets)
    dataset = concatenate(datasets, memory) if len(datasets) > 1 else datasets[0]
    if config.split < 1.0:
        dataset = split(dataset, config.split, config.split_part == "second", config.split_seed, memory)
    if config.subsample < 1.0:
        dataset = subsample(dataset, config.subsample, config.subsample_seed, memory)
    if config.labelled_fraction < 1.0 or config.action_free:
        dataset = registry.get("transform", "label_actions")(dataset, config, memory, device, quiet)
    if config.expert is not None:
        dataset = add_expert(dataset, config, memory)
    if config.imagined:
        dataset = add_imagined(dataset, config, memory)
    if config.reward_labels is not None:
        dataset = label_rewards(dataset, config.reward_labels)
    if config.cost_labels is not None:
        dataset = label_costs(dataset, config.cost_labels)
    if config.terminated_only:
        dataset = terminated_only(dataset, memory)
    if config.keep:
        dataset = keep(dataset, config.keep, memory)
    if config.top_fraction < 1.0:
        dataset = top_fraction(dataset, config.top_fraction, memory)
    if config.weighting != "none":
        dataset = weight_episodes(dataset, config.weighting, config.weighting_temperature, config.weighting_fraction)
    if config.imagined_share is not None:
        dataset = share_draws(dataset, config.imagined_share, IMAGINED)
    if config.intervention_share is not None:
        dataset = share_draws(dataset, config.intervention_share, "intervention")
    if config.reward_by_return_range:
        dataset = scale_by_return_range(dataset, config.reward_by_return_range)
    if config.normalize_rewards:
        dataset = normalize_rewards(dataset)
    if config.reward_scale != 1.0 or config.reward_shift != 0.0:
        dataset = scale_rewards(dataset, config.reward_scale, config.reward_shift)
    if config.discount_returns is not None:
        dataset = add_returns_to_go(dataset, config.discount_returns)
    if config.action_margin:
        dataset = clip_to_margin(dataset, config.action_margin)
    if config.normalize_observations:
        dataset = normalize_observations(dataset, memory, owned)
    if config.augment != "none":
        dataset = add_clusters(dataset, config)
    if config.observation_keys:
        dataset = without_streams(dataset, config.observation_keys)
    if (changed := config.changed(("frames", "image_size"))) and not any(s.image for s in dataset.spec.streams):
        raise UserError(
            f"dataset.{changed[0]}={getattr(config, changed[0])} is for images, and {dataset.spec.name} has none; "
            "leave it out"
        )
    if config.frames > 1:
        dataset = replace(dataset, spec=replace(dataset.spec, frames=config.frames))
    if config.changed(DatasetConfig.VIEW[1:]):
        dataset = with_history(dataset, config)
    if config.observation_keys:
        dataset = replace(dataset, spec=with_entries(dataset.spec, config.observation_keys))
    return dataset
