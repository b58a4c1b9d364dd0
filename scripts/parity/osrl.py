"""OSRL's baselines with limits of costs (liuzuxin/OSRL): BCQ-Lagrangian, BEAR-Lagrangian and CPQ."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from parity.align import rows_first
from parity.common import (
    ACTION,
    BATCH,
    OBSERVATION,
    UNUSED,
    Arrays,
    Ours,
    Outcome,
    batches,
    case,
    draws,
    fill,
    imported,
    linears,
    pair_layers,
    shared_noise,
    tensors,
)
from parity.corl import pair, split_head

OSRL, COMMIT = "liuzuxin/OSRL", "03a4586463690566ec8d7830ca4027b46d4ad02f"
ABSENT = ("fsrl", "fsrl.utils", "osrl.common.dataset", "osrl.common.exp_util")
SAMPLES, LATENT = 10, 2 * ACTION
HIDDEN, RATES = [32, 32], {"actor_lr": 1e-3, "critic_lr": 1e-3, "vae_lr": 1e-3}
SIZES: dict[str, Any] = {"hidden": HIDDEN, "autoencoder_hidden": [24, 24], "cost_pessimism": "min", "cost_horizon": 1}
THEIRS = {"a_hidden_sizes": HIDDEN, "c_hidden_sizes": HIDDEN, "vae_hidden_sizes": 24, "episode_len": 1}
ALIGNED = (
    "no terminals; costs above 0; the policy's step before that of the costs' critics, the multiplier's after it; the "
    "threshold 1; costs as they are, not relative to Q, and the loss not divided by 1 + lambda; of the costs' target "
    "critics the smaller"
)
REMAINS = (
    "these, for which see the page; its critics are two pairs, of each of which the smaller counts; its values end at "
    "time-outs, its costs nowhere"
)


def ours_of(method: str, **settings: Any) -> Ours:
    """Ours, whose critics of costs give some 5, so that no cost is cut off at 0."""
    ours = Ours(method, **SIZES, **settings)
    for params in (ours.state.params, ours.state.target):
        params["cost_critic"]["head.bias"] += 5.0
    return ours


def costly() -> list[Arrays]:
    return batches(costs=lambda g: g.uniform(0, 2, BATCH), masks=lambda g: np.ones(BATCH))


def columns(batch: Arrays) -> dict[str, Tensor]:
    b = tensors(batch)
    return {k: b[k] for k in ("observations", "next_observations", "actions", "rewards", "costs")} | {
        "done": 1 - b["masks"]
    }


def autoencoder(ours: Ours) -> list[tuple[np.ndarray, np.ndarray]]:
    encoder, decoder = (ours.mlp("autoencoder", prefix=f"{name}.") for name in ("encoder", "decoder"))
    return [*split_head(encoder, LATENT), *decoder]


def networks(ours: Ours, reference: Any, actor: list[tuple[np.ndarray, np.ndarray]]) -> dict[str, tuple[Any, Any]]:
    """The networks of both sides by name, ours as layers."""
    sides = {"actor": (actor, reference.actor), "autoencoder": (autoencoder(ours), reference.vae)}
    for name in ("critic", "cost_critic"):
        critic = getattr(reference, name)
        nets = critic.q_nets if hasattr(critic, "q_nets") else [critic.q1_nets[0], critic.q2_nets[0]]
        sides |= {f"{name}{i}": (ours.mlp(name, i), net) for i, net in enumerate(nets)}
    return sides


def start(ours: Ours, reference: Any, actor: list[tuple[np.ndarray, np.ndarray]]) -> None:
    for layers, network in networks(ours, reference, actor).values():
        fill(linears(network), layers)
    for name in ("actor", "critic", "cost_critic"):
        getattr(reference, f"{name}_old").load_state_dict(getattr(reference, name).state_dict())


@contextlib.contextmanager
def latents_first() -> Iterator[None]:
    """Within `shared_noise`: the reference's latents, several of each state, are ours of the shape [SAMPLES, BATCH,
    LATENT].
    """
    plain = torch.randn

    def randn(*shape: Any, **options: Any) -> Tensor:
        if np.prod(shape[0]) != SAMPLES * BATCH * LATENT:
            return plain(*shape, **options)
        noise = torch.as_tensor(draws.theirs((SAMPLES, BATCH, LATENT)))
        return noise.transpose(0, 1).reshape(shape[0])

    with mock.patch.object(torch, "randn", randn):
        yield


class Late:
    """The reference's controller, whose multiplier is that of the update before."""

    def __init__(self, controller: Any) -> None:
        self.controller, self.value = controller, torch.zeros(())

    def control(self, cost: Tensor) -> Tensor:
        value, self.value = self.value, self.controller.control(cost)
        return value


def plain_costs(ours: Ours) -> None:
    """Our policy's loss with costs as they are, and not divided by 1 + lambda."""
    penalised = ours.algorithm.constraint.penalised

    def limited(loss: Tensor, metrics: Any, state: Any, observations: Tensor, policy: Tensor, size: Any) -> Any:
        loss, metrics = penalised(loss, metrics, state, observations, policy, 1.0)
        loss = (1.0 + state.extra["multiplier"]["value"]) * loss
        return loss, {**metrics, "actor/loss": loss}

    ours.algorithm.limited = limited


