"""Learned models of an environment's dynamics, and what plans or trains in them."""
