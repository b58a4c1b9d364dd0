"""What the latent model is trained for: to reconstruct its observations (DreamerV3, arXiv 2301.04104), or to predict
rewards from as little of them as that takes (RePo, arXiv 2309.00082). Both predict rewards, and whether episodes go on.

Shapes: T states of a window; B windows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from offrl.algorithm import Batch, Loss, Params
from offrl.algorithms.rssm.latents import Latents, LatentWindows, kl, one_head
from offrl.algorithms.rssm.networks import HEAD
from offrl.data.samplers.states import ARRIVAL_REWARDS, IS_FIRST, IS_TERMINAL, VALID
from offrl.families.sequence import masked_mean
from offrl.nn.heads import symlog


def reconstruction(
    latents: Latents, windows: LatentWindows, batch: Batch, key: Tensor, params: Mapping[str, Params]
) -> Loss:
    """-ln p(o_t) - ln p(r_t) - ln p(c_t) + 1.0 max(1, KL(sg q | p)) + 0.1 max(1, KL(q | sg p)), with the rewards that
    led to the states; free_bits_of=mean: max(1, mean KL) in place of the mean of max(1, KL).
    """
    c, valid, features = latents.config, batch[VALID], windows.state.features
    prior = one_head(windows.prior, key)
    divergence = kl(windows.posterior.detach(), prior)
    representation = kl(windows.posterior, prior.detach())
    if c.free_bits_of == "mean":
        divergences = [masked_mean(x, valid).clamp(min=c.free_bits) for x in (divergence, representation)]
    else:
        divergences = [x.clamp(min=c.free_bits) for x in (divergence, representation)]
    balanced = masked_mean(c.dynamics_weight * divergences[0] + c.representation_weight * divergences[1], valid)
    reward, continuation = predictions(latents, features, batch)
    error = squared_error(latents.apply("decoder", features), batch["observations"])
    drawing = masked_mean(error, valid)
    metrics = {
        "model/kl": masked_mean(divergence, valid),
        "model/reward": reward,
        "model/continuation": continuation,
        "model/reconstruction": drawing,
    }
    return balanced + reward + continuation + drawing, metrics


def bottleneck(
    latents: Latents, windows: LatentWindows, batch: Batch, key: Tensor, params: Mapping[str, Params]
) -> Loss:
    """-ln p(r_t) - ln p(c_t) + sg(beta) (KL - epsilon) - ln(beta) sg(KL - epsilon), with KL = 5/6 KL(sg q | p) + 1/6
    KL(q | sg p), its mean over all states: the last term moves beta, the module "multiplier", and nothing else.
    """
    c, valid = latents.config, batch[VALID]
    prior, ahead, share = one_head(windows.prior, key), c.dynamics_weight, c.representation_weight
    forward, backward = kl(windows.posterior.detach(), prior), kl(windows.posterior, prior.detach())
    excess = masked_mean(ahead * forward + share * backward, valid) / (ahead + share) - c.kl_limit
    log_weight = params["multiplier"]["log"]
    weight = log_weight.detach().exp()
    reward, continuation = predictions(latents, windows.state.features, batch)
    metrics = {
        "model/kl": masked_mean(forward, valid),
        "model/kl_weight": weight,
        "model/reward": reward,
        "model/continuation": continuation,
    }
    return reward + continuation + weight * excess - log_weight * excess.detach(), metrics


OBJECTIVES: dict[str, Callable[..., Loss]] = {"reconstruction": reconstruction, "bottleneck": bottleneck}


def predictions(latents: Latents, features: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """-E ln p(r_t) of the rewards that led to the states with these features [T, B, F], and -E ln p(c_t) of whether
    episodes go on.
    """
    # a window's first state came from nowhere
    logits = latents.apply("reward", features)
    reward = masked_mean(HEAD.loss(logits, batch[ARRIVAL_REWARDS]), ~batch[IS_FIRST])
    continues = latents.apply("continuation", features).squeeze(-1).float()
    target = latents.config.discount * (~batch[IS_TERMINAL]).float()
    return reward, F.binary_cross_entropy_with_logits(continues, target)


def squared_error(decoded: Any, observations: Tensor | Mapping[str, Tensor]) -> Tensor:
    """The squared error [...] of what the decoder makes of features, summed over numbers, in symlog units, and over
    pixels, in units of their range.
    """
    if isinstance(observations, Tensor):
        return (decoded - symlog(observations)).square().sum(-1)
    images, numbers = decoded
    errors = [(x - observations[name] / 255.0).square().flatten(-3).sum(-1) for name, x in images.items()]
    if numbers is not None:
        vectors = torch.cat([x for name, x in observations.items() if name not in images], -1)
        errors.append((numbers - symlog(vectors)).square().sum(-1))
    return torch.stack(errors).sum(0)