def lagrangian(checkout: Path, method: str, kind: str, order: Mapping[int, Sequence[int]], kernel: str = "") -> Outcome:
    """BCQ-Lagrangian, or BEAR-Lagrangian with a kernel."""
    ours, outcome = ours_of(method, cost_limit=1.0, **({"mmd_kernel": kernel} if kernel else {})), Outcome()
    plain_costs(ours)

    def policy() -> list[tuple[np.ndarray, np.ndarray]]:
        return split_head(ours.mlp("actor")) if kernel else ours.mlp("actor")

    with imported(checkout, "osrl.algorithms", ABSENT) as osrl:
        options = {"kernel": kernel, "start_update_policy_step": 0} if kernel else {}
        reference = getattr(osrl, kind)(OBSERVATION, ACTION, 1.0, cost_limit=1, **THEIRS, **options)
        start(ours, reference, policy())
        reference.setup_optimizers(**RATES, **({"alpha_lr": 1e-3} if kernel else {}))
        reference.controller = Late(reference.controller)
    for batch in costly():
        b = columns(batch)
        states = b["observations"], b["next_observations"], b["actions"]
        with shared_noise(order), rows_first(BATCH, SAMPLES, ACTION), latents_first():
            losses = ours.update(batch)
            expected = reference.vae_loss(b["observations"], b["actions"])[1]
            expected |= reference.critic_loss(*states, b["rewards"], b["done"])[1]
            expected |= reference.actor_loss(b["observations"])[1]
            reference.lmbda = 1.0
            expected |= reference.cost_critic_loss(*states, b["costs"], b["done"])[1]
            reference.lmbda = 0.75
            reference.sync_weight()
        names = {"autoencoder/loss": "loss_vae", "critic/loss": "critic_loss", "actor/loss": "actor_loss"}
        names |= {"cost/loss": "cost_critic_loss", "cost/multiplier": "lagrangian"}
        outcome.losses.append({a: (losses[a], expected[f"loss/{b}"]) for a, b in names.items()})
    for name, (layers, network) in networks(ours, reference, policy()).items():
        outcome.parameters |= pair_layers(name, layers, linears(network))
    if kernel:
        outcome.parameters["log_alpha"] = pair(ours.state.extra["log_alpha"], reference.log_alpha)
    return outcome


@case("bcq_lag", OSRL, COMMIT, aligned=ALIGNED, remains=REMAINS)
def bcq_lag(checkout: Path) -> Outcome:
    return lagrangian(checkout, "bcq_lag", "BCQL", {SAMPLES * BATCH * LATENT: (0, 0)})


def bear(checkout: Path, kernel: str) -> Outcome:
    order = {SAMPLES * BATCH * ACTION: (0, 1, 0)}
    return lagrangian(checkout, "bear_lag", "BEARL", order, kernel)


@case("bear_lag", OSRL, COMMIT, aligned=ALIGNED, remains=REMAINS)
def bear_lag(checkout: Path) -> Outcome:
    return bear(checkout, "gaussian")


@case("bear_lag, laplacian", OSRL, COMMIT, aligned=ALIGNED, remains=REMAINS)
def bear_lag_laplacian(checkout: Path) -> Outcome:
    return bear(checkout, "laplacian")


@case(
    "cpq",
    OSRL,
    COMMIT,
    aligned="no terminals; costs above 0; of the costs' critics the smaller",
    remains="the term of actions outside the data has no gradient there, and takes actions before their tanh; here the "
    "dearer of the costs' critics counts; its values end at time-outs, its costs nowhere",
)
def cpq(checkout: Path) -> Outcome:
    ours, outcome = ours_of("cpq", cost_limit=5.0), Outcome()
    with imported(checkout, "osrl.algorithms", ABSENT) as osrl:
        reference = osrl.CPQ(OBSERVATION, ACTION, 1.0, cost_limit=5, num_q=2, num_qc=2, beta=0.5, **THEIRS)
        start(ours, reference, split_head(ours.mlp("actor")))
        trainer = osrl.CPQTrainer(reference, None, **{**RATES, "actor_lr": 1e-4}, alpha_lr=1e-4)
    # the policy's actions at the next observations are drawn twice there, and once more for nothing
    order = {BATCH * ACTION: (0, 0, UNUSED, 1)}
    for batch in costly():
        with shared_noise(order):
            losses = ours.update(batch)
            trainer.logger.store.reset_mock()
            trainer.train_one_step(**columns(batch))
        expected = {k: v for call in trainer.logger.store.call_args_list for k, v in call.kwargs.items()}
        names = {"autoencoder/loss": "loss_vae", "critic/loss": "critic_loss", "actor/loss": "actor_loss"}
        names |= {"cost/loss": "cost_critic_loss"}
        outcome.losses.append({a: (losses[a], expected[f"loss/{b}"]) for a, b in names.items()})
    for name, (layers, network) in networks(ours, reference, split_head(ours.mlp("actor"))).items():
        outcome.parameters |= pair_layers(name, layers, linears(network))
    outcome.parameters["log_alpha"] = pair(ours.state.extra["log_alpha"], reference.log_alpha)
    return outcome
