"""Trajectory Transformer: the discretiser, the model of tokens, the beam search, and the algorithm that joins them."""

from offrl.algorithms.tt.algorithm import TT, TTConfig

__all__ = ["TT", "TTConfig"]
