"""Runs whose policies are scored again."""

from offrl.runs.scored.run import ScoredRun

__all__ = ["ScoredRun"]
