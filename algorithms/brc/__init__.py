"""BRC: its networks and the algorithm."""

from offrl.algorithms.brc.algorithm import BRC, BRCConfig

__all__ = ["BRC", "BRCConfig"]
