"""Decision Diffuser beside its authors' PyTorch (anuragajay/decision-diffuser): the returns of windows, both losses,
plans and actions.
"""

from __future__ import annotations

import importlib
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor, nn

from offrl.algorithms.decision_diffuser import DecisionDiffuser
from offrl.data.arrays import from_arrays
from offrl.data.samplers.sequences import VALID, windows
from offrl.families.generative.plans import RETURN
from parity.common import (
    ACTION,
    BATCH,
    OBSERVATION,
    UPDATES,
    Ours,
    Outcome,
    case,
    draws,
    fill,
    imported,
    linears,
    pair_layers,
    shared_noise,
)
from parity.plans import unet
from parity.weights import Pair, compared, give, linear, packages, scramble, stubs

REPOSITORY, COMMIT = "anuragajay/decision-diffuser", "01ce528c30b4733dc59aa6203e46ec165561158d"
HORIZON, STEPS, BASE, MULTIPLES = 8, 5, 32, (1, 4)
LENGTHS, LIMIT = (12, 20, 17), 20  # of episodes, the second of which ends by a time-out
RETURNS = {"discount": 0.5, "return_scale": 256.0, "termination_penalty": -100.0}  # sums of these are exact in float32
ACTING = {"target_return": 0.9 * RETURNS["return_scale"], "guidance": 1.2, "noise_scale": 0.5, "clip": 1.0}
STUBS = ("gym", "d4rl")


def columns() -> dict[str, np.ndarray]:
    """A data set in D4RL's layout."""
    g, rows = np.random.default_rng(0), sum(LENGTHS)
    last = np.isin(np.arange(rows), np.cumsum(LENGTHS) - 1)
    late = np.arange(rows) == LENGTHS[0] + LENGTHS[1] - 1
    return {
        "observations": g.normal(size=(rows, OBSERVATION)).astype(np.float32),
        "actions": g.uniform(-0.95, 0.95, (rows, ACTION)).astype(np.float32),
        "rewards": g.integers(0, 8, rows).astype(np.float32),
        "terminals": last & ~late,
        "timeouts": last & late,
    }


class Theirs:
    """The reference's models, and its data set."""

    def __init__(self, checkout: Path, condition_dropout: float) -> None:
        utils = ModuleType("diffuser.utils")
        utils.Silent = lambda: SimpleNamespace(update=lambda _: None, close=lambda: None)  # type: ignore[attr-defined]
        modules = packages(checkout, "diffuser", "diffuser.models", "diffuser.datasets") | {"diffuser.utils": utils}
        modules["diffuser"].utils = utils  # type: ignore[attr-defined]
        with ExitStack() as stack:
            # the schedule of noise and the weights of the loss are of types that they name; NumPy has lost the name of
            # its integers
            patches = (mock.patch.object(torch, name, torch.float64) for name in ("float32", "float"))
            for patch in (
                stubs(modules),
                *patches,
                mock.patch("builtins.print"),
                mock.patch.object(np, "int", int, create=True),
            ):
                stack.enter_context(patch)
            nets = stack.enter_context(imported(checkout, "diffuser.models.temporal", STUBS))
            models = importlib.import_module("diffuser.models.diffusion")
            sequence = importlib.import_module("diffuser.datasets.sequence")
            options: dict[str, Any] = {"returns_condition": True, "condition_dropout": condition_dropout}
            self.plan = nets.TemporalUnet(HORIZON, OBSERVATION, OBSERVATION, dim=BASE, dim_mults=MULTIPLES, **options)
            self.diffusion = models.GaussianInvDynDiffusion(
                self.plan, HORIZON, OBSERVATION, ACTION, n_timesteps=STEPS, clip_denoised=True, returns_condition=True,
                condition_guidance_w=ACTING["guidance"],
            )  # fmt: skip
            made = sequence.load_environment = lambda env: env  # it asks whether `env` is a name
            environment = SimpleNamespace(name="hopper", get_dataset=columns)
            self.windows = sequence.SequenceDataset(
                made(environment),
                HORIZON,
                "GaussianNormalizer",
                [],
                LIMIT,
                discount=RETURNS["discount"],
                termination_penalty=RETURNS["termination_penalty"],
                returns_scale=RETURNS["return_scale"],
                include_returns=True,
            )

    def returns(self) -> dict[int, float]:
        """The condition of each of its windows, by the row of the data at which it begins."""
        begins = np.cumsum((0, *LENGTHS))
        return {
            int(begins[path] + start): float(self.windows[i].returns[0])
            for i, (path, start, _) in enumerate(self.windows.indices)
        }

    def acts(self, states: Tensor, share: float) -> tuple[Tensor, Tensor]:
        """Plans and actions of states [B, O], as in its evaluation."""
        plans = self.diffusion.conditional_sample(
            {0: states}, returns=share * torch.ones(len(states), 1), verbose=False
        )
        return plans, self.diffusion.inv_model(torch.cat([plans[:, 0], plans[:, 1]], -1))


