"""Playing an iteration: every environment of every replica makes the same number of steps, across the ends of its
episodes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
from torch import Tensor
from torch.func import vmap
from torch.utils import _pytree as pytree

from offrl import rng
from offrl.actor import Carry
from offrl.algorithm import TrainState, select
from offrl.data.samplers.transitions import Batch
from offrl.families.on_policy import ppo
from offrl.families.on_policy.algorithm import OnPolicy, OnPolicyActor
from offrl.finetuning.learner import ACTING
from offrl.finetuning.on_policy.learner import OnPolicyLearner
from offrl.finetuning.play.environments import Play
from offrl.finetuning.play.turns import Turn
from offrl.finetuning.transitions import normal


@dataclass
class RolloutStep:
    """One step of all environments: [N, E, ...] on the device."""

    sights: Batch  # what the policies saw
    draws: Batch  # what updates need of the actions that they drew
    rewards: Tensor
    terminated: Tensor  # bool
    over: Tensor  # bool
    weight: Tensor  # 0 where the physics blew up, and nothing came of the action
    after: Batch | None = None  # what the policies see of the true next states, where a cut or the end needs it


class Observers:
    """The policies as far as they look, with the memory of their running episodes. Nobody else's call changes that
    memory: looking ahead takes a copy.
    """

    def __init__(self, algorithm: OnPolicy, state: TrainState, envs: int, device: torch.device) -> None:
        """state: of all replicas."""
        self.device, self.envs = device, envs
        states = pytree.tree_map(lambda x: x.to(device), state._replace(opt={}, target={}, buffers={}))
        actors = [algorithm.actor(select(states, n)) for n in range(len(state.key))]
        self.actors = [cast(OnPolicyActor, actor) for actor in actors]
        self.carries: list[Carry] = [actor.start(envs) for actor in self.actors]

    @torch.no_grad()
    def look(self, carries: list[Carry], observations: Tensor, keys: Tensor) -> tuple[Batch, list[Carry]]:
        """(what the policies see of observations [N, E, O], by name [N, E, ...], the next carries)."""
        outputs = [actor.look(*x) for actor, *x in zip(self.actors, carries, observations, keys, strict=True)]
        sights, after = zip(*outputs, strict=True)
        return {name: torch.stack([one[name] for one in sights]) for name in sights[0]}, list(after)

    def go_on(self, carries: list[Carry], over: Tensor) -> None:
        """Keep the carries after a step; the episodes that are `over` [N, E] begin anew, with nothing of what their
        policies had planned.
        """
        self.carries = carries
        if bool(over.any()) and carries[0] is not None:
            self.carries = [a.begin_anew(c, o) for o, a, c in zip(over, self.actors, carries, strict=True)]

    def state(self) -> dict[str, Tensor]:
        """The memory, for a checkpoint."""
        leaves = {f"{n}.{i}": leaf for n, c in enumerate(self.carries) for i, leaf in enumerate(pytree.tree_leaves(c))}
        return {name: leaf.clone() for name, leaf in leaves.items() if leaf is not None}

    def load(self, tensors: dict[str, Tensor]) -> None:
        """The memory of a checkpoint."""
        for n, carry in enumerate(self.carries):
            leaves, spec = pytree.tree_flatten(carry)
            back = [None if leaf is None else tensors[f"{n}.{i}"].to(self.device) for i, leaf in enumerate(leaves)]
            self.carries[n] = pytree.tree_unflatten(back, spec)


def play_on(
    play: Play, observers: Observers, learner: OnPolicyLearner, keys: Tensor, t: int, steps: int,
    earn: Callable[[Turn, int], Tensor], checked: Callable[[np.ndarray, bool], bool],
) -> list[RolloutStep]:  # fmt: skip
    """`steps` steps of all environments from environment step t of each replica; `earn` gives their rewards [N, E] from
    what came of a step and its time. checked: whether actions [N, E, A] may be played; if not it was seen to, unless it
    was the last try, which raises. keys [N]: of the replicas."""
    many, envs, device = len(keys), observers.envs, observers.device

    def normalised(observations: np.ndarray) -> Tensor:
        rows = normal(play.spec, observations).reshape(many, envs, play.spec.observation_dim)
        return torch.as_tensor(rows, dtype=torch.float32).to(device)

    def split(t: int) -> tuple[Tensor, ...]:
        return rng.split(rng.fold_in(rng.fold_in(keys, ACTING), t))

    rows: list[RolloutStep] = []
    for step in range(steps):
        look_key, noise_key = split(t)
        sights, carries = observers.look(observers.carries, normalised(play.current), look_key)
        for last in (False, True):
            actions, draws = learner.sample(sights, noise_key)
            played = actions.cpu().numpy()
            if checked(played, last):
                break
        turn = play.step(played.reshape(many * envs, -1))
        t += envs
        rewards = earn(turn, t)
        flags = [torch.from_numpy(x.reshape(many, envs)).to(device) for x in (turn.terminated, turn.over, turn.valid)]
        row = RolloutStep(sights, draws, rewards.to(device), flags[0], flags[1], flags[2].float())
        if step == steps - 1 or bool((flags[1] & ~flags[0]).any()):
            # with a copy of their memory
            row.after, _ = observers.look(carries, normalised(turn.next_observations), split(t)[0])
        rows.append(row)
        observers.go_on(carries, flags[1])
    return rows


def batch_of(rows: list[RolloutStep], learner: OnPolicyLearner) -> Batch:
    """The rows as a batch [N, T x E, ...] with advantages, returns and values, from before anything is learnt of
    them.
    """
    config = learner.algorithm.config

    def flat(x: Tensor) -> Tensor:
        return x.transpose(0, 1).reshape(x.shape[1], x.shape[0] * x.shape[2], *x.shape[3:])

    def column(name: str) -> Tensor:
        return torch.stack([getattr(row, name) for row in rows])

    sights, draws = (
        {name: flat(torch.stack([getattr(row, part)[name] for row in rows])) for name in getattr(rows[0], part)}
        for part in ("sights", "draws")
    )
    rewards, terminated, over, weight = (column(name) for name in ("rewards", "terminated", "over", "weight"))
    times, many, envs = rewards.shape
    values = learner.values(sights).reshape(many, times, envs).transpose(0, 1)
    next_values = torch.cat([values[1:], values[-1:]])
    for t, row in enumerate(rows):
        if row.after is not None:
            other = row.over if t < times - 1 else torch.ones_like(row.over)
            next_values[t] = torch.where(other, learner.values(row.after), next_values[t])
    ended = terminated | (over if config.time_limits == "end" else False)
    advantages = ppo.generalised_advantages(
        rewards, values, next_values, ended, over, config.discount, config.gae_decay, weight
    )
    computed = {"weight": weight, "advantages": advantages, "returns": advantages + values, "values": values}
    batch = {**sights, **draws, **{name: flat(x) for name, x in computed.items()}}
    return vmap(learner.algorithm.prepared)(batch)
