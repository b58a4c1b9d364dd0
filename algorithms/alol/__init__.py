"""A-LoL: the values of the reference policy, the sampler by advantage, and the algorithm that joins them."""

from offrl.algorithms.alol.algorithm import ALoL, ALoLConfig

__all__ = ["ALoL", "ALoLConfig"]
