"""Policies. All act in [-1, 1] per dimension (the dataset's actions are scaled to that) or among K discrete actions."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from offrl import rng
from offrl.nn.mlp import MLP

Dist = tuple[Tensor, ...]  # the parameters of a policy's distribution
LOG_STD = (-10.0, 2.0)  # of a `TwoHeadedTanhGaussian`


class Policy(nn.Module, ABC):
    """The interface of every policy, with its network; observations [B, O].

    forward(observations, key) gives the distribution's parameters (a key switches dropout on); the methods below take
    those.
    """

    outputs: ClassVar[int] = 1  # of the network, for each dimension of an action (or for each of the discrete ones)

    def __init__(self, obs_dim: int, action_dim: int, hidden: Sequence[int], **mlp: Any) -> None:
        super().__init__()
        self.net = MLP(obs_dim, hidden, self.outputs * action_dim, actor=True, **mlp)

    @abstractmethod
    def mode(self, dist: Dist) -> Tensor:
        """The greedy action: [B, A] in [-1, 1], or [B] int64."""

    @abstractmethod
    def sample(self, dist: Dist, key: Tensor) -> Tensor:
        """One random action per row, reparametrised where the distribution allows it."""

    @abstractmethod
    def log_prob(self, dist: Dist, actions: Tensor) -> Tensor:
        """Log density (or log probability) of the data's actions: [B]."""

    def bc_loss(self, dist: Dist, actions: Tensor) -> Tensor:
        """Imitation loss per row: [B]. The negative log-likelihood unless a policy has none."""
        return -self.log_prob(dist, actions)


def gaussian_log_prob(mean: Tensor, log_std: Tensor, x: Tensor) -> Tensor:
    """Sum over the last axis of log N(x; mean, exp(log_std)**2)."""
    z = (x - mean) * torch.exp(-log_std)
    return (-0.5 * z.square() - log_std - 0.5 * math.log(2.0 * math.pi)).sum(-1)


class Deterministic(Policy):
    """a = tanh(f(s)). Its imitation loss is the squared error, averaged over action dimensions (TD3+BC, arXiv
    2106.06860).
    """

    def forward(self, observations: Tensor, key: Tensor | None = None) -> Dist:
        return (self.net(observations, key).tanh(),)

    def mode(self, dist: Dist) -> Tensor:
        return dist[0]

    def sample(self, dist: Dist, key: Tensor) -> Tensor:
        return dist[0]

    def log_prob(self, dist: Dist, actions: Tensor) -> Tensor:
        raise TypeError("a deterministic policy has no density; use a Gaussian one (algo.policy=gaussian)")

    def bc_loss(self, dist: Dist, actions: Tensor) -> Tensor:
        return (dist[0] - actions).square().mean(-1)


class Gaussian(Policy):
    """N(tanh(f(s)), diag(exp(2 log_std))) with log_std a free parameter; samples are clipped, not squashed (IQL, arXiv
    2110.06169).

    Not `bounded`: the mean is f(s) itself, and the greedy action is clipped as well (AWAC, arXiv 2006.09359).
    """

    def __init__(
        self,
        obs_dim: int,
        action_dim: int,
        hidden: Sequence[int],
        *,
        log_std_min: float = -5.0,
        log_std_max: float = 2.0,
        bounded: bool = True,
        **mlp: Any,
    ) -> None:
        super().__init__(obs_dim, action_dim, hidden, **mlp)
        self.bounded = bounded
        self.log_std = nn.Parameter(torch.zeros(action_dim))
        self.bounds = (log_std_min, log_std_max)

    def forward(self, observations: Tensor, key: Tensor | None = None) -> Dist:
        mean = self.net(observations, key)
        mean = mean.tanh() if self.bounded else mean
        return mean, self.log_std.clamp(*self.bounds).expand_as(mean)

    def mode(self, dist: Dist) -> Tensor:
        return dist[0] if self.bounded else dist[0].clamp(-1.0, 1.0)

    def sample(self, dist: Dist, key: Tensor) -> Tensor:
        mean, log_std = dist
        return (mean + log_std.exp() * rng.normal(key, tuple(mean.shape))).clamp(-1.0, 1.0)

    def log_prob(self, dist: Dist, actions: Tensor) -> Tensor:
        mean, log_std = dist
        return gaussian_log_prob(mean, log_std, actions)


class UnitGaussian(Policy):
    """N(f(s), I): imitation is half the squared error, whatever its size; the greedy action is the mean, clipped
    (OGBench, 2410.20092).
    """

    def forward(self, observations: Tensor, key: Tensor | None = None) -> Dist:
        return (self.net(observations, key),)

    def mode(self, dist: Dist) -> Tensor:
        return dist[0].clamp(-1.0, 1.0)

    def sample(self, dist: Dist, key: Tensor) -> Tensor:
        return (dist[0] + rng.normal(key, tuple(dist[0].shape))).clamp(-1.0, 1.0)

    def log_prob(self, dist: Dist, actions: Tensor) -> Tensor:
        return gaussian_log_prob(dist[0], torch.zeros_like(dist[0]), actions)


