"""Diffusion-QL (Zhendong-Wang/Diffusion-Policies-for-Offline-RL) and DTQL (TianyuCodings/Diffusion_Trusted_Q_Learning)
beside their authors' PyTorch."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor, nn

from offrl import rng
from offrl.families.generative.best_of_n import ValuedActor, noise_of
from parity.common import (
    ACTION,
    BATCH,
    OBSERVATION,
    UNUSED,
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
from parity.corl import fill_critics, pair_critics
from parity.weights import Pair, compared, give, linear, scramble

DIFFUSION_QL, DIFFUSION_QL_COMMIT = (
    "Zhendong-Wang/Diffusion-Policies-for-Offline-RL",
    "d871f5c6b4a3a3a19a10c662a54f32d5819dfcdb",
)
DTQL, DTQL_COMMIT = "TianyuCodings/Diffusion_Trusted_Q_Learning", "9a29cea109c0520e0c024f0249904e44e60a0aba"
EMA_FROM, EMA_EVERY = 2, 2  # so that five updates show the averaged denoiser at rest and on the move


class Replay:
    """What the authors' samplers are to an update: the batch of the moment."""

    def __init__(self, batch: Mapping[str, np.ndarray]) -> None:
        b = tensors(batch)
        self.columns = (
            b["observations"],
            b["actions"],
            b["next_observations"],
            b["rewards"][:, None],
            b["masks"][:, None],
        )

    def sample(self, _: int) -> tuple[Tensor, ...]:
        """Observations, actions, next observations, rewards and masks [B, 1]."""
        return self.columns


@contextlib.contextmanager
def same_draws(coin: int, order: Mapping[int, Sequence[int]]) -> Iterator[None]:
    """`shared_noise`, with critic `coin` as the one that the policy climbs on both sides."""
    with shared_noise(order), mock.patch.object(np.random, "uniform", lambda: 1.0 - coin):
        integers = rng.randint

        def ours(key: Tensor, shape: tuple[int, ...], high: int) -> Tensor:
            return integers(key, shape, high) if shape else torch.tensor(coin)

        with mock.patch.object(rng, "randint", ours):
            yield


def inputs(order: str) -> list[int]:
    """Our columns of a denoiser's input [action, observation, waves] in a reference's order: its letters."""
    width, ours = {"a": ACTION, "s": OBSERVATION, "t": 16}, {}
    for letter, begin in (("a", 0), ("s", ACTION), ("t", ACTION + OBSERVATION)):
        ours[letter] = list(range(begin, begin + width[letter]))
    return [column for letter in order for column in ours[letter]]


def first(name: str, layer: nn.Linear, order: str) -> list[Pair]:
    """A denoiser's first layer, whose inputs stand in another order."""
    return [(f"{name}.weight", lambda w: w[:, inputs(order)], layer.weight), (f"{name}.bias", lambda b: b, layer.bias)]


def chances(ours: Ours, observation: np.ndarray, agent: Any) -> tuple[np.ndarray, np.ndarray]:
    """Probabilities with which a policy plays each of its candidates [N] in one state: ours, and the reference's."""
    actor: Any = ours.algorithm.actor(ours.state)
    assert isinstance(actor, ValuedActor)
    count, state = ours.algorithm.config.candidates, torch.as_tensor(observation)[None]
    expected: list[Tensor] = []

    def multinomial(weights: Tensor, _: int) -> Tensor:
        expected.append(weights)
        return torch.zeros(1, dtype=torch.int64)

    with (
        torch.no_grad(),
        shared_noise(),
        warnings.catch_warnings(),
        mock.patch.object(torch, "FloatTensor", torch.as_tensor),
        mock.patch.object(torch, "multinomial", multinomial),
    ):
        warnings.simplefilter("ignore")  # theirs: softmax without dim
        drawn = actor.draw(actor.condition(state, count), ours.state.key, lambda key: noise_of(key, count, 1, ACTION))
        scores = actor.scores(state, drawn.unflatten(0, (count, -1)))
        agent.sample_action(observation)
    return scores[:, 0].softmax(0).numpy(), expected[0].numpy()


# ---- Diffusion-QL


