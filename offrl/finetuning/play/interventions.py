"""A person, or a script, who acts in a policy's place while it learns (HIL-SERL, arXiv 2410.21845)."""

from __future__ import annotations

from typing import Any

import numpy as np

from offrl.data.dataset import DataSpec
from offrl.errors import UserError
from offrl.system.user_code import function_of, guarded


class Interventions:
    """The user's function(observation, action) -> the action to take in its place, or None: the policy acts.

    Both actions are in the environment's units, [A] or a choice; the observation is as the environment gave it, [*O],
    or a dictionary of its streams.
    """

    def __init__(self, reference: str, spec: DataSpec) -> None:
        """reference: file.py:FUNCTION. Raises UserError."""
        self.name, self.spec = f"interventions={reference}", spec
        self.function = function_of(reference, "interventions")

    def __call__(self, observation: np.ndarray, action: np.ndarray, where: str) -> np.ndarray | None:
        """The action within the environment's range; None: the policy's stands. Raises UserError, at `where`."""
        observed: Any = observation.copy()  # the rows hold the original, whatever the function does with it
        if names := observation.dtype.names:
            observed = {name: observed[name] for name in names}
        answer = guarded(f"{self.name} {where}", self.function, observed, action)
        if answer is None:
            return None
        count, discrete = self.spec.num_actions, self.spec.discrete
        due = (
            f"a choice from 0 to {count - 1}" if discrete else f"an action of shape {[*action.shape]} of finite numbers"
        )
        fault = UserError(f"{self.name} gave {answer!r} {where}: {due} is due, or None where the policy acts")
        try:
            value = np.asarray(answer, np.float32)
        except (TypeError, ValueError):
            raise fault from None
        if value.shape != np.shape(action) or not np.isfinite(value).all() or (discrete and value not in range(count)):
            raise fault
        return value.astype(np.int64) if discrete else np.clip(value, *self.spec.action_bounds)
