"""Policies without a memory that are conditioned on returns, what MBRCSL trains before, and Meta-DT, beside their
authors' code.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import gymnasium
import numpy as np
import torch
from torch import Tensor, nn

from offrl.data.dataset import DataSpec
from offrl.data.samplers.histories import PROMPT
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
)
from parity.sequence import COLUMNS, GPT2, LONGEST, ROWS, SMALL, STEPS, WIDTH, columns, windows
from parity.weights import (
    Pair,
    compared,
    give,
    gpt2_blocks,
    linear,
    norm,
    old_transformers,
    optimizer,
    packages,
    scramble,
    stubs,
    table,
)  # fmt: skip

RVS, RVS_COMMIT = "scottemmons/rvs", "90c0ffb26a1a3dd617d4f51c726f135d06f44b00"
MBRCSL, MBRCSL_COMMIT = "zhaoyizhou1123/mbrcsl", "89863177e46b7d58c27bc2369376a5718299279b"
META, META_COMMIT = "NJU-RL/Meta-DT", "d5681001f446e8a745ddbf281ab451126345cf0b"


def steps_with_returns() -> list[dict[str, np.ndarray]]:
    """Batches of windows of one step, as return-conditioned policies without a memory draw them."""
    g = np.random.default_rng(2)
    kept = ("observations", "actions", "rewards")
    return [
        {
            **{name: batch[name][:, None] for name in kept}, "returns_to_go": g.uniform(0.0, 30.0, (BATCH, 1)),
            "timesteps": g.integers(0, 50, (BATCH, 1)), "valid": np.ones((BATCH, 1), bool),
        }
        for batch in batches()
    ]  # fmt: skip


# ---- RvS


@contextmanager
def lightning() -> Iterator[None]:
    """Inside, `pytorch_lightning` and `gym` are there, as far as RvS' policy needs them, and Stable-Baselines3 has its
    method of 2021.
    """
    from stable_baselines3.common import utils
    from stable_baselines3.common.policies import ActorCriticPolicy

    def latent(self: Any, observations: Tensor) -> tuple[Tensor, ...]:
        pi, value = self.mlp_extractor(self.extract_features(observations))
        return pi, value, pi

    module = type(
        "LightningModule", (nn.Module,), {"save_hyperparameters": lambda *_, **__: None, "log": lambda *_, **__: None}
    )
    package = ModuleType("pytorch_lightning")
    package.LightningModule, package.LightningDataModule = module, nn.Module  # type: ignore[attr-defined]
    original = ActorCriticPolicy._get_action_dist_from_latent
    patches = (
        mock.patch.object(ActorCriticPolicy, "_get_latent", latent, create=True),
        mock.patch.object(
            ActorCriticPolicy, "_get_action_dist_from_latent", lambda self, pi, _=None: original(self, pi)
        ),
        stubs({"pytorch_lightning": package, "gym": gymnasium}),
        mock.patch.object(utils, "constant_fn", lambda value: lambda _: value, create=True),
    )
    with ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        yield


@case(
    "rvs", RVS, RVS_COMMIT,
    aligned="tanh of the mean",
    remains="their mean is not squashed and log std has no floor (ours: -5); their weights begin orthogonal, 0.01 "
            "those of the output",
    needs=("stable_baselines3",),
)  # fmt: skip
def rvs(checkout: Path) -> Outcome:
    ours, outcome = (
        Ours("rvs", hidden=[32, 32], target_return=1.0, return_scale=30.0, max_length=60, batch_size=BATCH),
        Outcome(),
    )
    absent = (
        "d4rl",
        "d4rl.infos",
        "d4rl.offline_env",
        "d4rl.kitchen",
        "d4rl.kitchen.adept_envs",
        "d4rl.kitchen.adept_envs.franka",
        "d4rl.locomotion",
        "gcsl",
        "gcsl.algo",
        "gcsl.envs",
        "wandb",
        "wandb.sdk",
        "wandb.sdk.wandb_run",
        "configargparse",
        "seaborn",
    )
    with lightning(), ExitStack() as stack:
        with imported(checkout / "src", "rvs.policies", absent) as policies:
            box = gymnasium.spaces.Box(-1.0, 1.0, (OBSERVATION,)), gymnasium.spaces.Box(-1.0, 1.0, (ACTION,))
            with mock.patch.object(
                policies, "make_obs_goal_space", lambda *_, **__: gymnasium.spaces.Box(-1.0, 1.0, (OBSERVATION + 1,))
            ):
                policy = policies.RvS(*box, hidden_size=32, dropout_p=0.0, reward_conditioning=True)
        model = policy.model
        layers = [m for m in model.mlp_extractor.policy_net if isinstance(m, nn.Linear)] + [model.action_net]
        fill(layers, ours.mlp("actor", prefix="net."))
        model.action_net = nn.Sequential(model.action_net, nn.Tanh())
        adam = policy.configure_optimizers()
        stack.enter_context(mock.patch.object(Tensor, "float", Tensor.double))
        for batch in steps_with_returns():
            losses = ours.update(batch)
            observations, actions, returns, at = (torch.as_tensor(batch[k][:, 0]) for k in COLUMNS[:2] + COLUMNS[3:5])
            average = returns / (60 - at).clamp(min=1) * 60 / 30.0
            loss = policy.training_step((torch.cat([observations, average.unsqueeze(-1)], -1), actions), 0)
            adam.zero_grad()
            loss.backward()
            adam.step()
            outcome.losses.append({"loss": (losses["actor/loss"], loss.item())})
    outcome.parameters |= pair_layers("actor", ours.mlp("actor", prefix="net."), layers)
    outcome.parameters["log_std"] = (ours.state.params["actor"]["log_std"].numpy(), model.log_std.detach().numpy())
    return outcome


# ---- MBRCSL


@contextmanager
def offline_kit(checkout: Path) -> Iterator[None]:
    """Inside, modules of MBRCSL's `offlinerlkit` can be imported alone."""
    names = ("", ".policy", ".policy.rcsl", ".policy.diffusion", ".modules", ".nets", ".dynamics")
    made = packages(checkout, *(f"offlinerlkit{name}" for name in names))
    for name, base in (("policy", "BasePolicy"), ("dynamics", "BaseDynamics")):
        setattr(made[f"offlinerlkit.{name}"], base, nn.Module)
    with stubs({**made, "gym": gymnasium}):
        yield


