"""The replicas while they learn online: updates by the ordinary step, and one batched call for all their actions."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.func import vmap

from offrl import rng
from offrl.algorithm import TrainState, with_config
from offrl.settings.replicas import Replica
from offrl.system import backend
from offrl.training.engine import LocalEngine, Plan
from offrl.training.step import Batches

ACTING = -(1 << 40)  # keys of actions: updates have those of 0, 1, ..., evaluation those of -1, -2, ...


class Learner(LocalEngine):
    """All replicas of a run as one program, on one device."""

    def __init__(
        self,
        plan: Plan,
        batches: Batches,
        replicas: Sequence[Replica],
        device: torch.device,
        fixed: Mapping[str, float],
        anneal: Mapping[str, tuple[float, float, float]],
    ) -> None:
        """fixed: fields of the algorithm's config that are the same for all replicas whatever the grid says. anneal: field -> its factor
        at the start and at the end; see `progress`."""
        super().__init__(plan, None, replicas, device, batches, [len(replicas)])
        count = len(replicas)
        for name in fixed.keys() & self.hyper[0].keys():
            self.hyper[0][name] = torch.full((count,), float(fixed[name]), device=device)
        self.anneal = dict(anneal)
        config = plan.algorithm.config
        same = {name: torch.full((count,), float(getattr(config, name)), device=device) for name in anneal}
        self.base = {name: self.hyper[0].get(name, values) for name, values in same.items()}
        self.captured = "cudagraph" in plan.mode
        self._graphs: dict[Any, backend.Captured] = {}
        self._own = with_config(plan.algorithm, copy.copy(plan.algorithm.config))

    def progress(self, share: float) -> None:
        """Set the annealed settings: `share` of the steps is done."""
        for name, (first, last, until) in self.anneal.items():
            self.hyper[0][name] = self.base[name] * (first + (last - first) * min(1.0, share / until))

    @torch.no_grad()
    def act(self, observations: np.ndarray, t: int, noise: float | None) -> np.ndarray:
        """Actions [N, E, A] in [-1, 1], or [N, E] choices, for normalised observations [N, E, O] at environment step t.

        noise: None: the policy explores in its own way; else see `FinetuneConfig.noise`.
        """
        state, spec = self._state[0], self.algorithm.spec
        acting = TrainState(
            {n: state.params[n] for n in self.algorithm.traits.policy_modules}, {}, {}, state.extra, {}, state.step, state.key
        )
        obs = torch.tensor(observations, dtype=torch.float32, device=self.device)
        keys = rng.fold_in(rng.fold_in(state.key, ACTING), t)

        def one(state: TrainState, obs: Tensor, key: Tensor, values: dict[str, Tensor]) -> Tensor:
            for name, value in values.items():
                object.__setattr__(self._own.config, name, value)
            actions, _ = self._own.actor(state).act(None, obs, key, explore=noise is None)
            if not noise:
                return actions
            draw, other = rng.split(rng.fold_in(key, 1))
            if spec.discrete:
                return torch.where(rng.bernoulli(draw, (len(obs),), noise), rng.randint(other, (len(obs),), spec.num_actions), actions)
            return (actions + noise * rng.normal(draw, tuple(actions.shape))).clamp(-1.0, 1.0)

        inputs = acting, obs, keys, self.hyper[0]
        if not self.captured:
            return vmap(one)(*inputs).cpu().numpy()
        way = (noise, obs.shape)
        if way not in self._graphs:  # many small kernels for each step of the environments
            self._graphs[way] = backend.Captured(vmap(one), *inputs)
        return self._graphs[way](*inputs).cpu().numpy()

    def anything(self, envs: int, t: int) -> np.ndarray:
        """Uniformly random actions, shaped as those of `act`, before there is anything to go by."""
        spec = self.algorithm.spec
        keys = rng.fold_in(rng.fold_in(self._state[0].key, ACTING), t)
        if spec.discrete:
            return vmap(lambda k: rng.randint(k, (envs,), spec.num_actions))(keys).cpu().numpy()
        return vmap(lambda k: rng.uniform(k, (envs, spec.action_dim), -1.0, 1.0))(keys).cpu().numpy()
