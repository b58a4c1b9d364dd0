"""Scores of trained policies that may decide only once in several steps of the environment: no training, only more
replicas to score.
"""

from offrl.evaluation.frequency.action_repeat import HeldPolicy
from offrl.evaluation.frequency.scores import FrequencyScores, trapezoid

__all__ = ["FrequencyScores", "HeldPolicy", "trapezoid"]
