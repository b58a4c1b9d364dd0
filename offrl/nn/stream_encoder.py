"""The encoder that stands before an algorithm where observations are images or several streams: one vector of them."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from offrl import rng
from offrl.data.dataset import DataSpec
from offrl.nn.encoders import make_image_encoder, random_shift


class StreamEncoder(nn.Module):
    """z = tanh(LayerNorm(W [features of each image, vector, rows of tables])): the trunk of DrQ-v2 (arXiv 2107.09645),
    one for all networks.
    """

    def __init__(self, spec: DataSpec) -> None:
        """Raises UserError for images smaller than the encoder takes."""
        super().__init__()
        assert spec.encoder is not None
        self.shift = spec.encoder.shift
        stacks = {s.name: (s.shape[0], s.shape[1], s.shape[2] * spec.frames) for s in spec.streams if s.image}
        self.names = list(stacks)  # which may hold dots, unlike those of modules
        images = [make_image_encoder(spec.encoder.name, shape) for shape in stacks.values()]
        self.images = nn.ModuleList(images)
        width = sum(module.features for module in images)
        width += sum(math.prod(s.shape) for s in spec.streams if not s.image) + spec.observation_dim
        self.trunk = nn.Sequential(nn.Linear(width, spec.encoder.width), nn.LayerNorm(spec.encoder.width), nn.Tanh())

    def forward(self, observations: Mapping[str, Tensor]) -> Tensor:
        """{stream: [..., H, W, C] uint8 or [..., L]} -> [..., width]."""
        parts = [module(observations[name]) for name, module in zip(self.names, self.images, strict=True)]
        parts += [x for name, x in observations.items() if name not in self.names]
        return self.trunk(torch.cat(parts, -1))

    def shifted(self, observations: Mapping[str, Tensor], key: Tensor) -> dict[str, Tensor]:
        """The same observations with each image shifted by up to `shift` pixels, drawn apart for each [B, H, W, C]."""
        if not self.shift:
            return dict(observations)
        keys = dict(zip(self.names, rng.split(key, max(1, len(self.names))), strict=False))
        return {n: random_shift(x, keys[n], self.shift) if n in keys else x for n, x in observations.items()}
