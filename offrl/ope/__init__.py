"""Off-policy evaluation: how good policies are, estimated from logged data alone.

    from offrl import ope
    ranking = ope.select("runs/iql-hopper", method="fqe")
    values = ope.evaluate_policies(dataset, {"a": policy, "b": other}).estimates["fqe"]

Names are imported when they are first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from offrl.ope.config import FQEConfig, OPEConfig
    from offrl.ope.fqe import estimate
    from offrl.ope.judges.critics import Gates, gates
    from offrl.ope.judges.tournament import Bvft, bvft_losses, lstd_losses
    from offrl.ope.problem import Estimates
    from offrl.ope.selection import Selection, evaluate_policies, select

__all__ = [
    "Bvft",
    "Estimates",
    "FQEConfig",
    "Gates",
    "OPEConfig",
    "Selection",
    "bvft_losses",
    "estimate",
    "evaluate_policies",
    "gates",
    "lstd_losses",
    "select",
]

_WHERE = {
    "Bvft": "judges.tournament",
    "Gates": "judges.critics",
    "bvft_losses": "judges.tournament",
    "gates": "judges.critics",
    "lstd_losses": "judges.tournament",
    "Estimates": "problem",
    "FQEConfig": "config",
    "OPEConfig": "config",
    "Selection": "selection",
    "estimate": "fqe",
    "evaluate_policies": "selection",
    "select": "selection",
}


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'offrl.ope' has no attribute '{name}'")
    import importlib

    return getattr(importlib.import_module(f"offrl.ope.{_WHERE[name]}"), name)
