"""Environments and the tables that lead to them. Importing this package registers the tables; environments load when
they are made.
"""

from offrl.envs import (
    bandits,
    chain,
    d4rl,
    darkroom,
    delayed,
    dosing,
    drawn,
    forbidden_disc,
    fork,
    neorl2,
    neorl2_made,
    ogbench,
    point_mass,
    point_robot,
    published,
    stitch,
    text,
    velocity,
)

__all__ = [
    "bandits",
    "chain",
    "d4rl",
    "darkroom",
    "delayed",
    "dosing",
    "drawn",
    "forbidden_disc",
    "fork",
    "neorl2",
    "neorl2_made",
    "ogbench",
    "point_mass",
    "point_robot",
    "published",
    "stitch",
    "text",
    "velocity",
]
