"""Several tasks in one model: what is known of a task goes along with its latent states.

A latent of multi-task data is [z, e, m, gamma]: the latent state z [L], the task's learnt embedding e [EMBEDDING], the
mask m [A] of the actions that it has, and its discount factor. Networks read z and e.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from offrl.algorithm import Batch, DataSpec, Params, TrainState, Tree
from offrl.families.multitask.numbers import action_masks, of_numbers, parts_of
from offrl.tasks.task import TaskPart

EMBEDDING = 96  # numbers of a task's embedding, of norm at most 1
TASKS = "tasks"  # the parameter of the module "model" with the embeddings [T, EMBEDDING], and what `extra` has of tasks


class ManyTasks:
    """What TD-MPC2 does otherwise for multi-task data."""

    @property
    def parts(self: Any) -> tuple[TaskPart, ...]:
        """The tasks; () for data of one."""
        return parts_of(self.spec)

    def encode(self: Any, params: dict[str, Params], extra: Tree, observations: Any) -> Tensor:
        """Latents [..., L] of observations [..., O]; of several tasks with what is known of them."""
        if not self.parts:
            return self.apply("encoder", params["encoder"], observations)
        known = known_of(params["model"][TASKS], extra[TASKS], observations[..., -1])
        x = torch.cat([observations[..., :-1], known[..., :EMBEDDING]], -1)
        return torch.cat([self.apply("encoder", params["encoder"], x), known], -1)

    def latent_states(self: Any, params: dict[str, Params], batch: Batch, key: Tensor) -> Tensor:
        """See `offrl.world_models.open_loop.ProbedModel`: without what is known of tasks."""
        return self.encode(params, self.extra(params), batch["observations"])[..., : self.config.latent]

    def discount(self: Any, latents: Tensor) -> Any:
        """The discount factor, of several tasks that of each latent [..., L]: [...]."""
        return latents[..., -1] if self.config.discounts else self.config.discount

    def extra(self: Any, params: dict[str, Params]) -> Tree:
        scale = {"scale": torch.ones(())}
        if not self.parts:
            return scale
        return {**scale, TASKS: facts(self.parts, self.spec.action_dim, self.config.discounts)}

    def renewed(self: Any, state: TrainState, latents: Tensor, batch: Batch) -> tuple[TrainState, Tensor]:
        """The state after a step of the model with embeddings within the unit ball, and the latents [K, B, L] of a
        batch with those embeddings.
        """
        if not self.parts:
            return state, latents
        numbers = batch["observations"][..., -1]
        model = within_unit(state.params["model"])
        known = known_of(model[TASKS], state.extra[TASKS], numbers)
        latents = torch.cat([latents[..., : self.config.latent], known], -1)
        return state._replace(params={**state.params, "model": model}), latents

    def per_action(self, errors: Tensor, log_std: Tensor) -> Tensor:
        """The mean [...] of errors [..., A] over actions; a task lacks those whose log standard deviation is -inf, and
        their errors are 0.
        """
        return errors.sum(-1) / (log_std != -torch.inf).sum(-1)


def embedding_of(spec: DataSpec) -> int:
    """Numbers of a task's embedding; 0 for data of one task."""
    return EMBEDDING if parts_of(spec) else 0


def facts(parts: tuple[TaskPart, ...], action_dim: int, discounts: list[float]) -> Tensor:
    """The mask of actions and the discount factor (0 where the settings have one for all) of each task, [T, A + 1]."""
    gammas = torch.tensor(discounts or [0.0] * len(parts)).unsqueeze(-1)
    return torch.cat([action_masks(parts, action_dim), gammas], 1)


def known_of(embeddings: Tensor, table: Tensor, numbers: Tensor) -> Tensor:
    """(e, m, gamma) of the tasks with these numbers [...], the nearest ones: [..., EMBEDDING + A + 1]."""
    return of_numbers(torch.cat([embeddings, table.to(embeddings.device)], -1), numbers)


def within_unit(params: Params) -> Params:
    """The model's parameters with embeddings of norm 1 where theirs is larger."""
    norm = params[TASKS].norm(dim=-1, keepdim=True)
    return {**params, TASKS: torch.where(norm > 1.0, params[TASKS] / (norm + 1e-7), params[TASKS])}


def scaled_entropy(log_std: Tensor, noise: Tensor) -> Tensor:
    """-A log N(u), A the number of the task's actions: [...] of log standard deviations [..., A], -inf for actions that
    it lacks, and standard normal noise.
    """
    known = log_std != -torch.inf
    terms = log_std + 0.5 * noise.square() + 0.5 * math.log(2.0 * math.pi)
    return known.sum(-1) * torch.where(known, terms, 0.0).sum(-1)
