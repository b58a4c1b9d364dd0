"""Rollouts in a model: a few steps from states of the data, or whole episodes, many at once and on the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from offrl import rng
from offrl.algorithm import DataSpec, Metrics, Part, TrainState
from offrl.data.samplers.tables import Batch, Packed, layout_of
from offrl.world_models.model import Outcome, Prediction, Tree

# rollouts at once: the members' activations of more do not fit a CPU's memory; fixed, for the random numbers depend on
# it
CHUNK = 8192

Act = Callable[[Tensor, Tensor, Tensor], Tensor]  # observations [B, O], past, key -> actions [B, A] in [-1, 1], or [B]
Measure = Callable[[Any, Tree, Prediction, Tensor, Tensor], Tensor]  # see `offrl.world_models.uncertainty`


class Imagined(NamedTuple):
    """H steps of B rollouts, [H, B, ...]. A row is `valid` while its rollout has not ended before it."""

    observations: Tensor
    actions: Tensor
    past: Tensor
    next_observations: Tensor
    rewards: Tensor
    terminations: Tensor  # bool
    uncertainty: Tensor
    clipped: Tensor  # bool
    valid: Tensor  # bool


class ImaginedRing(Part):
    """A ring of imagined transitions, `buffers["ring"]`, which each replica has for itself."""

    def __init__(self, config: Any, spec: DataSpec) -> None:
        super().__init__(config, spec)
        shapes = {
            "observations": (spec.observation_dim,),
            "actions": (spec.action_dim,),
            "rewards": (),
            "next_observations": (spec.observation_dim,),
            "masks": (),
        }
        layout = layout_of({name: (torch.zeros(0, *shape), None) for name, shape in shapes.items()})
        assert layout is not None
        # once, for what is compiled cannot read it off the spec
        self.layout, self.width = layout, layout["masks"][1]

    @property
    def capacity(self) -> int:
        """Rows of the ring."""
        c = self.config
        return c.rollout_retain * c.rollouts * c.horizon

    @property
    def real_rows(self) -> int:
        """Rows of a batch that are the data's."""
        return int(self.config.batch_size * self.config.real_share)

    def buffers(self) -> Tree:
        """An empty ring."""
        none = torch.zeros((), dtype=torch.int64)
        # one row more, for what is thrown away
        return {"ring": {"rows": torch.zeros(self.capacity + 1, self.width), "at": none, "count": none.clone()}}

    def push(self, ring: Tree, imagined: Imagined, capacity: int | None = None) -> Tree:
        """The ring with the valid rows of rollouts [H, B] added, the oldest ones overwritten.

        capacity: of its rows the first so many, never fewer than the last time, where it is not yet to be filled.
        """
        capacity = capacity or self.capacity
        columns = {**imagined._asdict(), "masks": 1.0 - imagined.terminations.float()}
        flat = [columns[name].reshape(imagined.valid.numel(), -1) for name in self.layout]
        rows, valid = torch.cat(flat, -1), imagined.valid.reshape(-1)
        rows = torch.where(valid.unsqueeze(-1), rows, 0.0)  # where several rows go to one place, they are the same
        order = valid.long().cumsum(0)
        slots = torch.where(valid, (ring["at"] + order - 1) % capacity, self.capacity)
        end = ring["at"] + order[-1]
        return {
            "rows": ring["rows"].index_put((slots,), rows),
            "at": end % capacity,
            "count": torch.maximum(ring["count"], end.clamp(max=capacity)),
        }

    def draw(self, state: TrainState, key: Tensor, count: int) -> Batch:
        """`count` rows of the ring."""
        ring = state.buffers["ring"]
        return Packed(ring["rows"], self.layout).take(rng.randint(key, (count,), ring["count"].clamp(min=1)))

    def mixed(self, state: TrainState, batch: Batch, key: Tensor) -> Batch:
        """The data's rows first, then imagined ones."""
        imagined = self.draw(state, key, self.config.batch_size - self.real_rows)
        return {name: torch.cat([batch[name], imagined[name]]) for name in self.layout}


# (outcome, uncertainty [B]) -> rewards and terminations that are told
Judge = Callable[[Outcome, Tensor], tuple[Tensor, Tensor]]


