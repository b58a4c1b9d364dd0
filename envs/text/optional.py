"""Packages that only some environments need."""

from __future__ import annotations

import importlib
from types import ModuleType

from offrl.errors import UserError


def package(module: str, feature: str, pip: str) -> ModuleType:
    """The module of that name. Raises UserError, with the line that installs it, where it is missing or cannot be
    imported.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UserError(
            f"{feature} needs the package {pip}, which cannot be imported ({error}): pip install {pip}"
        ) from None
