"""Playing an iteration: every environment of every replica makes the same number of steps, across the ends of its
episodes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from offrl import rng
from offrl.actor import Carry
from offrl.algorithm import TrainState, select
from offrl.data.samplers.transitions import Batch
from offrl.families.on_policy import ppo
from offrl.families.on_policy.residual import Residual
from offrl.families.on_policy.residual_actor import ResidualActor
from offrl.finetuning.learner import ACTING
from offrl.finetuning.play.environments import Play
from offrl.finetuning.play.turns import Turn
from offrl.finetuning.residual.learner import ResidualLearner
from offrl.finetuning.transitions import normal


@dataclass
class RolloutStep:
    """One step of all environments: [N, E, ...] on the device."""

    observations: Tensor  # that the residual saw, normalised as the data's
    base_actions: Tensor
    u: Tensor
    log_prob: Tensor
    rewards: Tensor
    terminated: Tensor  # bool
    over: Tensor  # bool
    weight: Tensor  # 0 where the physics blew up, and nothing came of the action
    after: tuple[Tensor, Tensor] | None = (
        None  # (observations, base's actions) of the true next states, where a cut or the end needs them
    )


class Bases:
    """The frozen policies with the memory of their running episodes. Nobody else's call changes that memory: looking
    ahead takes a copy.
    """

    def __init__(self, algorithm: Residual, state: TrainState, envs: int, device: torch.device) -> None:
        """state: of all replicas."""
        self.device, self.envs = device, envs
        states = pytree.tree_map(lambda x: x.to(device), state._replace(opt={}, target={}, buffers={}))
        self.actors: list[ResidualActor] = [ResidualActor(algorithm, select(states, n)) for n in range(len(state.key))]
        self.carries: list[Carry] = [actor.start(envs) for actor in self.actors]

    @torch.no_grad()
    def look(self, carries: list[Carry], observations: Tensor, keys: Tensor) -> tuple[Tensor, Tensor, list[Carry]]:
        """(what the residuals see [N, E, O], the bases' actions [N, E, A], the next carries)."""
        outputs = [actor.below(*x) for actor, *x in zip(self.actors, carries, observations, keys, strict=True)]
        return (
            torch.stack([s for s, _, _ in outputs]),
            torch.stack([a for _, a, _ in outputs]),
            [carry for _, _, carry in outputs],
        )

    def go_on(self, carries: list[Carry], over: Tensor) -> None:
        """Keep the carries after a step; the episodes that are `over` [N, E] begin anew, with nothing of what their
        bases had planned.
        """
        self.carries = carries
        if bool(over.any()):
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
    play: Play, bases: Bases, learner: ResidualLearner, keys: Tensor, t: int, steps: int,
    earn: Callable[[Turn, int], Tensor], checked: Callable[[np.ndarray, bool], bool],
) -> list[RolloutStep]:  # fmt: skip
    """`steps` steps of all environments from environment step t of each replica; `earn` gives their rewards [N, E] from
    what came of a step and its time. checked: whether actions [N, E, A] may be played; if not it was seen to, unless it
    was the last try, which raises. keys [N]: of the replicas."""
    many, envs, device = len(keys), bases.envs, bases.device

    def seen(observations: np.ndarray) -> Tensor:
        rows = normal(play.spec, observations).reshape(many, envs, play.spec.observation_dim)
        return torch.as_tensor(rows, dtype=torch.float32).to(device)

    def drawn(t: int) -> tuple[Tensor, ...]:
        return rng.split(rng.fold_in(rng.fold_in(keys, ACTING), t))

    rows: list[RolloutStep] = []
    for step in range(steps):
        base_key, noise_key = drawn(t)
        observations, base_actions, carries = bases.look(bases.carries, seen(play.current), base_key)
        for last in (False, True):
            actions, u, log_prob = learner.sample(observations, base_actions, noise_key)
            played = actions.cpu().numpy()
            if checked(played, last):
                break
        turn = play.step(played.reshape(many * envs, -1))
        t += envs
        rewards = earn(turn, t)
        flags = [torch.from_numpy(x.reshape(many, envs)).to(device) for x in (turn.terminated, turn.over, turn.valid)]
        row = RolloutStep(
            observations, base_actions, u, log_prob, rewards.to(device), flags[0], flags[1], flags[2].float()
        )
        if step == steps - 1 or bool((flags[1] & ~flags[0]).any()):
            after = bases.look(carries, seen(turn.next_observations), drawn(t)[0])  # with a copy of their memory
            row.after = after[0], after[1]
        rows.append(row)
        bases.go_on(carries, flags[1])
    return rows


def batch_of(rows: list[RolloutStep], learner: ResidualLearner) -> Batch:
    """The rows as a batch [N, T x E, ...] with advantages and returns, from the values before anything is learnt of
    them.
    """
    config = learner.residual.config
    columns: dict[str, Any] = {
        f.name: torch.stack([getattr(r, f.name) for r in rows]) for f in fields(RolloutStep) if f.name != "after"
    }
    times, many, envs = columns["rewards"].shape

    def flat(x: Tensor) -> Tensor:
        return x.transpose(0, 1).reshape(many, times * envs, *x.shape[3:])

    values = (
        learner.values(flat(columns["observations"]), flat(columns["base_actions"]))
        .reshape(many, times, envs)
        .transpose(0, 1)
    )
    next_values = torch.cat([values[1:], values[-1:]])
    for t, row in enumerate(rows):
        if row.after is not None:
            other = row.over if t < times - 1 else torch.ones_like(row.over)
            next_values[t] = torch.where(other, learner.values(*row.after), next_values[t])
    terminated = columns["terminated"] | (columns["over"] if config.time_limits == "end" else False)
    advantages = ppo.generalised_advantages(
        columns["rewards"],
        values,
        next_values,
        terminated,
        columns["over"],
        config.discount,
        config.gae_decay,
        columns["weight"],
    )
    names = ("observations", "base_actions", "u", "log_prob", "weight")
    return {
        **{k: flat(columns[k]) for k in names},
        "advantages": flat(advantages),
        "returns": flat(advantages + values),
    }
