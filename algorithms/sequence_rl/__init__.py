"""Sequences of actions for slow decisions: the sampler of windows, the recurrent actor, its recall, and the algorithm
that learns it.
"""

from offrl.algorithms.sequence_rl.algorithm import SequenceRL, SequenceRLConfig

__all__ = ["SequenceRL", "SequenceRLConfig"]
