"""CrossQ: its networks and the algorithm."""

from offrl.algorithms.crossq.algorithm import CrossQ, CrossQConfig

__all__ = ["CrossQ", "CrossQConfig"]
