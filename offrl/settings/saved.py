"""Settings as files of runs and policies hold them, of this version or an older one."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from offrl.errors import UserError
from offrl.settings.field import check
from offrl.settings.kinds import check_types

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

_FLAX = {"layer_norm_epsilon": 1e-5}  # of algorithms whose networks have flax's 1e-6 today
_TARGETS = {**_FLAX, "target_update": "after"}
_UNCAPPED = {"max_entropy_weight": None}
# algorithm -> settings that version 0.1 did not have, at what it did; those of the others are at what it did by default
YOUNGER: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("rebrac", "td3_awr", "xql", "f_dvl", "recoil", "qrl"), _FLAX),
    **dict.fromkeys(("gcivl", "gciql", "hiql", "ota"), _TARGETS),
    **dict.fromkeys(("mopo", "rambo"), _UNCAPPED),
    "crl": {**_FLAX, "energy_floor": math.log(1e-6)},
    "decision_diffuser": {"discount": 1.0, "termination_penalty": 0.0},
}


def current(settings: Mapping[str, Any]) -> dict[str, Any]:
    """An algorithm's settings as this version has them: under today's names, and with those that are younger.

    settings: all that were saved, less those that a `grid` holds by name.
    """
    values = {RENAMED.get(name, name): value for name, value in settings.items()}
    return {**YOUNGER.get(values.get("name", ""), {}), **values}


def restored(kind: type, settings: Mapping[str, Any], where: str) -> Any:
    """The config of class `kind` that was saved as `settings`; what an older version did not have is at what it did.

    Raises UserError for a setting that this version does not have, and for values of another type or out of range.
    where: the file, for messages.
    """
    values, known = current(settings), {f.name for f in dataclasses.fields(kind)}
    if unknown := sorted(values.keys() - known):
        raise UserError(
            f"{where} was written by another version of offrl: it has the setting {unknown[0]}, which this one does "
            "not know"
        )
    check_types(kind, values, where)
    config = kind(**values)
    check(config, f"{where}: ")
    return config
