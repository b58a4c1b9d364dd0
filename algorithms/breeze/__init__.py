"""BREEZE: the networks, the implicit reward, and the algorithm that joins them."""

from offrl.algorithms.breeze.algorithm import Breeze
from offrl.algorithms.breeze.settings import BreezeConfig

__all__ = ["Breeze", "BreezeConfig"]
