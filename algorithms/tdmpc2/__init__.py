"""TD-MPC2: its settings, its networks, the policy that plans in its latent model, and the algorithm."""

from offrl.algorithms.tdmpc2.algorithm import TDMPC2
from offrl.algorithms.tdmpc2.settings import TDMPC2Config

__all__ = ["TDMPC2", "TDMPC2Config"]
