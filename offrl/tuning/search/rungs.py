"""Successive halving (arXiv 1603.06560): how many settings are trained for how many updates, and which of them go
on.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Rung:
    """One step of a bracket."""

    settings: int
    updates: int  # of each of them since its beginning


def halving(settings: int, updates: int, eta: int, rungs: int) -> list[Rung]:
    """n_{i+1} = max(1, floor(n_i / eta)), r_i = floor(updates / eta^(rungs - 1 - i)); the last rung has exactly
    `updates`.

    27 settings, 27 updates, eta 3 and 4 rungs: (27, 1), (9, 3), (3, 9), (1, 27).
    """
    counts = [settings]
    for _ in range(rungs - 1):
        counts.append(max(1, counts[-1] // eta))
    return [Rung(n, max(1, updates // eta ** (rungs - 1 - i))) for i, n in enumerate(counts)]


def cost(rungs: Sequence[Rung], seeds: int = 1) -> int:
    """Updates that a bracket trains: a setting that goes on is not trained again from its beginning."""
    done = [0, *(r.updates for r in rungs)]
    return seeds * sum(r.settings * (r.updates - before) for r, before in zip(rungs, done[:-1], strict=True))


def survivors(
    values: Sequence[float],
    keep: int,
    wild: int | None,
    families: Sequence[str],
    multiple: int = 1,
    always: Sequence[int] = (),
) -> dict[int, str]:
    """{index: why} of the settings that go on, from the judge's values, larger is better, NaN for those that all
    diverged.

    They are the `keep` best; "best of ALGO" where an algorithm would have none left; a wild card, number `wild` (any
    whole number) of the others, by which one sees what thinning out costs; and the next best, until their number is a
    multiple of `multiple`, so that programs have one size. `always`: earlier wild cards, which stay, and then no other
    is drawn. No setting that diverged goes on.
    """
    array = np.asarray(values, dtype=float)
    order = [
        int(i)
        for i in np.argsort(-np.where(np.isnan(array), -np.inf, array), kind="stable")
        if not math.isnan(array[i])
    ]
    chosen = dict.fromkeys(order[:keep], "kept")
    for family in dict.fromkeys(families):
        members = [i for i in order if families[i] == family]
        if members and not any(i in chosen for i in members):
            chosen[members[0]] = f"best of {family}"
    chosen |= {i: "wild card" for i in order if i in always and i not in chosen}
    remaining = [i for i in order if i not in chosen]
    if remaining and wild is not None and not always:
        chosen[remaining.pop(wild % len(remaining))] = "wild card"
    for i in list(remaining):
        if len(chosen) % multiple == 0:
            break
        chosen[i] = "fills a program"
    return dict(sorted(chosen.items()))
