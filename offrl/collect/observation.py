"""Observations of the environment that is recorded, as rows, columns, and what policies see."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np

from offrl.collect.environment import World
from offrl.collect.pictures import rendered
from offrl.data.formats.image_columns import PREFIX
from offrl.evaluation.result import Policy
from offrl.evaluation.streams import kind_of
from offrl.tasks.entries import PIXELS, VECTOR
from offrl.tasks.environments import flattener


class Observer:
    """Takes observations of one environment of `world`."""

    def __init__(self, world: World, env: gym.Env) -> None:
        self.world, self.env = world, env
        self.flatten = flattener(env, world.keys)[0] if world.kind.names else None  # where there are images

    def row(self, observation: Any) -> np.ndarray:
        """The present observation: numbers [O], or a field for each stream."""
        if self.flatten is not None:
            return self.flatten(observation)
        numbers = np.array(observation, np.float32).reshape(-1)
        if not self.world.picture:
            return numbers
        image = rendered(self.env, self.world.picture, self.world.env_id)
        row = np.zeros((), [(VECTOR, np.float32, numbers.shape), (PIXELS, np.uint8, image.shape)])
        row[VECTOR], row[PIXELS] = numbers, image
        return row

    def columns(self, row: np.ndarray) -> dict[str, np.ndarray]:
        """A row by the names of the data's columns."""
        if row.dtype.names is None:
            return {"observations": row}
        if row.dtype.names == (PIXELS,) and not self.world.keys:
            return {"observations": row[PIXELS]}
        images = {PREFIX + name: row[name] for name in row.dtype.names if name != VECTOR}
        return {"observations": row[VECTOR] if VECTOR in row.dtype.names else np.zeros(0, np.float32), **images}


def visible_to(policy: Policy, rows: np.ndarray, pictured: bool) -> np.ndarray:
    """What a policy is shown of observations [E, ...]: what it was trained on, or all but rendered images where it does
    not say.
    """
    spec = getattr(getattr(policy, "algorithm", None), "data_spec", None)
    if rows.dtype.names is None or (spec is None and not pictured):
        return rows
    names = (kind_of(spec).names or ()) if spec is not None and spec.streams else ()
    return rows[list(names)] if names else rows[VECTOR]
