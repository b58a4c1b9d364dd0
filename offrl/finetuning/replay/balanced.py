"""Balanced replay: rows of the data and of play by how much likelier they are in play, which a network learns along.

"Offline-to-Online Reinforcement Learning via Balanced Replay and Pessimistic Q-Ensemble" (Lee et al., 2021, arXiv
2107.00591); numbers as in the authors' code (shlee94/Off2OnRL). There a tree holds a priority of each row, from when it
was drawn last; here candidates are weighed by the network as it is, for all replicas at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.func import grad_and_value, vmap
from torch.nn import functional as F

from offrl import rng
from offrl.algorithm import Algorithm
from offrl.data.dataset import DataSpec
from offrl.data.samplers.transitions import Batch, Sampler, TransitionSampler
from offrl.errors import UserError
from offrl.finetuning.replay.batches import MixedBatches, joined
from offrl.finetuning.replay.ring import Ring
from offrl.nn import MLP, call
from offrl.optim import Adam, OptState, Params

WIDTHS, RATE, ROWS = (256, 256), 3e-4, 256  # of the network: hidden layers, Adam's rate, rows of each side in an update
EPSILON, LOWEST, HIGHEST = 1e-10, 1e-3, 1e3  # of logarithms and means; of priorities
CANDIDATES = 2  # of each side, for each row of a batch
NEWEST = 1_000  # rows of play that count as new: as many as the authors' code plays before it learns
METRICS = ("replay/play", "replay/effective_candidates", "replay/density_loss")


def density_loss(data: Tensor, play: Tensor) -> Tensor:
    """mean_data[-log(2 / (w + 1))] - mean_play[log(2 w / (w + 1))], a bound of the Jensen-Shannon divergence, which is
    least where w is the density of play over the data's.

    data [R], play [P]: w >= 0 of rows of each side.
    """
    return -(2.0 / (data + 1.0) + EPSILON).log().mean() - (2.0 * play / (play + 1.0) + EPSILON).log().mean()


def priorities(weights: Tensor, data: Tensor, temperature: float) -> Tensor:
    """w^(1/T) over its mean of the data's rows, between LOWEST and HIGHEST, for w = `weights` [...] and T =
    `temperature`. data [R]: w of rows of the data.
    """
    power = 1.0 / temperature
    return (weights**power / ((data**power).mean() + EPSILON)).clamp(LOWEST, HIGHEST)


def resampled(key: Tensor, data: Tensor, play: Tensor) -> tuple[Tensor, Tensor]:
    """(which candidate is taken for each of B rows [B], how many of them count (sum p)^2 / sum p^2 [B]).

    data, play [B, K]: priorities of candidates that were drawn from all rows of a side alike, times how many rows that
    side has; of row b the first K candidates are the data's. That half of them are play's, however few rows play has,
    is what brings play near the share that the priorities say: drawn from all rows, it could not have more than 2 K
    times its share of the rows.
    """
    chances = torch.cat([data, play], 1)
    effective = chances.sum(1).square() / chances.square().sum(1)
    return rng.categorical(key, chances.log()), effective


class Density:
    """Networks w(s, a) >= 0 of N replicas, which learn how much likelier an action in a state is in play than in the
    data.
    """

    def __init__(self, inputs: int, keys: Tensor) -> None:
        """keys [N]: of the replicas, each of which decides its first parameters."""
        self.adam, first = Adam(RATE), []
        for key in keys.tolist():
            with torch.random.fork_rng(devices=[]):
                torch.default_generator.manual_seed(key)
                self.network = MLP(inputs, WIDTHS, 1, init="fixed_bias")
            self.network.head.bias.data.fill_(1.0)
            first.append({name: value.detach() for name, value in self.network.named_parameters()})
        self.params: Params = {name: torch.stack([p[name] for p in first]).to(keys.device) for name in first[0]}
        self.opt: OptState = vmap(self.adam.init)(self.params)

    def weights(self, params: Params, rows: Tensor) -> Tensor:
        """w [R] of rows [R, I], by one replica's parameters."""
        return F.relu(call(self.network, params, rows).squeeze(-1))

    def descend(self, params: Params, opt: OptState, data: Tensor, play: Tensor) -> tuple[Params, OptState, Tensor]:
        """One step of one replica on rows [R, I] of each side, and the loss before it."""

        def loss_of(p: Params) -> Tensor:
            return density_loss(self.weights(p, data), self.weights(p, play))

        grads, loss = grad_and_value(loss_of)(params)
        return *self.adam.update(params, grads, opt), loss.detach()


