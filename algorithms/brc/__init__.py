"""BRC: its networks, the scaling of rewards and the algorithm."""

from offrl.algorithms.brc.algorithm import BRC
from offrl.algorithms.brc.scaling import BRCConfig

__all__ = ["BRC", "BRCConfig"]
