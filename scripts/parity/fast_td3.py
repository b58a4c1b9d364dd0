"""FastTD3: critics of a distribution of returns that learn for many environments. The authors' update is a closure of
their training script, so that its steps are made here of their networks, projection and values.
"""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import torch
from torch import Tensor
from torch.nn import functional as F

from parity.common import (
    ACTION,
    OBSERVATION,
    Ours,
    Outcome,
    batches,
    case,
    fill,
    imported,
    linears,
    pair_layers,
    shared_noise,
    tensors,
)

WIDTHS = {"critic": 24, "actor": 16}  # of the first layer; the others halve it twice
LOW, HIGH, BINS = -3.0, 4.0, 11


@case(
    "fast_td3",
    "younggyoseo/FastTD3",
    "229ed59bbf43ea2f7a2d5d90d1076314839944d7",
    aligned="the update is made of the authors' networks, projection and values, for it is a closure of their script",
    remains="the critic with the smaller mean: of the projection there, of what is projected here, which differ where "
    "values leave the range; rows come from every environment alike there; statistics of observations are of what was "
    "played here, of the batches as well there; actions are stored within the range here",
)
def fast_td3(checkout: Path) -> Outcome:
    widths = {name: [width, width // 2, width // 4] for name, width in WIDTHS.items()}
    ours, outcome = (
        Ours(
            "fast_td3",
            hidden=widths["actor"],
            critic_hidden=widths["critic"],
            value_bins=BINS,
            value_range=[LOW, HIGH],
            policy_noise=0.4,
            learning_rate=3e-3,
        ),
        Outcome(),
    )
    c = ours.algorithm.config
    with imported(checkout, "fast_td3.fast_td3", ("tensordict",)) as code:
        shared = {"sim_type": "", "sim_dimension": 1, "seq_len": 1, "device": "cpu"}
        actor = code.Actor(OBSERVATION, ACTION, 1, 0.01, WIDTHS["actor"], **shared)
        critic, target = (
            code.Critic(OBSERVATION, ACTION, BINS, LOW, HIGH, WIDTHS["critic"], **shared) for _ in range(2)
        )
    fill(linears(actor), ours.mlp("actor"))
    for network in (critic, target):
        for i, member in enumerate((network.qnet1, network.qnet2)):
            fill(linears(member), ours.mlp("critic", i))
    adam = {m: torch.optim.AdamW(m.parameters(), lr=c.learning_rate, weight_decay=0.1) for m in (actor, critic)}

    def descend(module: torch.nn.Module, loss: Tensor) -> float:
        adam[module].zero_grad()
        loss.backward()
        adam[module].step()
        return float(loss.detach())

    for number, batch in enumerate(batches()):
        b = tensors(batch)
        with shared_noise(), mock.patch.object(Tensor, "float", Tensor.double):  # value heads compute in float32
            losses = ours.update(batch)
            with torch.no_grad():
                noise = (torch.randn_like(b["actions"]) * c.policy_noise).clamp(-c.noise_clip, c.noise_clip)
                next_actions = (actor(b["next_observations"]) + noise).clamp(-1.0, 1.0)
                discount = torch.full_like(b["rewards"], c.discount)
                parts = target.projection(b["next_observations"], next_actions, b["rewards"], b["masks"], discount)
                first = target.get_value(parts[0]) < target.get_value(parts[1])
                chosen = torch.where(first[:, None], *parts)
            logits = critic(b["observations"], b["actions"])
            entropies = [-(chosen * F.log_softmax(x, 1)).sum(1).mean() for x in logits]
            expected = {"critic/loss": descend(critic, entropies[0] + entropies[1])}
            if number % 2:
                values = [critic.get_value(x.softmax(1)) for x in critic(b["observations"], actor(b["observations"]))]
                expected["actor/loss"] = descend(actor, -torch.minimum(*values).mean())
            with torch.no_grad():
                for old, new in zip(target.parameters(), critic.parameters(), strict=True):
                    old.lerp_(new, c.polyak)
        outcome.losses.append({name: (losses[name], value) for name, value in expected.items()})
    outcome.parameters |= pair_layers("actor", ours.mlp("actor"), linears(actor))
    for i, member in enumerate((critic.qnet1, critic.qnet2)):
        outcome.parameters |= pair_layers(f"critic{i}", ours.mlp("critic", i), linears(member))
    goals = ours.mlp_of(ours.state.target["critic"], 0), linears(target.qnet1)
    outcome.parameters |= pair_layers("target0", *goals)
    return outcome
