"""Environments and the tables that lead to them. Importing this package registers the tables; environments load when they are made."""

from offrl.envs import bandits, d4rl, darkroom, neorl2, point_robot, published, stitch

__all__ = ["bandits", "d4rl", "darkroom", "neorl2", "point_robot", "published", "stitch"]
