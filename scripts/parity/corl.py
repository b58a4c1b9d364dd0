"""CORL's single-file implementations (corl-team/CORL), those in PyTorch without a conservative penalty; see `corl_cql`
and `rebrac`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from parity.align import tanh_epsilon
from parity.common import (
    ACTION,
    BATCH,
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

CORL, COMMIT = "corl-team/CORL", "eeeeef2671235fcce3a3eb255576a207d78840e6"
ABSENT = ("d4rl", "gym", "pyrallis", "wandb")
Layers = list[tuple[np.ndarray, np.ndarray]]


def adam(*modules: torch.nn.Module, rate: float = 3e-4, **more: float) -> torch.optim.Adam:
    return torch.optim.Adam([p for m in modules for p in m.parameters()], lr=rate, **more)  # type: ignore[arg-type]


def columns(batch: Mapping[str, np.ndarray], *more: str) -> list[torch.Tensor]:
    """The batch in CORL's order: observations, actions, rewards [B, 1], next observations, done [B, 1]."""
    b = tensors(batch)
    return [
        b["observations"],
        b["actions"],
        b["rewards"][:, None],
        b["next_observations"],
        1 - b["masks"][:, None],
        *(b[k] for k in more),
    ]


def split_head(layers: Layers, width: int = ACTION) -> Layers:
    """The layers with the head that gives means and log standard deviations as two layers."""
    weight, bias = layers[-1]
    return [*layers[:-1], (weight[:, :width], bias[:width]), (weight[:, width:], bias[width:])]


def fill_critics(ours: Ours, *critics: torch.nn.Module) -> None:
    for i, critic in enumerate(critics):
        fill(linears(critic), ours.mlp("critic", i))


def pair_critics(ours: Ours, *critics: torch.nn.Module) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    return {
        k: v
        for i, c in enumerate(critics)
        for k, v in pair_layers(f"critic{i}", ours.mlp("critic", i), linears(c)).items()
    }