def branched(
    model: Any,
    tree: Tree,
    act: Act,
    observations: Tensor,
    past: Tensor,
    horizon: int,
    key: Tensor,
    *,
    measure: Measure | None = None,
    judge: Judge | None = None,
    chunk: int = CHUNK,
) -> Imagined:
    """Roll `horizon` steps from observations [B, O] with what came before them (MBPO, arXiv 1906.08253).

    measure: the uncertainty of each step; without one only one member is asked for each row. judge: what to make of an
    outcome; by default its own rewards and terminations.
    """
    starts = zip(observations.split(chunk), past.split(chunk), strict=True)
    parts = [
        _branch(model, tree, act, o, p, horizon, rng.fold_in(key, i), measure, judge) for i, (o, p) in enumerate(starts)
    ]
    return parts[0] if len(parts) == 1 else Imagined(*(torch.cat(columns, 1) for columns in zip(*parts, strict=True)))


def _branch(
    model: Any,
    tree: Tree,
    act: Act,
    observations: Tensor,
    past: Tensor,
    horizon: int,
    key: Tensor,
    measure: Measure | None,
    judge: Judge | None,
) -> Imagined:
    valid = torch.ones(observations.shape[0], dtype=torch.bool, device=observations.device)
    steps: list[Imagined] = []
    for t in range(horizon):
        choose, draw = rng.split(rng.fold_in(key, t))
        actions = act(observations, past, choose)
        uncertainty = observations.new_zeros(observations.shape[0])
        if measure is None:
            outcome = model.sample(tree, observations, actions, past, draw)
        else:
            prediction = model.predict(tree, observations, actions, past)
            outcome = model.outcome(tree, prediction, observations, actions, draw)
            uncertainty = measure(model, tree, prediction, observations, actions).nan_to_num(1e6, 1e6)
        rewards, terminations = (
            (outcome.rewards, outcome.terminations) if judge is None else judge(outcome, uncertainty)
        )
        following = outcome.next_observations
        steps.append(
            Imagined(observations, actions, past, following, rewards, terminations, uncertainty, outcome.clipped, valid)
        )
        valid = valid & ~terminations
        observations, past = following, model.later_past(past, observations, actions)
    return Imagined(*(torch.stack(columns) for columns in zip(*steps, strict=True)))


def careful(
    model: Any,
    tree: Tree,
    act: Act,
    observations: Tensor,
    past: Tensor,
    key: Tensor,
    *,
    horizon: int,
    candidates: int,
    measure: Measure,
    penalty: float | Tensor,
    discount: float | Tensor,
) -> Tensor:
    """The action with the best imagined future among `candidates` that `act` gives at each of observations [B, O]:
    actions [B, A].

    Each is followed for `horizon` steps, acting by `act` after the first, and worth the sum of discount^i (r_i -
    penalty u_i) until its end (UP-MPC, arXiv 2310.07220). A penalty above 0 is for rollouts in a model, one below it,
    optimism, for exploration. All futures are one batch of candidates * B.
    """
    rows = observations.shape[0]
    start, before = (x.expand(candidates, *x.shape).flatten(0, 1) for x in (observations, past))
    future = _branch(model, tree, act, start, before, horizon, key, measure, None)
    weights = torch.stack([torch.as_tensor(discount**i, device=observations.device) for i in range(horizon)]).unsqueeze(
        -1
    )
    worth = (weights * future.valid * (future.rewards - penalty * future.uncertainty)).sum(0).reshape(candidates, rows)
    first = future.actions[0].reshape(candidates, rows, -1)
    return first.gather(0, worth.argmax(0).view(1, rows, 1).expand(1, rows, first.shape[-1])).squeeze(0)


def describe(imagined: Imagined) -> Metrics:
    """Metrics of rollouts: means over their valid rows."""
    valid = imagined.valid.float()
    count = valid.sum().clamp(min=1.0)

    def mean(x: Tensor) -> Tensor:
        return (x.float() * valid).sum() / count

    return {
        "rollout/reward": mean(imagined.rewards),
        "rollout/uncertainty": mean(imagined.uncertainty),
        "rollout/ended": mean(imagined.terminations),
        "rollout/clipped": mean(imagined.clipped),
        "rollout/steps": valid.sum(0).mean(),
    }
