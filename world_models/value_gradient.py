"""The effect of each entry of a next observation on the values of a trained agent: the weights of a model's errors in
VaGraM.

"Value Gradient weighted Model-Based Reinforcement Learning" (Voelcker et al., 2022, arXiv 2204.01464): to first order
an error e of the next observation changes the value by grad V(s') e, and the bound that is made small weighs each
squared error with the squared slope."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.func import vjp
from torch.utils import _pytree as pytree

from offrl import registry
from offrl.algorithm import Algorithm, Dataset, DataSpec, TrainState
from offrl.errors import UserError
from offrl.families.critics import Critic
from offrl.pretrained import Pretrained, Requirement
from offrl.world_models.model import evenly_spread

CHUNK = 4096  # rows at once
MEASURED = 20_000  # rows, evenly spread, that say how large slopes are


def required() -> Requirement:
    """The run whose critics weigh errors: it has to be named, and all its replicas count."""
    return Requirement(check=check_values, every_replica=True, allow_other_normalisation=True)


def check_values(run: Pretrained) -> None:
    """Raise UserError for a run without critics."""
    if not run.algorithm.traits.critic_modules:
        able = [name for name, other in registry.names("algo").items() if other.traits.critic_modules]
        raise UserError(f"algo.value_run: {run.settings['name']} learns no values; take a run of {', '.join(able)}")


def slopes(algorithm: Algorithm, state: TrainState, observations: Tensor) -> Tensor:
    """The gradient of V(s) = Q(s, pi(s)) of each critic at observations [B, O] in the agent's own units: [E, B, O].

    pi is the greedy policy, through which the gradient goes as well. One critic, E = 1, for an algorithm that has its
    own idea of a value."""

    actor = algorithm.actor(state)

    def values(at: Tensor) -> Tensor:
        actions, _ = actor.act(actor.start(len(at)), at, state.key, explore=False)
        critic = getattr(algorithm, "critic", None)
        if isinstance(critic, Critic):
            return critic.q(state.params["critic"], at, actions)
        q = algorithm.q_value(state, at, actions)
        assert q is not None, "load refuses algorithms without values"
        return q.unsqueeze(0)

    pulled: Any = vjp(values, observations)
    out, back = pulled
    basis = torch.eye(len(out), device=out.device, dtype=out.dtype)
    return torch.stack([back(direction.unsqueeze(-1).expand_as(out).contiguous())[0] for direction in basis])


def squares(values: Pretrained, dataset: Dataset, rows: Tensor) -> Tensor:
    """The squared gradients at the next observations of `rows`, the mean over critics and replicas, in the units of
    `dataset`: [R, O].
    """
    trained_spec, data_spec = values.algorithm.spec, dataset.spec
    device, width = rows.device, data_spec.observation_dim

    def moments(spec: DataSpec) -> tuple[Tensor, Tensor]:
        if spec.observation_mean is None or spec.observation_std is None:
            return torch.zeros(width, device=device), torch.ones(width, device=device)
        return torch.tensor(spec.observation_mean, device=device), torch.tensor(spec.observation_std, device=device)

    (mean, std), (own_mean, own_std) = moments(data_spec), moments(trained_spec)
    flat = dataset.columns["next_observations"].reshape(len(dataset), width)
    members = [(a, pytree.tree_map(lambda x: x.to(device), state)) for a, state in values.replicas]
    gradients = []
    for part in rows.split(CHUNK):
        rescaled = (flat[part].float() * std + mean - own_mean) / own_std
        squared_slopes = [slopes(algorithm, state, rescaled).square().mean(0) for algorithm, state in members]
        gradients.append(torch.stack(squared_slopes).mean(0) * (std / own_std).square())  # the chain rule
    return torch.cat(gradients) if gradients else torch.zeros(0, width, device=device)


def weights(values: Pretrained, dataset: Dataset, rows: Tensor, quantile: float = 0.95) -> Tensor:
    """The factors of the squared errors at `rows`: [R, O + 1] float32.

    The reward's, the last, is 1. Of the next observation they are the squared slopes of the value, of mean 1 over the
    data's rows and dimensions. quantile: gradients longer than this quantile of their lengths are shortened to it; 1:
    none.
    Raises UserError for values that say nothing.
    """
    known_rows = torch.nonzero(dataset.columns["successor_known"]).squeeze(-1)
    sample = squares(values, dataset, evenly_spread(known_rows, MEASURED))
    limit = sample.sum(-1).quantile(quantile) if quantile < 1.0 else sample.new_tensor(torch.inf)

    def shortened(square: Tensor) -> Tensor:
        length = square.sum(-1, keepdim=True)
        return square * (limit / length.clamp(min=1e-30)).clamp(max=1.0)

    level = shortened(sample).mean()
    if not bool(torch.isfinite(level)) or not float(level) > 0.0:
        problem = "do not change with the observation" if float(level) == 0.0 else "are not finite"
        raise UserError(f"algo.value_run: the values of that run {problem}: they say nothing about what matters")
    factors = shortened(squares(values, dataset, rows)) / level
    return torch.cat([factors, torch.ones_like(factors[:, :1])], -1)
