"""MR.Q: its settings, its networks and policy, and the algorithm."""

from offrl.algorithms.mrq.algorithm import MRQ
from offrl.algorithms.mrq.settings import MRQConfig

__all__ = ["MRQ", "MRQConfig"]
