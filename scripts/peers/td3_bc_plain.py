"""TD3+BC as a plain PyTorch loop: modules, torch.optim.Adam, zero_grad, backward, step, `.item()` of each loss."""

from __future__ import annotations

import torch
from peers import plain
from peers.common import ACTION, HIDDEN, OBSERVATION
from torch.nn import functional as F


class TD3BC(plain.TD3):
    def __init__(self, noise: float = 0.2, discount: float = 0.99, tau: float = 0.005, alpha: float = 2.5) -> None:
        self.noise, self.discount, self.tau, self.alpha = noise, discount, tau, alpha
        super().__init__(plain.Actor(OBSERVATION, *HIDDEN, ACTION), plain.Twin(OBSERVATION + ACTION, *HIDDEN, 1), 3e-4)

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
        log["critic/loss"] = self.descend(self.critic_optimizer, critic_loss)

        if self.done % 2 == 0:
            pi = self.actor(state)
            q = self.critic.q1(torch.cat([state, pi], 1))
            scale = self.alpha / q.abs().mean().detach()
            actor_loss = -scale * q.mean() + F.mse_loss(pi, action)
            log["actor/loss"] = self.descend(self.actor_optimizer, actor_loss)
            self.follow(self.tau)
        return log


if __name__ == "__main__":
    plain.main(lambda check: TD3BC(noise=0.0) if check else TD3BC())
