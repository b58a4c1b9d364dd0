"""The recurrent core of Drama ("Drama: Mamba-Enabled Model-Based RL Is Sample and Parameter Efficient", Wang et al.,
2024, arXiv 2410.08893): Mamba-2's layers (Dao and Gu, 2024, arXiv 2405.21060) in plain operators. All steps of a window
are computed at once, by the state-space duality, and a single step is a window of one.

Shapes: T steps, the first axis; B rows; D width; I = 2 D; G heads of P = I / G numbers; N numbers that are kept of
each.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from offrl.world_models.recurrent.networks import layers

TAPS = 4  # steps that the convolution sees
CHUNK = 64  # steps that are computed by one matrix of decays
EXPANSION = 2


# what each layer remembers of B episodes, zeros at the start: the convolution's inputs [B, TAPS - 1, I + 2 N] and S
# [B, G, P, N]; apart, since to put them together would take as long as a step
ScanMemory = tuple[tuple[Tensor, Tensor], ...]


def empty_memory(rows: int, width: int, heads: int, size: int, count: int, device: torch.device) -> ScanMemory:
    """The memory of `count` layers at the start of episodes."""
    inner = EXPANSION * width
    shapes = (TAPS - 1, inner + 2 * size), (heads, inner // heads, size)
    inputs, states = (torch.zeros(rows, *shape, device=device) for shape in shapes)
    return ((inputs, states),) * count


def normalised(x: Tensor, scale: Tensor) -> Tensor:
    """x / rms(x) times learnt factors, the norm over the last axis."""
    return x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * scale


def scan(x: Tensor, log_decay: Tensor, b: Tensor, c: Tensor, state: Tensor, episode: Tensor) -> tuple[Tensor, Tensor]:
    """S_t = a_t S_{t-1} + x_t b_t^T and y_t = S_t c_t, where S is 0 before an episode's first step: y [T, B, G, P] and
    the last S [B, G, P, N], by chunks of steps.

    x [T, B, G, P], ln a [T, B, G], b, c [T, B, N]; state: S before the first step; episode [T, B]: the number of
    episodes that began up to each step.
    """
    outputs, before = [], torch.zeros_like(episode[0])
    for chunk in zip(*(each.split(CHUNK) for each in (x, log_decay, b, c, episode)), strict=True):
        y, state = _chunk(chunk, state, before)
        outputs.append(y)
        before = chunk[-1][-1]
    return torch.cat(outputs), state


def _chunk(moments: tuple[Tensor, ...], state: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
    """`scan` of a few steps by one matrix of decays. before [B]: the episode that `state` is of."""
    x, log_decay, b, c, episode = moments
    steps = torch.arange(len(x), device=x.device)
    alike = ((episode.unsqueeze(1) == episode) & (steps.unsqueeze(1) >= steps).unsqueeze(-1)).unsqueeze(-1)
    later = alike & (steps.unsqueeze(1) > steps)[..., None, None]
    # sums for each pair of steps: differences of sums from the beginning would round, and their gradients pass episodes
    exponents = torch.where(later, log_decay.unsqueeze(1), 0.0).cumsum(0)
    decays = exponents.exp() * alike  # [T, T, B, G]: from the second step to the first
    same = (episode == before).unsqueeze(-1)
    carried = torch.where(same, log_decay, 0.0).cumsum(0).exp() * same  # [T, B, G]: of `state`
    products = torch.einsum("tbn,sbn->tsb", c, b)
    y = torch.einsum("tsbg,sbgp->tbgp", decays * products.unsqueeze(-1), x)
    y = y + carried.unsqueeze(-1) * torch.einsum("tbn,bgpn->tbgp", c, state)
    end, driven = carried[-1][..., None, None] * state, decays[-1].unsqueeze(-1) * x
    if len(x) == 1:
        return y, torch.addcmul(end, driven[0].unsqueeze(-1), b[0][:, None, None])
    return y, end + torch.einsum("sbgp,sbn->bgpn", driven, b)


@torch.no_grad()
def states_of(x: Tensor, log_decay: Tensor, b: Tensor, state: Tensor, first: Tensor) -> Tensor:
    """S_t of `scan` at all steps [T, B, G, P, N], constants."""
    decay, states = log_decay.exp() * ~first.unsqueeze(-1), []
    for share, each, key in zip(decay, x, b, strict=True):
        state = torch.addcmul(share[..., None, None] * state, each.unsqueeze(-1), key[:, None, None])
        states.append(state)
    return torch.stack(states)


class ScanLayer(nn.Module):
    """One layer of Mamba-2 with what goes by it: x + f(x)."""

    def __init__(self, width: int, heads: int, size: int) -> None:
        super().__init__()
        self.inner, self.heads, self.size = EXPANSION * width, heads, size
        mixed = self.inner + 2 * size
        self.parts = [self.inner, mixed, heads]
        self.scale, self.inner_scale = nn.Parameter(torch.ones(width)), nn.Parameter(torch.ones(self.inner))
        self.entry = nn.Linear(width, sum(self.parts), bias=False)
        self.taps = nn.Parameter(torch.empty(TAPS, mixed).uniform_(-0.5, 0.5))  # 1 / sqrt(TAPS)
        self.bias = nn.Parameter(torch.zeros(mixed))
        self.log_rate = nn.Parameter(torch.empty(heads).uniform_(1.0, 16.0).log())
        step = torch.empty(heads).uniform_(math.log(1e-3), math.log(0.1)).exp()
        self.step = nn.Parameter(step + (-torch.expm1(-step)).log())  # whose softplus is that step
        self.direct = nn.Parameter(torch.ones(heads))
        self.exit = nn.Linear(self.inner, width, bias=False)

    def forward(self, x: Tensor, inputs: Tensor, state: Tensor, first: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x [T, B, D], memory [B, TAPS - 1, I + 2 N] and [B, G, P, N], first bool [T, B] -> [T, B, D] and the memory
        after each step.
        """
        gate, mixed, step = self.entry(normalised(x, self.scale)).split(self.parts, -1)
        episode = first.long().cumsum(0)
        padded = torch.cat([inputs.movedim(-2, 0), mixed])
        owners = torch.cat([torch.zeros_like(episode[:1]).expand(TAPS - 1, -1), episode])
        length = len(x)
        visible = [padded[k : k + length] * (owners[k : k + length] == episode).unsqueeze(-1) for k in range(TAPS)]
        mixed = F.silu(sum((tap * w for tap, w in zip(visible, self.taps, strict=True)), self.bias))
        values, b, c = mixed.split([self.inner, self.size, self.size], -1)
        values, step = values.unflatten(-1, (self.heads, -1)), F.softplus(step + self.step)
        log_decay, driven = -self.log_rate.exp() * step, step.unsqueeze(-1) * values
        y, end = scan(driven, log_decay, b, c, state, episode)
        y = (y + self.direct.unsqueeze(-1) * values).flatten(-2) * F.silu(gate)
        after = end.unsqueeze(0) if length == 1 else states_of(driven, log_decay, b, state, first)
        return x + self.exit(normalised(y, self.inner_scale)), torch.stack(visible[1:], -2), after