def diffusion_ql(checkout: Path, settings: Mapping[str, Any], theirs: Mapping[str, Any]) -> Outcome:
    """Five updates, in which the policy climbs the first critic and the second in turn."""
    ours = Ours("diffusion_ql", average_from=EMA_FROM, average_every=EMA_EVERY, **settings)
    outcome = Outcome()
    # their schedule of noise is of the type that its function has by default
    with mock.patch.object(torch, "float32", torch.float64), imported(checkout, "agents.ql_diffusion") as code:
        agent = code.Diffusion_QL(
            OBSERVATION, ACTION, 1.0, "cpu", 0.99, 0.005, beta_schedule="vp", n_timesteps=5, step_start_ema=EMA_FROM,
            update_ema_every=EMA_EVERY, **theirs,
        )  # fmt: skip
    scramble(ours, "actor")
    ours.state.extra["average"] = {k: v.clone() for k, v in ours.state.params["actor"].items()}

    def pairs(net: Any) -> list[Pair]:
        layers = linears(net.mid_layer)
        return [
            *linear("up", net.time_mlp[1]),
            *linear("down", net.time_mlp[3]),
            *first("net.layers.0", layers[0], "ats"),
            *linear("net.layers.1", layers[1]),
            *linear("net.layers.2", layers[2]),
            *linear("net.head", net.final_layer),
        ]

    for net in (agent.actor.model, agent.ema_model.model):
        give(pairs(net), ours.state.params["actor"])
    for critic in (agent.critic, agent.critic_target):
        fill_critics(ours, critic.q1_model, critic.q2_model)
    # actions of targets (where these are not of another size), the noise of cloning, the policy's actions; a last
    # step's noise is unused
    chain = [0, 1, 2, 3, 4, UNUSED] * (ours.algorithm.config.max_target_actions == 1)
    order = {BATCH * ACTION: [*chain, *range(5 if chain else 0, 11), UNUSED]}
    for update, batch in enumerate(batches()):
        with same_draws(update % 2, order):
            losses = ours.update(batch)
            expected = {k: v[0] for k, v in agent.train(Replay(batch), 1, BATCH).items()}
        names = {"critic/loss": "critic_loss", "actor/cloning": "bc_loss", "actor/loss": "actor_loss"}
        outcome.losses.append({a: (losses[a], expected[b]) for a, b in names.items()})
    outcome.parameters |= compared(pairs(agent.actor.model), ours.state.params["actor"])
    averages = compared(pairs(agent.ema_model.model), ours.state.extra["average"])
    outcome.parameters |= {f"average/{k}": pair for k, pair in averages.items()}
    outcome.parameters |= pair_critics(ours, agent.critic.q1_model, agent.critic.q2_model)
    for i, critic in enumerate((agent.critic_target.q1_model, agent.critic_target.q2_model)):
        mine = ours.mlp_of(ours.state.extra["target"], i)
        outcome.parameters |= pair_layers(f"target{i}", mine, linears(critic))
    outcome.parameters["chances"] = chances(ours, batches()[0]["observations"][0], agent)
    return outcome


SCHEDULED = "the schedule of noise in float64"
RATES = (
    "their cosine schedule (--lr_decay) makes one step in 50,000 updates, which is a rate 0.1% lower at the end: ours "
    "is constant"
)


@case("diffusion_ql", DIFFUSION_QL, DIFFUSION_QL_COMMIT, aligned=SCHEDULED, remains=RATES)
def diffusion_ql_plain(checkout: Path) -> Outcome:
    return diffusion_ql(checkout, {"clip_norm": 0.5, "q_weight": 2.0}, {"grad_norm": 0.5, "eta": 2.0})


@case(
    "diffusion_ql, best of 10 actions in targets", DIFFUSION_QL, DIFFUSION_QL_COMMIT, aligned=SCHEDULED, remains=RATES
)
def diffusion_ql_backup(checkout: Path) -> Outcome:
    settings = {"max_target_actions": 10, "clip_norm": 0.0, "actor_learning_rate": 1e-3}
    return diffusion_ql(checkout, settings, {"max_q_backup": True, "grad_norm": 0.0, "lr": 1e-3})


# ---- DTQL


