"""PETS: its settings, its sources, the returns of plans, the policy that searches for one, and the algorithm."""

from offrl.algorithms.pets.algorithm import PETS
from offrl.algorithms.pets.settings import PETSConfig

__all__ = ["PETS", "PETSConfig"]
