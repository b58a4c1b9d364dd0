"""Policies over skills."""
