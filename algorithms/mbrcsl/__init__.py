"""MBRCSL: the algorithm, the rollouts that it learns from, and its batches of them."""

from offrl.algorithms.mbrcsl.algorithm import MBRCSL, MBRCSLConfig

__all__ = ["MBRCSL", "MBRCSLConfig"]
