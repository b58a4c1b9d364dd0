"""Turns of play, compared."""

from __future__ import annotations

import dataclasses

from offrl.finetuning.play.turns import Turn


def assert_same(one: Turn, other: Turn) -> None:
    """The same numbers, of the same types, and the same episodes that ended."""
    for field in dataclasses.fields(Turn):
        expected, got = getattr(one, field.name), getattr(other, field.name)
        if field.name == "ended" or expected is None:
            assert got == expected, field.name
        else:
            assert got.dtype == expected.dtype and got.tobytes() == expected.tobytes(), field.name
