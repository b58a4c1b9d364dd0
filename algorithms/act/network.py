"""ACT's network for observations that are vectors (arXiv 2304.13705, appendix C). Shapes in comments: B batch, k
actions in a chunk, T and S tokens, W width, H heads, L numbers in a latent."""

from __future__ import annotations

import math
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from offrl import rng
from offrl.nn.mlp import Linear, initialise
from offrl.nn.transformer import Norm, attend, drop


def waves(count: int, width: int, device: torch.device) -> Tensor:
    """Positions 0 to count - 1 as [count, W]: sines in even places, cosines of the same wavelength in the odd ones
    ("Attention Is All You Need", arXiv 1706.03762, section 3.5)."""
    pair = torch.arange(width, device=device) // 2
    angle = torch.arange(count, device=device).unsqueeze(-1) * torch.exp(-math.log(10_000.0) * 2.0 * pair / width)
    return torch.where(torch.arange(width, device=device) % 2 == 0, angle.sin(), angle.cos())


class HeadsAttention(nn.Module):
    """Attention of several heads of queries x [B, T, W] to keys [B, S, W] and values [B, S, W] -> [B, T, W]."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.v, self.out = (Linear(width, width, "xavier") for _ in range(3))
        self.k = nn.Parameter(torch.empty(width, width))  # a bias of keys would not change what the softmax gives
        initialise(self.k.data, None, "xavier")

    def forward(
        self, x: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, rate: float, key: Tensor | None
    ) -> Tensor:
        q, k, v = (
            y.unflatten(-1, (self.heads, -1)).transpose(-2, -3)
            for y in (self.q(x), F.linear(keys, self.k), self.v(values))
        )
        return self.out(attend(q, k, v, mask, rate, key).transpose(-2, -3).flatten(-2))


class PlacedLayer(nn.Module):
    """A post-norm layer of DETR (arXiv 2005.12872): places are added to queries and keys, not to values, in every
    layer. Attention of the tokens to one another; in a decoder, to others; an MLP (ReLU). Each is added to its input,
    and the sum is normalised."""

    def __init__(self, width: int, heads: int, feed_forward: int, dropout: float, *, own: bool, decodes: bool) -> None:
        """own: its tokens attend to one another. decodes: they attend to others."""
        super().__init__()
        self.rate = dropout
        self.own = HeadsAttention(width, heads) if own else None
        self.own_norm = Norm(width) if own else None
        self.other = HeadsAttention(width, heads) if decodes else None
        self.other_norm = Norm(width) if decodes else None
        self.up, self.down, self.norm = (
            Linear(width, feed_forward, "xavier"),
            Linear(feed_forward, width, "xavier"),
            Norm(width),
        )

    def forward(
        self,
        x: Tensor,
        places: Tensor,
        mask: Tensor | None,
        key: Tensor | None,
        other: Tensor | None = None,
        other_places: Any = 0.0,
    ) -> Tensor:
        """x [B, T, W], places [T, W], mask bool [B, 1, 1, T]: tokens that are no padding -> [B, T, W]. other [B, S, W],
        other_places [S, W]."""
        own_key, other_key = (None, None) if key is None else rng.split(key, 2)
        if self.own is not None and self.own_norm is not None:
            placed = x + places
            x = self.own_norm(x + drop(self.own(placed, placed, x, mask, self.rate, own_key), self.rate, key, 1))
        if self.other is not None and self.other_norm is not None and other is not None:
            y = self.other(x + places, other + other_places, other, None, self.rate, other_key)
            x = self.other_norm(x + drop(y, self.rate, key, 2))
        y = drop(F.relu(self.up(x)), self.rate, key, 3)
        return self.norm(x + drop(self.down(y), self.rate, key, 4))


class ChunkAutoencoder(nn.Module):
    """Chunks of actions given an observation, and in training a latent of the chunk itself.

    The posterior reads a learnt token, the observation and the chunk, with places as `waves`. The encoder reads the
    latent and the observation, with learnt places. The decoder's tokens have k learnt places and attend to the
    encoder's. In the code they begin as zeros, whose attention to one another gives one vector for all of them in the
    first layer: here it is a parameter.
    """

    def __init__(
        self,
        obs_dim: int,
        action_dim: int,
        length: int,
        latent: int,
        width: int,
        heads: int,
        feed_forward: int,
        layers: int,
        decoder_layers: int,
        dropout: float,
    ) -> None:
        super().__init__()

        def stacked(count: int, decodes: bool) -> nn.ModuleList:
            sizes = (width, heads, feed_forward, dropout)
            return nn.ModuleList(PlacedLayer(*sizes, own=i > 0 or not decodes, decodes=decodes) for i in range(count))

        self.latent = latent
        self.first = nn.Parameter(torch.randn(width))
        self.read_observation, self.read_action, self.spread = (
            Linear(obs_dim, width),
            Linear(action_dim, width),
            Linear(width, 2 * latent),
        )
        self.posterior = stacked(layers, False)
        self.observation, self.code = Linear(obs_dim, width), Linear(latent, width)
        self.input_places, self.places = nn.Parameter(torch.randn(2, width)), nn.Parameter(torch.randn(length, width))
        self.begin = nn.Parameter(torch.zeros(width))
        self.encoder, self.decoder, self.norm = stacked(layers, False), stacked(decoder_layers, True), Norm(width)
        self.head = Linear(width, action_dim)

    def forward(
        self,
        observations: Tensor,
        latent: Tensor | None = None,
        actions: Tensor | None = None,
        valid: Tensor | None = None,
        key: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Chunks [B, k, A], and mean and log variance [B, L] of the latent: of its posterior given actions [B, k, A],
        of which `valid` bool [B, k] are no padding. Without them the latent [B, L] itself, by default 0. With a key
        there is dropout, and a latent is drawn."""
        keys: Any = (None,) * 4 if key is None else rng.split(key, 4)
        if actions is None or valid is None:
            mean = observations.new_zeros(observations.shape[0], self.latent) if latent is None else latent
            log_variance = torch.zeros_like(mean)
        else:
            mean, log_variance = self.encode(observations, actions, valid, keys[0])
            latent = mean if key is None else mean + (0.5 * log_variance).exp() * rng.normal(keys[1], tuple(mean.shape))
        return self.decode(observations, mean if latent is None else latent, keys[2], keys[3]), mean, log_variance

    def encode(self, observations: Tensor, actions: Tensor, valid: Tensor, key: Tensor | None) -> tuple[Tensor, Tensor]:
        """Mean and log variance [B, L]."""
        read = self.read_observation(observations).unsqueeze(-2)
        x = torch.cat([self.first.expand_as(read), read, self.read_action(actions)], -2)
        mask = F.pad(valid, (2, 0), value=True).unsqueeze(-2).unsqueeze(-2)
        x = through(self.posterior, x, waves(x.shape[-2], x.shape[-1], x.device), mask, key)
        mean, log_variance = self.spread(x[..., 0, :]).chunk(2, -1)
        return mean, log_variance

    def decode(self, observations: Tensor, latent: Tensor, key: Tensor | None, decoder_key: Tensor | None) -> Tensor:
        """[B, k, A]"""
        memory = torch.stack([self.code(latent), self.observation(observations)], -2)
        memory = through(self.encoder, memory, self.input_places, None, key)
        x = self.begin.expand(*memory.shape[:-2], *self.places.shape)
        return self.head(self.norm(through(self.decoder, x, self.places, None, decoder_key, memory, self.input_places)))


def through(
    layers: nn.ModuleList, x: Tensor, places: Tensor, mask: Tensor | None, key: Tensor | None, *other: Tensor
) -> Tensor:
    """x [B, T, W] after all layers, each with its own dropout."""
    for i, layer in enumerate(layers):
        x = cast(PlacedLayer, layer)(x, places, mask, None if key is None else rng.fold_in(key, i), *other)
    return x
