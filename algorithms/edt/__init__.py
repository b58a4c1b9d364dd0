"""EDT: the algorithm, and its policy, which searches for the best length of history."""

from offrl.algorithms.edt.algorithm import EDT, EDTConfig

__all__ = ["EDT", "EDTConfig"]
