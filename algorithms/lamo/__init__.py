"""LaMo: the algorithm, its network, its language model, and its batches."""

from offrl.algorithms.lamo.algorithm import LaMo, LaMoConfig

__all__ = ["LaMo", "LaMoConfig"]
