"""Denoising diffusion of actions (DDPM: Ho et al., 2020, arXiv 2006.11239): noise schedules, the forward and the
reverse process.

Steps are numbered 0 to T - 1; beta_t is the variance of the noise that step t adds, abar_t = prod (1 - beta_i), i <= t.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from offrl import rng
from offrl.nn.mlp import MLP, Linear, dropout
from offrl.nn.transformer import Norm
from offrl.optim import Params


def sinusoidal(step: Tensor, width: int) -> Tensor:
    """Steps [B] as sines and cosines [B, width] of wavelengths from 2 pi to 20,000 pi ("Attention Is All You Need",
    arXiv 1706.03762).
    """
    half = width // 2
    frequencies = torch.exp(torch.arange(half, device=step.device) * (-math.log(10_000.0) / (half - 1)))
    angle = step.unsqueeze(-1) * frequencies
    return torch.cat([angle.sin(), angle.cos()], -1)


def fourier(step: Tensor, waves: Tensor) -> Tensor:
    """Steps [B] as cosines and sines [B, 2 W] of frequencies waves [W], in turns a step."""
    angle = 2.0 * math.pi * step.unsqueeze(-1) * waves
    return torch.cat([angle.cos(), angle.sin()], -1)


class FilmBlock(nn.Module):
    """x W -> norm, Mish -> scaled and shifted by the condition (FiLM, arXiv 1709.07871) -> W', norm, Mish -> plus x."""

    def __init__(self, in_dim: int, out_dim: int, condition: int) -> None:
        super().__init__()
        self.first, self.norm1 = Linear(in_dim, out_dim), Norm(out_dim)
        self.film = Linear(condition, 2 * out_dim)
        self.second, self.norm2 = Linear(out_dim, out_dim), Norm(out_dim)
        self.skip = Linear(in_dim, out_dim) if in_dim != out_dim else None

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        scale, shift = self.film(condition).chunk(2, -1)
        y = scale * F.mish(self.norm1(self.first(x))) + shift
        return F.mish(self.norm2(self.second(y))) + (x if self.skip is None else self.skip(x))


class Denoiser(nn.Module):
    """(noisy action [B, A], diffusion step [B] int64, observation [B, O]) -> the noise [B, A], by a residual MLP."""

    def __init__(
        self, obs_dim: int, action_dim: int, hidden: Sequence[int], embedding: int, learned: bool = False
    ) -> None:
        """embedding: width of the step's, an even number above 2. learned: so are its wavelengths, normal at first as
        in IDQL's code (arXiv 2304.10573)."""
        super().__init__()
        self.width = embedding
        self.waves = nn.Parameter(0.2 * torch.randn(embedding // 2)) if learned else None
        self.up, self.down = Linear(embedding, 4 * embedding), Linear(4 * embedding, embedding)
        sizes = [action_dim, *hidden]
        self.blocks = nn.ModuleList(FilmBlock(i, o, embedding + obs_dim) for i, o in pairwise(sizes))
        self.head = Linear(sizes[-1], action_dim)

    def forward(self, noisy: Tensor, step: Tensor, observations: Tensor) -> Tensor:
        time = self.down(F.mish(self.up(self.embed(step))))
        x, condition = noisy, torch.cat([time, observations], -1)
        for block in self.blocks:
            x = cast(FilmBlock, block)(x, condition)
        return self.head(x)

    def embed(self, step: Tensor) -> Tensor:
        """Steps [B] as waves [B, width]."""
        return (
            sinusoidal(step, self.width).to(self.up.weight.dtype) if self.waves is None else fourier(step, self.waves)
        )


class PlainDenoiser(nn.Module):
    """(noisy action [B, A], diffusion step or noise level [B], observation [B, O]) -> the noise, or what else is
    learnt, [B, A], by a plain network of the three side by side, as Diffusion-QL's (arXiv 2208.06193).

    The step is seen as waves, through two layers with Mish. embedding: their number, even and above 2. linear_first: a
    layer without activation, as wide as the first, comes before the others, as in DTQL's code (arXiv 2405.19690).
    """

    def __init__(
        self,
        obs_dim: int,
        action_dim: int,
        hidden: Sequence[int],
        embedding: int,
        *,
        linear_first: bool = False,
        activation: str,
        init: str,
    ) -> None:
        super().__init__()
        self.width, inputs = embedding, action_dim + obs_dim + embedding
        self.up, self.down = Linear(embedding, 2 * embedding), Linear(2 * embedding, embedding)
        self.first = Linear(inputs, hidden[0], init) if linear_first else None
        self.net = MLP(hidden[0] if linear_first else inputs, hidden, action_dim, activation=activation, init=init)

    def forward(self, noisy: Tensor, step: Tensor, observations: Tensor) -> Tensor:
        time = self.down(F.mish(self.up(sinusoidal(step, self.width).to(self.up.weight.dtype))))
        x = torch.cat([noisy, observations, time], -1)
        return self.net(x if self.first is None else self.first(x))


TRUNCATED = 0.87962566103423978  # standard deviation of a standard normal number that is cut off at 2


class _ResidualBlock(nn.Module):
    """x + {dropout, LayerNorm, a layer four times as wide, activation, a linear one}(x). Weights begin truncated
    normal, as flax's.
    """

    def __init__(self, width: int, dropout: float, epsilon: float = 1e-6) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))
        self.wide, self.narrow = Linear(width, 4 * width), Linear(4 * width, width)
        self.dropout, self.epsilon = dropout, epsilon
        for layer in (self.wide, self.narrow):
            std = layer.weight.shape[1] ** -0.5 / TRUNCATED
            nn.init.trunc_normal_(layer.weight, 0.0, std, -2.0 * std, 2.0 * std)
            nn.init.zeros_(layer.bias)

    def forward(self, x: Tensor, key: Tensor | None) -> Tensor:
        y = x if key is None or self.dropout == 0.0 else dropout(x, self.dropout, key)
        y = F.layer_norm(y, y.shape[-1:], eps=self.epsilon) * self.scale + self.shift
        return x + self.narrow(F.mish(self.wide(y)))


