"""Settings as files of runs and policies hold them, of this version or an older one."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from offrl.errors import UserError

# names of version 0.1 -> today's; its runs and policies are read with these
RENAMED = {
    "largest_weight": "max_weight",
    "smallest_target": "min_target",
    "largest_entropy_weight": "max_entropy_weight",
    "smallest_difference": "min_difference",
    "largest_difference": "max_difference",
    "retain": "rollout_retain",
    "followed": "gradient_samples",
    "pushed": "penalised_states",
    "wanted": "accepted_episodes",
    "longest": "max_length",
    "plan_longest": "plan_max_length",
    "dropped": "term_dropout",
}

# what older runs and policies did where a younger setting has another default: algorithm -> {setting: value}
FORMER: dict[str, dict[str, Any]] = {"edt": {"return_units": "range", "expert_cut": 0.0}}


def renamed(settings: Mapping[str, Any]) -> dict[str, Any]:
    """An algorithm's settings under today's names, those that a `grid` holds by name too, and `FORMER`'s where it lacks them."""
    return {**FORMER.get(str(settings.get("name")), {}), **{RENAMED.get(name, name): value for name, value in settings.items()}}


def restored(kind: type, settings: Mapping[str, Any], where: str) -> Any:
    """The config of class `kind` that was saved as `settings`; what an older version did not have is at its default.

    Raises UserError for a setting that this version does not have. where: the file, for that message.
    """
    values, known = renamed(settings), {f.name for f in dataclasses.fields(kind)}
    if unknown := sorted(values.keys() - known):
        raise UserError(f"{where} was written by another version of offrl: it has the setting {unknown[0]}, which this one does not know")
    return kind(**values)
