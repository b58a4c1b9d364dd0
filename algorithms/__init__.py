"""One file for each algorithm. Importing this package registers them all."""

from offrl.algorithms import bc, iql, td3_bc

__all__ = ["bc", "iql", "td3_bc"]