def dtql(checkout: Path, settings: Mapping[str, Any], theirs: Mapping[str, Any]) -> Outcome:
    """Two updates of the warm-up and three after it."""
    ours, outcome = Ours("dtql", warm_up=2, **settings), Outcome()
    # their noise levels are of the type that their function has by default
    with mock.patch.object(torch, "float32", torch.float64), imported(checkout, "agents.dtql", ("einops",)) as code:
        agent = code.DTQL("cpu", OBSERVATION, ACTION, SimpleNamespace(high=[1.0]), **theirs)
    for network in ("critic", "denoiser"):  # scales and shifts of LayerNorm too
        scramble(ours, network)
    ours.state.target["critic"] = {k: v.clone() for k, v in ours.state.params["critic"].items()}
    ours.state.extra["target"] = ours.state.target["critic"]
    net, critics = agent.bc_actor, [agent.critic, agent.critic_target]
    hidden = linears(net.layers)
    denoiser: list[Pair] = [
        *linear("up", net.embed[1]), *linear("down", net.embed[3]), *first("first", hidden[0], "ast"),
        *(pair for i in range(3) for pair in linear(f"net.layers.{i}", hidden[i + 1])), *linear("net.head", hidden[4]),
    ]  # fmt: skip
    give(denoiser, ours.state.params["denoiser"])
    fill(linears(agent.distill_actor), ours.mlp("actor"))

    def norms(critic: Any, member: int) -> list[Pair]:
        layers = [m for m in (critic.q1_model, critic.q2_model)[member] if isinstance(m, nn.LayerNorm)]
        return [
            pair
            for i, layer in enumerate(layers)
            for pair in (
                (f"scales.{i}", lambda x: x[member, 0], layer.weight),
                (f"shifts.{i}", lambda x: x[member, 0], layer.bias),
            )
        ]

    for critic in critics:
        fill_critics(ours, critic.q1_model, critic.q2_model)
        fill(linears(critic.v_model), ours.mlp("value"))
        for member in range(2):
            give(norms(critic, member), ours.state.params["critic"])
    for update, batch in enumerate(batches()):
        with shared_noise():
            losses = ours.update(batch)
            if update < 2:
                agent.pretrain(Replay(batch), BATCH, 1)
                outcome.losses.append({"denoiser/loss": (losses["denoiser/loss"], agent.bc_loss.item())})
                continue
            expected = {k: v[0] for k, v in agent.train(Replay(batch), BATCH).items()}
        names = {"denoiser/loss": "bc_loss", "actor/trust_region_loss": "distill_loss", "actor/loss": "actor_loss"}
        outcome.losses.append({a: (losses[a], expected[b]) for a, b in names.items()})
        outcome.losses[-1]["values"] = losses["critic/loss"] + losses["value/loss"], expected["critic_loss"]
    outcome.parameters |= compared(denoiser, ours.state.params["denoiser"])
    outcome.parameters |= pair_layers("actor", ours.mlp("actor"), linears(agent.distill_actor))
    outcome.parameters |= pair_layers("value", ours.mlp("value"), linears(agent.critic.v_model))
    outcome.parameters |= pair_critics(ours, agent.critic.q1_model, agent.critic.q2_model)
    for i in range(2):
        outcome.parameters |= {
            f"{i}/{k}": pair for k, pair in compared(norms(agent.critic, i), ours.state.params["critic"]).items()
        }
        outcome.parameters |= {
            f"target{i}/{k}": pair for k, pair in compared(norms(critics[1], i), ours.state.extra["target"]).items()
        }
        mine = ours.mlp_of(ours.state.extra["target"], i)
        outcome.parameters |= pair_layers(f"target{i}", mine, linears((critics[1].q1_model, critics[1].q2_model)[i]))
    outcome.parameters["chances"] = chances(ours, batches()[0]["observations"][0], agent)
    return outcome


LEVELS = "noise levels in float64"


@case("dtql", DTQL, DTQL_COMMIT, aligned=LEVELS)
def dtql_gym(checkout: Path) -> Outcome:
    return dtql(checkout, {"alpha": 5.0}, {"alpha": 5.0, "gamma": 0.0})


@case("dtql, as on AntMaze", DTQL, DTQL_COMMIT, aligned=LEVELS)
def dtql_antmaze(checkout: Path) -> Outcome:
    settings = {
        "alpha": 1.0,
        "bc_weight": 1.0,
        "expectile": 0.9,
        "actor_learning_rate": 3e-5,
        "schedule": "cosine",
        "decay_steps": 4,
    }
    return dtql(
        checkout, settings, {"alpha": 1.0, "gamma": 1.0, "expectile": 0.9, "lr": 3e-5, "lr_decay": True, "lr_maxt": 4}
    )
