"""The residuals of all replicas: their actions, their values, and the passes over what they played."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.func import vmap

from offrl import rng
from offrl.data.samplers.transitions import Batch
from offrl.errors import UserError
from offrl.families.on_policy.residual import Residual, ResidualConfig
from offrl.optim import Params
from offrl.settings.replicas import Replica
from offrl.training.engine import LocalEngine, Plan

RATES = ("actor_learning_rate", "critic_learning_rate")


def minibatches(config: ResidualConfig, envs: int) -> int:
    """The updates of a pass. Raises UserError where batches are not all of one size."""
    rows = config.horizon * envs
    if config.batch_size and rows % config.batch_size:
        raise UserError(
            f"algo.batch_size={config.batch_size} does not divide the {rows:,} steps of an iteration (envs x "
            "algo.horizon)"
        )
    return rows // config.batch_size if config.batch_size else 1


class Passes:
    """The minibatches of an iteration: every pass goes over all rows once, in an order of its own where it has
    several.
    """

    def __init__(self, keys: Tensor, minibatches: int) -> None:
        """keys [N]: of the replicas."""
        self.keys, self.minibatches = keys, minibatches
        self.rows: Batch = {}  # [N, R, ...]

    def get(self, step: int) -> Batch:
        """The batch of update `step` for all replicas."""
        if self.minibatches == 1:
            return self.rows
        number, part = divmod(step, self.minibatches)
        count = self.rows["weight"].shape[1]
        size = count // self.minibatches
        draws = vmap(lambda key: rng.uniform(key, (count,)))(rng.fold_in(self.keys, number))
        index = draws.argsort(1)[:, part * size : (part + 1) * size]
        return {k: torch.stack([rows[i] for rows, i in zip(v, index, strict=True)]) for k, v in self.rows.items()}


class ResidualLearner(LocalEngine):
    """All replicas of a run as one program, on one device."""

    def __init__(self, plan: Plan, passes: Passes, replicas: Sequence[Replica], device: torch.device) -> None:
        super().__init__(plan, None, replicas, device, passes, [len(replicas)])
        assert isinstance(plan.algorithm, Residual)
        self.passes, self.residual = passes, plan.algorithm
        self.rates(1.0, 1.0)

    def rates(self, *factors: float) -> None:
        """The factors of the learning rates of actor and critic."""
        for name, factor in zip(RATES, factors, strict=True):
            rate = factor * float(getattr(self.residual.config, name))
            self.hyper[0][name] = torch.full((len(self.passes.keys),), rate, device=self.device)

    @torch.no_grad()
    def sample(self, observations: Tensor, base_actions: Tensor, keys: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(actions, outputs u [N, E, A], their log densities [N, E]) for observations [N, E, O], the base's actions and
        keys [N].
        """
        state, algorithm = self._state[0], self.residual

        def one(params: Params, statistics: Params, s: Tensor, a: Tensor, key: Tensor) -> tuple[Tensor, ...]:
            means = algorithm.apply("actor", params, algorithm.features(statistics, s, a))
            u = means + algorithm.sigma * rng.normal(key, tuple(means.shape))
            return algorithm.combine(a, u), u, algorithm.log_prob(means, u)

        actions, u, density = vmap(one)(state.params["actor"], self._statistics(), observations, base_actions, keys)
        return actions, u, density

    @torch.no_grad()
    def values(self, observations: Tensor, base_actions: Tensor) -> Tensor:
        """V [N, R] of R rows of each replica."""
        algorithm = self.residual

        def one(params: Params, statistics: Params, s: Tensor, a: Tensor) -> Tensor:
            return algorithm.apply("critic", params, algorithm.features(statistics, s, a)).squeeze(-1)

        return vmap(one)(self._state[0].params["critic"], self._statistics(), observations, base_actions)

    def learn(self, rows: Batch, first: int, updates: int) -> None:
        """The passes over rows [N, R, ...], from update number `first`, until every replica's have ended."""
        self.passes.rows = rows
        self.put("learning", torch.ones(len(self.passes.keys), device=self.device))
        for step in range(first, first + updates):
            self.run(step, 1)
            if not bool((self._state[0].extra["learning"] > 0.0).any()):
                break

    def put(self, name: str, values: Tensor) -> None:
        """Set an entry of `extra` of all replicas."""
        state = self._state[0]
        if self.groups[0].mode == "eager":
            self._state[0] = state._replace(extra={**state.extra, name: values.clone()})
        else:  # compiled programs write over the state where it lies
            state.extra[name].copy_(values)

    def _statistics(self) -> Params:
        return {name: self._state[0].extra[name] for name in ("mean", "std")}
