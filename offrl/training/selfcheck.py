"""The self-check of training on a device: its step against the eager one and the CPU's, its speed, and the memory that
a seed takes.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Mapping
from functools import cached_property

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from offrl import registry
from offrl.data import load_dataset
from offrl.data.memory import free_bytes
from offrl.errors import UserError
from offrl.settings.compose import compose
from offrl.settings.replicas import Replica
from offrl.system.backend import move
from offrl.training.engine import LocalEngine, Plan, first_state
from offrl.training.execution import PAYS_FROM, STATES, choose_mode, default_group, replica_bytes
from offrl.training.setup import check_kind, make_algorithm
from offrl.training.stages import ready

SEEDS = 8  # tried side by side
TRIED = 20  # updates that are compared; a multiple of every algorithm's period
# relative difference of a module that is rounding. It moves them by 1e-5 in as many updates of IQL, another batch by
# 5e-3
SAME = 1e-4


class SelfCheck:
    """A plan of training on the built-in dataset, tried with fresh replicas."""

    def __init__(self, algo: str, compile: str, device: torch.device) -> None:
        """Raises UserError for settings under which nothing can be tried."""
        settings = {
            "algo": algo,
            "compile": compile,
            "device": str(device),
            "steps": PAYS_FROM,
            "quiet": True,
            "experiment": "none",
        }
        config = compose(settings)
        kind = registry.get("algo", config.algo.name)
        dataset = load_dataset(config.dataset, str(device), True)
        check_kind(kind, config.algo.name, dataset)
        if kind.requires(config, dataset):
            raise UserError(
                f"algo={config.algo.name} has others trained first, which takes long; try one that begins at once, "
                "such as iql"
            )
        config, _ = ready(config, dataset)
        algorithm = make_algorithm(config, dataset)
        mode = choose_mode(config.compile, device, config.steps, algorithm)
        plan = Plan(algorithm, config.algo.batch_size, mode, config.precision, SEEDS)
        self.device, self.dataset = device, dataset
        self.source = algorithm.sampler().prepare(dataset.to(device))
        self.plan = dataclasses.replace(plan, group=default_group(SEEDS, 1, plan, self.source, device))

    @property
    def modes(self) -> list[str]:
        """The modes in which the step may run here, the fastest first."""
        return [self.plan.mode, *(["cudagraph"] if self.plan.mode == "compiled-cudagraph" else [])]

    def engine(
        self, mode: str, seeds: int = SEEDS, device: torch.device | None = None, nudged: bool = False
    ) -> LocalEngine:
        """Fresh replicas. nudged: with their first weights moved by one unit in the last place, up or down by
        chance.
        """
        plan, device = dataclasses.replace(self.plan, mode=mode), device or self.device
        replicas = [Replica(seed) for seed in range(seeds)]
        state = first_state(plan.algorithm, replicas)
        if nudged:
            generator, infinity = torch.Generator().manual_seed(0), torch.tensor(float("inf"))

            def nudge(p: Tensor) -> Tensor:
                return torch.nextafter(
                    p, torch.where(torch.rand(p.shape, generator=generator) < 0.5, infinity, -infinity)
                )

            state = state._replace(params=pytree.tree_map(nudge, state.params))
        engine = LocalEngine(plan, move(self.source, device), replicas, device)
        engine.load(state, state, {})
        return engine

    def parameters(self, engine: LocalEngine) -> dict[str, Tensor]:
        """Each module's parameters after the updates that are compared, [N, all of them] on the CPU. One by one, those
        that were 0 at first are small, and one step of Adam that rounding turned round is much of them."""
        engine.run(0, TRIED)
        modules = engine.state().params
        return {
            name: torch.cat([x.reshape(len(x), -1) for x in module.values()], 1)
            for name, module in modules.items()
            if module
        }

    @cached_property
    def eager(self) -> dict[str, Tensor]:
        """The parameters of the eager step, the reference of every comparison."""
        return self.parameters(self.engine("eager"))

    @cached_property
    def tolerance(self) -> float:
        """Relative difference that is rounding: three times what moving the first weights by one unit in the last place
        makes.
        """
        return max(SAME, 3.0 * difference(self.eager, self.parameters(self.engine("eager", nudged=True))))

    def cpu_difference(self) -> float:
        """Relative difference of the eager step's parameters and those of the CPU's, for one seed."""
        cpu = self.parameters(self.engine("eager", 1, torch.device("cpu")))
        return difference({name: x[:1] for name, x in self.eager.items()}, cpu)

    def rate(self, engine: LocalEngine, seconds: float) -> float:
        """Updates per second of an engine that has made `TRIED`. seconds: how long the timing takes."""
        done, count = TRIED, TRIED
        while True:
            start = time.perf_counter()
            engine.run(done, count)
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            spent, done = time.perf_counter() - start, done + count
            if spent >= seconds / 2:
                return count / spent
            per_update = max(spent, 1e-6) / count
            count = TRIED * max(2, math.ceil(min(20 * count, seconds / per_update) / TRIED))

    def memory(self) -> tuple[float, float, float]:
        """Bytes: (of a seed's state, that a seed takes while its group trains, that are free)."""
        if self.device.type == "cpu":  # what an update needs besides the states is little there: a few seeds' at a time
            tensors = pytree.tree_leaves(first_state(self.plan.algorithm, [Replica(0)]))
            return STATES * float(sum(x.nbytes for x in tensors)), 0.0, free_bytes()
        state, working = replica_bytes(self.plan, self.source, self.device)
        torch.cuda.empty_cache()
        return state, working, float(torch.cuda.mem_get_info(self.device)[0])


def difference(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """Largest difference of a row of [N, K], relative to its norm; infinite where one is not a number."""
    largest = 0.0
    for name, value in actual.items():
        a, b = value.double(), expected[name].double()
        relative = ((a - b).norm(dim=1) / a.norm(dim=1).clamp(min=1e-30)).max().item()
        largest = max(largest, relative if relative == relative else float("inf"))
    return largest