class ResidualDenoiser(nn.Module):
    """(noisy action [B, A], diffusion step [B] int64, observation [B, O]) -> the noise [B, A], by IDQL's network (arXiv
    2304.10573).

    Action, observation and the step (as waves of learned lengths, through two layers twice as wide) side by side -> a
    linear layer -> residual blocks with LayerNorm -> activation -> a linear layer. Dropout is on exactly when a key is
    given. embedding: waves, an even number.
    """

    def __init__(
        self,
        obs_dim: int,
        action_dim: int,
        width: int,
        blocks: int,
        embedding: int,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        waves = embedding // 2
        self.waves = nn.Parameter(0.2 * torch.randn(waves))
        self.up, self.down = Linear(2 * waves, 4 * waves, "xavier"), Linear(4 * waves, 4 * waves, "xavier")
        self.first = Linear(action_dim + obs_dim + 4 * waves, width, "xavier")
        self.blocks = nn.ModuleList(_ResidualBlock(width, dropout) for _ in range(blocks))
        self.head = Linear(width, action_dim, "xavier")

    def forward(self, noisy: Tensor, step: Tensor, observations: Tensor, key: Tensor | None = None) -> Tensor:
        time = self.down(F.mish(self.up(fourier(step, self.waves))))
        x = self.first(torch.cat([noisy, observations, time], -1))
        for i, block in enumerate(self.blocks):
            x = cast(_ResidualBlock, block)(x, None if key is None else rng.fold_in(key, i))
        return self.head(F.mish(x))


OFFSET, LARGEST = 0.008, 0.999  # of the cosine schedule, and of its betas (arXiv 2102.09672, section 3.2)
# of the variance-preserving schedule (arXiv 2011.13456; the constants of arXiv 2208.06193 and 2304.10573)
SLOWEST, FASTEST = (0.1, 10.0)


def add_noise(actions: Tensor, noise: Tensor, step: Tensor, steps: int, schedule: str = "cosine") -> Tensor:
    """sqrt(abar_t) a + sqrt(1 - abar_t) e for actions and noise [B, A] at steps [B] (equation 4)."""
    abar = signal(step, steps, schedule).unsqueeze(-1)
    return abar.sqrt() * actions + (1.0 - abar).sqrt() * noise


def noised(
    actions: Tensor, steps: int, keys: Sequence[Tensor], schedule: str = "cosine"
) -> tuple[Tensor, Tensor, Tensor]:
    """Noisy actions [B, A], their random steps [B], and the noise [B, A] in them; keys: of the steps, of the noise."""
    step, noise = rng.randint(keys[0], (len(actions),), steps), rng.normal(keys[1], tuple(actions.shape))
    return add_noise(actions, noise, step, steps, schedule), step, noise


def clean_action(noisy: Tensor, noise: Tensor, step: Tensor, steps: int, schedule: str = "cosine") -> Tensor:
    """The action [B, A], cut off at the range, of which `noisy` is the noisy form at steps [B] if `noise` is the noise
    in it.
    """
    abar = signal(step, steps, schedule).unsqueeze(-1)
    return ((noisy - (1.0 - abar).sqrt() * noise) / abar.sqrt()).clamp(-1.0, 1.0)


def reverse_process(
    predict_noise: Callable[[Tensor, Tensor], Tensor],
    x: Tensor,
    noise: Callable[[int], Tensor] | None,
    steps: int,
    schedule: str = "cosine",
    clip: str = "clean",
    variance: str = "posterior",
) -> Tensor:
    """Actions [B, A] in [-1, 1] from noise x [B, A] (algorithm 2). predict_noise(x, steps [B]): the noise in x.
    noise(t): what step t adds; None: nothing.

    clip: what is cut off at the range: "clean", the action that each step predicts, as in the appendix's code; "state",
    x after each step, as in IDQL's (arXiv 2304.10573). variance: see `transition`.
    """
    for t in reversed(range(steps)):
        step = torch.full((x.shape[0],), t, device=x.device)
        predicted_noise = predict_noise(x, step)
        abar, noisy_factor, action_factor, std = transition(t, steps, schedule, variance)
        clean = (x - math.sqrt(1.0 - abar) * predicted_noise) / math.sqrt(abar)
        x = noisy_factor * x + action_factor * (clean.clamp(-1.0, 1.0) if clip == "clean" else clean)
        if noise is not None and t > 0:
            x = x + std * noise(t)
        if clip == "state":
            x = x.clamp(-1.0, 1.0)
    return x.clamp(-1.0, 1.0)


def update_average(average: Params, params: Params, step: Tensor, rate: float | Tensor) -> Params:
    """The averaged network, which acts, after update number `step` []: it follows at `rate`, at first at 9 / (10 +
    step), where that is more; after the first update it is the network."""
    share = torch.where(step > 0, (9.0 / (10.0 + step)).clamp(min=rate), 1.0)
    return {name: torch.lerp(value, params[name], share) for name, value in average.items()}


def cosine(step: float, steps: int) -> float:
    """The share of the action's variance that remains, up to a factor, after `at` of `steps` (arXiv 2102.09672,
    equation 17).
    """
    return math.cos((step / steps + OFFSET) / (1.0 + OFFSET) * math.pi / 2.0) ** 2


def preserved_variance(step: int, steps: int) -> float:
    """abar after `step` steps of the variance-preserving schedule: the integral of a rate that rises linearly."""
    return math.exp(-SLOWEST * step / steps - 0.5 * (FASTEST - SLOWEST) * (step / steps) ** 2)


def signal(step: Tensor, steps: int, schedule: str = "cosine") -> Tensor:
    """abar_t for steps t [B]: float32 [B]. Of the cosine schedule only the last beta is cut off."""
    if schedule == "vp":
        share = (step + 1) / steps
        return torch.exp(-SLOWEST * share - 0.5 * (FASTEST - SLOWEST) * share.square())
    angle = ((step + 1) / steps + OFFSET) / (1.0 + OFFSET) * (math.pi / 2.0)
    floor = (1.0 - LARGEST) * cosine(steps - 1, steps)
    return torch.where(step + 1 < steps, torch.cos(angle) ** 2, floor) / cosine(0, steps)


def transition(
    t: int, steps: int, schedule: str = "cosine", variance: str = "posterior"
) -> tuple[float, float, float, float]:
    """The step back from t: abar_t; the factors of the noisy action and of the predicted one in the mean; and the
    standard deviation.

    variance: "posterior", that of the less noisy action where the clean one is known, or "beta", the larger one of the
    step forward (both of section 3.2).
    """
    if schedule == "vp":
        previous = preserved_variance(t, steps)
        beta = 1.0 - preserved_variance(t + 1, steps) / previous
    else:
        previous = cosine(t, steps) / cosine(0, steps)
        beta = min(1.0 - cosine(t + 1, steps) / cosine(t, steps), LARGEST)
    abar = previous * (1.0 - beta)
    noisy_factor, action_factor = (
        math.sqrt(1.0 - beta) * (1.0 - previous) / (1.0 - abar),
        math.sqrt(previous) * beta / (1.0 - abar),
    )
    return (
        abar,
        noisy_factor,
        action_factor,
        math.sqrt(beta if variance == "beta" else beta * (1.0 - previous) / (1.0 - abar)),
    )
