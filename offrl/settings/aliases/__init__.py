"""Habits from other libraries, and settings without their prefix, understood where only one thing can be meant."""
