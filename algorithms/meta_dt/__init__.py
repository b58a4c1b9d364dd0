"""Meta-DT: the algorithm, its network, and its policy, which takes prompts from its own episodes."""

from offrl.algorithms.meta_dt.algorithm import MetaDT, MetaDTConfig

__all__ = ["MetaDT", "MetaDTConfig"]
