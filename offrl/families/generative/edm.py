"""Denoisers of all noise levels at once (EDM: Karras et al., 2022, arXiv 2206.00364), as DTQL trains one (arXiv
2405.19690).

A level sigma is the standard deviation of the noise that is added: x = a + sigma e. The network F sees x and ln(sigma)
/ 4 and is scaled so that inputs and outputs have the variance 1 where the data's is sigma_data^2.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

Network = Callable[[Tensor, Tensor], Tensor]  # (x [B, A], ln(sigma) / 4 [B]) -> [B, A]


def scalings(sigma: Tensor, sigma_data: float) -> tuple[Tensor, Tensor, Tensor]:
    """(c_skip, c_out, c_in) for levels sigma, in their shape (table 1): D(x) = c_skip x + c_out F(c_in x)."""
    total = sigma.square() + sigma_data**2
    return sigma_data**2 / total, sigma * sigma_data / total.sqrt(), total.rsqrt()


def levels(share: Tensor, sigma_data: float, smallest: float, largest: float) -> Tensor:
    """Noise levels at the quantiles `share`, in [0, 1], of DTQL's distribution: ln(sigma) logistic about ln(sigma_data)
    with scale 1/2, cut off at the smallest and the largest."""
    centre, scale = math.log(sigma_data), 0.5
    low, high = (1.0 / (1.0 + math.exp(-(math.log(level) - centre) / scale)) for level in (smallest, largest))
    share = low + (high - low) * share
    return torch.exp(centre + scale * (share.log() - torch.log1p(-share)))


def denoised(network: Network, noisy: Tensor, sigma: Tensor, sigma_data: float) -> Tensor:
    """D(x; sigma) [B, A], cut off at the range: the action of which `noisy` [B, A] is the noisy form at levels sigma
    [B].
    """
    c_skip, c_out, c_in = (c.unsqueeze(-1) for c in scalings(sigma, sigma_data))
    return (c_out * network(c_in * noisy, sigma.log() / 4.0) + c_skip * noisy).clamp(-1.0, 1.0)


def denoising_loss(network: Network, actions: Tensor, noise: Tensor, sigma: Tensor, sigma_data: float) -> Tensor:
    """E ((D(a + sigma e; sigma) - a) / c_out)^2 over actions and noise [B, A] and levels [B], the mean over an action's
    entries too.
    """
    predicted = denoised(network, actions + sigma.unsqueeze(-1) * noise, sigma, sigma_data)
    return ((predicted - actions) / scalings(sigma, sigma_data)[1].unsqueeze(-1)).square().mean()
