"""Searches over settings: of an algorithm with many, only the best stands beside the others, and that it was chosen is
said.
"""

from __future__ import annotations

from collections.abc import Sequence

SEARCH = 3  # settings of one algorithm from which on the best of them counts as chosen


def without_searches(ordered: Sequence[str], algorithm: dict[str, str]) -> tuple[list[str], dict[str, int]]:
    """(labels, the best first, of a searched algorithm only its best, {label of a searched algorithm's best: its number
    of settings}).
    """
    count: dict[str, int] = {}
    for label in ordered:
        count[algorithm[label]] = count.get(algorithm[label], 0) + 1
    labels: list[str] = []
    searched: dict[str, int] = {}
    names = set()
    for label in ordered:
        name = algorithm[label]
        if count[name] >= SEARCH:
            if name in names:
                continue
            searched[label] = count[name]
        names.add(name)
        labels.append(label)
    return labels, searched


def chosen(labels: Sequence[str], searched: dict[str, int], algorithm: dict[str, str]) -> tuple[str, ...]:
    """`iql (temperature=3) is the best of 16 settings of iql, chosen with the environment: ...`, for those that are."""
    return tuple(
        f"{label} is the best of {searched[label]} settings of {algorithm[label]}, chosen with the environment: its "
        "score is too high an "
        "estimate."
        for label in labels
        if label in searched
    )
