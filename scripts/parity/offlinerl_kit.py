"""The model-based methods of OfflineRL-Kit (yihaosun1124/OfflineRL-Kit), whose settings ours take over, and their
dynamics model.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from offrl.world_models.dynamics import DynamicsSettings
from offrl.world_models.model import WorldModel
from offrl.world_models.model_rollouts import ModelSource
from parity.align import CRITICS_FIRST, rows_first, steps_in_order, tanh_epsilon
from parity.common import (
    ACTION,
    BATCH,
    OBSERVATION,
    Arrays,
    Ours,
    Outcome,
    batches,
    case,
    fill,
    imported,
    linears,
    pair_layers,
    pattern,
    shared_noise,
)
from parity.corl import adam, fill_critics, pair, pair_critics, split_head

KIT, COMMIT = "yihaosun1124/OfflineRL-Kit", "e3ce69793766d02660217d4dfc0af4693a5531bd"
ABSENT = ("gym", "gym.envs", "gym.envs.mujoco", "torch.utils.tensorboard")
MEMBERS, ELITES, ACTIONS, SAMPLES = 4, 2, 4, 3
HIDDEN = [32, 32]
# a ring of imagined transitions that nothing reads here
SMALL = {"batch_size": BATCH, "rollouts": 4, "horizon": 1, "rollout_retain": 1}
TANH = "1e-6 in tanh's correction"
ORDER = "order of steps (critic, actor, alpha there; alpha, actor, critic here)"


class Wide:
    """`torch` as a module of the reference sees it, with float64 in place of the float32 that it casts to."""

    float32, FloatTensor = torch.float64, torch.DoubleTensor

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


@contextlib.contextmanager
def kit(checkout: Path) -> Iterator[SimpleNamespace]:
    """The reference's packages, in float64."""
    with imported(checkout, "offlinerlkit.policy", ABSENT) as policy:
        import offlinerlkit.dynamics
        import offlinerlkit.modules
        import offlinerlkit.nets  # type: ignore[import-not-found]

        for name, module in list(sys.modules.items()):
            if name.startswith("offlinerlkit.") and getattr(module, "torch", None) is torch:
                module.torch = Wide()  # type: ignore[attr-defined]
        yield SimpleNamespace(
            policy=policy,
            modules=offlinerlkit.modules,
            nets=offlinerlkit.nets,
            dynamics=offlinerlkit.dynamics.EnsembleDynamics,
        )


def actor_critics(kit: SimpleNamespace, ours: Ours, hidden: list[int]) -> tuple[Any, list[Any]]:
    """The reference's actor and critics with our weights."""
    nets, modules = kit.nets, kit.modules
    head = modules.TanhDiagGaussian(hidden[-1], ACTION, unbounded=True, conditioned_sigma=True, max_mu=1.0)
    actor = modules.ActorProb(nets.MLP(OBSERVATION, hidden), head)
    critics = [modules.Critic(nets.MLP(OBSERVATION + ACTION, hidden)) for _ in range(2)]
    fill(linears(actor), split_head(ours.mlp("actor")))
    fill_critics(ours, *critics)
    return actor, critics


def learnt_alpha() -> tuple[float, Tensor, torch.optim.Optimizer]:
    log_alpha = torch.full((1,), 0.0, requires_grad=True)
    return -float(ACTION), log_alpha, torch.optim.Adam([log_alpha], lr=1e-4)


def halves(batch: Arrays, real: int) -> dict[str, dict[str, Tensor]]:
    """The reference's batch: the data's rows and imagined ones."""
    columns = {k: torch.as_tensor(batch[k]) for k in ("observations", "actions", "next_observations")}
    columns |= {
        "rewards": torch.as_tensor(batch["rewards"])[:, None],
        "terminals": 1 - torch.as_tensor(batch["masks"])[:, None],
    }
    return {"real": {k: v[:real] for k, v in columns.items()}, "fake": {k: v[real:] for k, v in columns.items()}}


def unmixed(ours: Ours) -> None:
    """Our batch is what `Ours.update` is handed: the data's rows first, then those that were imagined."""
    ours.algorithm.rollouts.mixed = lambda state, batch, key: batch


