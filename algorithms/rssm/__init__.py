"""Recurrent state-space models: settings, networks, the latent model, the policy that remembers, and the algorithm."""

from offrl.algorithms.rssm.algorithm import RSSM
from offrl.algorithms.rssm.settings import RSSMConfig

__all__ = ["RSSM", "RSSMConfig"]
