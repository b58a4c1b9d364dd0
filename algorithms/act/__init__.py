"""ACT: the algorithm and its network, a variational autoencoder of chunks of actions whose parts are transformers."""

from offrl.algorithms.act.algorithm import ACT, ACTConfig

__all__ = ["ACT", "ACTConfig"]
