"""Forward-backward representations beside facebookresearch/controllable_agent and enjeeneer/zero-shot-rl; torch."""

from __future__ import annotations

import contextlib
import functools
import sys
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor, nn

from offrl import rng
from parity.common import (
    ACTION,
    BATCH,
    OBSERVATION,
    Arrays,
    Ours,
    Outcome,
    batches,
    case,
    draws,
    imported,
    shared_noise,
)

Layers = list[tuple[np.ndarray, np.ndarray]]  # (weight as torch has it, bias) of each layer with parameters
ORDER = np.random.default_rng(0).permutation(BATCH)
DISCOUNT = 0.98
EDGE = "theirs cuts actions at 1 - 1e-6, ours at 1"


@contextlib.contextmanager
def shared_draws() -> Iterator[None]:
    """`shared_noise`, and the same order of a batch and the same share of goals among its tasks."""

    def uniform(*shape: Any, size: Any = None) -> np.ndarray:
        return draws.theirs((size,) if size is not None else shape, "uniform")

    with (
        shared_noise(),
        mock.patch.object(rng, "permuted", lambda key, index, high: torch.as_tensor(ORDER)),
        mock.patch.object(torch, "randperm", lambda count: torch.as_tensor(ORDER)),
        mock.patch.object(np.random, "uniform", uniform),
        mock.patch.object(np.random, "rand", uniform),
    ):
        yield


def ours_of(params: Mapping[str, Tensor], prefix: str, member: int | None = None) -> Layers:
    """The layers of one of our perceptrons in the order in which they act, its LayerNorm after its first layer."""
    layers: Layers = []
    depth = sum(k.startswith(f"{prefix}layers.") and k.endswith(".weight") for k in params)
    for name in (*(f"layers.{i}" for i in range(depth)), "head"):
        weight, bias = params[f"{prefix}{name}.weight"].numpy(), params[f"{prefix}{name}.bias"].numpy()
        layers.append((weight, bias) if member is None else (weight[member].T, bias[member, 0]))
        if name == "layers.0" and f"{prefix}norm.weight" in params:
            layers.append((params[f"{prefix}norm.weight"].numpy(), params[f"{prefix}norm.bias"].numpy()))
    return layers


def theirs_of(module: nn.Module) -> list[Any]:
    """The layers with parameters of a reference's perceptron."""
    return [m for m in module.modules() if isinstance(m, nn.Linear | nn.LayerNorm)]


def parts(
    ours: Ours, params: Mapping[str, Mapping[str, Tensor]], modules: Mapping[str, nn.Module]
) -> list[tuple[str, Layers, list[Any]]]:
    """(name, our layers, theirs) of each part that both sides have. modules: theirs by our prefixes."""
    found = []
    for name, module in modules.items():
        tree = params["actor" if name.startswith("actor.") else "representation"]
        prefix, _, member = name.removeprefix("actor.").partition("#")
        layers = ours_of(tree, prefix, int(member) if member else None)
        their_layers = theirs_of(module)
        assert [w.shape for w, _ in layers] == [tuple(m.weight.shape) for m in their_layers], name
        found.append((name, layers, their_layers))
    return found


def fill(ours: Ours, params: Mapping[str, Mapping[str, Tensor]], modules: Mapping[str, nn.Module]) -> None:
    """Give their modules our weights."""
    with torch.no_grad():
        for _, layers, their_layers in parts(ours, params, modules):
            for (weight, bias), module in zip(layers, their_layers, strict=True):
                module.weight.copy_(torch.as_tensor(weight.copy()))
                module.bias.copy_(torch.as_tensor(bias.copy()))


