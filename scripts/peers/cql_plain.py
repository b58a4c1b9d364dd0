"""CQL as a plain PyTorch loop, as papers' code has it: a pass through the critics for each of the three kinds of tried
actions.
"""

from __future__ import annotations

import copy
import math

import torch
from peers import common, plain
from peers.common import ACTION, OBSERVATION, Arrays
from peers.flops import DEEP_HIDDEN
from torch import nn
from torch.nn import functional as F

TRIED = 10  # actions of each kind for a state


class TanhPolicy(nn.Module):
    """tanh of a Gaussian whose mean and spread depend on the state; `noise` draws its standard normal numbers."""

    def __init__(self, low: float, scaled: bool, noise: plain.Draw) -> None:
        super().__init__()
        self.net = plain.mlp(OBSERVATION, *DEEP_HIDDEN, 2 * ACTION)
        self.low, self.noise = low, noise
        self.scale, self.shift = (
            nn.Parameter(torch.tensor(v)) if scaled else v for v in ((1.0, -1.0) if scaled else (1.0, 0.0))
        )

    def forward(self, state: torch.Tensor, many: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Actions [B, A] and log densities [B], or `many` of each: [many, B, A] and [many, B]."""
        mean, log_std = self.net(state).chunk(2, -1)
        log_std = (self.scale * log_std + self.shift).clamp(self.low, 2.0)
        normal = torch.distributions.Normal(mean, log_std.exp())
        u = mean + log_std.exp() * self.noise(mean.shape if many is None else (many, *mean.shape))
        log_p = normal.log_prob(u) - 2.0 * (math.log(2.0) - u - F.softplus(-2.0 * u))
        return torch.tanh(u), log_p.sum(-1)


class CQL:
    def __init__(
        self,
        noise: plain.Draw = torch.randn,
        uniform: plain.Draw = lambda shape: torch.empty(shape).uniform_(-1.0, 1.0),
        discount: float = 0.99,
        tau: float = 0.005,
        weight: float = 10.0,
    ) -> None:
        self.uniform, self.discount, self.tau, self.weight = uniform, discount, tau, weight
        self.actor = TanhPolicy(-20.0, True, noise)
        self.critic = plain.Twin(OBSERVATION + ACTION, *DEEP_HIDDEN, 1)
        self.critic_target = copy.deepcopy(self.critic)
        self.log_alpha = torch.zeros((), requires_grad=True)
        self.actor_optimizer = torch.optim.Adam(self.actor.parameters(), lr=3e-5)
        self.critic_optimizer = torch.optim.Adam(self.critic.parameters(), lr=3e-4)
        self.alpha_optimizer = torch.optim.Adam([self.log_alpha], lr=3e-5)

    def load(self, weights: Arrays) -> None:
        for name, net in (("critic0", self.critic.q1), ("critic1", self.critic.q2), ("actor", self.actor.net)):
            plain.load(net, weights, name)
        self.critic_target.load_state_dict(self.critic.state_dict())

    def tried(self, state: torch.Tensor, actions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Both critics [n, B] at n actions for each state."""
        repeated = state.unsqueeze(0).repeat(len(actions), 1, 1).reshape(-1, OBSERVATION)
        q1, q2 = self.critic(repeated, actions.reshape(-1, ACTION))
        return q1.view(len(actions), -1), q2.view(len(actions), -1)

    def update(self, batch: dict[str, torch.Tensor]) -> dict[str, float]:
        state, action, after = batch["observations"], batch["actions"], batch["next_observations"]

        pi, log_pi = self.actor(state)
        alpha_loss = -(self.log_alpha * (log_pi - ACTION).detach()).mean()
        alpha = self.log_alpha.exp().detach()
        actor_loss = (alpha * log_pi - torch.min(*self.critic(state, pi))).mean()

        with torch.no_grad():
            next_action, _ = self.actor(after)
            y = batch["rewards"] + self.discount * batch["masks"] * torch.min(*self.critic_target(after, next_action))
            sampled, log_sampled = self.actor(state, TRIED)
            sampled_next, log_next = self.actor(after, TRIED)
        random = self.uniform((TRIED, *action.shape))
        log_random = torch.full(random.shape[:2], -ACTION * math.log(2.0))
        q1, q2 = self.critic(state, action)
        td_loss = F.mse_loss(q1, y) + F.mse_loss(q2, y)
        parts = [
            (self.tried(state, a), log_p)
            for a, log_p in ((random, log_random), (sampled, log_sampled), (sampled_next, log_next))
        ]
        penalty = torch.zeros(())
        for k, q in enumerate((q1, q2)):
            level = torch.logsumexp(torch.cat([values[k] - log_p for values, log_p in parts]), 0)
            penalty = penalty + self.weight * (level - q).mean()

        self.alpha_optimizer.zero_grad()
        alpha_loss.backward()
        self.alpha_optimizer.step()
        self.actor_optimizer.zero_grad()
        actor_loss.backward()
        self.actor_optimizer.step()
        self.critic_optimizer.zero_grad()
        (td_loss + penalty).backward()
        self.critic_optimizer.step()
        plain.soft_update(self.critic_target, self.critic, self.tau)
        return {"actor/loss": actor_loss.item(), "critic/loss": td_loss.item(), "cql/penalty": penalty.item()}


if __name__ == "__main__":
    plain.main(lambda check: CQL(plain.zeros, plain.spread) if check else CQL(), chunk=common.CHUNKS["cql"])