@case(
    "mbrcsl", MBRCSL, MBRCSL_COMMIT,
    aligned="tanh of the action; no weight decay",
    remains="their actions are not squashed; weight decay is added to the gradient (Adam), here AdamW's; they keep the "
            "best held-out epoch",
)  # fmt: skip
def mbrcsl(checkout: Path) -> Outcome:
    ours = Ours(
        "mbrcsl",
        hidden=[32, 32],
        target_return=1.0,
        return_scale=1.0,
        max_length=60,
        weight_decay=0.0,
        batch_size=BATCH,
    )
    outcome = Outcome()
    with offline_kit(checkout):
        with imported(checkout, "offlinerlkit.nets.mlp") as nets:
            network = nets.MLP(OBSERVATION + 1, [32, 32], ACTION)
        with imported(checkout, "offlinerlkit.modules.rcsl_module") as modules:
            module = modules.RcslModule(nn.Sequential(network, nn.Tanh()))
        with imported(checkout, "offlinerlkit.policy.rcsl.rcsl_mlp") as policies:
            adam = torch.optim.Adam(module.parameters(), lr=5e-5, weight_decay=0.0)
            policy = policies.RcslPolicy(module, adam, "cpu")
    fill(linears(network), ours.mlp("actor", prefix="net."))
    with mock.patch.object(torch, "float32", torch.float64):
        for batch in steps_with_returns():
            losses = ours.update(batch)
            rows = {name: torch.as_tensor(batch[name][:, 0]) for name in ("observations", "actions")}
            expected = policy.learn({**rows, "rtgs": torch.as_tensor(batch["returns_to_go"][:, 0])})
            outcome.losses.append({"loss": (losses["actor/loss"], expected["loss"])})
    outcome.parameters |= pair_layers("actor", ours.mlp("actor", prefix="net."), linears(network))
    return outcome


