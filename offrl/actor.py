"""Policies that act: an algorithm with the parameters of one moment, and the memory of the episodes that are played."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from offrl import rng
from offrl.errors import UserError
from offrl.optim import Params

if TYPE_CHECKING:
    from offrl.algorithm import Algorithm, TrainState

Carry = Any  # the memory of episodes: see `Actor`


class BoundParams(dict[str, Tensor]):
    """A module's parameters and the module that holds them. Calling it saves what `functional_call` takes for swapping
    them in: of 74 us for one of IQL's actors of two layers, 31 us."""

    def __init__(self, module: nn.Module, params: Params) -> None:
        super().__init__(params)
        self.module = module


def bind(algorithm: Algorithm, state: TrainState) -> TrainState:
    """`state` with `BoundParams`, for an actor that acts often with the same parameters. No gradient reaches them."""

    def bound(name: str, params: Params) -> BoundParams:
        module = copy.deepcopy(algorithm.networks[name]).requires_grad_(False)
        module.load_state_dict(params, assign=True)
        module.to(state.step.device)  # frozen tensors are no parameters
        return BoundParams(module, params)

    return state._replace(params={name: bound(name, params) for name, params in state.params.items()})


class Actor(ABC):
    """A policy bound to one state of training, pure like its algorithm: its memory is an argument and a result.

    A carry is the memory of E episodes that are played side by side: None, or a tree whose tensors have the episodes
    first, [E, ...]. Its nodes are known to `torch.utils._pytree` (dictionaries, lists, named tuples; a dataclass once
    it is registered there), so that carries are saved, moved and compared by their leaves, and pass through `vmap` and
    CUDA graphs. A recurrent state is [E, H], a chunk of actions a queue [E, n, A] beside the number [E] that is left, a
    stacked history [E, K, ...] filled with the first observation. Where shapes stay the same from step to step, the
    episodes of a mask [E] begin anew by choosing, leaf by leaf, between `start(E)` and the carry. A memory that grows
    with time, or counts steps in a number of Python's, belongs to episodes that began together and begin anew together.
    Policies of texts keep a list with an entry for each episode.
    """

    def __init__(self, algorithm: Algorithm, state: TrainState) -> None:
        """A subclass computes here, once, the quantities that acting needs and that follow from the state alone."""
        self.algorithm, self.state = algorithm, state

    # True: the shapes of its carry stay the same, so that some of its episodes may `begin_anew` while others go on
    resettable = False
    # True: the actions that it chose enter its later decisions, so that no others may be played in their place
    remembers_actions = False

    @property
    def action_steps(self) -> int:
        """Actions that one decision fixes: they are played one after another, whatever is observed meanwhile."""
        return 1

    def start(self, episodes: int) -> Carry:
        """The carry at the start of `episodes` episodes."""
        return None

    def begin_anew(self, carry: Carry, mask: Tensor) -> Carry:
        """The carry where the episodes of a mask bool [E] begin anew and the others go on; for a `resettable`
        actor.
        """

        def choose(fresh: Tensor, old: Tensor) -> Tensor:
            return torch.where(mask.reshape(-1, *[1] * (old.ndim - 1)), fresh, old)

        return pytree.tree_map(choose, self.start(mask.shape[0]), carry)

    @staticmethod
    def columns(carry: Carry) -> dict[str, Tensor]:
        """What a carry, as `act` gave it, says of the step that was acted in: columns [E, ...] of the rows of play."""
        return {}

    @abstractmethod
    def act(self, carry: Carry, observations: Tensor, key: Tensor, *, explore: bool) -> tuple[Tensor, Carry]:
        """Actions [E, A] in [-1, 1] (or [E] int64) for normalised observations [E, O], and the next carry.

        Greedy, or with `explore` a sample, which `key` decides.
        """

    def actions_per_decision(self, steps: int) -> int:
        """How many actions, of 1 to `steps`, one decision gives with the setting `action_steps` at that number.

        Where a policy may decide once in `steps` steps, whoever plays it holds the last of them for the others. 1: it
        decides for a single step.
        """
        return 1

    def observe_reward(self, carry: Carry, rewards: Tensor) -> Carry:
        """The carry after `rewards` [E] of the actions just taken, in the units of the rewards trained on."""
        return carry

    def observe_cost(self, carry: Carry, costs: Tensor) -> Carry:
        """The carry after `costs` [E] of the actions just taken."""
        return carry

    def set_goal(self, carry: Carry, goals: Tensor) -> Carry:
        """The carry of episodes with new goals [E, G] from now on; normalised where goals are observations."""
        return carry

    def new_episode(self, carry: Carry, observations: Tensor, lengths: Tensor) -> Carry:
        """The carry where all episodes begin anew in the same tasks, for policies that learn in context; the memory of
        others is emptied.

        observations [E, O]: the last ones of the old episodes; lengths [E]: their steps, after which an episode went on
        in name only."""
        return self.start(len(lengths))

    def infer_task(self, next_observations: Tensor, rewards: Tensor) -> Actor:
        """The actor for other rewards [K], which are earned by reaching these normalised states [K, O], without
        training.

        Raises UserError for a policy that has to be trained for them.
        """
        raise UserError(
            f"a policy of {self.algorithm.config.name} has to be trained for other rewards: only zero-shot ones can be "
            "told, such as fb or breeze"
        )

    def apply(self, name: str, *x: Any) -> Any:
        """Module `name` with the state's parameters."""
        return self.algorithm.apply(name, self.state.params[name], *x)

    def choose(self, dist: tuple[Tensor, ...], key: Tensor, explore: bool) -> Tensor:
        """The mode of a distribution of the module "actor", or with `explore` a sample."""
        policy = self.algorithm.policy
        return policy.sample(dist, key) if explore else policy.mode(dist)


class MemorylessActor(Actor):
    """Policy of the module "actor", which sees the observation alone."""

    def act(self, carry: Carry, observations: Tensor, key: Tensor, *, explore: bool) -> tuple[Tensor, Carry]:
        return self.choose(self.apply("actor", observations), key, explore), carry


class NoisyActor(MemorylessActor):
    """A deterministic policy that explores with TD3's noise (arXiv 1802.09477)."""

    noise = 0.1  # its standard deviation

    def act(self, carry: Carry, observations: Tensor, key: Tensor, *, explore: bool) -> tuple[Tensor, Carry]:
        actions, carry = super().act(carry, observations, key, explore=False)
        if explore:
            actions = (actions + self.noise * rng.normal(key, tuple(actions.shape))).clamp(-1.0, 1.0)
        return actions, carry
