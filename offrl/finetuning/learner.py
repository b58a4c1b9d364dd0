"""The replicas while they learn online: updates by the ordinary step, and one batched call for all their actions."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.func import vmap
from torch.utils import _pytree as pytree

from offrl import rng
from offrl.algorithm import TrainState, select, with_config
from offrl.errors import UserError
from offrl.finetuning.replay.batches import MixedBatches
from offrl.nn.encoders.streams import ENCODER
from offrl.settings.replicas import Replica
from offrl.system import backend
from offrl.training.engine import LocalEngine, Plan

ACTING = -(1 << 40)  # keys of actions: updates have those of 0, 1, ..., evaluation those of -1, -2, ...


class Learner(LocalEngine):
    """All replicas of a run as one program, on one device."""

    def __init__(
        self,
        plan: Plan,
        batches: MixedBatches,
        replicas: Sequence[Replica],
        device: torch.device,
        fixed: Mapping[str, float],
        anneal: Mapping[str, tuple[float, float, float]],
    ) -> None:
        """fixed: fields of the algorithm's config that are the same for all replicas whatever the grid says. anneal:
        field -> its factor at the start and at the end; see `progress`."""
        super().__init__(plan, None, replicas, device, batches, [len(replicas)])
        if plan.algorithm.traits.learns_model:
            self.groups[0].experience = batches.experience
        count = len(replicas)
        for name in fixed.keys() & self.hyper[0].keys():
            del self.hyper[0][name]  # the algorithm's settings have it
        self.anneal = dict(anneal)
        config = plan.algorithm.config
        same = {name: torch.full((count,), float(getattr(config, name)), device=device) for name in anneal}
        self.base = {name: self.hyper[0].get(name, values) for name, values in same.items()}
        self.captured = "cudagraph" in plan.mode
        self._graphs: dict[Any, backend.Captured] = {}
        self._own = with_config(plan.algorithm, copy.copy(plan.algorithm.config))
        # the memory of the running episodes [N, E, ...], () for policies without one: at the step that is acted in
        self._before: Any = ()
        self._after: Any = ()  # and behind its action
        self._acted = -1  # that step

    def begin(self, envs: int, memory: Mapping[str, Tensor]) -> None:
        """Get ready to act in `envs` environments of each replica. memory: a checkpoint's, {} at the start.

        Raises UserError for policies whose episodes cannot begin anew one by one.
        """
        actor = self._own.actor(select(self._acting(), 0))
        start = actor.start(envs)
        if start is None:
            return
        if not actor.resettable:
            raise UserError(
                f"a policy of {self.algorithm.config.name} remembers its episodes in a way in which they cannot begin "
                "anew one by one: offrl finetune cannot play it"
            )
        leaves, spec = pytree.tree_flatten(start)
        same = [leaf.expand(len(self._state[0].key), *leaf.shape).clone() for leaf in leaves]
        leaves_kept = [memory[str(i)].to(self.device) for i in range(len(leaves))] if memory else same
        self._after = pytree.tree_unflatten(leaves_kept, spec)

    def memory(self, t: int) -> dict[str, Tensor]:
        """The memory of the running episodes at environment step t, for a checkpoint: that before an action which was
        chosen there but not played, where the environment failed.
        """
        memory = self._before if t == self._acted else self._after
        return {str(i): leaf.clone() for i, leaf in enumerate(pytree.tree_leaves(memory))}

    def columns(self) -> dict[str, np.ndarray]:
        """What the memory of the running episodes says of the step that was acted in: columns [N * E, ...] of rows."""
        columns = self.algorithm.actor_class.columns(self._after)
        return {name: column.flatten(0, 1).cpu().numpy() for name, column in columns.items()}

    def _acting(self) -> TrainState:
        """What acting reads of all replicas' states."""
        state = self._state[0]
        params = {n: state.params[n] for n in self.algorithm.traits.policy_modules}
        return TrainState(params, {}, {}, state.extra, {}, state.step, state.key)

    def progress(self, share: float) -> None:
        """Set the annealed settings: `share` of the steps is done."""
        for name, (first, last, until) in self.anneal.items():
            self.hyper[0][name] = self.base[name] * (first + (last - first) * min(1.0, share / until))

    @torch.no_grad()
    def act(
        self, observations: Any, t: int, noise: float | None, begun: np.ndarray, goals: np.ndarray | None = None
    ) -> np.ndarray:
        """Actions [N, E, A] in [-1, 1], or [N, E] choices, for normalised observations [N, E, O], or several streams of
        them by name, at environment step t.

        noise: None: the policy explores in its own way; else see `FinetuneConfig.noise`. begun [N, E]: episodes that
        are at their start. A second call for the same t acts from the same memory. goals [N, E, G]: of goal-conditioned
        policies, which have no other memory.
        """
        acting, spec, encoded = self._acting(), self.algorithm.spec, self.algorithm.encoder is not None
        if t != self._acted:
            self._before, self._acted = self._after, t
        if isinstance(observations, Mapping):
            obs: Any = pytree.tree_map(lambda x: x.to(self.device), observations)
        else:
            obs = torch.as_tensor(observations, dtype=torch.float32, device=self.device)
        keys, fresh = rng.fold_in(rng.fold_in(acting.key, ACTING), t), torch.from_numpy(begun).to(self.device)
        towards_goals = goals is not None
        aims: Any = () if goals is None else torch.from_numpy(goals).to(self.device)

        def one(
            state: TrainState, obs: Any, key: Tensor, values: dict[str, Tensor], carry: Any, fresh: Tensor, goals: Any
        ) -> tuple[Tensor, Any]:
            for name, value in values.items():
                object.__setattr__(self._own.config, name, value)
            actor = self._own.actor(state)
            if encoded:
                obs = actor.apply(ENCODER, obs)
            if towards_goals:
                carry = actor.set_goal(None, goals)
            else:
                carry = None if carry == () else actor.begin_anew(carry, fresh)
            actions, carry = actor.act(carry, obs, key, explore=noise is None)
            after = () if carry is None or towards_goals else carry
            if not noise:
                return actions, after
            draw, other = rng.split(rng.fold_in(key, 1))
            if spec.discrete:
                random_actions = rng.randint(other, (len(obs),), spec.num_actions)
                return torch.where(rng.bernoulli(draw, (len(obs),), noise), random_actions, actions), after
            return (actions + noise * rng.normal(draw, tuple(actions.shape))).clamp(-1.0, 1.0), after

        inputs = acting, obs, keys, self.hyper[0], self._before, fresh, aims
        if not self.captured:
            actions, self._after = vmap(one)(*inputs)
            return actions.cpu().numpy()
        way = (noise, begun.shape)
        if way not in self._graphs:  # many small kernels for each step of the environments
            self._graphs[way] = backend.Captured(vmap(one), *inputs)
        actions, after = self._graphs[way](*inputs)
        self._after = pytree.tree_map(torch.clone, after)  # the next call writes there
        return actions.cpu().numpy()

    def anything(self, envs: int, t: int) -> np.ndarray:
        """Uniformly random actions, shaped as those of `act`, before there is anything to go by."""
        spec = self.algorithm.spec
        keys = rng.fold_in(rng.fold_in(self._state[0].key, ACTING), t)
        if spec.discrete:
            return vmap(lambda k: rng.randint(k, (envs,), spec.num_actions))(keys).cpu().numpy()
        return vmap(lambda k: rng.uniform(k, (envs, spec.action_dim), -1.0, 1.0))(keys).cpu().numpy()
