"""Training of a run's replicas between two stops of the loop: in this process, or spread over worker processes
(`offrl.training.workers`)."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from offrl.algorithm import Algorithm, Metrics, TrainState, select, stack, with_settings
from offrl.evaluation.policy import TrainedPolicy, acting_part
from offrl.settings.replicas import Replica, hyper
from offrl.system.progress import Pace
from offrl.training.compiling.program import Hyper
from offrl.training.distributed import World
from offrl.training.step import Batches, Step

SLICE_SECONDS = 0.5  # the longest that an interrupt waits


@dataclass(frozen=True)
class Plan:
    """All inputs but the data that a process needs to train some replicas."""

    algorithm: Algorithm
    batch_size: int
    mode: str  # of the step
    precision: str
    group: int  # the most replicas in one program
    world: World = World()  # noqa: RUF009 - frozen


class Slices:
    """Updates in slices of about SLICE_SECONDS, between which signals, scores and the progress bar are looked at, and
    their speed.
    """

    def __init__(self, period: int = 1) -> None:
        """period: of the algorithm. A slice ends with a whole pattern: parts of one round differently, and where it
        ends depends on the clock."""
        self.period = self.size = period
        self.rate, self.recent = 0.0, 0.0  # updates per second: since `begin`, of late
        self._pace = Pace()
        self._first = self._step = 0
        self._tick = self._began = self._mark = 0.0  # times; no mark: something else came between
        self._warm = False

    def begin(self, step: int) -> None:
        """Measure `rate` from here."""
        self._first, self._tick = step, time.monotonic()

    def pause(self) -> None:
        """Something else takes time before the next slice."""
        self._mark = 0.0

    def next(self, step: int, last: int) -> int:
        """The end of the slice from `step`, `last` at most."""
        self._step, self._began = step, time.monotonic()
        end = min(step + self.size, last)
        return end - end % self.period if end < last else end

    def done(self, step: int) -> float | None:
        """The slice up to `step` is over. The first one gives its seconds, as tracing and compiling are no measure of
        speed.
        """
        tick, count = time.monotonic(), step - self._step
        seconds = tick - self._began
        if not self._warm:
            self._warm, self._tick, self._first = True, tick, step
            return seconds
        self.size = max(self.period, min(4 * self.size, int(count * SLICE_SECONDS / max(seconds, 1e-9))))
        self.rate = (step - self._first) / max(tick - self._tick, 1e-9)
        self.recent = self._pace.add(count, tick - (self._mark or self._began))
        self._mark = tick
        return None


def group_sizes(replicas: int, largest: int) -> list[int]:
    """The number of replicas that each program trains: as few programs as `largest` allows, of sizes that differ by one
    at most.
    """
    programs = -(-replicas // largest)
    small, more = divmod(replicas, programs)
    return [small + 1] * more + [small] * (programs - more)


def first_state(algorithm: Algorithm, replicas: Sequence[Replica], device: str = "cpu") -> TrainState:
    """The replicas' states before the first update."""
    return stack([with_settings(algorithm, dict(r.values)).init(r.seed) for r in replicas], device)