def pair(ours: Any, reference: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Two tensors of as many numbers for `Outcome.parameters`."""
    return ours.numpy().reshape(-1), reference.detach().numpy().reshape(-1)


@case("td3_bc", CORL, COMMIT)
def td3_bc(checkout: Path) -> Outcome:
    ours, outcome = Ours("td3_bc", hidden=[256, 256], learning_rate=3e-4), Outcome()
    with imported(checkout, "algorithms.offline.td3_bc", ABSENT) as corl:
        actor = corl.Actor(OBSERVATION, ACTION, 1.0)
        critics = [corl.Critic(OBSERVATION, ACTION) for _ in range(2)]
        fill(linears(actor), ours.mlp("actor"))
        fill_critics(ours, *critics)
        reference = corl.TD3_BC(1.0, actor, adam(actor), critics[0], adam(critics[0]), critics[1], adam(critics[1]))
    for batch in batches():
        with shared_noise():
            losses = ours.update(batch)
            expected = reference.train(columns(batch))
        names = {"critic/loss": "critic_loss", "actor/loss": "actor_loss"}
        outcome.losses.append({a: (losses[a], expected[b]) for a, b in names.items() if b in expected})
    outcome.parameters |= pair_layers("actor", ours.mlp("actor"), linears(actor)) | pair_critics(ours, *critics)
    return outcome


@case("bc", CORL, COMMIT, remains="nothing; of the best returns there, here with dataset.top_fraction (%BC)")
def bc(checkout: Path) -> Outcome:
    ours, outcome = Ours("bc"), Outcome()
    with imported(checkout, "algorithms.offline.any_percent_bc", ABSENT) as corl:
        actor = corl.Actor(OBSERVATION, ACTION, 1.0)
        fill(linears(actor), ours.mlp("actor"))
        reference = corl.BC(1.0, actor, adam(actor))
    for batch in batches():
        losses, expected = ours.update(batch), reference.train(columns(batch))
        outcome.losses.append({"actor/loss": (losses["actor/loss"], expected["actor_loss"])})
    outcome.parameters |= pair_layers("actor", ours.mlp("actor"), linears(actor))
    return outcome


@case(
    "iql",
    CORL,
    COMMIT,
    aligned="V's step comes first; Adam's epsilon of the critics halved there",
    remains="CORL's targets and weights are of the V before its step, and its critics' loss is half as large; ours are "
    "the authors'",
)
def iql(checkout: Path) -> Outcome:
    # CORL casts to float32 what it multiplies these two with
    expectile, discount = 0.75, 1 - 2.0**-5
    ours, outcome = Ours("iql", expectile=expectile, discount=discount, decay_steps=1000), Outcome()
    with imported(checkout, "algorithms.offline.iql", ABSENT) as corl:
        actor = corl.GaussianPolicy(OBSERVATION, ACTION, 1.0).double()
        q, v = corl.TwinQ(OBSERVATION, ACTION), corl.ValueFunction(OBSERVATION)
        fill(linears(actor), ours.mlp("actor"))
        fill(linears(v), ours.mlp("value"))
        fill_critics(ours, q.q1, q.q2)
        optimisers = adam(actor), adam(q, eps=0.5e-8), adam(v)
        reference = corl.ImplicitQLearning(
            1.0, actor, optimisers[0], q, optimisers[1], v, optimisers[2], expectile, max_steps=1000, discount=discount
        )
    for batch in batches():
        losses, expected = ours.update(batch), dict[str, float]()
        s, a, r, next_s, done = columns(batch)
        with torch.no_grad():
            target_q = reference.q_target(s, a)
        reference._update_v(s, a, expected)
        with torch.no_grad():
            advantage, next_v = target_q - v(s), v(next_s)
        reference._update_q(next_v, s, a, r[:, 0], done[:, 0], expected)
        reference._update_policy(advantage, s, a, expected)
        outcome.losses.append(
            {
                "value/loss": (losses["value/loss"], expected["value_loss"]),
                "critic/loss": (losses["critic/loss"], 2 * expected["q_loss"]),
                "actor/loss": (losses["actor/loss"], expected["actor_loss"]),
            }
        )
    outcome.parameters |= pair_layers("actor", ours.mlp("actor"), linears(actor)) | pair_layers(
        "value", ours.mlp("value"), linears(v)
    )
    outcome.parameters |= pair_critics(ours, q.q1, q.q2) | {
        "log_std": pair(ours.state.params["actor"]["log_std"], actor.log_std)
    }
    return outcome


@case("awac", CORL, COMMIT, remains="the greedy action is clipped here, there by the environment")
def awac(checkout: Path) -> Outcome:
    ours, outcome = Ours("awac", temperature=2.0), Outcome()
    with imported(checkout, "algorithms.offline.awac", ABSENT) as corl:
        actor = corl.Actor(OBSERVATION, ACTION, 256).double()
        critics = [corl.Critic(OBSERVATION, ACTION, 256) for _ in range(2)]
        fill(linears(actor), ours.mlp("actor"))
        fill_critics(ours, *critics)
        first, second = critics
        reference = corl.AdvantageWeightedActorCritic(
            actor, adam(actor), first, adam(first), second, adam(second), tau=0.005, awac_lambda=0.5
        )
    for batch in batches():
        with shared_noise():
            losses, expected = ours.update(batch), reference.update(columns(batch))
        names = {"critic/loss": "critic_loss", "actor/loss": "actor_loss"}
        outcome.losses.append({a: (losses[a], expected[b]) for a, b in names.items()})
    outcome.parameters |= pair_layers("actor", ours.mlp("actor"), linears(actor)) | pair_critics(ours, *critics)
    outcome.parameters["log_std"] = pair(ours.state.params["actor"]["log_std"], actor._log_std)
    return outcome


def ensembles(critic: torch.nn.Module) -> list[Any]:
    """The vectorised layers of SAC-N's critics."""
    return [m for m in critic.modules() if type(m).__name__ == "VectorizedLinear"]


def many_critics(checkout: Path, name: str, kind: str, **more: float) -> Outcome:
    """SAC-N or EDAC with four critics."""
    ours, outcome = Ours(name, critics=4, **more), Outcome()
    with imported(checkout, f"algorithms.offline.{name}", ABSENT) as corl:
        actor = corl.Actor(OBSERVATION, ACTION, 256)
        critic = corl.VectorizedCritic(OBSERVATION, ACTION, 256, 4)
        fill(linears(actor), split_head(ours.mlp("actor")))
        parameters = ours.state.params["critic"]
        names = ["layers.0", "layers.1", "layers.2", "head"]
        with torch.no_grad():
            for own, layer in zip(names, ensembles(critic), strict=True):
                layer.weight.copy_(parameters[f"{own}.weight"])
                layer.bias.copy_(parameters[f"{own}.bias"])
        reference = getattr(corl, kind)(actor, adam(actor), critic, adam(critic), alpha_learning_rate=3e-4, **more)
    reference.log_alpha = torch.zeros(1, requires_grad=True)  # in float64
    reference.alpha_optimizer, reference.alpha = (
        torch.optim.Adam([reference.log_alpha], lr=3e-4),
        reference.log_alpha.exp().detach(),
    )
    for batch in batches():
        with shared_noise({BATCH * ACTION: (0, 0, 1)}), tanh_epsilon():
            losses, expected = ours.update(batch), reference.update(columns(batch))
        total = losses["critic/loss"] + more.get("eta", 0.0) * 4 * losses.get("critic/alignment", 0.0)
        outcome.losses.append(
            {"critic": (total, expected["critic_loss"]), "actor": (losses["actor/loss"], expected["actor_loss"])}
        )
    outcome.parameters |= pair_layers("actor", split_head(ours.mlp("actor")), linears(actor))
    outcome.parameters["alpha"] = pair(ours.state.params["entropy"]["log"], reference.log_alpha)
    for own, layer in zip(names, ensembles(critic), strict=True):
        outcome.parameters[f"critic/{own}.w"] = pair(ours.state.params["critic"][f"{own}.weight"], layer.weight)
        outcome.parameters[f"critic/{own}.b"] = pair(ours.state.params["critic"][f"{own}.bias"], layer.bias)
    return outcome


TANH = "1e-6 in the logarithm of tanh's correction"
OWN = "alpha's loss has a draw of its own there, the actor's here"


@case("sac_n", CORL, COMMIT, aligned=f"{TANH}; {OWN}", remains=f"{TANH}: ours is exact; {OWN}")
def sac_n(checkout: Path) -> Outcome:
    return many_critics(checkout, "sac_n", "SACN")


@case("edac", CORL, COMMIT, aligned=f"{TANH}; {OWN}", remains=f"{TANH}: ours is exact; {OWN}")
def edac(checkout: Path) -> Outcome:
    return many_critics(checkout, "edac", "EDAC", eta=2.0)
