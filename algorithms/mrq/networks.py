"""Networks of MR.Q, whose layers normalise without learning to, its policy, and what its model expects."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from offrl.actor import NoisyActor
from offrl.algorithm import Batch, Carry, DataSpec, Params
from offrl.nn import MLP, Deterministic, EnsembleMLP
from offrl.nn.encoders.streams import observation_network
from offrl.nn.heads import SymexpTwoHot
from offrl.nn.mlp import Linear
from offrl.nn.policies import Dist
from offrl.world_models.open_loop import Expected

if TYPE_CHECKING:
    from offrl.algorithms.mrq.algorithm import MRQ

FORM: dict[str, Any] = {"layer_norm": True, "affine": False, "norm_first": True, "init": "xavier_relu"}
HEAD = SymexpTwoHot(65, 10.0)  # of rewards


class StateEncoder(nn.Module):
    """z(s): observations [..., O] -> latents [..., L]."""

    def __init__(self, in_dim: int, hidden: Sequence[int], latent: int) -> None:
        super().__init__()
        self.net = MLP(in_dim, hidden, latent, activation="elu", **FORM)

    def forward(self, observations: Tensor) -> Tensor:
        y = self.net(observations)
        return F.elu(F.layer_norm(y, y.shape[-1:]))


def state_encoder(spec: DataSpec, hidden: Sequence[int], latent: int) -> nn.Module:
    """The encoder of these observations; behind the features of images it has one layer."""
    layers = [] if spec.streams else hidden
    return observation_network(spec, lambda inputs: StateEncoder(inputs, layers, latent))


class PairEncoder(nn.Module):
    """z(s, a): latents [..., L] and actions [..., A] -> [..., L]."""

    def __init__(self, latent: int, action_dim: int, action_latent: int, hidden: Sequence[int]) -> None:
        super().__init__()
        self.action = Linear(action_dim, action_latent, FORM["init"])
        self.net = MLP(latent + action_latent, hidden, latent, activation="elu", **FORM)

    def forward(self, latents: Tensor, actions: Tensor) -> Tensor:
        return self.net(torch.cat([latents, F.elu(self.action(actions))], -1))


class LinearModel(nn.Module):
    """Linear predictions from z(s, a) [..., L]: whether a terminal follows [...], the next latent [..., L], and outputs
    that HEAD reads as the reward [..., K].
    """

    def __init__(self, latent: int) -> None:
        super().__init__()
        self.sizes = [1, latent, HEAD.out_dim]
        self.linear = Linear(latent, sum(self.sizes), FORM["init"])

    def forward(self, pairs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        end, latent, reward = self.linear(pairs).split(self.sizes, -1)
        return end.squeeze(-1), latent, reward


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


class LatentActor(NoisyActor):
    """The policy on the encoder's latents."""

    noise = 0.2

    def act(self, carry: Carry, observations: Tensor, key: Tensor, *, explore: bool) -> tuple[Tensor, Carry]:
        return super().act(carry, self.apply("encoder", observations), key, explore=explore)


def open_loop(algorithm: MRQ, params: dict[str, Params], batch: Batch, context: int, key: Tensor) -> Expected:
    """See `offrl.world_models.open_loop.OpenLoopModel`: rewards alone, for latents are not decoded."""
    latent, rewards = algorithm.latents(params, batch, context - 1), []
    for action in batch["actions"][context - 1 : -1]:
        pair = algorithm.apply("pair_encoder", params["pair_encoder"], latent, action)
        _, latent, reward = algorithm.apply("model", params["model"], pair)
        rewards.append(HEAD.mean(reward))
    return Expected(torch.stack(rewards))
