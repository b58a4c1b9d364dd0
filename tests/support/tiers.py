"""The third tier's share of a parametrised test."""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Any

import pytest


def nightly_but(kept: Container[Any], values: Iterable[Any]) -> list[Any]:
    """The values as pytest's parameters; those that are not among `kept` run nightly."""
    return [pytest.param(value, marks=() if value in kept else pytest.mark.nightly) for value in values]
