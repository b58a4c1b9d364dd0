"""The curves of a run: one value per replica as means, over all and over each grid point, and single replicas where
they are few.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from offrl.errors import UserError, one_line
from offrl.settings.replicas import Replica, by_cell, cell_name
from offrl.system import files, trust

MOST_REPLICAS = 8  # with more than this only means are shown; metrics.jsonl always has every replica
MOST_CELLS = 16  # of a grid: with more points than this no means of single ones
IDS = "loggers.json"  # in a run: what W&B and MLflow call it


def groups_of(replicas: Sequence[Replica]) -> dict[str, list[int]]:
    """{prefix of a curve's name: the replicas whose mean it shows}; "" for all."""
    cells, groups = by_cell(replicas), {"": list(range(len(replicas)))}
    if 1 < len(cells) <= MOST_CELLS:
        groups |= {f"cell/{cell_name(values)}/": where for values, where in cells.items()}
    if 1 < len(replicas) <= MOST_REPLICAS:
        groups |= {f"{replica.name}/": [i] for i, replica in enumerate(replicas)}
    return groups


def curves(groups: Mapping[str, list[int]], rows: Mapping[str, Sequence[float | None]]) -> dict[str, float]:
    """{name of a curve: value} of `rows` {name: one value per replica}; those without a value are left out."""
    values = {}
    for name, row in rows.items():
        for label, where in groups.items():
            value = mean([row[i] for i in where])
            if value is not None:
                values[f"{label}{name}" if label else f"{name}/mean"] = value
    return values


def mean(values: Sequence[float | None]) -> float | None:
    """Of the finite ones; None where there are none."""
    finite = [v for v in values if v is not None and math.isfinite(v)]
    return sum(finite) / len(finite) if finite else None


def plain(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings as numbers and texts."""
    shown = {
        k: v if isinstance(v, (bool, int, float, str)) else "null" if v is None else str(v) for k, v in settings.items()
    }
    return {k: one_line(v) if isinstance(v, str) else v for k, v in shown.items()}


def known_id(run_dir: Path, logger: str) -> str | None:
    """What `logger` calls this run; None where it does not know it yet."""
    try:
        value = json.loads(trust.read_text(run_dir / IDS))[logger]
    except (OSError, ValueError, KeyError, TypeError, UserError):
        return None
    return value if isinstance(value, str) and value.isalnum() else None


def keep_id(run_dir: Path, logger: str, value: str) -> None:
    """Note what `logger` calls this run, so that a resumed one goes on there."""
    try:
        old = json.loads(trust.read_text(run_dir / IDS))
    except (OSError, ValueError, UserError):
        old = {}
    files.write_text(run_dir / IDS, json.dumps({**(old if isinstance(old, dict) else {}), logger: value}) + "\n")