class CosineNoise:
    """diffusers' DDPMScheduler with beta_schedule="squaredcos_cap_v2", as far as training needs it."""

    def __init__(self, num_train_timesteps: int, **_: Any) -> None:
        def share(t: int) -> float:
            return math.cos((t / num_train_timesteps + 0.008) / 1.008 * math.pi / 2) ** 2

        betas = [min(1 - share(t + 1) / share(t), 0.999) for t in range(num_train_timesteps)]
        self.alphas_cumprod = torch.cumprod(1 - torch.tensor(betas), 0)

    def add_noise(self, x: Tensor, noise: Tensor, step: Tensor) -> Tensor:
        """x after `step` steps."""
        alpha = self.alphas_cumprod[step].unsqueeze(-1)
        return alpha.sqrt() * x + (1 - alpha).sqrt() * noise


class LastLayer(nn.Module):
    """A linear output layer in the place of a conditional block."""

    def __init__(self, block: Any) -> None:
        super().__init__()
        self.layer = nn.Linear(block.blocks[0].block[0].in_features, ACTION)

    def forward(self, x: Tensor, _: Tensor) -> Tensor:
        return self.layer(x)


@case(
    "diffusion_bc", MBRCSL, MBRCSL_COMMIT,
    aligned="their residual network in place of their U-net, with a linear output layer; constant learning rate",
    remains="their runs have the U-net, a return of 0 as a further input, and a learning rate that rises from 0 to "
            "1e-5: its warm-up of 500 steps makes one of them in each of 50 epochs",
)  # fmt: skip
def diffusion_bc(checkout: Path) -> Outcome:
    ours, outcome = Ours("diffusion_bc", hidden=[32, 32], embedding=16, batch_size=BATCH), Outcome()
    schedulers, optimization = ModuleType("diffusers.schedulers.scheduling_ddpm"), ModuleType("diffusers.optimization")
    schedulers.DDPMScheduler = CosineNoise  # type: ignore[attr-defined]
    optimization.get_scheduler = lambda **_: None  # type: ignore[attr-defined]
    diffusers = {name: ModuleType(name) for name in ("diffusers", "diffusers.schedulers")}
    diffusers |= {schedulers.__name__: schedulers, optimization.__name__: optimization}
    with (
        offline_kit(checkout),
        stubs(diffusers),
        imported(checkout, "offlinerlkit.policy.diffusion.simple_diffusion") as module,
    ):
        network = module.ConditionalResNet1D

        class Residual(network):  # type: ignore[misc, valid-type]
            def __init__(self, input_dim: int, global_cond_dim: int) -> None:
                super().__init__(input_dim, global_cond_dim, embed_dim=16, hidden_dims=[32, 32])
                self.blocks[-1] = LastLayer(self.blocks[-1])

        with mock.patch.object(module, "ConditionalResNet1D", Residual):
            policy = module.SimpleDiffusionPolicy((OBSERVATION - 1,), (ACTION,), 1, 50, 10, "cpu", model_cls="resnet")
    net = policy.noise_pred_net
    pairs: list[Pair] = [
        *linear("up", net.diffusion_step_encoder[1]), *linear("down", net.diffusion_step_encoder[3]),
        *linear("head", net.blocks[-1].layer),
    ]  # fmt: skip
    for i, block in enumerate(net.blocks[:-1]):
        first, second = (part.block for part in block.blocks)
        pairs += (
            linear(f"blocks.{i}.first", first[0])
            + norm(f"blocks.{i}.norm1", first[1])
            + linear(f"blocks.{i}.film", block.film)
        )
        pairs += linear(f"blocks.{i}.second", second[0]) + norm(f"blocks.{i}.norm2", second[1])
        pairs += linear(f"blocks.{i}.skip", block.residual_fc) if isinstance(block.residual_fc, nn.Linear) else []
    give(pairs, ours.state.params["actor"])
    policy.ema.shadow_params = [p.detach().clone() for p in policy.model_params]

    for batch in batches():
        with shared_noise(), mock.patch.object(torch, "float32", torch.float64):
            losses = ours.update(batch)
            observations, actions = torch.as_tensor(batch["observations"]), torch.as_tensor(batch["actions"])
            expected = policy.learn(
                {"observations": observations[:, :-1], "actions": actions, "rtgs": observations[:, -1]}
            )
        outcome.losses.append({"loss": (losses["actor/loss"], expected["loss"])})
    outcome.parameters |= compared(pairs, ours.state.params["actor"])
    places = {id(p): average for p, average in zip(policy.model_params, policy.ema.shadow_params, strict=True)}
    averages = [(name, view, places[id(tensor)]) for name, view, tensor in pairs]
    outcome.parameters |= {f"average/{k}": pair for k, pair in compared(averages, ours.state.extra["average"]).items()}
    return outcome


