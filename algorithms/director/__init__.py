"""Director: settings, what a hierarchy in a latent model is made of, the policy that keeps its goal, the algorithm."""

from offrl.algorithms.director.algorithm import Director
from offrl.algorithms.director.settings import DirectorConfig

__all__ = ["Director", "DirectorConfig"]
