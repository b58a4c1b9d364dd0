"""The tests; `tests.support` holds what several of them share."""
