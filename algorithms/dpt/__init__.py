"""DPT: the algorithm, its network, and its policy, which learns in context."""

from offrl.algorithms.dpt.algorithm import DPT, DPTConfig

__all__ = ["DPT", "DPTConfig"]
