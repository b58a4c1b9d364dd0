"""IQL as a plain PyTorch loop: modules, torch.optim.Adam, zero_grad, backward, step, `.item()` of each loss."""

from __future__ import annotations

import copy

import torch
from peers import plain
from peers.common import ACTION, HIDDEN, OBSERVATION, Arrays
from torch import nn
from torch.distributions import Normal
from torch.nn import functional as F


class Policy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = plain.mlp(OBSERVATION, *HIDDEN, ACTION)
        self.log_std = nn.Parameter(torch.zeros(ACTION))

    def forward(self, state: torch.Tensor) -> Normal:
        return Normal(torch.tanh(self.net(state)), torch.exp(self.log_std.clamp(-5.0, 2.0)))


class IQL:
    def __init__(
        self, discount: float = 0.99, tau: float = 0.005, expectile: float = 0.7, temperature: float = 3.0
    ) -> None:
        self.discount, self.tau, self.expectile, self.temperature = discount, tau, expectile, temperature
        self.qf = plain.Twin(OBSERVATION + ACTION, *HIDDEN, 1)
        self.q_target = copy.deepcopy(self.qf).requires_grad_(False)
        self.vf = plain.mlp(OBSERVATION, *HIDDEN, 1)
        self.actor = Policy()
        self.q_optimizer = torch.optim.Adam(self.qf.parameters(), lr=3e-4)
        self.v_optimizer = torch.optim.Adam(self.vf.parameters(), lr=3e-4)
        self.actor_optimizer = torch.optim.Adam(self.actor.parameters(), lr=3e-4)
        self.actor_schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.actor_optimizer, 1_000_000)

    def load(self, weights: Arrays) -> None:
        for name, net in (
            ("critic0", self.qf.q1),
            ("critic1", self.qf.q2),
            ("value", self.vf),
            ("actor", self.actor.net),
        ):
            plain.load(net, weights, name)
        self.q_target.load_state_dict(self.qf.state_dict())

    def update(self, batch: dict[str, torch.Tensor]) -> dict[str, float]:
        state, action, reward = batch["observations"], batch["actions"], batch["rewards"]
        log = {}

        with torch.no_grad():
            target_q = torch.min(*self.q_target(state, action))
        u = target_q - self.vf(state).squeeze(-1)
        v_loss = (torch.abs(self.expectile - (u < 0).float()) * u**2).mean()
        log["value/loss"] = v_loss.item()
        self.v_optimizer.zero_grad()
        v_loss.backward()
        self.v_optimizer.step()

        with torch.no_grad():
            advantage = target_q - self.vf(state).squeeze(-1)
            weight = torch.exp(self.temperature * advantage).clamp(max=100.0)
        bc_loss = -self.actor(state).log_prob(action).sum(-1)
        actor_loss = (weight * bc_loss).mean()
        log["actor/loss"] = actor_loss.item()
        self.actor_optimizer.zero_grad()
        actor_loss.backward()
        self.actor_optimizer.step()
        self.actor_schedule.step()

        with torch.no_grad():
            y = reward + self.discount * batch["masks"] * self.vf(batch["next_observations"]).squeeze(-1)
        q1, q2 = self.qf(state, action)
        q_loss = F.mse_loss(q1, y) + F.mse_loss(q2, y)
        log["critic/loss"] = q_loss.item()
        self.q_optimizer.zero_grad()
        q_loss.backward()
        self.q_optimizer.step()

        plain.soft_update(self.q_target, self.qf, self.tau)
        return log


if __name__ == "__main__":
    plain.main(lambda check: IQL())
