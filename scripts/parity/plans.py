"""Diffuser beside its authors' PyTorch (jannerm/diffuser): both losses, and plans that the value guides."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor, nn

from offrl.algorithms.diffuser import Diffuser
from offrl.data.samplers.sequences import VALID
from offrl.families.generative.plans import RETURN
from parity.common import ACTION, BATCH, OBSERVATION, UPDATES, Ours, Outcome, case, imported, shared_noise
from parity.diffusion import same_draws
from parity.weights import Pair, compared, give, linear, packages, scramble, stubs

DIFFUSER, DIFFUSER_COMMIT = "jannerm/diffuser", "7ea422860cc0106e5ca5949d980f04b799d5462c"
# groups of a normalisation are eight there, and here where that is four channels each
HORIZON, STEPS, BASE, MULTIPLES = (8, 5, 32, (1, 4))
GUIDE: dict[str, Any] = {"guide_scale": 0.1, "guide_steps": 2, "guide_stop": 2}


def same(name: str, module: Any) -> list[Pair]:
    """Weight and bias of a convolution."""
    return [(f"{name}.weight", lambda w: w, module.weight), (f"{name}.bias", lambda b: b, module.bias)]


def block(name: str, module: Any) -> list[Pair]:
    """One of their residual blocks."""
    pairs = linear(f"{name}.embed", module.time_mlp[1])
    for part, half in zip(("first", "second"), module.blocks, strict=True):
        pairs += same(f"{name}.{part}.convolution", half.block[0])
        norm = half.block[2]
        pairs += [(f"{name}.{part}.scale", lambda x: x, norm.weight), (f"{name}.{part}.shift", lambda x: x, norm.bias)]
    return (
        pairs if isinstance(module.residual_conv, nn.Identity) else pairs + same(f"{name}.skip", module.residual_conv)
    )


def embedding(net: Any) -> list[Pair]:
    """Of the diffusion step."""
    return [*linear("time.up", net.time_mlp[1]), *linear("time.down", net.time_mlp[3])]


def unet(net: Any) -> list[Pair]:
    pairs = [*embedding(net), *block("middle.0", net.mid_block1), *block("middle.1", net.mid_block2)]
    for i, (one, two, *_, halve) in enumerate(net.downs):
        pairs += block(f"down.{i}.0", one) + block(f"down.{i}.1", two)
        pairs += [] if isinstance(halve, nn.Identity) else same(f"halve.{i}", halve.conv)
    for i, (one, two, *_, widen) in enumerate(net.ups):
        pairs += block(f"up.{i}.0", one) + block(f"up.{i}.1", two) + same(f"widen.{i}", widen.conv)
    last = net.final_conv[0].block
    pairs += same("last.convolution", last[0]) + same("head", net.final_conv[1])
    return [*pairs, ("last.scale", lambda x: x, last[2].weight), ("last.shift", lambda x: x, last[2].bias)]


def value_net(net: Any) -> list[Pair]:
    pairs = [*embedding(net), *linear("hidden", net.final_block[0]), *linear("head", net.final_block[2])]
    levels = len(net.blocks)
    for i, (one, two, halve) in enumerate(net.blocks):
        pairs += block(f"blocks.{i}.0", one) + block(f"blocks.{i}.1", two) + same(f"halve.{i}", halve.conv)
    for i, (one, halve) in enumerate(((net.mid_block1, net.mid_down1), (net.mid_block2, net.mid_down2))):
        pairs += block(f"narrow.{i}.0", one) + same(f"halve.{levels + i}", halve.conv)
    return pairs


def windows() -> list[dict[str, np.ndarray]]:
    """Windows of noise, all of whose steps are there."""
    g = np.random.default_rng(0)
    return [
        {
            "observations": g.normal(size=(BATCH, HORIZON, OBSERVATION)),
            "actions": g.uniform(-0.95, 0.95, (BATCH, HORIZON, ACTION)),
            VALID: np.ones((BATCH, HORIZON), bool),
            RETURN: g.normal(size=(BATCH, HORIZON)),
        }
        for _ in range(UPDATES)
    ]


class Theirs:
    """The reference's models, and its guided sampling."""

    def __init__(self, checkout: Path, action_weight: float) -> None:
        utils = ModuleType("diffuser.utils")
        utils.to_np = lambda x: x.detach().numpy()  # type: ignore[attr-defined]
        modules = packages(checkout, "diffuser", "diffuser.models", "diffuser.sampling") | {"diffuser.utils": utils}
        modules["diffuser"].utils = utils  # type: ignore[attr-defined]
        # the schedule of noise and the weights of the loss are of a type that they name
        double = [mock.patch.object(torch, name, torch.float64) for name in ("float32", "float")]
        with (
            stubs(modules),
            double[0],
            double[1],
            imported(checkout, "diffuser.models.temporal") as nets,
            mock.patch("builtins.print"),
        ):
            models = importlib.import_module("diffuser.models.diffusion")
            self.functions = importlib.import_module("diffuser.sampling.functions")
            guides = importlib.import_module("diffuser.sampling.guides")
            shape = HORIZON, OBSERVATION + ACTION, OBSERVATION
            sizes = HORIZON, OBSERVATION, ACTION
            options = {"n_timesteps": STEPS, "predict_epsilon": False}
            self.plan = nets.TemporalUnet(*shape, dim=BASE, dim_mults=MULTIPLES)
            self.value = nets.ValueFunction(*shape, dim=BASE, dim_mults=MULTIPLES)
            self.diffusion = models.GaussianDiffusion(
                self.plan, *sizes, loss_type="l2", action_weight=action_weight, **options
            )
            self.values = models.ValueDiffusion(self.value, *sizes, loss_type="value_l2", **options)
            self.guide = guides.ValueGuide(self.values)

    def guided(self, states: Tensor) -> Tensor:
        """Plans [B, T, D] from states [B, O], in the order of the states: what `p_sample_loop` does but for its sorting
        by value.
        """
        condition, put = {0: states}, self.functions.apply_conditioning
        x = put(torch.randn(len(states), HORIZON, ACTION + OBSERVATION), condition, ACTION)
        settings = {
            "scale": GUIDE["guide_scale"],
            "n_guide_steps": GUIDE["guide_steps"],
            "t_stopgrad": GUIDE["guide_stop"],
        }
        for t in reversed(range(STEPS)):
            step = torch.full((len(states),), t)
            x, _ = self.functions.n_step_guided_p_sample(self.diffusion, x, condition, step, self.guide, **settings)
            x = put(x, condition, ACTION)
        return x


