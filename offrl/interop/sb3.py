"""The policies that `offrl collect` trains with Stable-Baselines3 as plain tensors, acting without SB3: SAC's and PPO's
with its default networks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from offrl.errors import UserError

Linear = tuple[Tensor, Tensor]  # weight [out, in], bias [out]


@dataclass(frozen=True)
class Actor:
    """A feed-forward policy. `kind`: squashed (SAC: tanh of a Gaussian), gaussian (PPO: clipped) or categorical."""

    kind: str
    layers: tuple[Linear, ...]  # the hidden ones, each followed by the activation: ReLU (SAC) or tanh (PPO)
    head: Linear  # mean [A], or logits of the choices [N]
    spread: Linear | Tensor | None  # log std: a second head (squashed), or numbers [A] (gaussian)
    low: np.ndarray | None  # [A] range of the actions; None for discrete ones
    high: np.ndarray | None
    seed: int = 0

    def start(self, episodes: int) -> np.random.Generator:
        """The source of the noise of that many episodes played side by side."""
        return np.random.default_rng(self.seed)

    def step(self, carry: Any, observations: np.ndarray, t: int, explore: bool = False) -> tuple[np.ndarray, Any]:
        """Actions for raw observations [E, O]: [E, A] float32 in the environment's range, or [E] int64. See
        `offrl.evaluation.result.Policy`."""
        return self.act(observations, carry if explore else None)[0], carry

    @torch.no_grad()
    def act(self, observations: np.ndarray, rng: np.random.Generator | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Actions, and the log density or probability of each [E] float32 under the noisy policy. Greedy without `rng`.

        The density is that of the actions as they are returned, in the environment's range; of a Gaussian policy (PPO)
        before they are clipped to it, as SB3 and D4RL have it."""
        x = torch.as_tensor(np.asarray(observations, np.float32)).reshape(len(observations), -1)
        for weight, bias in self.layers:
            x = F.linear(x, weight, bias)
            x = F.relu(x) if self.kind == "squashed" else torch.tanh(x)
        out = F.linear(x, *self.head)
        return self._choose(out, rng) if self.kind == "categorical" else self._continuous(x, out, rng)

    def _choose(self, out: Tensor, rng: np.random.Generator | None) -> tuple[np.ndarray, np.ndarray]:
        log, choice = F.log_softmax(out, 1), out.argmax(1)
        if rng is not None:  # the Gumbel trick: argmax of log p + Gumbel noise has the distribution p
            choice = (log.double() + torch.from_numpy(rng.gumbel(size=tuple(log.shape)))).argmax(1)
        return choice.numpy(), log.gather(1, choice[:, None])[:, 0].numpy()

    def _continuous(self, x: Tensor, mean: Tensor, rng: np.random.Generator | None) -> tuple[np.ndarray, np.ndarray]:
        assert self.low is not None and self.high is not None and self.spread is not None
        low, high = torch.as_tensor(self.low), torch.as_tensor(self.high)
        if isinstance(self.spread, tuple):
            log_std = F.linear(x, *self.spread).clamp(-20, 2)
        else:
            log_std = self.spread.expand_as(mean)
        noise = torch.zeros_like(mean)
        if rng is not None:
            noise = torch.from_numpy(rng.standard_normal(tuple(mean.shape), np.float32))
        raw = mean + log_std.exp() * noise
        log = (-0.5 * noise**2 - log_std - 0.5 * float(np.log(2 * np.pi))).sum(1)
        if self.kind == "gaussian":
            return torch.clamp(raw, low, high).numpy(), log.numpy()
        squashed = torch.tanh(raw)
        # log(1 - tanh(u)^2), stable for large u, and the width of the range
        slope = 2.0 * (float(np.log(2.0)) - raw - F.softplus(-2.0 * raw)) + torch.log((high - low) / 2)
        return (low + 0.5 * (squashed + 1.0) * (high - low)).numpy(), (log - slope.sum(1)).numpy()


def actor_from(
    tensors: Mapping[str, Tensor], *, low: np.ndarray | None, high: np.ndarray | None, discrete: bool, where: str
) -> Actor:
    """The state dictionary of an MLP policy of SAC or PPO, with their default activations, as an Actor.

    Raises UserError where its training had diverged.
    """
    weights = {k: v.detach().cpu().float() for k, v in tensors.items()}
    if not all(torch.isfinite(v).all() for v in weights.values()):
        raise UserError(f"{where} holds NaN or infinite weights: its training had diverged")

    def linear(name: str) -> Linear:
        return weights[f"{name}.weight"], weights[f"{name}.bias"]

    squashed = "actor.mu.weight" in weights
    stack = "actor.latent_pi" if squashed else "mlp_extractor.policy_net"
    layers: list[Linear] = []
    while f"{stack}.{2 * len(layers)}.weight" in weights:  # an activation stands between two
        layers.append(linear(f"{stack}.{2 * len(layers)}"))
    if squashed:
        return Actor("squashed", tuple(layers), linear("actor.mu"), linear("actor.log_std"), low, high)
    kind, spread = ("categorical", None) if discrete else ("gaussian", weights["log_std"])
    return Actor(kind, tuple(layers), linear("action_net"), spread, low, high)
