"""CORL's single-file implementations (corl-team/CORL)."""

from __future__ import annotations

from pathlib import Path

import torch

from parity.common import ACTION, OBSERVATION, Ours, Outcome, batches, case, fill, imported, linears, pair_layers, shared_noise

CORL, COMMIT = "corl-team/CORL", "eeeeef2671235fcce3a3eb255576a207d78840e6"
ABSENT = ("d4rl", "gym", "pyrallis", "wandb")


def adam(*modules: torch.nn.Module, rate: float = 3e-4) -> torch.optim.Adam:
    return torch.optim.Adam([p for m in modules for p in m.parameters()], lr=rate)


@case("td3_bc", CORL, COMMIT)
def td3_bc(checkout: Path) -> Outcome:
    ours, outcome = Ours("td3_bc", hidden=[256, 256], learning_rate=3e-4), Outcome()
    with imported(checkout, "algorithms.offline.td3_bc", ABSENT) as corl:
        actor = corl.Actor(OBSERVATION, ACTION, 1.0)
        critics = [corl.Critic(OBSERVATION, ACTION) for _ in range(2)]
        fill(linears(actor), ours.mlp("actor"))
        for i, critic in enumerate(critics):
            fill(linears(critic), ours.mlp("critic", i))
        reference = corl.TD3_BC(1.0, actor, adam(actor), critics[0], adam(critics[0]), critics[1], adam(critics[1]))
    for batch in batches():
        with shared_noise():
            losses = ours.update(batch)
            columns = (torch.as_tensor(batch[k]) for k in ("observations", "actions", "rewards", "next_observations"))
            observations, actions, rewards, next_observations = columns
            done = torch.as_tensor(1 - batch["masks"])[:, None]
            expected = reference.train([observations, actions, rewards[:, None], next_observations, done])
        names = {"critic/loss": "critic_loss", "actor/loss": "actor_loss"}
        outcome.losses.append({a: (losses[a], expected[b]) for a, b in names.items() if b in expected})
    outcome.parameters |= pair_layers("actor", ours.mlp("actor"), linears(actor))
    for i, critic in enumerate(critics):
        outcome.parameters |= pair_layers(f"critic{i}", ours.mlp("critic", i), linears(critic))
    return outcome