class ScanCore(nn.Module):
    """The recurrent state of windows from latent samples and actions alone, whatever it was before."""

    def __init__(self, width: int, sample: int, action_dim: int, heads: int, size: int, count: int) -> None:
        super().__init__()
        self.entry = layers(sample + action_dim, width, 1)
        self.layers = nn.ModuleList(ScanLayer(width, heads, size) for _ in range(count))
        self.scale = nn.Parameter(torch.ones(width))

    def forward(
        self, sample: Tensor, action: Tensor, memory: ScanMemory, first: Tensor | None = None
    ) -> tuple[Tensor, ScanMemory]:
        """sample [T, B, Z] and action [T, B, A] before each step, the memory of rows before the first step, first:
        bool [T, B], steps before which the memory is emptied (None: none) -> [T, B, D], and the memory after each step
        [T, B, ...], constants where there are several steps. Actions beyond [-1, 1] count as the nearest within.
        """
        if first is None:
            first = torch.zeros(sample.shape[:2], dtype=torch.bool, device=sample.device)
        action = action / action.abs().clamp(min=1.0).detach()
        x, memories = self.entry(torch.cat([sample, action], -1)), []
        for layer, (inputs, state) in zip(self.layers, memory, strict=True):
            x, *after = layer(x, inputs, state, first)
            memories.append(tuple(after))
        return normalised(x, self.scale), tuple(memories)
