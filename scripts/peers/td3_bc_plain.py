"""TD3+BC as a plain PyTorch loop: modules, torch.optim.Adam, zero_grad, backward, step, `.item()` of each loss."""

from __future__ import annotations

import copy

import torch
from peers import plain
from peers.common import ACTION, HIDDEN, OBSERVATION, Arrays
from torch import nn
from torch.nn import functional as F


class Actor(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = plain.mlp(OBSERVATION, *HIDDEN, ACTION)

    def forward(self, state: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.net(state))


class TD3BC:
    def __init__(self, noise: float = 0.2, discount: float = 0.99, tau: float = 0.005, alpha: float = 2.5) -> None:
        self.noise, self.discount, self.tau, self.alpha = noise, discount, tau, alpha
        self.actor, self.critic = Actor(), plain.Twin(OBSERVATION + ACTION, *HIDDEN, 1)
        self.actor_target, self.critic_target = copy.deepcopy(self.actor), copy.deepcopy(self.critic)
        self.actor_optimizer = torch.optim.Adam(self.actor.parameters(), lr=3e-4)
        self.critic_optimizer = torch.optim.Adam(self.critic.parameters(), lr=3e-4)
        self.done = 0

    def load(self, weights: Arrays) -> None:
        for name, net in (("critic0", self.critic.q1), ("critic1", self.critic.q2), ("actor", self.actor.net)):
            plain.load(net, weights, name)
        self.actor_target.load_state_dict(self.actor.state_dict())
        self.critic_target.load_state_dict(self.critic.state_dict())

    def update(self, batch: dict[str, torch.Tensor]) -> dict[str, float]:
        state, action = batch["observations"], batch["actions"]
        log = {}
        self.done += 1

        with torch.no_grad():
            noise = (torch.randn_like(action) * self.noise).clamp(-0.5, 0.5)
            next_action = (self.actor_target(batch["next_observations"]) + noise).clamp(-1.0, 1.0)
            target_q = torch.min(*self.critic_target(batch["next_observations"], next_action))
            y = batch["rewards"] + self.discount * batch["masks"] * target_q
        q1, q2 = self.critic(state, action)
        critic_loss = F.mse_loss(q1, y) + F.mse_loss(q2, y)
        log["critic/loss"] = critic_loss.item()
        self.critic_optimizer.zero_grad()
        critic_loss.backward()
        self.critic_optimizer.step()

        if self.done % 2 == 0:
            pi = self.actor(state)
            q = self.critic.q1(torch.cat([state, pi], 1))
            scale = self.alpha / q.abs().mean().detach()
            actor_loss = -scale * q.mean() + F.mse_loss(pi, action)
            log["actor/loss"] = actor_loss.item()
            self.actor_optimizer.zero_grad()
            actor_loss.backward()
            self.actor_optimizer.step()
            plain.soft_update(self.critic_target, self.critic, self.tau)
            plain.soft_update(self.actor_target, self.actor, self.tau)
        return log


if __name__ == "__main__":
    plain.main(lambda check: TD3BC(noise=0.0) if check else TD3BC())
