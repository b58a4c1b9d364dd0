"""BREEZE's networks: F and B by attention. Shapes in comments: B batch, D dimension of z, T tokens, W width."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from offrl.nn.ensemble import EnsembleLinear
from offrl.nn.mlp import Linear, initialise
from offrl.nn.representations.forward_backward import on_sphere, reader
from offrl.nn.transformer import Norm


class Mixing(nn.Module):
    """One block of BREEZE's F on tokens [B, T, W]: attention y of one head, y plus an MLP (GELU) of its RMS norm,
    LayerNorm.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.query, self.value = Linear(width, width), Linear(width, width)
        self.key = nn.Parameter(torch.empty(width, width))  # a bias would not change what the softmax gives
        initialise(self.key.data, None, "torch")
        self.gain = nn.Parameter(torch.ones(width))
        self.wide, self.narrow, self.norm = Linear(width, 4 * width), Linear(4 * width, width), Norm(width)

    def forward(self, x: Tensor) -> Tensor:
        weights = (self.query(x) @ F.linear(x, self.key).transpose(-1, -2) / math.sqrt(x.shape[-1])).softmax(-1)
        y = weights @ self.value(x)
        return self.norm(y + self.narrow(F.gelu(self.wide(on_sphere(y) * self.gain))))


class AttentiveForward(nn.Module):
    """F(s, a, z) of BREEZE, twice: features of (s, z) and of (s, a) are two tokens that attend to each other in two
    blocks; both together go through two linear layers. -> [2, B, D]. Without the code's dropout."""

    def __init__(self, obs_dim: int, action_dim: int, z_dim: int, inputs: Sequence[int], hidden: Sequence[int]) -> None:
        super().__init__()
        self.action, self.task = reader(obs_dim + action_dim, inputs), reader(obs_dim + z_dim, inputs)
        self.blocks = nn.Sequential(Mixing(inputs[-1]), Mixing(inputs[-1]))
        sizes = [2 * inputs[-1], *hidden, z_dim]
        self.heads = nn.Sequential(*(EnsembleLinear(2, i, o) for i, o in pairwise(sizes)))

    def forward(self, observations: Tensor, actions: Tensor, z: Tensor) -> Tensor:
        features = self.task(torch.cat([observations, z], -1)), self.action(torch.cat([observations, actions], -1))
        return self.heads(self.blocks(torch.stack(features, -2)).flatten(-2))


class OneToken(nn.Module):
    """Attention to a single token is its value, whatever the query: W' W x."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.value, self.out = Linear(width, width), Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.value(x))


class TokenLayer(nn.Module):
    """A post-norm transformer layer on one token: each part is added to its input, and the sum is normalised. The parts
    attend to the token itself, then, in a decoder, to another one; an MLP comes last."""

    def __init__(self, width: int, feed_forward: int, decodes: bool) -> None:
        super().__init__()
        self.own, self.own_norm = OneToken(width), Norm(width)
        self.other = OneToken(width) if decodes else None
        self.other_norm = Norm(width) if decodes else None
        self.wide, self.narrow, self.norm = Linear(width, feed_forward), Linear(feed_forward, width), Norm(width)

    def forward(self, x: Tensor, other: Tensor | None = None) -> Tensor:
        x = self.own_norm(x + self.own(x))
        if self.other is not None and self.other_norm is not None:
            x = self.other_norm(x + self.other(other))
        return self.norm(x + self.narrow(F.relu(self.wide(x))))


class AttentiveBackward(nn.Module):
    """B(s) of BREEZE, of length sqrt(D): a transformer's encoder reads the one token s, its decoder begins with a
    learnt one. [B, D].

    Queries and keys of attention to a single token have no effect, and are left out, as is the code's dropout.
    """

    def __init__(self, obs_dim: int, z_dim: int, width: int, layers: int, feed_forward: int) -> None:
        super().__init__()
        self.read, self.head = Linear(obs_dim, width), Linear(width, z_dim)
        self.encoder = nn.ModuleList(TokenLayer(width, feed_forward, decodes=False) for _ in range(layers))
        self.decoder = nn.ModuleList(TokenLayer(width, feed_forward, decodes=True) for _ in range(layers))
        self.read_norm, self.norm = Norm(width), Norm(width)
        self.begin = nn.Parameter(torch.randn(width))

    def forward(self, observations: Tensor) -> Tensor:
        x = self.read(observations)
        for layer in self.encoder:
            x = layer(x)
        x, y = self.read_norm(x), self.begin.expand_as(x)
        for layer in self.decoder:
            y = layer(y, x)
        return on_sphere(self.head(self.norm(y)))
