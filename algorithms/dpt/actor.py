"""Acting in context: the memory of a task's transitions, and the best action after them."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from offrl.actor import Actor, Carry
from offrl.data.samplers.transitions import Batch
from offrl.nn.transformer import Cache, visible

if TYPE_CHECKING:
    from offrl.algorithms.dpt.algorithm import DPT


@dataclass(frozen=True)
class ContextMemory:
    """The transitions of E tasks so far, by columns of a context: observations and next_observations [E, n, O], actions
    as a network takes them [E, n, A], rewards [E, n]."""

    transitions: Batch
    valid: Tensor | None = (
        None  # bool [E, n]: False is no transition, and stands before all transitions; None: all are valid
    )
    pending: Batch | None = None  # the transition that is being made, without its successor: [E, ...]
    cache: Cache = ()  # of the query and the first tokens of `transitions`, where there is one observation only
    cached_count: int = 0  # transitions in the cache
    steps: int = 0  # of the episode


pytree.register_dataclass(ContextMemory)


class DPTActor(Actor):
    """Policy conditioned on the transitions so far. A carry is a `ContextMemory`, which outlives episodes."""

    algorithm: DPT

    def start(self, episodes: int) -> Carry:
        observation = torch.zeros(episodes, 0, self.algorithm.spec.observation_dim)
        actions = torch.zeros(episodes, 0, self.algorithm.spec.encoded_action_dim)
        transitions = {
            "observations": observation,
            "actions": actions,
            "next_observations": observation,
            "rewards": torch.zeros(episodes, 0),
        }
        return ContextMemory(transitions)

    def act(self, carry: Carry, observations: Tensor, key: Tensor, *, explore: bool) -> tuple[Tensor, Carry]:
        dist, memory = self.predict(self.extended(carry, observations), observations)
        actions = self.choose(dist, key, explore)
        pending = {
            "observations": observations,
            "actions": self.algorithm.spec.encode(actions),
            "rewards": torch.zeros(len(observations)),
        }
        return actions, dataclasses.replace(memory, pending=pending, steps=memory.steps + 1)

    def observe_reward(self, carry: Carry, rewards: Tensor) -> Carry:
        return dataclasses.replace(carry, pending={**carry.pending, "rewards": rewards})

    def new_episode(self, carry: Carry, observations: Tensor, lengths: Tensor) -> Carry:
        context, memory = self.algorithm.config.context, self.extended(carry, observations)
        count = memory.transitions["rewards"].shape[1]
        step = torch.arange(count) - (count - memory.steps)  # of the episode, negative for what was before it
        ends = lengths.unsqueeze(-1)
        next_observations = torch.where(
            (step == ends - 1).unsqueeze(-1), observations.unsqueeze(1), memory.transitions["next_observations"]
        )
        transitions = {**memory.transitions, "next_observations": next_observations}
        mask = step < ends
        if bool(mask.all()) and count <= context:
            return dataclasses.replace(memory, transitions=transitions, steps=0)
        valid = mask if memory.valid is None else mask & memory.valid
        order = valid.long().argsort(dim=1, stable=True)[:, -context:]  # the last ones, behind padding
        valid = valid.gather(1, order)
        rows = torch.arange(len(order)).unsqueeze(-1)
        # no cache: it depends on the transitions that are left out
        return ContextMemory(
            {name: column[rows, order] for name, column in transitions.items()}, None if bool(valid.all()) else valid
        )

    def extended(self, memory: ContextMemory, obs: Tensor) -> ContextMemory:
        """The memory with the transition that led to `obs` [E, O]."""
        if memory.pending is None:
            return memory
        transition, valid = {**memory.pending, "next_observations": obs}, memory.valid
        transitions = {
            name: torch.cat([column, transition[name].unsqueeze(1)], 1) for name, column in memory.transitions.items()
        }
        if valid is not None:
            valid = torch.cat([valid, torch.ones_like(valid[:, :1])], 1)
        return dataclasses.replace(memory, transitions=transitions, valid=valid, pending=None)

    def predict(self, memory: ContextMemory, obs: Tensor) -> tuple[tuple[Tensor, ...], ContextMemory]:
        """The distribution of the best action at `obs` [E, ...]; and the memory, with the cache computed for it."""
        algorithm, limit, valid, cache = self.algorithm, self.algorithm.config.context, memory.valid, memory.cache
        tokens = algorithm.tokens({name: column[:, -limit:] for name, column in memory.transitions.items()})
        count = tokens.shape[-2] + 1
        if valid is not None:
            valid = torch.cat([torch.ones_like(valid[:, :1]), valid[:, -limit:]], 1)
        mask = None if valid is None else visible(valid, count)
        if not algorithm.config.one_state or memory.transitions["rewards"].shape[1] > limit:
            dist = self.apply("actor", torch.cat([algorithm.query_token(obs), tokens], 1), mask)
            return tuple(x[:, -1] for x in dist), memory
        new_tokens = tokens[:, memory.cached_count :] if cache else torch.cat([algorithm.query_token(obs), tokens], 1)
        dist, cache = self.apply(
            "actor", new_tokens, None if mask is None else mask[..., count - new_tokens.shape[-2] :, :], None, cache
        )
        return tuple(x[:, -1] for x in dist), dataclasses.replace(memory, cache=cache, cached_count=count - 1)
