"""Plans that a diffusion model draws: trajectories of one length whose first state is given (inpainting: arXiv
2205.09991, section 3.3).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from offrl import rng
from offrl.data.dataset import Dataset
from offrl.data.transforms.columns import returns_to_go
from offrl.families.generative.chunks import action_steps_field
from offrl.families.generative.settings import greedy_field
from offrl.nn import diffusion
from offrl.settings.field import setting

Predict = Callable[[Tensor, int], Tensor]  # (noisy plans [B, T, D], step) -> the clean ones that it expects
RETURN = "discounted_return"  # the column of `discounted_returns`, of which a window's first step counts


@dataclass
class DiffusionPlanSettings:
    """Settings of planners by diffusion; the defaults are Diffuser's (arXiv 2205.09991) for D4RL's locomotion tasks."""

    learning_rate: float = setting(2e-4, "Adam's learning rate", low=0.0)
    batch_size: int = setting(64, "windows in a batch", low=1)
    plan_horizon: int = setting(32, "steps of a plan", low=2, high=10_000)
    denoising_steps: int = setting(20, "steps from noise to a plan (T)", low=2, high=1000)
    base: int = setting(32, "width of the U-net's first level", low=8)
    polyak: float = setting(
        5e-4,
        "rate at which the averaged networks, which act, follow the trained ones; at first 9 / (10 + updates), where "
        "that is more",
        low=0.0,
        high=1.0,
    )
    action_steps: int = action_steps_field(1)
    greedy: str = greedy_field()


def discounted_returns(dataset: Dataset, rewards: Tensor, discount: float, termination_penalty: float) -> Tensor:
    """sum_k discount^k r_{t+k} from each row to the end of its episode, [R] float32 on the CPU. A time-out cuts the
    sum.

    rewards: float64 [R]. termination_penalty: added to the reward of a termination, in the same units.
    """
    ended = dataset.columns["terminations"].cpu()
    start, end = dataset.episode_start.cpu().numpy(), dataset.episode_end.cpu().numpy()
    values = returns_to_go((rewards + termination_penalty * ended).numpy(), ended.numpy(), start, end, discount)
    return torch.from_numpy(values).float()


def with_first_state(plans: Tensor, states: Tensor) -> Tensor:
    """Plans [B, T, D] whose first step ends in `states` [B, O]: the last O of its D numbers are replaced."""
    prefix = plans[:, :1, : plans.shape[-1] - states.shape[-1]]
    return torch.cat([torch.cat([prefix, states.unsqueeze(1)], -1), plans[:, 1:]], 1)


def noisy_plans(plans: Tensor, noise: Tensor, step: Tensor, steps: int) -> Tensor:
    """sqrt(abar_t) x + sqrt(1 - abar_t) e of plans and noise [B, T, D] at steps [B]."""
    return diffusion.add_noise(plans.flatten(1), noise.flatten(1), step, steps).reshape(plans.shape)


def denoise(
    predict: Predict,
    states: Tensor,
    dim: int,
    horizon: int,
    steps: int,
    key: Tensor,
    temperature: float = 1.0,
    push: Callable[[Tensor, int, float], Tensor] | None = None,
) -> Tensor:
    """Plans [B, T, D] from noise, with the first states [B, O] put in before and after each step.

    temperature: factor of all noise. push(plans, t, variance) changes them before step t, where its posterior variance
    is given."""
    keys = rng.split(key, steps + 1)
    shape = (states.shape[0], horizon, dim)
    x = with_first_state(temperature * rng.normal(keys[steps], shape), states)
    for t in reversed(range(steps)):
        _, noisy_factor, clean_factor, std = diffusion.transition(t, steps)
        if push is not None:
            x = push(x, t, std**2)
        x = noisy_factor * x + clean_factor * predict(x, t)
        if t > 0:
            x = x + temperature * std * rng.normal(keys[t], shape)
        x = with_first_state(x, states)
    return x


def followed(
    average: Mapping[str, Any], params: Mapping[str, Any], step: Tensor, rate: float | Tensor
) -> dict[str, Any]:
    """The averaged networks by name after update number `step`."""
    return {name: diffusion.update_average(old, params[name], step, rate) for name, old in average.items()}
