"""Acting by a frozen policy and what a residual adds to it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from offrl import rng
from offrl.actor import Carry, bind
from offrl.algorithm import Algorithm, Batch, TrainState, Tree
from offrl.families.on_policy.algorithm import OnPolicyActor

if TYPE_CHECKING:
    from offrl.families.on_policy.residual import Residual


class Glance(NamedTuple):
    """The carry of E episodes where the residual does not see every observation."""

    base: Any  # the carry of the policy below
    observations: Tensor  # [E, O]: the last ones that the residual looked at
    age: Tensor  # [E] int64: steps since then; 0: it looks


class ResidualActor(OnPolicyActor):
    """The policy below, greedy, and the residual's mean or, to explore, a sample. Its carry is that of the policy
    below, or a `Glance` where `look_every` is above 1."""

    algorithm: Residual
    resettable = True

    def __init__(self, algorithm: Algorithm, state: TrainState) -> None:
        super().__init__(algorithm, state)
        below, parts = self.algorithm.base, state.extra["base"]
        self.base = below.actor(
            bind(below, TrainState(parts["params"], {}, {}, parts["extra"], {}, state.step, state.key))
        )

    def start(self, episodes: int) -> Carry:
        carry = self.base.start(episodes)
        if self.algorithm.config.look_every == 1:
            return carry
        device = self.state.step.device
        observations = torch.zeros(episodes, self.algorithm.spec.observation_dim, device=device)
        return Glance(carry, observations, torch.zeros(episodes, dtype=torch.int64, device=device))

    def begin_anew(self, carry: Carry, mask: Tensor) -> Carry:
        """The carry where the episodes of a mask bool [E] begin anew, with nothing of what the policy below had
        planned.
        """

        def choose(fresh: Any, old: Any) -> Any:
            # None: it has no memory
            return None if old is None else torch.where(mask.reshape(-1, *[1] * (old.ndim - 1)), fresh, old)

        return pytree.tree_map(choose, self.start(mask.shape[0]), carry)

    def look(self, carry: Carry, observations: Tensor, key: Tensor) -> tuple[Batch, Carry]:
        """The "observations" that the residual sees [E, O], and the "base_actions" [E, A]."""
        interval = self.algorithm.config.look_every
        if interval == 1:
            actions, carry = self.base.act(carry, observations, key, explore=False)
            return {"observations": observations, "base_actions": actions}, carry
        latest = torch.where((carry.age == 0).unsqueeze(-1), observations, carry.observations)
        actions, inner = self.base.act(carry.base, observations, key, explore=False)
        after = Glance(inner, latest, (carry.age + 1) % interval)
        return {"observations": latest, "base_actions": actions}, after

    def act(self, carry: Carry, observations: Tensor, key: Tensor, *, explore: bool) -> tuple[Tensor, Carry]:
        sights, carry = self.look(carry, observations, key)
        u = self.apply("actor", self.algorithm.features(self.state.extra, sights))
        if explore:
            u = u + self.algorithm.sigma * rng.normal(rng.fold_in(key, 1), tuple(u.shape))
        return self.algorithm.combine(sights["base_actions"], u), carry


def frozen(algorithm: Algorithm, state: TrainState) -> Tree:
    """The part of the state of a policy that `ResidualActor` needs of it."""
    return {"params": {name: state.params[name] for name in algorithm.traits.policy_modules}, "extra": state.extra}