def pairs_of(net: Any) -> list[Pair]:
    """The U-net, and the perceptron of its condition."""
    layers = [m for m in net.returns_mlp if isinstance(m, nn.Linear)]
    return [*unet(net), *(pair for i, layer in enumerate(layers) for pair in linear(f"condition.{i}", layer))]


@case(
    "decision_diffuser", REPOSITORY, COMMIT, needs=("einops", "scipy"),
    aligned="windows of whole steps; observations normalised alike; one batch in place of two halves; predictions cut "
            "off at 1",
    remains="their observations and actions are mapped to their ranks; steps beyond an end are zeros that are learnt; "
            "no window begins at an episode's last step or where it would pass the time limit; the averaged networks "
            "follow every ten updates; where `return_scale` is not set it is the data's largest",
)  # fmt: skip
def decision_diffuser(checkout: Path) -> Outcome:
    sizes = {"plan_horizon": HORIZON, "denoising_steps": STEPS, "base": BASE, "multiples": list(MULTIPLES)}
    ours, outcome = Ours("decision_diffuser", **sizes, **RETURNS, **ACTING), Outcome()
    algorithm, params = ours.algorithm, ours.state.params
    assert isinstance(algorithm, DecisionDiffuser)
    theirs = Theirs(checkout / "code", algorithm.config.condition_dropout)
    pairs, layers = pairs_of(theirs.plan), linears(theirs.diffusion.inv_model)
    scramble(ours, "plan")
    assert sorted({n for n, _, _ in pairs}) == sorted(params["plan"])
    give(pairs, params["plan"])
    fill(layers, ours.mlp("inverse"))
    data = columns()
    arrays = (data[k] for k in ("observations", "actions", "rewards", "terminals", "timeouts"))
    dataset = from_arrays(*arrays, action_low=-1.0, action_high=1.0)
    source, shares = algorithm.sampler().prepare(dataset), theirs.returns()
    begins = torch.tensor(sorted(shares))
    own = windows(source, begins, HORIZON)[RETURN][:, 0].double() / algorithm.config.return_scale
    outcome.parameters["returns"] = own.numpy(), np.array([shares[int(row)] for row in begins])

    adam, g = (
        torch.optim.Adam(theirs.diffusion.parameters(), lr=algorithm.config.learning_rate),
        np.random.default_rng(1),
    )
    whole = [
        int(row) for row, valid in zip(begins, windows(source, begins, HORIZON)[VALID], strict=True) if valid.all()
    ]

    def masks(kept: Tensor) -> Tensor:
        return torch.as_tensor(draws.theirs(kept.shape, "uniform")) >= 1.0 - kept

    for _ in range(UPDATES):
        rows = torch.as_tensor(g.choice(whole, BATCH))
        batch = {k: v.double() if v.is_floating_point() else v for k, v in windows(source, rows, HORIZON).items()}
        states = batch["observations"]
        given = torch.tensor([[shares[int(row)]] for row in rows])
        with shared_noise(), mock.patch.object(torch, "bernoulli", lambda kept: masks(kept).double()):
            losses = ours.update({k: v.numpy() for k, v in batch.items()})
            loss, info = theirs.diffusion.loss(torch.cat([batch["actions"], states], -1), {0: states[:, 0]}, given)
        adam.zero_grad()
        loss.backward()
        adam.step()
        total = losses["plan/loss"] + losses["inverse/loss"]
        outcome.losses.append(
            {"loss": (total, loss.item()), "plan": (2.0 * losses["plan/loss"], info["a0_loss"].item())}
        )
    outcome.parameters |= {f"plan/{k}": pair for k, pair in compared(pairs, ours.state.params["plan"]).items()}
    outcome.parameters |= pair_layers("inverse", ours.mlp("inverse"), layers)

    with shared_noise(), torch.no_grad():
        current = ours.state.params
        plans = algorithm.future(current, states[:, 0], ours.state.key)
        expected, actions = theirs.acts(states[:, 0], 0.9)
        outcome.parameters["plans"] = plans.numpy(), expected.numpy()
        outcome.parameters["actions"] = algorithm.act_between(current["inverse"], plans)[:, 0].numpy(), actions.numpy()
    return outcome
