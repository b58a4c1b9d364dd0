"""The modules of the latent model, for vectors or for images with numbers beside them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from offrl.algorithm import DataSpec
from offrl.families.sac import LogWeight
from offrl.nn.encoders.decoder import StreamDecoder
from offrl.nn.encoders.streams import StreamFeatures
from offrl.nn.heads import symlog
from offrl.world_models.recurrent.distributions import latent_kind
from offrl.world_models.recurrent.networks import HEAD, BlockGRU, PriorHeads, head, layers
from offrl.world_models.recurrent.scan import ScanCore
from offrl.world_models.recurrent.settings import LatentConfig


class StreamEmbedding(StreamFeatures):
    """Features of images beside three layers of the numbers, in symlog units."""

    def __init__(self, spec: DataSpec, width: int, depth: int) -> None:
        assert spec.encoder is not None
        super().__init__(spec, **({"depth": depth} if spec.encoder.name == "dreamer" else {}))
        self.layers = layers(self.numbers, width, 3) if self.numbers else None
        self.out_dim = self.features + width * (self.numbers > 0)

    def forward(self, observations: Mapping[str, Tensor]) -> Tensor:
        """{stream: [..., H, W, C] uint8 or [..., L]} -> [..., out_dim]."""
        parts = self.image_features(observations)
        if self.layers is not None:
            parts.append(self.layers(symlog(torch.cat(self.vectors(observations), -1))))
        return torch.cat(parts, -1)


class ObservationDecoder(nn.Module):
    """Images in 0..1 by the names of their streams, and the numbers beside them (None without any) in symlog units."""

    def __init__(self, features: int, spec: DataSpec, numbers: int, width: int, depth: int) -> None:
        super().__init__()
        self.images = StreamDecoder(features, spec, depth=depth)
        self.numbers = head(features, width, 3, numbers) if numbers else None

    def forward(self, features: Tensor) -> tuple[dict[str, Tensor], Tensor | None]:
        """[..., F] -> {stream: [..., H, W, C]}, [..., L]."""
        return self.images(features), None if self.numbers is None else self.numbers(features)


def feature_size(config: LatentConfig) -> int:
    """How many numbers of a latent state heads read."""
    return config.recurrent_width + latent_kind(config).size


def recurrent_core(config: LatentConfig, action_dim: int) -> nn.Module:
    """The network of the recurrent state."""
    c, sample = config, latent_kind(config).size
    if c.core == "scan":
        return ScanCore(c.recurrent_width, sample, action_dim, c.blocks, c.scan_states, c.scan_layers)
    return BlockGRU(c.recurrent_width, sample, action_dim, c.width, c.blocks)


def model_networks(config: LatentConfig, spec: DataSpec) -> dict[str, nn.Module]:
    """The modules of the latent model."""
    c, features, outputs = config, feature_size(config), latent_kind(config).outputs
    streams = StreamEmbedding(spec, c.width, c.depth) if spec.streams else None
    embedded = c.width if streams is None else streams.out_dim
    networks: dict[str, nn.Module] = {
        "encoder": streams or layers(spec.observation_dim, c.width, 3),
        "dynamics": recurrent_core(c, spec.action_dim),
        "prior": PriorHeads(c.members, c.recurrent_width, c.width, outputs),
        "posterior": head(embedded + c.recurrent_width * (c.core == "gru"), c.width, 1, outputs),
        "reward": head(features, c.width, 1, HEAD.out_dim, 0.0),
        "continuation": head(features, c.width, 1, 1),
    }
    if c.objective == "information":
        contrast, inverse = (
            nn.Linear(features, embedded, bias=False),
            head(2 * features, c.width, 2, 2 * spec.action_dim),
        )
        return {**networks, "contrast": contrast, "inverse": inverse, "multiplier": LogWeight(c.contrast_weight)}
    if c.objective == "bottleneck":
        return {**networks, "multiplier": LogWeight(c.kl_weight)}
    if streams is None:
        return {**networks, "decoder": head(features, c.width, 3, spec.observation_dim)}
    return {**networks, "decoder": ObservationDecoder(features, spec, streams.numbers, c.width, c.depth)}
