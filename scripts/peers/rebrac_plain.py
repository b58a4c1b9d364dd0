"""ReBRAC as a plain PyTorch loop: modules, torch.optim.Adam, zero_grad, backward, step, `.item()` of each loss."""

from __future__ import annotations

import torch
from peers import common, plain
from peers.common import ACTION, OBSERVATION
from peers.flops import BATCHES, DEEP_HIDDEN
from torch import nn
from torch.nn import functional as F


def normed(*sizes: int) -> nn.Sequential:
    """An MLP with LayerNorm after each activation."""
    layers: list[nn.Module] = []
    for i, o in zip(sizes[:-2], sizes[1:-1], strict=True):
        layers += [nn.Linear(i, o), nn.ReLU(), nn.LayerNorm(o, eps=1e-6)]
    return nn.Sequential(*layers, nn.Linear(*sizes[-2:]))


class Twin(plain.Twin):
    """Two such critics Q(s, a)."""

    def __init__(self, *sizes: int) -> None:
        nn.Module.__init__(self)
        self.q1, self.q2 = normed(*sizes), normed(*sizes)


class ReBRAC(plain.TD3):
    def __init__(self, noise: float = 0.2, discount: float = 0.99, tau: float = 0.005, penalty: float = 0.01) -> None:
        self.noise, self.discount, self.tau, self.penalty = noise, discount, tau, penalty
        super().__init__(
            plain.Actor(OBSERVATION, *DEEP_HIDDEN, ACTION), Twin(OBSERVATION + ACTION, *DEEP_HIDDEN, 1), 1e-3
        )

    def update(self, batch: dict[str, torch.Tensor]) -> dict[str, float]:
        state, action, after = batch["observations"], batch["actions"], batch["next_observations"]
        log = {}
        self.done += 1

        with torch.no_grad():
            noise = (torch.randn_like(action) * self.noise).clamp(-0.5, 0.5)
            next_action = (self.actor_target(after) + noise).clamp(-1.0, 1.0)
            distance = (next_action - batch["next_actions"]).pow(2).sum(-1)
            target_q = torch.min(*self.critic_target(after, next_action)) - self.penalty * distance
            y = batch["rewards"] + self.discount * batch["masks"] * target_q
        q1, q2 = self.critic(state, action)
        critic_loss = F.mse_loss(q1, y) + F.mse_loss(q2, y)
        log["critic/loss"] = self.descend(self.critic_optimizer, critic_loss)

        if self.done % 2 == 0:
            pi = self.actor(state)
            q = torch.min(*self.critic(state, pi))
            actor_loss = self.penalty * (pi - action).pow(2).sum(-1).mean() - q.mean() / q.abs().mean().detach()
            log["actor/loss"] = self.descend(self.actor_optimizer, actor_loss)
            self.follow(self.tau)
        return log


if __name__ == "__main__":
    plain.main(
        lambda check: ReBRAC(noise=0.0) if check else ReBRAC(),
        lambda rows: plain.Buffer(rows, common.with_next_actions),
        BATCHES["rebrac"],
        common.CHUNKS["rebrac"],
    )
