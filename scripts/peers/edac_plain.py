"""EDAC as a plain PyTorch loop, as papers' code has it: critics in one batched product, their gradients by a second
pass.
"""

from __future__ import annotations

import copy

import torch
from peers import common, plain
from peers.common import ACTION, OBSERVATION, Arrays
from peers.cql_plain import TanhPolicy
from peers.flops import DEEP_HIDDEN, EDAC_CRITICS
from torch import nn


class Critics(nn.Module):
    """Q of N critics, [N, B]. States and actions are [B, ...], or [N, B, ...] with inputs of each critic's own."""

    def __init__(self) -> None:
        super().__init__()
        sizes = (OBSERVATION + ACTION, *DEEP_HIDDEN, 1)
        pairs = list(zip(sizes[:-1], sizes[1:], strict=True))
        self.weights = nn.ParameterList(torch.empty(EDAC_CRITICS, i, o).uniform_(-(i**-0.5), i**-0.5) for i, o in pairs)
        self.biases = nn.ParameterList(torch.zeros(EDAC_CRITICS, 1, o) for _, o in pairs)

    def forward(self, state: torch.Tensor, action: torch.Tensor) -> torch.Tensor:
        x = torch.cat([state, action], -1)
        x = x if x.dim() == 3 else x.unsqueeze(0).repeat_interleave(EDAC_CRITICS, 0)
        for weight, bias in zip(self.weights[:-1], self.biases[:-1], strict=True):
            x = torch.relu(torch.baddbmm(bias, x, weight))
        return torch.baddbmm(self.biases[-1], x, self.weights[-1]).squeeze(-1)


class EDAC:
    def __init__(
        self, noise: plain.Draw = torch.randn, discount: float = 0.99, tau: float = 0.005, eta: float = 1.0
    ) -> None:
        self.discount, self.tau, self.eta = discount, tau, eta
        self.actor, self.critic = TanhPolicy(-5.0, False, noise), Critics()
        self.critic_target = copy.deepcopy(self.critic)
        self.log_alpha = torch.zeros((), requires_grad=True)
        self.actor_optimizer = torch.optim.Adam(self.actor.parameters(), lr=3e-4)
        self.critic_optimizer = torch.optim.Adam(self.critic.parameters(), lr=3e-4)
        self.alpha_optimizer = torch.optim.Adam([self.log_alpha], lr=3e-4)

    def load(self, weights: Arrays) -> None:
        plain.load(self.actor.net, weights, "actor")
        with torch.no_grad():
            for j, (weight, bias) in enumerate(zip(self.critic.weights, self.critic.biases, strict=True)):
                for k in range(EDAC_CRITICS):
                    weight[k].copy_(torch.from_numpy(weights[f"critic{k}/w{j}"]))
                    bias[k, 0].copy_(torch.from_numpy(weights[f"critic{k}/b{j}"]))
        self.critic_target.load_state_dict(self.critic.state_dict())

    def similarity(self, state: torch.Tensor, action: torch.Tensor) -> torch.Tensor:
        """Mean over states of the sum over pairs of critics of the cosines of their gradients at the data's actions."""
        states = state.unsqueeze(0).repeat_interleave(EDAC_CRITICS, 0)
        actions = action.unsqueeze(0).repeat_interleave(EDAC_CRITICS, 0).requires_grad_(True)
        (g,) = torch.autograd.grad(self.critic(states, actions).sum(), actions, create_graph=True)
        g = g / (g.norm(p=2, dim=2, keepdim=True) + 1e-10)
        g = g.transpose(0, 1)  # [B, N, A]
        cosines = (g @ g.transpose(1, 2)) * (1.0 - torch.eye(EDAC_CRITICS))
        return cosines.sum(dim=(1, 2)).mean()

    def update(self, batch: dict[str, torch.Tensor]) -> dict[str, float]:
        state, action, after = batch["observations"], batch["actions"], batch["next_observations"]

        with torch.no_grad():
            _, log_pi = self.actor(state)
        alpha_loss = -(self.log_alpha * (log_pi - ACTION)).mean()
        self.alpha_optimizer.zero_grad()
        alpha_loss.backward()
        self.alpha_optimizer.step()
        alpha = self.log_alpha.exp().detach()

        pi, log_pi = self.actor(state)
        actor_loss = (alpha * log_pi - self.critic(state, pi).min(0).values).mean()
        self.actor_optimizer.zero_grad()
        actor_loss.backward()
        self.actor_optimizer.step()

        with torch.no_grad():
            next_action, next_log_pi = self.actor(after)
            next_q = self.critic_target(after, next_action).min(0).values - alpha * next_log_pi
            y = batch["rewards"] + self.discount * batch["masks"] * next_q
        td_loss = (self.critic(state, action) - y).pow(2).mean(1).sum(0)
        similar = self.similarity(state, action)
        self.critic_optimizer.zero_grad()
        (td_loss + self.eta * similar / (EDAC_CRITICS - 1)).backward()
        self.critic_optimizer.step()
        plain.soft_update(self.critic_target, self.critic, self.tau)
        alignment = similar.item() / (EDAC_CRITICS * (EDAC_CRITICS - 1))
        return {"actor/loss": actor_loss.item(), "critic/loss": td_loss.item(), "critic/alignment": alignment}


if __name__ == "__main__":
    plain.main(lambda check: EDAC(plain.zeros) if check else EDAC(), chunk=common.CHUNKS["edac"])
