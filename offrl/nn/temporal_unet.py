"""U-nets over the steps of a plan: one-dimensional convolutions (Diffuser: Janner et al., 2022, arXiv 2205.09991,
appendix C).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from offrl.nn.diffusion import sinusoidal
from offrl.nn.mlp import Linear

GROUPS = 8  # of channels that are normalised together, fewer where these would be less than four


class Convolution(nn.Module):
    """x [B, C, T] -> [B, C', T']: a convolution along time; transposed: one that makes more steps of few."""

    def __init__(self, inputs: int, outputs: int, width: int, *, stride: int = 1, transposed: bool = False) -> None:
        super().__init__()
        kind = nn.ConvTranspose1d if transposed else nn.Conv1d
        padding = 1 if stride > 1 else width // 2
        layer = kind(inputs, outputs, width, stride=stride, padding=padding)
        self.weight, self.bias = layer.weight, cast(nn.Parameter, layer.bias)
        self.stride, self.padding, self.transposed = stride, padding, transposed

    def forward(self, x: Tensor) -> Tensor:
        operation = F.conv_transpose1d if self.transposed else F.conv1d
        # gradients of a strided one in bfloat16 are not finite on CPUs (torch 2.13)
        with torch.autocast("cpu", enabled=False):
            return operation(x.to(self.weight.dtype), self.weight, self.bias, stride=self.stride, padding=self.padding)


class ConvBlock(nn.Module):
    """Convolution of five steps, group normalisation, Mish."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.convolution = Convolution(inputs, outputs, 5)
        self.scale, self.shift = nn.Parameter(torch.ones(outputs)), nn.Parameter(torch.zeros(outputs))
        self.groups = next(n for n in range(max(1, min(GROUPS, outputs // 4)), 0, -1) if outputs % n == 0)

    def forward(self, x: Tensor) -> Tensor:
        y = self.convolution(x)
        # not F.group_norm: its rule under vmap copies each member
        grouped = y.unflatten(1, (self.groups, -1)).flatten(2)
        grouped = F.layer_norm(grouped, grouped.shape[-1:], eps=1e-5)
        return F.mish(grouped.reshape(y.shape) * self.scale.unsqueeze(-1) + self.shift.unsqueeze(-1))


class TemporalBlock(nn.Module):
    """Two `ConvBlock`s, the embedding of the diffusion step added between them, plus the input."""

    def __init__(self, inputs: int, outputs: int, embedding: int) -> None:
        super().__init__()
        self.first, self.second = ConvBlock(inputs, outputs), ConvBlock(outputs, outputs)
        self.embed = Linear(embedding, outputs)
        self.skip = Convolution(inputs, outputs, 1) if inputs != outputs else None

    def forward(self, x: Tensor, embedding: Tensor) -> Tensor:
        y = self.second(self.first(x) + self.embed(F.mish(embedding)).unsqueeze(-1))
        return y + (x if self.skip is None else self.skip(x))


class Blocks(nn.ModuleList):
    """`TemporalBlock`s one after another: from the first of these numbers of channels to the last."""

    def __init__(self, embedding: int, *channels: int) -> None:
        super().__init__(TemporalBlock(i, o, embedding) for i, o in pairwise(channels))

    def forward(self, x: Tensor, embedding: Tensor) -> Tensor:
        for block in self:
            x = block(x, embedding)
        return x


class StepEmbedding(nn.Module):
    """Diffusion steps [B] -> [B, width]: sines and cosines, and a perceptron of one hidden layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width, self.up, self.down = width, Linear(width, 4 * width), Linear(4 * width, width)

    def forward(self, step: Tensor) -> Tensor:
        return self.down(F.mish(self.up(sinusoidal(step, self.width).to(self.up.weight.dtype))))


def padded(x: Tensor, multiple: int) -> Tensor:
    """Steps [B, C, T] with zeros at the end up to a multiple."""
    return F.pad(x, (0, -x.shape[-1] % multiple))


class TemporalUnet(nn.Module):
    """(noisy plan [B, T, D], diffusion step [B] int64, condition [B, K] or None) -> [B, T, D].

    Levels of widths base * multiples, each but the last halving the steps; the same back, beside the level's output on
    the way down. `condition`: K numbers more, of which a perceptron makes an embedding that stands beside the step's.
    """

    def __init__(self, dim: int, base: int, multiples: Sequence[int], condition: int = 0) -> None:
        super().__init__()
        widths = [dim, *(base * m for m in multiples)]
        pairs = list(pairwise(widths))
        self.time = StepEmbedding(base)
        self.condition = (
            nn.ModuleList([Linear(condition, base), Linear(base, 4 * base), Linear(4 * base, base)])
            if condition
            else None
        )
        width = 2 * base if condition else base
        self.down = nn.ModuleList(Blocks(width, i, o, o) for i, o in pairs)
        self.halve = nn.ModuleList(Convolution(o, o, 3, stride=2) for _, o in pairs[:-1])
        self.middle = Blocks(width, *[widths[-1]] * 3)
        back = list(reversed(pairs[1:]))
        self.up = nn.ModuleList(Blocks(width, 2 * o, i, i) for i, o in back)
        self.widen = nn.ModuleList(Convolution(i, i, 4, stride=2, transposed=True) for i, _ in back)
        self.last, self.head = ConvBlock(widths[1], widths[1]), Convolution(widths[1], dim, 1)
        self.multiple = 2 ** (len(multiples) - 1)

    def forward(
        self, plan: Tensor, step: Tensor, condition: Tensor | None = None, keep: Tensor | None = None
    ) -> Tensor:
        """keep [B]: 0 where the condition's embedding is left out (classifier-free guidance, arXiv 2207.12598); None:
        kept everywhere.
        """
        embedding = self.time(step)
        if self.condition is not None:
            assert condition is not None
            first, second, third = self.condition
            known = third(F.mish(second(F.mish(first(condition)))))
            embedding = torch.cat([embedding, known if keep is None else known * keep.unsqueeze(-1)], -1)
        x = padded(plan.transpose(1, 2), self.multiple)
        levels = []
        for i, blocks in enumerate(self.down):
            x = blocks(x, embedding)
            levels.append(x)
            x = self.halve[i](x) if i < len(self.halve) else x
        x = self.middle(x, embedding)
        for blocks, stretch in zip(self.up, self.widen, strict=True):
            x = stretch(blocks(torch.cat([x, levels.pop()], 1), embedding))
        return self.head(self.last(x)).transpose(1, 2)[:, : plan.shape[1]]


class PlanValue(nn.Module):
    """(noisy plan [B, T, D], diffusion step [B]) -> its value [B]: the way down of `TemporalUnet`, two narrower levels,
    a perceptron.
    """

    def __init__(self, horizon: int, dim: int, base: int, multiples: Sequence[int]) -> None:
        super().__init__()
        widths = [dim, *(base * m for m in multiples)]
        pairs = list(pairwise(widths))
        narrow = [(widths[-1], widths[-1] // 2), (widths[-1] // 2, widths[-1] // 4)]
        self.time = StepEmbedding(base)
        self.blocks = nn.ModuleList(Blocks(base, i, o, o) for i, o in pairs)
        self.narrow = nn.ModuleList(Blocks(base, i, o) for i, o in narrow)
        self.halve = nn.ModuleList(Convolution(o, o, 3, stride=2) for _, o in (*pairs, *narrow))
        steps = horizon
        for _ in self.halve:
            steps = (steps + 1) // 2
        flat = widths[-1] // 4 * steps
        self.hidden, self.head = Linear(flat + base, flat // 2), Linear(flat // 2, 1)

    def forward(self, plan: Tensor, step: Tensor) -> Tensor:
        embedding, x = self.time(step), plan.transpose(1, 2)
        for blocks, halve in zip([*self.blocks, *self.narrow], self.halve, strict=True):
            x = halve(blocks(x, embedding))
        return self.head(F.mish(self.hidden(torch.cat([x.flatten(1), embedding], -1)))).squeeze(-1)
