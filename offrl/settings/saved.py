"""Settings as files of runs and policies hold them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from offrl.errors import UserError
from offrl.settings.field import check
from offrl.settings.kinds import check_types


def restored(kind: type, settings: Mapping[str, Any], where: str) -> Any:
    """The config of class `kind` that was saved as `settings`; what they lack is at its default.

    Raises UserError for a setting that `kind` does not have, and for values of another type or out of range. where: the
    file, for messages.
    """
    known = {f.name for f in dataclasses.fields(kind)}
    if unknown := sorted(settings.keys() - known):
        raise UserError(
            f"{where} was written by another version of offrl: it has the setting {unknown[0]}, which this one does "
            "not know"
        )
    check_types(kind, settings, where)
    config = kind(**settings)
    check(config, f"{where}: ")
    return config
