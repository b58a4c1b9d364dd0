"""MO-DT: the algorithm, the regions of its actions, and the weights of its losses."""

from offrl.algorithms.modt.algorithm import MODT, MODTConfig

__all__ = ["MODT", "MODTConfig"]
