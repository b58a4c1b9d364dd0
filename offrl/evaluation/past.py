"""What policies remember that see stacks of frames, or windows of vectors and actions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from offrl.data.dataset import DataSpec
from offrl.tasks.entries import VECTOR


class Past(NamedTuple):
    """The carry of E episodes of a policy that sees stacks of frames, or windows."""

    # oldest first: images [E, H, W, frames * C] uint8; the vectors of all steps that a window spans, [E, steps * O]
    frames: dict[str, Tensor]
    actions: Tensor  # [E, history_actions, A] as networks take them, oldest first
    fresh: Tensor  # [E] bool: of episodes without an observation so far
    inner: Any  # the actor's own


def window_moments(spec: DataSpec) -> tuple[np.ndarray, np.ndarray] | None:
    """What is subtracted from the raw numbers of a window, and what they are divided by, [W] float32 each: observations
    as the data's, actions from their range to [-1, 1]. None where neither changes anything; without a window
    `observation_moments`.
    """
    moments = spec.observation_moments
    if not spec.windowed:
        return moments
    mean, std = moments or (np.zeros(spec.observation_dim, np.float32), np.ones(spec.observation_dim, np.float32))
    middle, half = np.zeros(spec.encoded_action_dim, np.float32), np.ones(spec.encoded_action_dim, np.float32)
    if not spec.discrete:
        low, high = spec.action_bounds
        half = np.where(high > low, high - low, np.float32(1.0)) / 2
        middle = low + half
    counts = (spec.history, spec.history_actions)
    shift, scale = (
        np.concatenate([np.tile(x, n) for x, n in zip(pair, counts, strict=True)])
        for pair in ((mean, middle), (std, half))
    )
    return shift, scale


def begin(episodes: int, spec: DataSpec, inner: Any) -> Past:
    """The carry before the first observations."""
    stacks = {s.name: (*s.shape[:-1], s.shape[-1] * spec.frames) for s in spec.streams if s.image}
    frames = {name: torch.zeros(episodes, *shape, dtype=torch.uint8) for name, shape in stacks.items()}
    if spec.windowed:
        steps = (spec.history - 1) * spec.history_stride + 1
        frames[VECTOR] = torch.zeros(episodes, steps * spec.observation_dim)
    actions = torch.zeros(episodes, spec.history_actions, spec.encoded_action_dim)
    return Past(frames, actions, torch.ones(episodes, dtype=torch.bool), inner)


def push(past: Past, observed: Mapping[str, Tensor], spec: DataSpec) -> tuple[dict[str, Tensor], Past]:
    """(what the policy sees, the next carry): each image's stack with the newest frame [E, H, W, C] at its end, and the
    window up to the newest vector [E, O]. An episode's first frame and vector fill them, and actions before it are 0.
    """
    frames, visible = {}, {**observed}
    for name, old in past.frames.items():
        new = observed[name]
        repeated = new.repeat(*[1] * (new.ndim - 1), old.shape[-1] // new.shape[-1])
        shifted = torch.cat([old[..., new.shape[-1] :], new], -1)
        visible[name] = frames[name] = torch.where(past.fresh.reshape(-1, *[1] * (new.ndim - 1)), repeated, shifted)
    actions = torch.where(past.fresh.reshape(-1, 1, 1), 0.0, past.actions)
    if spec.windowed:
        vectors = frames[VECTOR].unflatten(-1, (-1, spec.observation_dim))[:, :: spec.history_stride]
        visible[VECTOR] = torch.cat([vectors.flatten(1), actions.flatten(1)], -1)
    return visible, past._replace(frames=frames, actions=actions, fresh=torch.zeros_like(past.fresh))


def acted(past: Past, actions: Tensor, spec: DataSpec) -> Past:
    """The carry once `actions`, [E, A] or [E] int64 as the data have them, were played."""
    played = spec.encode(actions if spec.discrete else actions.clamp(-1.0, 1.0)).unsqueeze(1)
    return past._replace(actions=torch.cat([past.actions, played], 1)[:, 1:])
