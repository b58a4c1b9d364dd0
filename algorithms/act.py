"""ACT: "Learning Fine-Grained Bimanual Manipulation with Low-Cost Hardware" (Zhao et al., 2023, arXiv 2304.13705), for
observations that are vectors."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from offrl import rng
from offrl.algorithm import Adam, Algorithm, Batch, Loss, Params, TrainState, Traits, Update
from offrl.data.samplers.chunks import VALID, ChunkSampler
from offrl.errors import UserError
from offrl.families.generative.chunks import action_steps_field, length_field
from offrl.families.generative.ensembling import EnsemblingActor, ensemble_field
from offrl.nn.mlp import Linear, initialise
from offrl.nn.transformer import Norm, attend, drop
from offrl.registry import register
from offrl.settings.field import setting


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

    def __init__(
        self, width: int, heads: int, feed_forward: int, dropout: float, *, self_attention: bool, decodes: bool
    ) -> None:
        """self_attention: its tokens attend to one another. decodes: they attend to others."""
        super().__init__()
        self.rate = dropout
        self.own = HeadsAttention(width, heads) if self_attention else None
        self.own_norm = Norm(width) if self_attention else None
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
        positions: Tensor,
        mask: Tensor | None,
        key: Tensor | None,
        other: Tensor | None = None,
        other_positions: Any = 0.0,
    ) -> Tensor:
        """x [B, T, W], places [T, W], mask bool [B, 1, 1, T]: tokens that are no padding -> [B, T, W]. other [B, S, W],
        other_places [S, W]."""
        own_key, other_key = (None, None) if key is None else rng.split(key, 2)
        if self.own is not None and self.own_norm is not None:
            placed = x + positions
            x = self.own_norm(x + drop(self.own(placed, placed, x, mask, self.rate, own_key), self.rate, key, 1))
        if self.other is not None and self.other_norm is not None and other is not None:
            y = self.other(x + positions, other + other_positions, other, None, self.rate, other_key)
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
            return nn.ModuleList(
                PlacedLayer(*sizes, self_attention=i > 0 or not decodes, decodes=decodes) for i in range(count)
            )

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
    layers: nn.ModuleList, x: Tensor, positions: Tensor, mask: Tensor | None, key: Tensor | None, *other: Tensor
) -> Tensor:
    """x [B, T, W] after all layers, each with its own dropout."""
    for i, layer in enumerate(layers):
        x = cast(PlacedLayer, layer)(x, positions, mask, None if key is None else rng.fold_in(key, i), *other)
    return x


@dataclass
class ACTConfig:
    """Settings of ACT; the defaults suit a CPU. Published: length 100, width 512, 8 heads, feed_forward 3200, layers 4,
    batch_size 8 and learning_rate 1e-5, for images."""

    name: str = "act"
    learning_rate: float = setting(1e-4, "AdamW's learning rate", low=0.0)
    weight_decay: float = setting(1e-4, "AdamW's decay of all parameters", low=0.0, structural=True)
    batch_size: int = setting(64, "windows in a batch", low=1)
    length: int = length_field(20)
    action_steps: int = action_steps_field()
    ensemble: float | None = ensemble_field()
    kl_weight: float = setting(
        10.0, "weight of the posterior's divergence from the prior, beside the error of an action", low=0.0
    )
    latent: int = setting(32, "numbers in the latent, which is 0 when it acts", low=1)
    width: int = setting(128, "width of the transformers", low=1)
    heads: int = setting(4, "their attention heads", low=1)
    feed_forward: int = setting(512, "width of the hidden layer in their blocks", low=1)
    layers: int = setting(2, "blocks of the posterior, and of the encoder", low=1)
    decoder_layers: int = setting(1, "blocks of the decoder", low=1)
    dropout: float = setting(0.1, "dropout rate of attention and blocks", low=0.0, high=0.99, structural=True)


class ACTActor(EnsemblingActor):
    """The decoder at latent 0; with `explore`, at one drawn from the prior."""

    algorithm: ACT

    def chunk(self, observations: Tensor, key: Tensor, explore: bool) -> Tensor:
        latent = rng.normal(key, (observations.shape[0], self.algorithm.config.latent)) if explore else None
        return self.apply("actor", observations, latent)[0].clamp(-1.0, 1.0)


@register("algo", "act")
class ACT(Algorithm[ACTConfig]):
    """A variational autoencoder of chunks: the latent takes up what differs between demonstrations, and at 0 the policy
    is of one style.

    The posterior, which training alone needs, is a part of module "actor": one loss trains both.
    """

    traits = Traits(actions=("continuous",), observations="encoded")
    actor_class = ACTActor

    def modules(self) -> dict[str, nn.Module]:
        c, s = self.config, self.spec
        if c.width % c.heads:
            width = c.heads * max(1, c.width // c.heads)
            raise UserError(
                f"algo.width={c.width} is no multiple of algo.heads={c.heads}: take algo.width={width}, or other heads"
            )
        sizes = (c.length, c.latent, c.width, c.heads, c.feed_forward, c.layers, c.decoder_layers)
        return {"actor": ChunkAutoencoder(s.observation_dim, s.action_dim, *sizes, dropout=c.dropout)}

    def sampler(self) -> ChunkSampler:
        return ChunkSampler(self.config.length)

    def optimizer(self, name: str) -> Adam:
        return Adam(self.config.learning_rate, weight_decay=self.config.weight_decay)

    def actor_loss(self, actor: Params, state: TrainState, batch: Batch, key: Tensor) -> Loss:
        """E |a - pi(s, z)| + kl_weight E KL(q(z|s, a) | N(0, 1)), z ~ q (algorithm 1): the mean of steps that there
        are, the sum over z.
        """
        actions, valid = batch["actions"], batch[VALID]
        chunk, mean, log_variance = self.apply("actor", actor, batch["observations"], None, actions, valid, key)
        error = torch.where(valid.unsqueeze(-1), (actions - chunk).abs(), 0.0).sum() / (
            valid.sum() * self.spec.action_dim
        )
        divergence = -0.5 * (1.0 + log_variance - mean.square() - log_variance.exp()).sum(-1).mean()
        loss = error + self.config.kl_weight * divergence
        return loss, {"actor/loss": loss, "actor/error": error, "actor/divergence": divergence}

    def update(self, state: TrainState, batch: Batch, key: Tensor, *, phase: int) -> Update:
        return self.descend(state, "actor", self.actor_loss, batch, key)
