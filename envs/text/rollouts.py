"""`offrl.text.rollouts`, where it was first."""

from offrl.text.rollouts import Policy, rollouts

__all__ = ["Policy", "rollouts"]
