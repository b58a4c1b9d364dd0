"""Images of vectors: the decoder of an autoencoder."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from offrl.data.dataset import DataSpec
from offrl.nn.encoders.images import Shape, scaled_channels


class ImageDecoder(nn.Module):
    """z [..., Z] -> images [..., H, W, C] in 0..1, as DreamerV3's decoder (arXiv 2301.04104): a linear layer to a small
    image, RMS normalisation over the channels, SiLU; then three or four times each pixel is doubled along both edges,
    and there is a convolution 5x5, normalised likewise but for the last, which a sigmoid follows. Odd sizes are cut.
    """

    def __init__(self, width: int, shape: Shape, *, depth: int = 16) -> None:
        super().__init__()
        self.height, self.width, channels = shape
        stages = 4 if min(shape[:2]) >= 48 else 3
        sizes = [depth * m for m in (4, 4, 3, 2)[-stages:]]
        self.small = (sizes[0], *(-(-n // 2**stages) for n in shape[:2]))
        self.entry = nn.Linear(width, self.small[0] * self.small[1] * self.small[2])
        self.layers = nn.ModuleList(nn.Conv2d(i, o, 5, padding=2) for i, o in pairwise([*sizes, channels]))
        self.scales = nn.ParameterList(torch.ones(o) for o in sizes)

    def forward(self, z: Tensor) -> Tensor:
        x = self.entry(z).reshape(-1, *self.small)
        for layer, scale in zip(self.layers, self.scales, strict=True):
            x = F.silu(scaled_channels(x, scale))
            x = layer(x.repeat_interleave(2, -2).repeat_interleave(2, -1))
        return torch.sigmoid(x[..., : self.height, : self.width]).movedim(-3, -1).unflatten(0, z.shape[:-1])


class StreamDecoder(nn.Module):
    """z [..., Z] -> images for each stream of `spec` that is one, stacks of frames included, by its name."""

    def __init__(self, width: int, spec: DataSpec, *, depth: int = 16) -> None:
        super().__init__()
        self.names = [s.name for s in spec.streams if s.image]
        shapes = [(s.shape[0], s.shape[1], s.shape[2] * spec.frames) for s in spec.streams if s.image]
        self.images = nn.ModuleList(ImageDecoder(width, shape, depth=depth) for shape in shapes)

    def forward(self, z: Tensor) -> dict[str, Tensor]:
        return {name: decoder(z) for name, decoder in zip(self.names, self.images, strict=True)}
