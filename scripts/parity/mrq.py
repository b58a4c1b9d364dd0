"""MR.Q beside its authors' PyTorch (facebookresearch/MRQ): five updates, with the encoders' before every second one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from offrl import rng
from offrl.data.samplers.states import IS_TERMINAL, VALID
from parity.common import ACTION, BATCH, OBSERVATION, UPDATES, Ours, Outcome, case, imported, shared_noise, tensors
from parity.weights import Pair, compared, give, linear, scramble

HORIZON, N_STEP, EVERY, LATENT, WIDTH = 5, 3, 2, 16, 12
SIZES = {"zs_dim": LATENT, "zsa_dim": LATENT, "za_dim": 8, "enc_hdim": WIDTH, "value_hdim": WIDTH, "policy_hdim": WIDTH}
SETTINGS: dict[str, Any] = {
    "latent": LATENT,
    "action_latent": 8,
    "hidden": [WIDTH, WIDTH],
    "target_every": EVERY,
    "episodic": True,
    "bc_weight": 0.0,
}
REWARDS = torch.linspace(-3.0, 9.0, 40)  # of all data


class Windows:
    """The reference's replay buffer, which holds one row and gives windows that are handed in."""

    size, env_terminates, state_shape = 1, True, [OBSERVATION]

    def __init__(self, *_: Any, **__: Any) -> None:
        self.windows: Iterator[dict[str, np.ndarray]] = iter(())

    def sample(self, horizon: int, include_intermediate: bool) -> tuple[Tensor, ...]:
        """States, actions, next states, rewards and 1 - terminal of so many steps, or with only the ends' states."""
        x = tensors(next(self.windows))
        seen, actions, going_on = x["observations"], x["actions"], 1.0 - x[IS_TERMINAL].double()
        columns = x["rewards"][:, :horizon, None], going_on[:, 1 : horizon + 1, None]
        if include_intermediate:
            return seen[:, :horizon], actions[:, :horizon], seen[:, 1 : horizon + 1], *columns
        return seen[:, 0], actions[:, 0], seen[:, horizon], *columns

    def reward_scale(self) -> float:
        return float(REWARDS.abs().mean())

    def update_priority(self, _: Tensor) -> None:
        """Priorities are not compared."""


class Theirs:
    """The reference's agent, which keeps what its last update of the critics computed."""

    def __init__(self, checkout: Path) -> None:
        with imported(checkout / "MRQ", "MRQ") as module, mock.patch.object(module.buffer, "ReplayBuffer", Windows):
            settings = {**SIZES, "target_update_freq": EVERY, "buffer_size_before_training": 0}
            self.agent = module.Agent((OBSERVATION,), ACTION, 1.0, False, False, torch.device("cpu"), hp=settings)
        learn = self.agent.train_rl

        def kept(*x: Any) -> tuple[Tensor, Tensor]:
            self.q, self.target = learn(*x)
            return self.q, self.target

        self.agent.train_rl = kept

    def update(self, windows: list[dict[str, np.ndarray]]) -> dict[str, float]:
        """One update, after the encoders' where it is their turn; its losses."""
        self.agent.replay_buffer.windows = iter(windows)
        self.agent.train()
        loss = F.smooth_l1_loss(self.q, self.target.expand_as(self.q))
        return {"critic/loss": loss.item(), "critic/q": self.q.mean().item() * self.agent.reward_scale}

    def pairs(self, kind: str = "") -> dict[str, list[Pair]]:
        """Our parameters of each module and theirs; kind: "" or "_target"."""
        encoder, value, policy = (getattr(self.agent, f"{name}{kind}") for name in ("encoder", "value", "policy"))
        critics = [[q.q1.l1, q.q1.l2, q.q1.l3, q.q2] for q in (value.q1, value.q2)]
        modules = {
            "encoder": perceptron(encoder.zs_mlp),
            "pair_encoder": [*linear("action", encoder.za), *perceptron(encoder.zsa)],
            "model": linear("linear", encoder.model),
            "critic": [pair for i, layers in enumerate(critics) for pair in member(i, layers)],
            "actor": perceptron(policy.policy),
        }
        return modules if not kind else {name: pairs for name, pairs in modules.items() if name != "model"}


def perceptron(module: Any) -> list[Pair]:
    return [*linear("net.layers.0", module.l1), *linear("net.layers.1", module.l2), *linear("net.head", module.l3)]


def member(i: int, layers: list[Any]) -> list[Pair]:
    pairs: list[Pair] = []
    for name, layer in zip(("layers.0", "layers.1", "layers.2", "head"), layers, strict=True):
        pairs += [
            (f"net.{name}.weight", lambda w: w[i].T, layer.weight),
            (f"net.{name}.bias", lambda b: b[i, 0], layer.bias),
        ]
    return pairs


def windows(seed: int) -> dict[str, np.ndarray]:
    """Windows of states, some of which end in terminals after the steps of a target."""
    g = np.random.default_rng(seed)
    shape = BATCH, HORIZON + 1
    last = g.integers(N_STEP + 1, HORIZON + 3, BATCH)
    return {
        "observations": g.normal(size=(*shape, OBSERVATION)),
        "actions": g.uniform(-0.95, 0.95, (*shape, ACTION)),
        "rewards": 10 * g.normal(size=shape),
        IS_TERMINAL: np.arange(HORIZON + 1) >= last[:, None],
        VALID: np.ones(shape, bool),
    }


@case(
    "mrq, as published",
    "facebookresearch/MRQ",
    "8a44a7d4b1cf117e5da4bf8214d35b02aa68d68b",
    aligned="no terminal among the steps of a target",
    remains="their targets lose the rewards of terminals and count rewards beyond; they draw windows by priorities "
    "(LAP), here uniformly",
)
def mrq(checkout: Path) -> Outcome:
    ours, theirs, outcome = Ours("mrq", **SETTINGS), Theirs(checkout), Outcome()
    pairs = theirs.pairs()
    for name, module in pairs.items():
        scramble(ours, name)
        give(module, ours.state.params[name])
    source = SimpleNamespace(table=SimpleNamespace(column=lambda *_: REWARDS), final=torch.zeros(1, dtype=torch.bool))
    for i in range(UPDATES):
        drawn = [windows(10 * i + j) for j in range(EVERY + 1 if i % EVERY == 0 else 1)]
        with shared_noise(), mock.patch.object(Tensor, "float", Tensor.double):
            if i % EVERY == 0:
                batches = iter(drawn)
                ours.algorithm.sampler = lambda b=batches: lambda *_: tensors(next(b))  # type: ignore[method-assign]
                ours.state, _ = ours.algorithm.refresh(ours.state, source, rng.make_key(i), step=i)
            metrics = ours.update(drawn[-1])
            reference = theirs.update(drawn)
        outcome.losses.append({k: (metrics[k], reference[k]) for k in reference})
    for kind, params in (("", ours.state.params), ("_target", ours.state.target)):
        for name, module in theirs.pairs(kind).items():
            outcome.parameters |= {f"{name}{kind}/{k}": v for k, v in compared(module, params[name]).items()}
    return outcome
