"""The policies of all replicas: their actions, their values, and the passes over what they played."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.func import vmap

from offrl import rng
from offrl.data.samplers.transitions import Batch
from offrl.errors import UserError
from offrl.families.on_policy.algorithm import OnPolicy, OnPolicySettings
from offrl.optim import Params
from offrl.settings.replicas import Replica
from offrl.training.engine import LocalEngine, Plan


def minibatches(config: OnPolicySettings, envs: int) -> int:
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
        self._order: tuple[int, Tensor] | None = None  # of a pass: its number, [N, R]

    def get(self, step: int) -> Batch:
        """The batch of update `step` for all replicas."""
        if self.minibatches == 1:
            return self.rows
        number, part = divmod(step, self.minibatches)
        count = self.rows["weight"].shape[1]
        size = count // self.minibatches
        if self._order is None or self._order[0] != number:
            draws = vmap(lambda key: rng.uniform(key, (count,)))(rng.fold_in(self.keys, number))
            self._order = number, draws.argsort(1)
        index = self._order[1][:, part * size : (part + 1) * size]
        return {k: torch.stack([rows[i] for rows, i in zip(v, index, strict=True)]) for k, v in self.rows.items()}


class OnPolicyLearner(LocalEngine):
    """All replicas of a run as one program, on one device."""

    algorithm: OnPolicy

    def __init__(self, plan: Plan, passes: Passes, replicas: Sequence[Replica], device: torch.device) -> None:
        super().__init__(plan, None, replicas, device, passes, [len(replicas)])
        self.passes = passes
        self.rates(0, 1)

    def rates(self, number: int, iterations: int) -> None:
        """Set the learning rates of an iteration, from 0."""
        for name, rate in self.algorithm.rates(number, iterations).items():
            self.hyper[0][name] = torch.full((len(self.passes.keys),), rate, device=self.device)

    @torch.no_grad()
    def sample(self, sights: Batch, keys: Tensor) -> tuple[Tensor, Batch]:
        """(actions [N, E, A], columns of `OnPolicy.draw` [N, E, ...]) for what the policies see [N, E, ...] and keys
        [N].
        """
        algorithm = self.algorithm

        def one(params: Params, statistics: Params, sights: Batch, key: Tensor) -> tuple[Tensor, Batch]:
            return algorithm.draw(params, algorithm.features(statistics, sights), sights, key)

        return vmap(one)(self._state[0].params["actor"], self._statistics(), sights, keys)

    @torch.no_grad()
    def values(self, sights: Batch) -> Tensor:
        """V [N, R] of R rows of each replica."""
        algorithm = self.algorithm

        def one(params: Params, statistics: Params, sights: Batch) -> Tensor:
            return algorithm.value(params, algorithm.features(statistics, sights))

        return vmap(one)(self._state[0].params["critic"], self._statistics(), sights)

    def learn(self, rows: Batch, iteration: int, first: int, updates: int) -> None:
        """The passes over rows [N, R, ...], from update number `first`, until every replica's have ended."""
        self.passes.rows = rows
        for name, value in self.algorithm.flags(iteration).items():
            self.put(name, torch.full((len(self.passes.keys),), value, device=self.device))
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
