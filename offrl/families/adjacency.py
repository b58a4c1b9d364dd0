"""HRAC's adjacency constraint ("Generating Adjacency-Constrained Subgoals in Hierarchical Reinforcement Learning",
Zhang et al., 2020, arXiv 2006.11485) where subgoals are latents: a subgoal should be a state that is reached within k
steps.

HRAC's high level names a position, its adjacency network psi embeds positions so that those within k steps of each
other lie within 1, and the high level pays for what lies beyond. HIQL's high level names phi(s, w), a latent, which psi
cannot take. So a second network reads psi(w) out of (s, phi(s, w)), learnt from pairs of states in the data, and the
penalty is that of its output; phi itself, which only the values train, is left alone. Other differences: pairs come
from the data's trajectories and are drawn anew at each update, instead of 25 passes over a table of positions, and
HRAC's goals are relative.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from offrl.algorithm import Batch, DataSpec, Loss, Metrics, Params, Part
from offrl.data.samplers.adjacency import ADJACENT, ANY_STATES, NEAR_STATES
from offrl.nn import MLP, call, initialise

WITHIN, BEYOND = 1.0, 1.2  # adjacent pairs are to lie within this, others beyond that
MARGIN = (WITHIN + BEYOND) / 2  # of the penalty, as in the authors' code
HIDDEN, WIDTH = (128, 128, 128), 32


class Adjacency(nn.Module):
    """psi over the first `dims` entries of a state (0: all), and the network that reads psi(w) out of (s, phi(s,
    w)).
    """

    def __init__(self, observation_dim: int, latent: int, dims: int) -> None:
        super().__init__()
        self.dims = dims or observation_dim
        self.psi = MLP(self.dims, HIDDEN[:-1], HIDDEN[-1])
        self.head = nn.Parameter(torch.empty(WIDTH, HIDDEN[-1]))  # without a bias, which no distance would depend on
        initialise(self.head, None, "torch")
        self.reads = MLP(observation_dim + latent, HIDDEN, WIDTH)

    def forward(self, part: str, observations: Tensor, latents: Tensor | None = None) -> Tensor:
        """`part`: "psi" of states, or "reads" of states and latents; [B, WIDTH]."""
        flat = observations.flatten(1)
        if part == "psi":
            return F.linear(F.relu(self.psi(flat[:, : self.dims])), self.head)
        assert latents is not None
        return self.reads(torch.cat([flat, latents], -1))


def length(x: Tensor) -> Tensor:
    """Euclidean length [B] of vectors [B, D]; it has a gradient at 0."""
    return (x.square().sum(-1) + 1e-12).sqrt()


def contrast(distances: Tensor, adjacent: Tensor) -> Tensor:
    """Mean of adjacent max(0, d - 1) + (1 - adjacent) max(0, 1.2 - d) (with the authors' margins)."""
    return (
        adjacent * (distances - WITHIN).clamp(min=0.0) + (1.0 - adjacent) * (BEYOND - distances).clamp(min=0.0)
    ).mean()


class AdjacencyConstraint(Part):
    """The penalty of subgoals that are not reached within k steps, the algorithm's module "adjacency"."""

    def __init__(self, config: Any, spec: DataSpec) -> None:
        super().__init__(config, spec)
        self.network = Adjacency(spec.observation_dim, config.representation, config.adjacency_dims)

    def __call__(self, params: Params, *x: Any) -> Tensor:
        """The network's outputs for its own inputs: [B, WIDTH]."""
        return call(self.network, params, *x)

    def penalty(self, params: Params, observations: Tensor, latents: Tensor) -> Tensor:
        """Mean of max(0, d - 1.1), d the distances of states [B, O] to the subgoals [B, D]."""
        distances = length(self(params, "psi", observations) - self(params, "reads", observations, latents))
        return (distances - MARGIN).clamp(min=0.0).mean()

    def loss(self, params: Params, batch: Batch, near_latents: Tensor, any_latents: Tensor) -> Loss:
        """The contrast of psi over both kinds of pairs, and the squared error of reading psi(w) out of (s, phi(s, w)).

        near_latents, any_latents [B, D]: phi(s, w) of the pairs' second states w.
        """
        observations, adjacent = batch["observations"], batch[ADJACENT]
        psi = self(params, "psi", observations)
        distances, error = [], torch.zeros((), device=psi.device)
        for states, latents in ((NEAR_STATES, near_latents), (ANY_STATES, any_latents)):
            psi_w = self(params, "psi", batch[states])
            prediction = self(params, "reads", observations, latents)
            distances.append(length(psi - psi_w))
            error = error + 0.5 * (prediction - psi_w.detach()).square().sum(-1).mean()
        contrasts = 0.5 * (contrast(distances[0], torch.ones_like(adjacent)) + contrast(distances[1], adjacent))
        loss = contrasts + error
        metrics = {"adjacency/loss": loss, "adjacency/contrast": contrasts, "adjacency/missed": error}
        return loss, {**metrics, **accuracy(distances[0], distances[1], adjacent)}


def accuracy(near_distances: Tensor, other_distances: Tensor, adjacent: Tensor) -> Metrics:
    """Share of the pairs on the right side of the margin, of those near and of those that are not."""
    distant = 1.0 - adjacent
    return {
        "adjacency/near_accuracy": (near_distances < MARGIN).float().mean(),
        "adjacency/far_right": ((other_distances > MARGIN).float() * distant).sum() / distant.sum().clamp(min=1.0),
    }
