"""A small dataset and an algorithm for it."""

from __future__ import annotations

from typing import Any

import numpy as np

from offrl import registry
from offrl.data.arrays import from_arrays


def compiled_problem(name: str = "iql", **settings: Any) -> tuple[Any, Any]:
    """(algorithm, what its sampler prepared) of 500 rows."""
    g, n = np.random.default_rng(0), 500
    ends = np.isin(np.arange(n), [40, 99, 170, n - 1])
    data = from_arrays(
        g.normal(size=(n, 4)), g.uniform(-1, 1, (n, 2)), g.normal(size=n), ends, action_low=-1.0, action_high=1.0
    )
    kind = registry.get("algo", name)
    algorithm = kind(kind.Config(**{"hidden": [16, 16], "batch_size": 8, **settings}), data.spec)
    return algorithm, algorithm.sampler().prepare(data)