class BalancedBatches(MixedBatches):
    """Batches of which each row is one of the 1,000 newest of play with probability `fresh`, less as play grows, and
    else one of all rows of data and play, in proportion to its priority. A batch depends on all before it, by which the
    networks have learnt.
    """

    def __init__(
        self,
        ring: Ring,
        sampler: Sampler,
        source: Any,
        keys: Tensor,
        batch_size: int,
        spec: DataSpec,
        temperature: float,
        fresh: float,
        change: Callable[[Batch], Batch] | None = None,
    ) -> None:
        """See `MixedBatches`. spec: of the rows. temperature: T of `priorities`."""
        super().__init__(ring, sampler, source, keys, batch_size, None, change=change)
        self.spec, self.temperature, self.fresh = spec, temperature, fresh
        action = spec.num_actions if spec.discrete else spec.action_dim
        inputs = math.prod(ring.columns["observations"][0]) + action
        self.density = Density(inputs, rng.fold_in(self.keys, -1))
        self.sums = torch.zeros(len(METRICS), len(keys), device=ring.device)

    def _rows(self, step: int) -> Batch:
        half, density = CANDIDATES * self.size, self.density
        slots = vmap(self._slots)(self._key(step, 0, self.keys), self.ring.counts, self.ring.ends)
        rows = joined(self._of_data(step, half), self.ring.take(slots))
        keys, inputs = self._key(step, 4, self.keys), self._inputs(rows)
        index, density.params, density.opt, metrics = vmap(self._chosen)(
            keys, inputs, self.ring.counts, density.params, density.opt
        )
        self.sums += metrics.T
        replica = torch.arange(len(index), device=index.device).unsqueeze(-1)
        return {name: column[replica, index] for name, column in rows.items()}

    def _slots(self, key: Tensor, count: Tensor, end: Tensor) -> Tensor:
        """Slots in one replica's part of the ring: of the candidates, and of as many new rows as a batch has."""
        any_row, newest = rng.split(key)
        back = 1 + rng.randint(newest, (self.size,), count.clamp(max=NEWEST))
        slots = rng.randint(any_row, (CANDIDATES * self.size,), count)
        return torch.cat([slots, (end - back) % self.ring.capacity])

    def _inputs(self, rows: Batch) -> Tensor:
        """Rows as the network reads them: [N, R, I]."""
        actions = rows["actions"]
        if self.spec.discrete:
            actions = F.one_hot(actions, self.spec.num_actions)
        return torch.cat([rows["observations"].flatten(2), actions.float()], -1)

    def _chosen(
        self, key: Tensor, rows: Tensor, count: Tensor, params: Params, opt: OptState
    ) -> tuple[Tensor, Params, OptState, Tensor]:
        """For one replica: (places of a batch among `rows`, which are the data's candidates, play's and the new ones;
        the network after a step; METRICS). count: rows of play."""
        size, half = self.size, CANDIDATES * self.size
        data, play = rows[:half], rows[half : 2 * half]
        of_data, of_play = self.density.weights(params, data), self.density.weights(params, play)
        weighed = [
            side * priorities(weights, of_data, self.temperature).reshape(size, CANDIDATES)
            for side, weights in ((self.source.count, of_data), (count, of_play))
        ]
        draw, entry = rng.split(key)
        candidate, effective = resampled(draw, *weighed)
        row = torch.arange(size, device=rows.device)
        index = row * CANDIDATES + candidate + torch.where(candidate < CANDIDATES, 0, half - CANDIDATES)
        fresh = self.fresh * (NEWEST / count).clamp(max=1.0)
        index = torch.where(rng.uniform(entry, (size,)) < fresh, 2 * half + row, index)
        # strided, for a sampler may give its rows in an order
        stride = max(1, half // ROWS)
        params, opt, loss = self.density.descend(params, opt, data[::stride][:ROWS], play[::stride][:ROWS])
        share = (index >= half).float().mean()
        return index, params, opt, torch.stack([share, effective.mean(), loss])

    def means(self, updates: int) -> dict[str, list[float]]:
        values = (self.sums / updates).tolist() if updates else []
        self.sums.zero_()
        return dict(zip(METRICS, values, strict=False))

    def state(self) -> dict[str, Any]:
        return {"params": self.density.params, "opt": self.density.opt, "sums": self.sums.clone()}

    def load(self, state: dict[str, Any]) -> None:
        self.density.params, self.density.opt, self.sums = state["params"], state["opt"], state["sums"]


def check_balanced(algorithm: Algorithm, spec: DataSpec) -> None:
    """Raise UserError for an algorithm, or for observations, that balanced replay does not fit."""
    name, sampler = algorithm.config.name, algorithm.sampler()
    if algorithm.traits.learns_model or not isinstance(sampler, TransitionSampler):
        raise UserError(
            f"replay=balanced weighs single transitions, and {name} learns from windows, goals or a model of its own: "
            "leave it out"
        )
    if spec.streams or spec.encoder is not None:
        raise UserError(f"replay=balanced compares vectors, and observations of {spec.name} are images or encoded: "
                        "leave it out")  # fmt: skip
