"""TD-MPC2 beside its authors' PyTorch (nicklashansen/tdmpc2): five updates of one task with terminals."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from offrl.data.samplers.states import IS_TERMINAL, VALID
from parity.common import ACTION, BATCH, OBSERVATION, UPDATES, Ours, Outcome, case, draws, imported, shared_noise
from parity.weights import Pair, compared, give, linear, norm, scramble

HORIZON, LATENT, WIDTH, CRITICS = 3, 16, 12, 5
PUBLISHED = {"bc_weight": 0.0, "target_critics": 2}
SETTINGS: dict[str, Any] = {
    "latent": LATENT,
    "hidden": [WIDTH, WIDTH],
    "encoder_hidden": [10],
    "critics": CRITICS,
    "critic_dropout": 0.0,
    "discount": 0.95,
    "episodic": True,
}
LOSSES = {
    "model/consistency": "consistency_loss",
    "model/reward": "reward_loss",
    "critic/loss": "value_loss",
    "model/termination": "termination_loss",
    "actor/loss": "pi_loss",
    "actor/scale": "pi_scale",
}


class Torch:
    """torch for a CPU, in modules that name a GPU."""

    def __init__(self) -> None:
        self.optim = SimpleNamespace(Adam=lambda *x, capturable, **settings: torch.optim.Adam(*x, **settings))

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @staticmethod
    def device(_: str) -> torch.device:
        return torch.device("cpu")


class Theirs:
    """The reference's agent."""

    def __init__(self, checkout: Path) -> None:
        with imported(checkout / "tdmpc2", "tdmpc2") as module, mock.patch("builtins.print"):
            module.torch = module.math.torch = Torch()
            module.RunningScale.__init__.__globals__["torch"] = module.torch
            module.WorldModel.to = lambda model, _: model.init() or model  # all is on the CPU
            self.agent = module.TDMPC2(self.config())
        self.agent.scale.double()

    @staticmethod
    def config() -> SimpleNamespace:
        """Its configuration as far as it is read, with the values of config.yaml beside our sizes."""
        weights = {"consistency_coef": 20, "reward_coef": 0.1, "value_coef": 0.1, "termination_coef": 1}
        optimizer = {"lr": 3e-4, "enc_lr_scale": 0.3, "grad_clip_norm": 20, "tau": 0.01, "entropy_coef": 1e-4}
        discount = {"discount_denom": 5, "discount_min": 0.95, "discount_max": 0.995, "episode_length": 100, "rho": 0.5}
        bins = {"num_bins": 101, "vmin": -10, "vmax": 10, "bin_size": 0.2, "simnorm_dim": 8, "dropout": 0}
        sizes = {"num_enc_layers": 2, "enc_dim": 10, "latent_dim": LATENT, "mlp_dim": WIDTH, "task_dim": 0}
        task = {"obs": "state", "obs_shape": {"state": (OBSERVATION,)}, "action_dim": ACTION, "multitask": False}
        flags = {"episodic": True, "compile": False, "iterations": 6, "horizon": HORIZON, "batch_size": BATCH}
        policy = {"log_std_min": -10.0, "log_std_max": 2.0, "num_q": CRITICS}
        return SimpleNamespace(**weights, **optimizer, **discount, **bins, **sizes, **task, **flags, **policy)

    def pairs(self) -> dict[str, list[Pair]]:
        """Our parameters of each module and theirs."""
        model = self.agent.model
        return {
            "encoder": latent("", model._encoder["state"]),
            "model": latent("dynamics.", model._dynamics)
            + perceptron("reward.", model._reward)
            + perceptron("termination.", model._termination),
            "critic": ensemble(model._Qs.params),
            "actor": perceptron("net.", model._pi),
        }

    def update(self, batch: Mapping[str, np.ndarray]) -> dict[str, float]:
        """One update; its losses."""
        observations, actions, rewards, ends = (
            torch.as_tensor(batch[name]).transpose(0, 1) for name in ("observations", "actions", "rewards", IS_TERMINAL)
        )
        columns = rewards[:-1, :, None], ends[1:, :, None].to(torch.float64)
        with mock.patch.object(torch, "randperm", ranked):
            return {k: float(v) for k, v in self.agent._update(observations, actions[:-1], *columns).items()}