def parameters(
    ours: Ours, actor: Any, critics: list[Any], log_alpha: Tensor
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    pairs = pair_layers("actor", split_head(ours.mlp("actor")), linears(actor)) | pair_critics(ours, *critics)
    return pairs | {"alpha": pair(ours.state.params["entropy"]["log"], log_alpha)}


def world(ours: Ours) -> tuple[WorldModel, dict[str, Any]]:
    """A small untrained model of ours with its tree, in float64, and its inputs' scale."""
    torch.manual_seed(0)
    settings = {
        "members": MEMBERS,
        "elites": ELITES,
        "hidden": HIDDEN,
        "termination": "never",
        "weight_decay": [1e-3, 2e-3, 3e-3],
    }
    model = WorldModel(DynamicsSettings(**settings), ours.spec)
    with torch.no_grad():
        params = {k: v.detach().double() + 0.05 * torch.randn(v.shape) for k, v in model.network.named_parameters()}
    mean, std = torch.as_tensor(pattern((model.in_dim,))), 0.5 + torch.as_tensor(pattern((model.in_dim,), "uniform"))
    wide = torch.full((OBSERVATION,), 1e6)
    tree = {"params": params, "mean": mean, "std": std, "elites": torch.tensor([2, 0]), "low": -wide, "high": wide}
    return model, {**tree, "scale": torch.ones(model.out_dim)}


def ensemble_layers(network: Any) -> list[Any]:
    return [*network.backbones, network.output_layer]


def reference_model(kit: SimpleNamespace, model: WorldModel, tree: dict[str, Any], rate: float) -> Any:
    """The reference's dynamics with the same weights, scaler and elites."""
    network = kit.modules.EnsembleDynamicsModel(
        OBSERVATION, ACTION, HIDDEN, num_ensemble=MEMBERS, num_elites=ELITES, weight_decays=model.config.weight_decay
    )
    params = tree["params"]
    with torch.no_grad():
        for name, layer in zip(("layers.0", "layers.1", "head"), ensemble_layers(network), strict=True):
            layer.weight.copy_(params[f"net.{name}.weight"])
            layer.bias.copy_(params[f"net.{name}.bias"])
        network.max_logvar.copy_(params["max_log_var"])
        network.min_logvar.copy_(params["min_log_var"])
    network.set_elites(tree["elites"].tolist())
    mean, std = tree["mean"].numpy(), tree["std"].numpy()
    scaler = SimpleNamespace(
        transform=lambda x: (x - mean) / std, transform_tensor=lambda x: (x - tree["mean"]) / tree["std"]
    )
    return kit.dynamics(network, torch.optim.Adam(network.parameters(), lr=rate), scaler, never)


def never(observations: np.ndarray, actions: np.ndarray, following: np.ndarray) -> np.ndarray:
    return np.zeros((len(observations), 1), dtype=bool)


def pair_models(params: dict[str, Tensor], network: Any) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    pairs = {
        "max": pair(params["max_log_var"], network.max_logvar),
        "min": pair(params["min_log_var"], network.min_logvar),
    }
    for name, layer in zip(("layers.0", "layers.1", "head"), ensemble_layers(network), strict=True):
        pairs[f"model/{name}.w"] = pair(params[f"net.{name}.weight"], layer.weight)
        pairs[f"model/{name}.b"] = pair(params[f"net.{name}.bias"], layer.bias)
    return pairs


def actor_critic_losses(losses: dict[str, float], expected: dict[str, float]) -> dict[str, tuple[float, float]]:
    critic = expected["loss/critic1"] + expected["loss/critic2"]
    return {
        "critic": (losses["critic/loss"] + losses.get("cql/penalty", 0.0), critic),
        "actor": (losses["actor/loss"], expected["loss/actor"]),
    }


@case("mopo", KIT, COMMIT, aligned=f"{TANH}; {ORDER}", remains=f"{TANH}: ours is exact; {ORDER}: as EDAC's authors")
def mopo(checkout: Path) -> Outcome:
    # a weight that rises from near 1 passes the cap
    ours, outcome = Ours("mopo", entropy_learning_rate=1e-4, real_share=0.25, target_entropy=9.0, **SMALL), Outcome()
    with kit(checkout) as k:
        actor, critics = actor_critics(k, ours, [256, 256])
        _, log_alpha, optimiser = learnt_alpha()
        optimisers = adam(actor, rate=1e-4), adam(critics[0]), adam(critics[1])
        reference = k.policy.MOPOPolicy(None, actor, *critics, *optimisers, alpha=(9.0, log_alpha, optimiser))
        unmixed(ours)
        ours.algorithm.update = steps_in_order(ours.algorithm, "cae")
        for batch in batches():
            with shared_noise(CRITICS_FIRST), tanh_epsilon():
                losses, expected = ours.update(batch), reference.learn(halves(batch, 8))
            outcome.losses.append(actor_critic_losses(losses, expected))
    outcome.parameters |= parameters(ours, actor, critics, log_alpha)
    return outcome


ACTOR_FIRST = "order of steps (actor, alpha, critic there; alpha, actor, critic here)"


@case(
    "combo",
    KIT,
    COMMIT,
    aligned=f"{TANH}; {ACTOR_FIRST}; kit_compat=true",
    remains=f"{TANH}: ours is exact; {ACTOR_FIRST}; kit_compat",
)
def combo(checkout: Path) -> Outcome:
    ours, outcome = (
        Ours("combo", kit_compat=True, actions=ACTIONS, entropy_learning_rate=1e-4, decay_steps=1000, **SMALL),
        Outcome(),
    )
    with kit(checkout) as k:
        actor, critics = actor_critics(k, ours, [256, 256, 256])
        target, log_alpha, optimiser = learnt_alpha()
        actor_optimiser = adam(actor, rate=1e-4)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(actor_optimiser, 1000)
        space = SimpleNamespace(low=[-1.0], high=[1.0])
        reference = k.policy.COMBOPolicy(
            None,
            actor,
            *critics,
            actor_optimiser,
            adam(critics[0]),
            adam(critics[1]),
            space,
            alpha=(target, log_alpha, optimiser),
            cql_weight=0.5,
            with_lagrange=False,
            num_repeart_actions=ACTIONS,
        )
        unmixed(ours)
        ours.algorithm.update = steps_in_order(ours.algorithm, "aec")
        for batch in batches():
            with shared_noise(), rows_first(BATCH, ACTIONS, ACTION), tanh_epsilon():
                losses, expected = ours.update(batch), reference.learn(halves(batch, BATCH // 2))
            schedule.step()
            outcome.losses.append(actor_critic_losses(losses, expected))
    outcome.parameters |= parameters(ours, actor, critics, log_alpha)
    return outcome


@case(
    "mobile",
    KIT,
    COMMIT,
    aligned=f"{TANH}; {ORDER}; min_target=0; Adam's epsilon of the critics halved there",
    remains=f"{TANH}: ours is exact; {ORDER}; targets below 0 are cut off there, here where min_target says; the "
    "critics' loss is a mean there, a sum here",
)
def mobile(checkout: Path) -> Outcome:
    ours = Ours(
        "mobile",
        entropy_learning_rate=1e-4,
        real_share=0.25,
        min_target=0.0,
        backup_samples=SAMPLES,
        decay_steps=1000,
        **SMALL,
    )
    outcome, (model, tree) = Outcome(), world(ours)
    ours.algorithm.runtime.source = ModelSource(None, model, tree, None, None)  # type: ignore[arg-type]
    with kit(checkout) as k:
        actor, critics = actor_critics(k, ours, [256, 256])
        target, log_alpha, optimiser = learnt_alpha()
        both = torch.nn.ModuleList(critics)
        actor_optimiser = adam(actor, rate=1e-4)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(actor_optimiser, 1000)
        reference = k.policy.MOBILEPolicy(
            reference_model(k, model, tree, 1e-3), actor, both, actor_optimiser, adam(both, eps=0.5e-8),
            alpha=(target, log_alpha, optimiser), penalty_coef=0.5, num_samples=SAMPLES, deterministic_backup=True,
        )  # fmt: skip
        unmixed(ours)
        ours.algorithm.update = steps_in_order(ours.algorithm, "cae")
        for batch in batches():
            with shared_noise(CRITICS_FIRST), tanh_epsilon(), kit_inconsistency(reference):
                losses, expected = ours.update(batch), reference.learn(halves(batch, 8))
            schedule.step()
            both = {
                "loss/critic1": expected["loss/critic"],
                "loss/critic2": expected["loss/critic"],
                "loss/actor": expected["loss/actor"],
            }
            outcome.losses.append(actor_critic_losses(losses, both))
    outcome.parameters |= parameters(ours, actor, critics, log_alpha)
    return outcome


@contextlib.contextmanager
def kit_inconsistency(reference: Any) -> Iterator[None]:
    """The reference estimates the inconsistency of all rows and then forgets that of the data's; ours asks for imagined
    rows alone.

    Here the noise of its next states and of the actions there is ours, in the imagined rows.
    """
    rows, real = BATCH, 8

    def randn_like(x: Tensor, **_: Any) -> Tensor:  # [K, B, D] once for each of SAMPLES
        drawn = torch.as_tensor(pattern((SAMPLES, ELITES, rows - real, OBSERVATION)))
        call = randn_like.count % SAMPLES  # type: ignore[attr-defined]
        randn_like.count += 1  # type: ignore[attr-defined]
        noise = torch.zeros(x.shape)
        noise[:, real:, :OBSERVATION] = drawn[call]
        return noise

    randn_like.count = 0  # type: ignore[attr-defined]
    normal = torch.distributions.normal._standard_normal  # type: ignore[attr-defined]

    def standard_normal(shape: Any, **options: Any) -> Tensor:
        if tuple(shape) != (SAMPLES * ELITES * rows, ACTION):
            return normal(shape, **options)
        own = torch.as_tensor(pattern((SAMPLES * ELITES * (rows - real), ACTION))).reshape(
            SAMPLES, ELITES, rows - real, ACTION
        )
        return torch.cat([torch.zeros(SAMPLES, ELITES, real, ACTION), own], 2).reshape(-1, ACTION)

    with (
        mock.patch.object(torch, "randn_like", randn_like),
        mock.patch.object(torch.distributions.normal, "_standard_normal", standard_normal),
    ):
        yield


@case("dynamics", KIT, COMMIT, remains="which rows are held out, and the order of batches")
def dynamics(checkout: Path) -> Outcome:
    ours, outcome = (
        Ours("dynamics", epoch=1, members=MEMBERS, elites=ELITES, hidden=HIDDEN, termination="never"),
        Outcome(),
    )
    model, tree = world(ours)
    ours.state.params["dynamics"].update({k: v.clone() for k, v in tree["params"].items()})
    ours.state.extra.update(mean=tree["mean"], std=tree["std"])
    ours.algorithm.decay = model.config.weight_decay
    rows: list[Arrays] = []
    for i in range(5):
        members = batches(seed=i, count=MEMBERS)
        inputs = np.stack([np.concatenate([b["observations"], b["actions"]], -1) for b in members])
        targets = np.stack([np.concatenate([b["next_observations"], b["rewards"][:, None]], -1) for b in members])
        rows.append({"inputs": inputs, "targets": targets})
    with kit(checkout) as k:
        reference = reference_model(k, model, tree, 1e-3)
        for batch in rows:
            drawn = {name: torch.as_tensor(v) for name, v in batch.items()} | {"ending": torch.zeros(MEMBERS, BATCH)}
            ours.algorithm.draw = lambda state, drawn=drawn: drawn
            losses = ours.update({})
            expected = reference.learn(reference.scaler.transform(batch["inputs"]), batch["targets"], BATCH, 0.01)
            outcome.losses.append({"loss": (losses["dynamics/loss"], float(expected))})
    outcome.parameters |= pair_models(ours.state.params["dynamics"], reference.model)
    return outcome
