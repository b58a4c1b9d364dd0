"""RAMBO: its settings and the runs that come first, the model's losses, and the algorithm."""

from offrl.algorithms.rambo.algorithm import RAMBO
from offrl.algorithms.rambo.settings import RAMBOConfig

__all__ = ["RAMBO", "RAMBOConfig"]
