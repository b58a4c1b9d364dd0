"""Critics and policy of MR.Q, and what its model expects."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from offrl.algorithm import Batch, Params
from offrl.families.critics.representation import NoisyLatentActor
from offrl.families.predictive import FORM, HEAD
from offrl.nn import Deterministic, EnsembleMLP
from offrl.nn.policies import Dist
from offrl.world_models.open_loop import Expected

if TYPE_CHECKING:
    from offrl.algorithms.mrq.algorithm import MRQ


class LatentValues(nn.Module):
    """Two critics of z(s, a): [B, L] -> [2, B]. They have one hidden layer more than the other networks."""

    def __init__(self, latent: int, hidden: Sequence[int]) -> None:
        super().__init__()
        self.net = EnsembleMLP(2, latent, [*hidden, hidden[-1]], 1, activation="elu", **FORM)

    def forward(self, pairs: Tensor) -> Tensor:
        return self.net(pairs).squeeze(-1)


class OutputPolicy(Deterministic):
    """Deterministic, whose distribution also holds the network's outputs before tanh."""

    def __init__(self, latent: int, action_dim: int, hidden: Sequence[int]) -> None:
        super().__init__(latent, action_dim, hidden, **FORM)

    def forward(self, observations: Tensor, key: Tensor | None = None) -> Dist:
        x = self.net(observations, key)
        return x.tanh(), x


class ExploringActor(NoisyLatentActor):
    """The policy on latents, with MR.Q's noise."""

    noise = 0.2


def open_loop(algorithm: MRQ, params: dict[str, Params], batch: Batch, context: int, key: Tensor) -> Expected:
    """See `offrl.world_models.open_loop.OpenLoopModel`: rewards alone, for latents are not decoded."""
    latent, rewards = algorithm.latents(params, batch, context - 1), []
    for action in batch["actions"][context - 1 : -1]:
        pair = algorithm.apply("pair_encoder", params["pair_encoder"], latent, action)
        _, latent, reward = algorithm.apply("model", params["model"], pair)
        rewards.append(HEAD.mean(reward))
    return Expected(torch.stack(rewards))


def latent_states(algorithm: MRQ, params: dict[str, Params], batch: Batch, key: Tensor) -> Tensor:
    """See `offrl.world_models.open_loop.ProbedModel`."""
    return algorithm.latents(params, batch, slice(None))
