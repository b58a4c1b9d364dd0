"""Scores that others published, to stand beside ours: D4RL, NeoRL-2 and OGBench by the exact names of their datasets.

The numbers are data (`published.json`): tables in order of preference, the reproduction that reports the last
checkpoint first. They were measured in the benchmarks' own environments (gym's MuJoCo-v2 tasks for D4RL), which
docs/environments.md compares with ours.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from pathlib import Path

from offrl.registry import register


@dataclass(frozen=True)
class Published:
    """One published number and what it is."""

    mean: float
    std: float | None  # over seeds; None where none was printed
    label: str  # short, for a footnote mark: "CORL"
    protocol: str  # which checkpoint, seeds, updates, episodes
    where: str  # paper or repository
    unit: str  # "score": normalised; "success %"

    @property
    def source(self) -> str:
        """All of it in one line."""
        return f"{self.label}: {self.protocol}; {self.where}"


@functools.cache
def table() -> dict[tuple[str, str], tuple[Published, ...]]:
    """(dataset, algorithm) -> what was published, in order of preference."""
    numbers: dict[tuple[str, str], tuple[Published, ...]] = {}
    for part in json.loads((Path(__file__).parent / "published.json").read_text(encoding="utf-8"))["tables"]:
        for dataset, row in part["scores"].items():
            for algorithm, (mean, *std) in row.items():
                number = Published(
                    mean, std[0] if std else None, part["label"], part["protocol"], part["source"], part["unit"]
                )
                numbers[dataset, algorithm] = (*numbers.get((dataset, algorithm), ()), number)
    return numbers


@register("published", "papers")
def published(dataset: str, algorithm: str) -> Published | None:
    """The preferred published number, or None.

    dataset: an exact name, such as "hopper-medium-v2"; a file with a name of its own has none. algorithm: as offrl
    calls it ("td3_bc", "percent_bc"), without settings: a variant of it that somebody tuned was not published.
    """
    numbers = every(dataset, algorithm)
    return numbers[0] if numbers else None


def every(dataset: str, algorithm: str) -> tuple[Published, ...]:
    """All published numbers, the preferred first; see `published`."""
    return table().get((dataset, algorithm), ())