# ---- Meta-DT


@case(
    "meta_dt", META, META_COMMIT,
    aligned="their linear layer from the observation to 16 numbers is the identity and not trained; a prompt for every "
            "window",
    remains="that layer; a tenth of our windows have no prompt (`prompt_skip`); initial weights as for dt",
    needs=("transformers",),
)  # fmt: skip
def meta_dt(checkout: Path) -> Outcome:
    size, prompt = 16, 3  # of an observation, as large as an encoded task
    spec = DataSpec((size,), ACTION, action_low=(-1.0,) * ACTION, action_high=(1.0,) * ACTION)
    settings = {
        "prompt": prompt,
        "prompt_warmup": 0,
        "prompt_skip": 0.0,
        "target_return": 1.0,
        "return_scale": 500.0,
        "batch_size": ROWS,
    }
    ours, outcome = Ours("meta_dt", spec, **{**SMALL, **settings}), Outcome()
    scramble(ours, "actor")
    with old_transformers():
        with imported(checkout, "meta_dt.trainer") as training:
            trainer_of = training.MetaDT_Trainer
        with imported(checkout, "meta_dt.model") as models:
            net = models.MetaDecisionTransformer(
                size, ACTION, WIDTH, context_dim=size, max_length=STEPS, max_ep_len=LONGEST, **GPT2
            )
    net.state_encoder = nn.Identity()
    pairs: list[Pair] = [
        *linear("steps.embed.return", net.embed_return),
        *linear("steps.embed.observation", net.embed_state),
        *linear("steps.embed.action", net.embed_action),
        *table("steps.time", net.embed_timestep),
        *norm("steps.norm", net.embed_ln),
        *linear("steps.prompt_embed.return", net.prompt_embed_return),
        *linear("steps.prompt_embed.action", net.prompt_embed_action),
        *linear("steps.prompt_embed.observation", net.prompt_embed_state),
        *table("steps.prompt_time", net.prompt_embed_timestep),
        *gpt2_blocks("steps.trunk", net.transformer),
        *linear("head.net.head", net.predict_action[0]),
    ]
    give(pairs, ours.state.params["actor"])
    adam, schedule = optimizer(net.parameters())
    trainer, g = trainer_of(net, adam), np.random.default_rng(5)
    for batch in windows():
        batch["observations"] = g.normal(size=(ROWS, STEPS, size))
        batch["task"] = g.normal(size=(ROWS, STEPS, size))
        batch |= {
            PROMPT + "observations": g.normal(size=(ROWS, prompt, size)),
            PROMPT + "actions": g.uniform(-1, 1, (ROWS, prompt, ACTION)),
            PROMPT + "returns_to_go": g.uniform(0, 500, (ROWS, prompt)),
            PROMPT + "timesteps": g.integers(0, LONGEST, (ROWS, prompt)),
            PROMPT + "valid": np.ones((ROWS, prompt), bool),
        }
        losses = ours.update(batch)
        states, actions, rewards, returns, steps, mask = columns(batch, *COLUMNS)
        given = columns(
            batch, *(PROMPT + name for name in ("observations", "actions", "returns_to_go", "timesteps", "valid"))
        )
        returns = torch.cat([returns / 500.0, torch.zeros(ROWS, 1)], 1).unsqueeze(-1)
        prompts = (given[0], given[1], None, given[2].unsqueeze(-1) / 500.0, given[3], given[4].long())
        expected = trainer.train_step(
            states, torch.as_tensor(batch["task"]), actions, rewards, None, returns, steps, mask.long(), prompts
        )
        schedule.step()
        outcome.losses.append({"loss": (losses["actor/loss"], expected)})
    outcome.parameters |= compared(pairs, ours.state.params["actor"])
    return outcome
