"""Networks of DreamerV3 (arXiv 2301.04104 and its code): layers are a linear map, RMS normalisation and SiLU."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from offrl import rng
from offrl.nn import Policy
from offrl.nn.heads import SymexpTwoHot
from offrl.nn.policies import Dist, gaussian_log_prob

HEAD = SymexpTwoHot(255, 20.0)  # of rewards and values


def fill(weight: Tensor, inputs: int, scale: float = 1.0) -> None:
    """Fill in place: normal, cut off at two deviations, of standard deviation scale / sqrt(inputs) after the cut."""
    deviation = 1.1368 * scale / math.sqrt(inputs)
    if scale:
        nn.init.trunc_normal_(weight, 0.0, deviation, -2.0 * deviation, 2.0 * deviation)
    else:
        nn.init.zeros_(weight)


def linear(in_dim: int, out_dim: int, scale: float = 1.0) -> nn.Linear:
    """A linear layer, its weights by `fill` and its biases 0."""
    layer = nn.Linear(in_dim, out_dim)
    fill(layer.weight, in_dim, scale)
    nn.init.zeros_(layer.bias)
    return layer


class Activation(nn.Module):
    """SiLU of x / rms(x) times learnt factors; the norm is over the last axis."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(shape))

    def forward(self, x: Tensor) -> Tensor:
        # not F.rms_norm, which converts its input without need
        return F.silu(x * (x.square().mean(-1, keepdim=True) + 1e-4).rsqrt() * self.scale)


def layers(in_dim: int, width: int, count: int) -> nn.Sequential:
    """[..., in_dim] -> [..., width] by so many layers."""
    sizes = [in_dim, *[width] * count]
    return nn.Sequential(
        *(nn.Sequential(linear(i, o), Activation(o)) for i, o in zip(sizes[:-1], sizes[1:], strict=True))
    )


def head(in_dim: int, width: int, count: int, out_dim: int, scale: float = 1.0) -> nn.Sequential:
    """`layers` and a linear map to [..., out_dim]."""
    return nn.Sequential(layers(in_dim, width, count), linear(width, out_dim, scale))


class BlockLinear(nn.Module):
    """A linear map for each of G blocks: [..., G, in] -> [..., G, out]."""

    def __init__(self, blocks: int, in_dim: int, out_dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(blocks, in_dim, out_dim))
        self.bias = nn.Parameter(torch.zeros(blocks, out_dim))
        fill(self.weight, blocks * in_dim)

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("...gi,gio->...go", x, self.weight) + self.bias


class BlockGRU(nn.Module):
    """The recurrent state after one more step: gated recurrent units in blocks that read their own part of the state,
    and all of the latent sample and of the action.

    r, c, u of a block from a hidden layer; h' = sigma(u - 1) tanh(sigma(r) c) + (1 - sigma(u - 1)) h.
    """

    def __init__(self, recurrent: int, sample: int, action_dim: int, width: int, blocks: int) -> None:
        super().__init__()
        self.inputs = nn.ModuleList(layers(size, width, 1) for size in (recurrent, sample, action_dim))
        self.blocks, size = blocks, recurrent // blocks
        self.hidden, self.activation = BlockLinear(blocks, size + 3 * width, size), Activation(recurrent)
        self.gates = BlockLinear(blocks, size, 3 * size)

    def forward(self, h: Tensor, sample: Tensor, action: Tensor) -> Tensor:
        """h [..., D], sample [..., Z], action [..., A] -> [..., D]. Actions beyond [-1, 1] count as the nearest
        within."""
        action = action / action.abs().clamp(min=1.0).detach()
        x = torch.cat([net(x) for net, x in zip(self.inputs, (h, sample, action), strict=True)], -1)
        x = x.unsqueeze(-2).expand(*x.shape[:-1], self.blocks, x.shape[-1])
        x = torch.cat([h.unflatten(-1, (self.blocks, -1)), x], -1)
        x = self.activation(self.hidden(x).flatten(-2))
        reset, candidate, update = (
            gate.flatten(-2) for gate in self.gates(x.unflatten(-1, (self.blocks, -1))).chunk(3, -1)
        )
        return gated(h, reset, candidate, update)


def gated(h: Tensor, reset: Tensor, candidate: Tensor, update: Tensor) -> Tensor:
    """The state after gates' outputs, all [..., D]: without any the old one stays for the most part."""
    share = (update - 1.0).sigmoid()
    return share * (reset.sigmoid() * candidate).tanh() + (1.0 - share) * h


class PriorHeads(nn.Module):
    """M predictions of the latent sample from the recurrent state: [..., D] -> [..., M, outputs]."""

    def __init__(self, members: int, recurrent: int, width: int, outputs: int) -> None:
        super().__init__()
        self.members = members
        self.net = nn.Sequential(
            BlockLinear(members, recurrent, width),
            Activation(members, width),
            BlockLinear(members, width, width),
            Activation(members, width),
            BlockLinear(members, width, outputs),
        )

    def forward(self, h: Tensor) -> Tensor:
        return self.net(h.unsqueeze(-2).expand(*h.shape[:-1], self.members, h.shape[-1]))


class BoundedNormal(Policy):
    """N(tanh(m), s^2) with s = 0.9 sigma(x + 2) + 0.1, of which the environment sees what lies in [-1, 1]."""

    def __init__(self, features: int, action_dim: int, width: int) -> None:
        super(Policy, self).__init__()
        self.body = layers(features, width, 3)
        self.mean, self.deviation = (linear(width, action_dim, 0.01) for _ in range(2))

    def forward(self, features: Tensor) -> Dist:
        """(mean, log standard deviation), [..., A] each."""
        x = self.body(features)
        return self.mean(x).tanh(), (0.9 * (self.deviation(x) + 2.0).sigmoid() + 0.1).log()

    def mode(self, dist: Dist) -> Tensor:
        return dist[0]

    def unbounded(self, dist: Dist, key: Tensor) -> Tensor:
        """A sample that is not clipped, which alone has a density."""
        return dist[0] + dist[1].exp() * rng.normal(key, tuple(dist[0].shape))

    def sample(self, dist: Dist, key: Tensor) -> Tensor:
        return self.unbounded(dist, key).clamp(-1.0, 1.0)

    def log_prob(self, dist: Dist, actions: Tensor) -> Tensor:
        return gaussian_log_prob(dist[0], dist[1], actions)

    def entropy(self, dist: Dist) -> Tensor:
        """[...], before clipping."""
        return (dist[1] + 0.5 * math.log(2.0 * math.pi * math.e)).sum(-1)
