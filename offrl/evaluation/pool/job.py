"""An evaluation in pieces of work, which the processes of a pool share."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from offrl.algorithm import Algorithm
from offrl.evaluation.result import Tally


@dataclass(eq=False)
class Unit:
    """Some episodes of one policy: what one process does at a time."""

    policy: int
    seed: int
    episodes: list[int]
    policy_bytes: bytes
    finished: int = 0


@dataclass(eq=False)
class Job:
    """One evaluation."""

    number: int
    seeds: list[int]
    tally: Tally
    waiting: list[Unit]  # not begun; the next one last
    algorithms: list[Algorithm]  # that the policies refer to by their places here
    algorithms_bytes: bytes  # the same, for the workers
    running: list[Unit] = field(default_factory=list)

    def add(self, unit: Unit, part: Tally) -> None:
        """The results of a unit, whose policy is the only one of `part`."""
        for name in ("returns", "lengths", "successes", "discounted", "estimates"):
            getattr(self.tally, name)[unit.policy, unit.episodes] = getattr(part, name)[0, unit.episodes]
        self.tally.faults += part.faults
        self.tally.finished += len(unit.episodes)
        self.running.remove(unit)

    @property
    def finished(self) -> int:
        """Episodes over so far, those of running units included."""
        return self.tally.finished + sum(u.finished for u in self.running)


def cut(policies: int, episodes: int, num_processes: int) -> list[tuple[int, list[int]]]:
    """(policy, episodes) of each piece of work for so many processes, the largest first.

    A policy's episodes are kept together where that keeps all processes busy, since each piece asks the policy anew at
    each step.
    """
    pairs = [(n, e) for n in range(policies) for e in range(episodes)]
    if policies % num_processes == 0 or policies >= 3 * num_processes:
        cuts = [pairs[n * episodes : (n + 1) * episodes] for n in range(policies)]
    else:
        edges = np.linspace(0, len(pairs), min(num_processes, len(pairs)) + 1).round().astype(int)
        cuts = [pairs[a:b] for a, b in zip(edges[:-1], edges[1:], strict=True)]
    shares = [(n, [e for m, e in part if m == n]) for part in cuts for n in sorted({n for n, _ in part})]
    return sorted(shares, key=lambda share: -len(share[1]))
