"""Stepping environments that speak: what `offrl.evaluation.evaluator` needs besides what it does for those of numbers.
Imports nothing heavy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from offrl.evaluation.steppers import StepFailed, Steps
from offrl.tasks.episodes import success_of


class Observed(str):
    """A text that an environment said, with the legal actions that it named, if it did."""

    legal_actions: tuple[str, ...] | None = None


def observed(text: Any, info: Any) -> Observed:
    """An environment's observation and info as one text."""
    observation = Observed(text)
    legal = info.get("legal_actions") if isinstance(info, Mapping) else None
    observation.legal_actions = None if legal is None else tuple(str(action) for action in legal)
    return observation


def step_texts(envs: Sequence[Any], actions: np.ndarray) -> Steps:
    """`offrl.evaluation.steppers.step_all` where observations and actions are texts. `actions`: an array of objects.

    Raises StepFailed where an environment raises.
    """
    texts = np.full(len(envs), None, object)
    rewards, over, successes = np.zeros(len(envs)), np.zeros(len(envs), bool), np.full(len(envs), np.nan)
    reports_success = False
    for k, env in enumerate(envs):
        try:
            text, reward, terminated, truncated, info = env.step(str(actions[k]))
        except Exception as error:  # of a third-party environment
            raise StepFailed(k) from error
        texts[k] = observed(text, info)
        rewards[k], over[k] = float(reward), bool(terminated or truncated)
        success = success_of(info)
        if success is not None:
            successes[k], reports_success = success, True
    return Steps(texts, rewards, over, successes if reports_success else None, {})
