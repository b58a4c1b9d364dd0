"""ARSQ: digits of actions, the network that values them one after another, and the algorithm."""

from offrl.algorithms.arsq.algorithm import ARSQ, ARSQConfig

__all__ = ["ARSQ", "ARSQConfig"]
