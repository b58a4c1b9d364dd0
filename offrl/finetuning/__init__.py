"""Offline to online: `offrl finetune` lets the replicas of a run, or fresh ones, go on learning in an environment."""
