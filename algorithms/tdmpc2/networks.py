"""Networks of TD-MPC2: layers are a linear map, LayerNorm and Mish."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from offrl.algorithm import DataSpec
from offrl.algorithms.tdmpc2.settings import BINS
from offrl.algorithms.tdmpc2.tasks import EMBEDDING, embedding_of
from offrl.families.multitask.numbers import of_present_actions
from offrl.nn import MLP, TanhGaussian
from offrl.nn.encoders.streams import observation_network
from offrl.nn.heads import SymlogTwoHot
from offrl.nn.policies import Dist
from offrl.nn.simnorm import SimNormMLP

FORM: dict[str, Any] = {"activation": "mish", "layer_norm": True, "norm_first": True, "init": "gpt"}
HEAD = SymlogTwoHot(BINS, 10.0)  # of rewards and values
LOG_STD = (-10.0, 2.0)  # of the policy


class LatentStep(NamedTuple):
    """Predictions of the model for latents and actions [...]."""

    latent: Tensor  # [..., L]: the next one
    reward: Tensor  # [..., K]: outputs that HEAD reads
    termination: Tensor | None  # [...]: logit of a terminal at the next latent; None where ends are not learnt


def latent_encoder(spec: DataSpec, hidden: Sequence[int], latent: int) -> nn.Module:
    """The encoder of these observations; of several tasks with the embedding in place of the task's number."""
    more = max(0, embedding_of(spec) - 1)
    return observation_network(spec, lambda inputs: SimNormMLP(inputs + more, hidden, latent))


class LatentModel(nn.Module):
    """Dynamics, rewards and terminals in latent space; of `tasks` tasks, if there are several, with their embeddings.

    Then of latents the first L numbers are predicted, and what tells of the task stays as it is.
    """

    def __init__(
        self, latent: int, action_dim: int, hidden: Sequence[int], episodic: bool | None, tasks: int = 0
    ) -> None:
        super().__init__()
        self.latent, self.inputs = latent, latent + (EMBEDDING if tasks else 0)
        self.dynamics = SimNormMLP(self.inputs + action_dim, hidden, latent)
        self.reward = MLP(self.inputs + action_dim, hidden, HEAD.out_dim, **FORM)
        self.termination = MLP(self.inputs, hidden, 1, **FORM) if episodic else None
        nn.init.zeros_(self.reward.head.weight)
        self.tasks = nn.Parameter(torch.empty(tasks, EMBEDDING).uniform_(-0.02, 0.02)) if tasks else None

    def forward(self, latents: Tensor, actions: Tensor) -> LatentStep:
        """latents [..., L], actions [..., A]."""
        x = torch.cat([latents[..., : self.inputs], actions], -1)
        following = self.dynamics(x)
        if self.tasks is not None:
            following = torch.cat([following, latents[..., self.latent :]], -1)
        ends = None if self.termination is None else self.termination(following[..., : self.inputs]).squeeze(-1)
        return LatentStep(following, self.reward(x), ends)


class LatentPolicy(TanhGaussian):
    """TanhGaussian whose log standard deviation is low + (high - low) (tanh(x) + 1) / 2 of the network's output x.

    many: latents are of several tasks, whose mask says which actions they lack: these are 0, with the log standard
    deviation -inf.
    """

    def __init__(self, latent: int, action_dim: int, hidden: Sequence[int], many: bool = False, **form: Any) -> None:
        self.inputs = latent + EMBEDDING if many else None
        super().__init__(self.inputs or latent, action_dim, hidden, **form)

    def forward(self, observations: Tensor, key: Tensor | None = None) -> Dist:
        mean, x = self.net(observations[..., : self.inputs], key).chunk(2, -1)
        low, high = LOG_STD
        log_std = low + 0.5 * (high - low) * (x.tanh() + 1.0)
        if self.inputs is None:
            return mean, log_std
        mask = observations[..., self.inputs : -1]
        return of_present_actions(mean, log_std, mask)
