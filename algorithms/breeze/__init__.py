"""BREEZE: the networks, the implicit reward, and the algorithm that joins them."""

from offrl.algorithms.breeze.algorithm import Breeze, BreezeConfig

__all__ = ["Breeze", "BreezeConfig"]
