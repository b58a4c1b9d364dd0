"""Settings of evaluation. Imports nothing heavy, so that help and mistakes in a command are quick."""

from __future__ import annotations

from dataclasses import dataclass

from offrl.settings import setting


@dataclass
class EvalConfig:
    """How a trained policy is scored in its environment."""

    every: int | None = setting(None, "updates between evaluations; null: a few evenly spaced ones; 0: only at the end", low=0)
    episodes: int = setting(10, "episodes of each seed at each evaluation", low=1)
    seed: int = setting(0, "decides the start states, together with the replica's seed and the episode")
    parallel: int = setting(64, "environments alive at once; changes memory and speed, never a score", low=1)
    env: str = setting("auto", "auto (the data set's own environment), none, or a Gymnasium id")
    max_steps: int | None = setting(None, "cut episodes after so many steps; null: the environment's own limit", low=1)
