"""QRL as a plain PyTorch loop: modules, one Adam for each network, zero_grad, backward, step, `.item()` of each
loss.
"""

from __future__ import annotations

import numpy as np
import torch
from peers import common, plain
from peers.common import ACTION, OBSERVATION, Arrays
from peers.flops import BATCHES, QRL_HIDDEN, QRL_LATENT
from torch import nn
from torch.nn import functional as F

COMPONENT = 8  # numbers of the latent that make up one union of intervals


def net(inputs: int, outputs: int, norm: bool) -> nn.Sequential:
    """An MLP with GELU by its tanh approximation, and LayerNorm after it if `norm`."""
    layers: list[nn.Module] = []
    for width in QRL_HIDDEN:
        layers += [nn.Linear(inputs, width), nn.GELU("tanh"), *([nn.LayerNorm(width, eps=1e-6)] if norm else [])]
        inputs = width
    return nn.Sequential(*layers, nn.Linear(inputs, outputs))


class Value(nn.Module):
    """Encoder, dynamics of latents, interval quasimetric, and the multiplier of the constraint."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.moves = net(OBSERVATION, QRL_LATENT, True), net(QRL_LATENT + ACTION, QRL_LATENT, True)
        self.alpha, self.log_multiplier = nn.Parameter(torch.zeros(())), nn.Parameter(torch.zeros(()))

    def move(self, x: torch.Tensor, action: torch.Tensor) -> torch.Tensor:
        return x + self.moves(torch.cat([x, action], -1))

    def between(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """d(x, y) [B]: the lengths of unions of intervals, their mean and maximum mixed."""
        x, y = x.unflatten(-1, (-1, COMPONENT)), y.unflatten(-1, (-1, COMPONENT))
        begin, order = x.sort(-1)
        reach = torch.maximum(x, y).gather(-1, order).cummax(-1).values
        before = torch.cat([begin[..., :1], torch.maximum(reach[..., :-1], begin[..., 1:])], -1)
        lengths = (reach - before).clamp(min=0.0).sum(-1)
        share = torch.sigmoid(self.alpha)
        return share * lengths.mean(-1) + (1.0 - share) * lengths.amax(-1)


class QRL:
    def __init__(
        self, slack: float = 0.05, spread: float = 5.0, scale: float = 100.0, bc_weight: float = 0.003
    ) -> None:
        self.slack, self.spread, self.scale, self.bc_weight = slack, spread, scale, bc_weight
        self.value, self.actor = Value(), net(2 * OBSERVATION, ACTION, False)
        self.value_optimizer = torch.optim.Adam(self.value.parameters(), lr=3e-4)
        self.actor_optimizer = torch.optim.Adam(self.actor.parameters(), lr=3e-4)

    def load(self, weights: Arrays) -> None:
        for name, module in (
            ("value/encoder", self.value.encoder),
            ("value/moves", self.value.moves),
            ("actor/net", self.actor),
        ):
            linears = [m for m in module if isinstance(m, nn.Linear)]
            layers = [f"{name}.layers.{i}" for i in range(len(QRL_HIDDEN))] + [f"{name}.head"]
            with torch.no_grad():
                for layer, key in zip(linears, layers, strict=True):
                    layer.weight.copy_(torch.from_numpy(weights[f"{key}.weight"]))
                    layer.bias.copy_(torch.from_numpy(weights[f"{key}.bias"]))

    def update(self, batch: dict[str, torch.Tensor]) -> dict[str, float]:
        state, action, goal = batch["observations"], batch["actions"], batch["actor_goals"]
        value = self.value

        mean = self.actor(torch.cat([state, goal], -1))
        log_prob = torch.distributions.Normal(mean, 1.0).log_prob(action).sum(-1)
        q = -value.between(value.move(value.encoder(state), mean.clamp(-1.0, 1.0)), value.encoder(goal))
        actor_loss = -q.mean() / (q.detach().abs().mean() + 1e-6) - self.bc_weight * log_prob.mean()
        self.actor_optimizer.zero_grad()
        actor_loss.backward()
        self.actor_optimizer.step()

        x, next_x, far = (value.encoder(batch[k]) for k in ("observations", "next_observations", "value_goals"))
        distance, step = value.between(x, far), value.between(x, next_x)
        repulsion = self.scale * F.softplus(self.spread - distance / self.scale).mean()
        excess = (step - 1.0).clamp(min=0.0).pow(2).mean()
        multiplier = value.log_multiplier.exp()
        value_loss = repulsion + multiplier.detach() * excess + multiplier * (self.slack - excess.detach())
        predicted = value.move(x, action)
        dynamics = 0.5 * (value.between(predicted, next_x) + value.between(next_x, predicted)).mean()
        self.value_optimizer.zero_grad()
        (value_loss + dynamics).backward()
        self.value_optimizer.step()
        return {"actor/loss": actor_loss.item(), "value/loss": value_loss.item()}


class Buffer(plain.Buffer):
    """Transitions with two goals: any state of the data, and a later one of the same episode."""

    def __init__(self, rows: int) -> None:
        super().__init__(rows)
        starts, ends = common.episodes(rows)
        self.last = np.repeat(ends - 1, ends - starts)
        self.rows = len(self.last)  # what comes after the last end is of no episode

    def sample(self, batch_size: int) -> dict[str, torch.Tensor]:
        indices = np.random.randint(0, self.rows, size=batch_size)
        batch = {k: self.columns[k][indices] for k in ("observations", "actions", "next_observations")}
        last = self.last[indices]
        later = np.minimum(indices + 1 + (np.random.rand(batch_size) * (last - indices)).astype(int), last)
        batch["value_goals"] = self.columns["observations"][np.random.randint(0, self.rows, size=batch_size)]
        batch["actor_goals"] = self.columns["observations"][later]
        return batch


if __name__ == "__main__":
    plain.main(lambda check: QRL(), Buffer, BATCHES["qrl"], common.CHUNKS["qrl"])
