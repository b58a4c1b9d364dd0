"""SHARSA: values of subgoals n steps ahead, and the policy that pursues the best of many that a flow draws."""

from offrl.algorithms.sharsa.algorithm import SHARSA, SHARSAConfig

__all__ = ["SHARSA", "SHARSAConfig"]