class LocalEngine:
    """The replicas of a run, trained in this process: group after group, each group's replicas as one program.

    Everything it gives out is a copy on the CPU, with the replica axis in the run's order.
    """

    def __init__(
        self,
        plan: Plan,
        source: Any,
        replicas: Sequence[Replica],
        device: torch.device,
        batches: Batches | None = None,
        sizes: Sequence[int] | None = None,
    ) -> None:
        """source: what the algorithm's sampler prepared, on `device`. batches: see `Step`; only where there is a
        single group. sizes: of the groups, where they are not those of `plan.group`."""
        self.algorithm, self.device = plan.algorithm, device
        self.steps: dict[int, Step] = {}
        self.parts: list[slice] = []
        self.groups: list[Step] = []
        self.hyper: list[Hyper] = []
        # replicas of one group after the other: what their graphs take besides the states is needed once
        pool = torch.cuda.graph_pool_handle() if "cudagraph" in plan.mode else None
        varied = {
            name: torch.tensor(values, dtype=torch.float32, device=device) for name, values in hyper(replicas).items()
        }
        first = 0
        for size in sizes or group_sizes(len(replicas), plan.group):
            part = slice(first, first + size)
            if size not in self.steps:  # groups of one size share a compiled program
                self.steps[size] = Step(
                    plan.algorithm,
                    source,
                    batch_size=plan.batch_size,
                    replicas=size,
                    mode=plan.mode,
                    batches=batches,
                    precision=plan.precision,
                    world=plan.world,
                    pool=pool,
                )
            self.hyper.append({name: column[part] for name, column in varied.items()})
            self.groups.append(self.steps[size])
            self.parts.append(part)
            first += size
        self._state: list[TrainState] = []
        self._good: list[TrainState] = []
        self._sums: list[Metrics] = []

    def run(self, step: int, count: int) -> None:
        """`count` updates of every replica from update number `step`."""
        for i, program in enumerate(self.groups):
            self._state[i], self._sums[i] = program.run(self._state[i], self._sums[i], step, count, i, self.hyper[i])
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # a run of updates is over when they are made, not when they are queued

    def sums(self) -> Metrics:
        """Sums of each metric [N] since `settle`."""
        return {name: torch.cat([sums[name] for sums in self._sums]).cpu() for name in self._sums[0]}

    def settle(self, alive: Tensor) -> None:
        """The states now are good: remember them and begin new sums. What is not `alive` [N] goes back to what was
        remembered before.
        """
        self.freeze(alive)
        for i, (state, good) in enumerate(zip(self._state, self._good, strict=True)):
            for old, new in zip(pytree.tree_leaves(good), pytree.tree_leaves(state._replace(buffers={})), strict=True):
                old.copy_(new)
            self._sums[i] = {}

    def freeze(self, alive: Tensor) -> None:
        """Put what is not `alive` [N] back to what `settle` remembered."""
        if alive.all():
            return
        for i, part in enumerate(self.parts):
            keep = alive[part].to(self.device)

            def choose(new: Tensor, old: Tensor, keep: Tensor = keep) -> Tensor:
                return torch.where(keep.view(-1, *[1] * (new.ndim - 1)), new, old)

            frozen = self._state[i].buffers
            self._state[i] = pytree.tree_map(choose, self._state[i]._replace(buffers={}), self._good[i])._replace(
                buffers=frozen
            )

    def state(self) -> TrainState:
        """The states as they are."""
        return self._gather(self._state)

    def acting(self) -> TrainState:
        """The part of the states that `TrainedPolicy` needs."""
        return self._gather([acting_part(self.algorithm, state) for state in self._state])

    def good(self) -> TrainState:
        """The states that `settle` remembered."""
        return self._gather(self._good)

    def load(self, state: TrainState, good: TrainState, sums: Metrics) -> None:
        """Go on from here."""
        self._state = [self._part(state, part) for part in self.parts]
        # what diverged is not trained again
        self._good = [self._part(good._replace(buffers={}), part) for part in self.parts]
        self._sums = [self._part(sums, part) for part in self.parts]

    def verify_compiled(self) -> str | None:
        """`Step.verify_compiled` of the states that `settle` remembered."""
        for step, state, good, hyper_ in zip(self.groups, self._state, self._good, self.hyper, strict=True):
            if problem := step.verify_compiled(good._replace(buffers=state.buffers), hyper_):
                return problem
        return None

    def finished(self) -> Tensor | None:
        """Mask of the replicas [N] that need no more updates; None where the algorithm does not say."""
        flags = [self.algorithm.finished(select(s, i)) for s in self._state for i in range(len(s.step))]
        return None if any(flag is None for flag in flags) else torch.stack([f for f in flags if f is not None]).cpu()

    def _part(self, tree: Any, part: slice) -> Any:
        return pytree.tree_map(lambda x: x[part].to(self.device, copy=True), tree)

    @staticmethod
    def _gather(states: Sequence[TrainState]) -> TrainState:
        return pytree.tree_map(
            lambda *leaves: torch.cat([leaf.detach() for leaf in leaves]).to("cpu", copy=len(leaves) == 1), *states
        )


def policies_of(
    algorithm: Algorithm, state: TrainState, replicas: Sequence[Replica], device: torch.device | str = "cpu"
) -> list[TrainedPolicy]:
    """One TrainedPolicy for each replica."""
    return [
        TrainedPolicy(with_settings(algorithm, dict(r.values)), select(state, i), r.seed, device)
        for i, r in enumerate(replicas)
    ]
