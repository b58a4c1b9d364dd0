"""What the latent model is trained for: to reconstruct its observations (DreamerV3, arXiv 2301.04104), to predict
rewards from as little of them as that takes (RePo, arXiv 2309.00082), to tell observations apart, and actions from
what changed (InfoPower, arXiv 2204.08585), or nothing else. All predict rewards, and whether episodes go on.

Shapes: T states of a window; B windows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from offrl.algorithm import Batch, Loss, Params
from offrl.data.samplers.states import ARRIVAL_REWARDS, IS_FIRST, IS_TERMINAL, PREVIOUS_ACTIONS, VALID
from offrl.families.sequence import masked_mean
from offrl.nn.heads import symlog
from offrl.nn.policies import gaussian_log_prob
from offrl.world_models.recurrent.distributions import one_head
from offrl.world_models.recurrent.latents import Latents, LatentWindows
from offrl.world_models.recurrent.networks import HEAD

LOG_STD = (-2.0, 2.0)  # of actions told from states


def reconstruction(
    latents: Latents, windows: LatentWindows, batch: Batch, key: Tensor, params: Mapping[str, Params]
) -> Loss:
    """-ln p(o_t) - ln p(r_t) - ln p(c_t) + 1.0 max(1, KL(sg q | p)) + 0.1 max(1, KL(q | sg p)), with the rewards that
    led to the states; free_bits_of=mean: max(1, mean KL) in place of the mean of max(1, KL). objective=none: with
    ln p(o_t | sg s_t), so that the decoder is a probe, and the model learns from the rest.
    """
    features = windows.state.features
    balanced, divergence = balanced_kl(latents, windows, batch, key)
    reward, continuation = predictions(latents, features, batch)
    inputs = features.detach() if latents.config.objective == "none" else features
    error = squared_error(latents.apply("decoder", inputs), batch["observations"])
    drawing = masked_mean(error, batch[VALID])
    metrics = {
        "model/kl": divergence,
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
    forward, backward = (
        latents.kind.kl(windows.posterior.detach(), prior),
        latents.kind.kl(windows.posterior, prior.detach()),
    )
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


def information(
    latents: Latents, windows: LatentWindows, batch: Batch, key: Tensor, params: Mapping[str, Params]
) -> Loss:
    """-ln p(r_t) - ln p(c_t) - ln q(a_t-1|s_t-1, s_t) + the balanced KL of `reconstruction` + sg(beta) (C - epsilon) -
    ln(beta) sg(C - epsilon), with the contrastive loss C of states and observations; InfoPower's terms as its abstract
    has them, the coefficients ours.
    """
    c, features = latents.config, windows.state.features
    balanced, divergence = balanced_kl(latents, windows, batch, key)
    contrast = contrastive(latents.apply("contrast", features), windows.embeddings, batch[VALID])
    known = action_log_prob(latents, features, batch[PREVIOUS_ACTIONS][1:])
    inverse = -masked_mean(known, ~batch[IS_FIRST][1:] & batch[VALID][1:])
    excess, log_weight = contrast - c.contrast_limit, params["multiplier"]["log"]
    weight = log_weight.detach().exp()
    reward, continuation = predictions(latents, features, batch)
    metrics = {
        "model/kl": divergence,
        "model/reward": reward,
        "model/continuation": continuation,
        "model/contrast": contrast,
        "model/contrast_weight": weight,
        "model/inverse": inverse,
    }
    model = balanced + reward + continuation + inverse
    return model + weight * excess - log_weight * excess.detach(), metrics


OBJECTIVES: dict[str, Callable[..., Loss]] = {
    "reconstruction": reconstruction,
    "bottleneck": bottleneck,
    "information": information,
    "none": reconstruction,
}


def balanced_kl(latents: Latents, windows: LatentWindows, batch: Batch, key: Tensor) -> tuple[Tensor, Tensor]:
    """The loss of the divergence of posterior and prior, each of which it trains by its weight, less the free bits; and
    its mean.
    """
    c, valid, prior = latents.config, batch[VALID], one_head(windows.prior, key)
    divergence = latents.kind.kl(windows.posterior.detach(), prior)
    representation = latents.kind.kl(windows.posterior, prior.detach())
    if c.free_bits_of == "mean":
        divergences = [masked_mean(x, valid).clamp(min=c.free_bits) for x in (divergence, representation)]
    else:
        divergences = [x.clamp(min=c.free_bits) for x in (divergence, representation)]
    balanced = masked_mean(c.dynamics_weight * divergences[0] + c.representation_weight * divergences[1], valid)
    return balanced, masked_mean(divergence, valid)


def contrastive(queries: Tensor, embeddings: Tensor, valid: Tensor) -> Tensor:
    """-E ln p(which observation a state is of), among its own and all those of other windows, by the products of
    queries of the states and embeddings of the observations [T, B, E] (InfoNCE, arXiv 1807.03748).
    """
    steps, windows = valid.shape
    window = torch.arange(windows, device=valid.device).repeat(steps)
    number = torch.arange(len(window), device=valid.device)
    compared = (window.unsqueeze(-1) != window) & valid.flatten() | (number.unsqueeze(-1) == number)
    scores = queries.flatten(0, 1).float() @ embeddings.flatten(0, 1).float().mT
    log_shares = torch.where(compared, scores, -torch.inf).log_softmax(-1).diagonal(dim1=-2, dim2=-1)
    return -masked_mean(log_shares, valid.flatten())


def action_log_prob(latents: Latents, features: Tensor, actions: Tensor) -> Tensor:
    """ln q(a_t|s_t, s_t+1) [T - 1, B], normal, of the actions [T - 1, B, A] between states with features [T, B, F]."""
    mean, raw = latents.apply("inverse", torch.cat([features[:-1], features[1:]], -1)).float().chunk(2, -1)
    return gaussian_log_prob(mean, raw.clamp(*LOG_STD), actions)


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