def pairs(
    ours: Ours, params: Mapping[str, Mapping[str, Tensor]], modules: Mapping[str, nn.Module], prefix: str
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Parameters of both sides for `Outcome.parameters`."""
    result = {}
    for name, layers, their_layers in parts(ours, params, modules):
        for i, ((weight, bias), module) in enumerate(zip(layers, their_layers, strict=True)):
            result[f"{prefix}{name}{i}/weight"] = (weight, module.weight.detach().numpy())
            result[f"{prefix}{name}{i}/bias"] = (bias, module.bias.detach().numpy())
    return result


def run(
    ours: Ours, online: Mapping[str, nn.Module], target: Mapping[str, nn.Module], update: Any, names: Mapping[str, str]
) -> Outcome:
    """Five updates. online, target: their modules by our prefixes; update: theirs, of a batch; names: our losses ->
    theirs.
    """
    outcome = Outcome()
    fill(ours, ours.state.params, online)
    fill(ours, ours.state.target, target)
    for batch in batches():
        with shared_draws():
            losses, expected = ours.update(batch), update(batch)
        outcome.losses.append({a: (losses[a], float(torch.as_tensor(expected[b]).detach())) for a, b in names.items()})
    outcome.parameters = pairs(ours, ours.state.params, online, "") | pairs(ours, ours.state.target, target, "target/")
    return outcome


def tensors(batch: Arrays) -> dict[str, Tensor]:
    columns = {k: torch.as_tensor(v) for k, v in batch.items()}
    return {**columns, "discounts": DISCOUNT * columns["masks"][:, None]}


def cut_at_one(module: str) -> None:
    """Let the reference's noisy actions reach 1, as ours do."""
    names = vars(sys.modules[module])
    names["TruncatedNormal"] = functools.partial(names["TruncatedNormal"], eps=0.0)


@contextlib.contextmanager
def stand_in(package: str, checkout: Path) -> Iterator[None]:
    """A package without what it imports by itself, here every agent, and with them their environments; its modules are
    found.
    """
    module = types.ModuleType(package)
    module.__path__ = [str(checkout.joinpath(*package.split(".")))]
    sys.modules[package] = module
    try:
        yield
    finally:
        del sys.modules[package]


CONTROLLABLE = "facebookresearch/controllable_agent"
ABSENT = ("dm_env", "url_benchmark.dmc", "url_benchmark.in_memory_replay_buffer", "url_benchmark.goals")


@case(
    "fb", CONTROLLABLE, "5a9950b07f1edcb4bddd04f5819379541793d975", needs=("hydra", "omegaconf"),
    aligned="norm_tanh=[inputs,backward] hidden=[1024] backward_hidden=[526,526] gradient_limit=0; actions cut at 1",
    remains=f"our defaults are the sizes and the limit of zero-shot-rl; {EDGE}; batches of 512, theirs 1024",
)  # fmt: skip
def controllable_agent(checkout: Path) -> Outcome:
    networks: dict[str, Any] = {"norm_tanh": ["inputs", "backward"], "hidden": [1024], "backward_hidden": [526, 526]}
    ours = Ours("fb", gradient_limit=0.0, **networks)
    with stand_in("url_benchmark.agent", checkout), imported(checkout, "url_benchmark.agent.fb_ddpg", ABSENT) as module:
        agent = module.FBDDPGAgent(
            obs_type="states",
            obs_shape=(OBSERVATION,),
            action_shape=(ACTION,),
            device="cpu",
            use_tb=True,
            use_wandb=False,
            use_hiplog=False,
            num_expl_steps=0,
            update_encoder=True,
            goal_space=None,
            batch_size=BATCH,
        )
        cut_at_one("url_benchmark.utils")

    def representation(forward: Any, backward: Any) -> dict[str, nn.Module]:
        heads = {"ahead.heads.#0": forward.F1, "ahead.heads.#1": forward.F2}
        return {
            "ahead.action.": forward.obs_action_net,
            "ahead.task.": forward.obs_z_net,
            **heads,
            "back.net.": backward.B,
        }

    def update(batch: Arrays) -> dict[str, float]:
        c = tensors(batch)
        names = {"obs": "observations", "action": "actions", "discount": "discounts", "next_obs": "next_observations"}
        rows = SimpleNamespace(**{a: c[b] for a, b in names.items()}, future_obs=None)
        rows.to = lambda device: rows
        return dict(agent.update(SimpleNamespace(sample=lambda count: rows), 0))

    actor = {
        "actor.state.": agent.actor.obs_net,
        "actor.task.": agent.actor.obs_z_net,
        "actor.net.": agent.actor.policy,
    }
    online = representation(agent.forward_net, agent.backward_net) | actor
    target = representation(agent.forward_target_net, agent.backward_target_net)
    return run(
        ours,
        online,
        target,
        update,
        {"fb/loss": "fb_loss", "fb/orthonormality": "orth_loss", "actor/loss": "actor_loss"},
    )


@case(
    "fb, as zero-shot-rl", "enjeeneer/zero-shot-rl", "2280cdf8fd8a5ccd51593ce9e6e06d27636c5a44", needs=("h5py", "tqdm"),
    aligned="norm_tanh=[actor] inputs_hidden=[1024,1024,512]; actions cut at 1",
    remains="our default networks have LayerNorm and tanh in what reads the inputs and in B too, and one layer less "
            f"there; {EDGE}",
)  # fmt: skip
def zero_shot_rl(checkout: Path) -> Outcome:
    ours = Ours("fb", norm_tanh=["actor"], inputs_hidden=[1024, 1024, 512])
    with imported(checkout, "agents.fb.agent", ("wandb", "loguru", "rewards")) as module:
        agent = module.FB(
            observation_length=OBSERVATION,
            action_length=ACTION,
            preprocessor_hidden_dimension=1024,
            preprocessor_output_dimension=512,
            preprocessor_hidden_layers=2,
            preprocessor_activation="relu",
            z_dimension=50,
            forward_hidden_dimension=1024,
            forward_hidden_layers=2,
            forward_number_of_features=2,
            backward_hidden_dimension=256,
            backward_hidden_layers=3,
            actor_hidden_dimension=1024,
            actor_hidden_layers=2,
            forward_activation="relu",
            backward_activation="relu",
            actor_activation="relu",
            actor_learning_rate=1e-4,
            critic_learning_rate=1e-4,
            learning_rate_coefficient=1.0,
            orthonormalisation_coefficient=1.0,
            discount=DISCOUNT,
            batch_size=BATCH,
            z_mix_ratio=0.5,
            gaussian_actor=False,
            std_dev_clip=0.3,
            std_dev_schedule="0.2",
            tau=0.01,
            device="cpu",
            name="fb",
        )
        cut_at_one("agents.base")

    def representation(forward: Any, backward: Any) -> dict[str, nn.Module]:
        readers = {"ahead.action.": forward.obs_action_preprocessor, "ahead.task.": forward.obs_z_preprocessor}
        return {**readers, "ahead.heads.#0": forward.F1, "ahead.heads.#1": forward.F2, "back.net.": backward}

    actor = agent.actor
    policy = {
        "actor.state.": actor.obs_preprocessor,
        "actor.task.": actor.obs_z_preprocessor,
        "actor.net.": actor.actor,
    }
    online = representation(agent.FB.forward_representation, agent.FB.backward_representation) | policy
    target = representation(agent.FB.forward_representation_target, agent.FB.backward_representation_target)
    names = {"fb/loss": "train/forward_backward_total_loss", "fb/measure_loss": "train/forward_backward_fb_loss"}
    names |= {"actor/loss": "train/actor_loss"}
    return run(ours, online, target, lambda batch: agent.update(SimpleNamespace(**tensors(batch)), 0), names)