class TanhGaussian(Policy):
    """a = tanh(u), u ~ N(mu(s), diag(exp(2 log_std(s)))), with a state-dependent log_std (SAC, arXiv 1801.01290,
    appendix C).

    `scaled`: log_std is w * output + b with learnt scalars w (first 1) and b (first -1), as in CQL's code.
    """

    outputs = 2

    def __init__(
        self,
        obs_dim: int,
        action_dim: int,
        hidden: Sequence[int],
        *,
        log_std_min: float = -5.0,
        log_std_max: float = 2.0,
        scaled: bool = False,
        **mlp: Any,
    ) -> None:
        super().__init__(obs_dim, action_dim, hidden, **mlp)
        self.scale = nn.Parameter(torch.ones(())) if scaled else None
        self.shift = nn.Parameter(-torch.ones(())) if scaled else None
        self.bounds = (log_std_min, log_std_max)

    def forward(self, observations: Tensor, key: Tensor | None = None) -> Dist:
        mean, log_std = self.net(observations, key).chunk(2, -1)
        if self.scale is not None and self.shift is not None:
            log_std = self.scale * log_std + self.shift
        return mean, log_std.clamp(*self.bounds)

    def mode(self, dist: Dist) -> Tensor:
        return dist[0].tanh()

    def sample(self, dist: Dist, key: Tensor) -> Tensor:
        return self.sample_with_log_prob(dist, key)[0]

    def sample_with_log_prob(self, dist: Dist, key: Tensor, count: int | None = None) -> tuple[Tensor, Tensor]:
        """Actions [B, A] and their log densities [B], from the pre-tanh sample, so that no inverse of tanh is needed.

        With `count`, that number of actions for each row: [count, B, A] and [count, B].
        """
        mean, log_std = dist
        shape = tuple(mean.shape) if count is None else (count, *mean.shape)
        u = mean + log_std.exp() * rng.normal(key, shape)
        return u.tanh(), self._density(dist, u)

    def log_prob(self, dist: Dist, actions: Tensor) -> Tensor:
        return self._density(dist, torch.atanh(actions.clamp(-1.0 + 1e-6, 1.0 - 1e-6)))

    @staticmethod
    def _density(dist: Dist, u: Tensor) -> Tensor:
        # log(1 - tanh(u)**2) = 2 (log 2 - u - softplus(-2u)), exact where the direct form underflows
        correction = 2.0 * (math.log(2.0) - u - nn.functional.softplus(-2.0 * u))
        mean, log_std = dist
        return gaussian_log_prob(mean, log_std, u) - correction.sum(-1)


class TwoHeadedTanhGaussian(TanhGaussian):
    """A `TanhGaussian` of features, with a head for the mean and one for log_std, which tanh keeps in [-10, 2]."""

    def __init__(self, features: nn.Module, mean: nn.Module, log_std: nn.Module) -> None:
        nn.Module.__init__(self)  # without the layers that a `Policy` makes
        self.features, self.mean, self.log_std = features, mean, log_std

    def forward(self, observations: Tensor, key: Tensor | None = None) -> Dist:
        h, (low, high) = self.features(observations), LOG_STD
        return self.mean(h), low + 0.5 * (high - low) * (1.0 + self.log_std(h).tanh())


class Categorical(Policy):
    """Softmax over K actions."""

    def forward(self, observations: Tensor, key: Tensor | None = None) -> Dist:
        return (self.net(observations, key).log_softmax(-1),)

    def mode(self, dist: Dist) -> Tensor:
        return dist[0].argmax(-1)

    def sample(self, dist: Dist, key: Tensor) -> Tensor:
        return rng.categorical(key, dist[0])

    def log_prob(self, dist: Dist, actions: Tensor) -> Tensor:
        return dist[0].gather(-1, actions.unsqueeze(-1)).squeeze(-1)


POLICIES: dict[str, type[Policy]] = {
    "deterministic": Deterministic,
    "gaussian": Gaussian,
    "tanh_gaussian": TanhGaussian,
    "unit_gaussian": UnitGaussian,
}


def make_policy(
    name: str, obs_dim: int, action_dim: int, num_actions: int, hidden: Sequence[int], **mlp: Any
) -> Policy:
    """The policy called `name`; for discrete actions (num_actions > 0) always a categorical one."""
    if num_actions:
        return Categorical(obs_dim, num_actions, hidden, **mlp)
    return POLICIES[name](obs_dim, action_dim, hidden, **mlp)
