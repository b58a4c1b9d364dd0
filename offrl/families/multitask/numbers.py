"""What networks know of a task of multi-task data by its number: rows of tables, and the actions that it has."""

from __future__ import annotations

import torch
from torch import Tensor

from offrl.algorithm import DataSpec
from offrl.nn.policies import Dist
from offrl.tasks.task import TaskPart


def parts_of(spec: DataSpec) -> tuple[TaskPart, ...]:
    """The tasks of multi-task data; () for data of one."""
    return spec.task.parts if spec.task is not None else ()


def action_masks(parts: tuple[TaskPart, ...], action_dim: int) -> Tensor:
    """1 for the actions that each task has, 0 for those that it lacks: [T, A]."""
    return torch.tensor([[float(a < len(part.action_low)) for a in range(action_dim)] for part in parts])


def one_hot(numbers: Tensor, count: int) -> Tensor:
    """Which of so many tasks have these numbers [...], the nearest ones: bool [..., T]."""
    numbers = numbers.round().clamp(0, count - 1)
    return numbers.unsqueeze(-1) == torch.arange(count, device=numbers.device)


def of_numbers(table: Tensor, numbers: Tensor) -> Tensor:
    """The rows [..., K] of a finite table [T, K] for tasks with these numbers [...]; see `one_hot`."""
    # sums, for a product may round to fewer bits
    return (one_hot(numbers, len(table)).to(table.dtype).unsqueeze(-1) * table).sum(-2)


def of_present_actions(mean: Tensor, log_std: Tensor, mask: Tensor) -> Dist:
    """A Gaussian [..., A] before tanh whose actions with the mask 0 are 0: log standard deviation -inf."""
    return mean * mask, torch.where(mask > 0.0, log_std, -torch.inf)
