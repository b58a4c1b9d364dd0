"""FQL as a plain PyTorch loop, of single actions or of chunks (QC-FQL): modules with an Adam each, zero_grad, backward,
step, `.item()`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import numpy as np
import torch
from peers import common, plain
from peers.common import ACTION, OBSERVATION, Arrays
from peers.flops import FQL_HIDDEN, QC_LENGTH
from torch import nn

ALPHA = {"fql": 10.0, "qc": 100.0}
Numbers = Callable[..., torch.Tensor]


def net(inputs: int, outputs: int, norm: bool = False) -> nn.Sequential:
    """An MLP with GELU by its tanh approximation, and LayerNorm after it if `norm`."""
    layers: list[nn.Module] = []
    for width in FQL_HIDDEN:
        layers += [nn.Linear(inputs, width), nn.GELU("tanh"), *([nn.LayerNorm(width, eps=1e-6)] if norm else [])]
        inputs = width
    return nn.Sequential(*layers, nn.Linear(inputs, outputs))


class FQL:
    """length: actions in a chunk. normal, uniform: of a shape."""

    def __init__(
        self,
        length: int = 1,
        normal: Numbers = torch.randn,
        uniform: Numbers = torch.rand,
        discount: float = 0.99,
        tau: float = 0.005,
    ) -> None:
        self.length, self.width, self.normal, self.uniform = length, length * ACTION, normal, uniform
        self.alpha, self.discount, self.tau = ALPHA["fql" if length == 1 else "qc"], discount, tau
        self.critics = nn.ModuleList(net(OBSERVATION + self.width, 1, True) for _ in range(2))
        self.target = copy.deepcopy(self.critics)
        self.flow, self.actor = net(OBSERVATION + self.width + 1, self.width), net(OBSERVATION + self.width, self.width)
        self.optimizers = [torch.optim.Adam(m.parameters(), lr=3e-4) for m in (self.critics, self.flow, self.actor)]

    def load(self, weights: Arrays) -> None:
        for name, module in (
            ("critic0", self.critics[0]),
            ("critic1", self.critics[1]),
            ("flow", self.flow),
            ("actor", self.actor),
        ):
            plain.load(module, weights, name)
        self.target.load_state_dict(self.critics.state_dict())

    def values(self, critics: nn.ModuleList, state: torch.Tensor, action: torch.Tensor) -> torch.Tensor:
        return torch.stack([q(torch.cat([state, action], -1)).squeeze(-1) for q in critics])

    def update(self, batch: dict[str, torch.Tensor]) -> dict[str, float]:
        state, action, next_state = batch["observations"], batch["actions"].flatten(1), batch["next_observations"]
        rows = len(state)
        rewards, discount, whole = batch["rewards"], self.discount, 1.0
        valid = torch.ones(rows, self.length)
        if self.length > 1:
            rewards = (batch["step_rewards"] * self.discount ** torch.arange(self.length)).sum(-1)
            discount, whole, valid = self.discount ** batch["span"], batch["whole"], batch["valid"].float()

        with torch.no_grad():
            z = self.normal((rows, self.width))
            chosen = self.actor(torch.cat([next_state, z], -1)).clamp(-1.0, 1.0)
            y = rewards + discount * batch["masks"] * self.values(self.target, next_state, chosen).mean(0)
        critic_loss = (whole * (self.values(self.critics, state, action) - y).square()).mean()

        z, t = self.normal((rows, self.width)), self.uniform((rows, 1))
        error = self.flow(torch.cat([state, (1 - t) * z + t * action, t], -1)) - (action - z)
        flow_loss = (error.square().unflatten(1, (self.length, -1)) * valid.unsqueeze(-1)).mean()

        z = self.normal((rows, self.width))
        with torch.no_grad():
            x = z
            for i in range(10):
                x = x + self.flow(torch.cat([state, x, torch.full((rows, 1), i / 10)], -1)) / 10
            x = x.clamp(-1.0, 1.0)
        drawn = self.actor(torch.cat([state, z], -1))
        distillation = (drawn - x).square().mean()
        for parameter in self.critics.parameters():
            parameter.requires_grad_(False)
        actor_loss = self.alpha * distillation - self.values(self.critics, state, drawn.clamp(-1.0, 1.0)).mean()
        for parameter in self.critics.parameters():
            parameter.requires_grad_(True)

        log = {"critic/loss": critic_loss.item(), "flow/loss": flow_loss.item(), "actor/loss": actor_loss.item()}
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        for loss in (critic_loss, flow_loss, actor_loss):
            loss.backward()
        plain.soft_update(self.target, self.critics, self.tau)  # towards the critics of before the step
        for optimizer in self.optimizers:
            optimizer.step()
        return log


class Windows(plain.Buffer):
    """Windows of `QC_LENGTH` steps; those that an episode's end cuts repeat its last action."""

    def __init__(self, rows: int) -> None:
        super().__init__(rows)
        starts, ends = common.episodes(rows)
        self.last = np.repeat(ends - 1, ends - starts)
        self.rows = len(self.last)  # what comes after the last end is of no episode

    def sample(self, batch_size: int) -> dict[str, torch.Tensor]:
        first = np.random.randint(0, self.rows, size=batch_size)
        at, last = first[:, None] + np.arange(QC_LENGTH), self.last[first][:, None]
        steps, valid, c = np.minimum(at, last), torch.from_numpy(at <= last), self.columns
        end = steps[:, -1]
        batch = {
            "observations": c["observations"][first],
            "next_observations": c["next_observations"][end],
            "masks": c["masks"][end],
        }
        batch |= {"actions": c["actions"][steps], "rewards": c["rewards"][first], "valid": valid, "span": valid.sum(-1)}
        batch |= {"step_rewards": torch.where(valid, c["rewards"][steps], 0.0)}
        return batch | {"whole": (valid[:, -1] | (batch["masks"] == 0.0)).float()}


def checked(length: int) -> FQL:
    """A trainer whose random numbers are those of a check."""
    return FQL(length, plain.zeros, plain.spread)


if __name__ == "__main__":
    plain.main(lambda check: checked(1) if check else FQL(), chunk=common.CHUNKS["fql"])