def ranked(count: int, **_: Any) -> Tensor:
    """A permutation by ranks, as ours are drawn."""
    return torch.as_tensor(draws.theirs((count,), "uniform")).argsort(descending=True)


def layers(name: str, module: Any, count: int) -> list[Pair]:
    pairs: list[Pair] = []
    for i in range(count):
        pairs += [*linear(f"{name}layers.{i}", module[i]), *norm(f"{name}norms.{i}", module[i].ln)]
    return pairs


def perceptron(name: str, module: Any) -> list[Pair]:
    return [*layers(name, module, len(module) - 1), *linear(f"{name}head", module[-1])]


def latent(name: str, module: Any) -> list[Pair]:
    return [*perceptron(f"{name}net.", module), *norm(f"{name}out", module[-1].ln)]


def ensemble(params: Any) -> list[Pair]:
    pairs: list[Pair] = []
    for i in range(3):
        name = f"layers.{i}" if i < 2 else "head"
        pairs += [(f"{name}.weight", lambda w: w.transpose(1, 2), params[str(i), "weight"].data)]
        pairs += [(f"{name}.bias", lambda b: b[:, 0], params[str(i), "bias"].data)]
        if i < 2:
            for ours, theirs in (("scales", "weight"), ("shifts", "bias")):
                pairs += [(f"{ours}.{i}", lambda x: x[:, 0], params[str(i), "ln", theirs].data)]
    return pairs


def windows(seed: int) -> dict[str, np.ndarray]:
    """Windows of states, some of which end in a terminal."""
    g = np.random.default_rng(seed)
    shape = BATCH, HORIZON + 1
    terminal = np.zeros(shape, bool)
    terminal[:, -1] = g.random(BATCH) < 0.3
    return {
        "observations": g.normal(size=(*shape, OBSERVATION)),
        "actions": g.uniform(-0.95, 0.95, (*shape, ACTION)),
        "rewards": 10 * g.normal(size=shape),
        IS_TERMINAL: terminal,
        VALID: np.ones(shape, bool),
    }


@case(
    "tdmpc2, as published",
    "nicklashansen/tdmpc2",
    "e9f59321933cbc8e11a002b842adc7d4ffae8ff1",
    aligned="no dropout in the critics",
    remains="episodes are drawn before windows there, windows uniformly here",
    needs=("tensordict",),
)
def tdmpc2(checkout: Path) -> Outcome:
    ours, theirs, outcome = Ours("tdmpc2", **SETTINGS, **PUBLISHED), Theirs(checkout), Outcome()
    pairs = theirs.pairs()
    for name, module in pairs.items():
        scramble(ours, name)
        give(module, ours.state.params[name])
    targets = ensemble(theirs.agent.model._target_Qs_params)
    ours.state.target["critic"] = {k: v + 0.1 for k, v in ours.state.params["critic"].items()}
    give(targets, ours.state.target["critic"])
    for i in range(UPDATES):
        batch = windows(i)
        with shared_noise():
            with mock.patch.object(Tensor, "float", Tensor.double):
                metrics = ours.update(batch)
            reference = theirs.update(batch)
        outcome.losses.append({k: (metrics[k], reference[name]) for k, name in LOSSES.items()})
    for name, module in pairs.items():
        outcome.parameters |= {f"{name}/{k}": v for k, v in compared(module, ours.state.params[name]).items()}
    outcome.parameters |= {f"target/{k}": v for k, v in compared(targets, ours.state.target["critic"]).items()}
    return outcome