@case(
    "diffuser", DIFFUSER, DIFFUSER_COMMIT, needs=("einops",),
    aligned="all steps of a window are there; the same noise in both losses; one batch in place of two halves; the "
            "value learns in the same updates",
    remains="their actions are normalised, steps beyond an end are zeros that are learnt; the averaged networks follow "
            "every ten updates",
)  # fmt: skip
def diffuser(checkout: Path) -> Outcome:
    ours = Ours("diffuser", plan_horizon=HORIZON, denoising_steps=STEPS, base=BASE, multiples=list(MULTIPLES), **GUIDE)
    algorithm, outcome = ours.algorithm, Outcome()
    assert isinstance(algorithm, Diffuser)
    theirs, params = Theirs(checkout, algorithm.config.action_weight), ours.state.params
    networks = {"plan": theirs.plan, "value": theirs.value}
    pairs = {"plan": unet(theirs.plan), "value": value_net(theirs.value)}
    for name in pairs:
        scramble(ours, name)
        assert sorted(n for n, _, _ in pairs[name]) == sorted(params[name])
        give(pairs[name], params[name])
    optimizers = {
        name: torch.optim.Adam(net.parameters(), lr=algorithm.config.learning_rate) for name, net in networks.items()
    }
    # the noise of the plans' loss is that of the values'
    order = {BATCH: (0, 0), BATCH * HORIZON * (ACTION + OBSERVATION): (0, 0)}
    for batch in windows():
        plans = torch.as_tensor(np.concatenate([batch["actions"], batch["observations"]], -1))
        states = torch.as_tensor(batch["observations"][:, 0])
        with same_draws(0, order):
            losses = ours.update(batch)
            expected = {
                "plan": theirs.diffusion.loss(plans, {0: states})[0],
                "value": theirs.values.loss(plans, {0: states}, torch.as_tensor(batch[RETURN][:, :1]))[0],
            }
        for name, loss in expected.items():
            optimizers[name].zero_grad()
            loss.backward()
            optimizers[name].step()
        outcome.losses.append({name: (losses[f"{name}/loss"], loss.item()) for name, loss in expected.items()})
    for name in pairs:
        outcome.parameters |= {
            f"{name}/{k}": pair for k, pair in compared(pairs[name], ours.state.params[name]).items()
        }
    with shared_noise(), torch.no_grad():
        drawn, _ = algorithm.guided(ours.state.params, states, ours.state.key)
        outcome.parameters["plans"] = drawn.numpy(), theirs.guided(states).numpy()
    return outcome
