"""Environments and the tables that lead to them. Importing this package registers the tables; environments load when they are made."""

from offrl.envs import d4rl, neorl2, published, stitch

__all__ = ["d4rl", "neorl2", "published", "stitch"]
