"""Language models as helpers for control: they label rewards, preferences or subgoals of a dataset (`offrl data
label`).

    # or LocalModel("path/to/model"), or any object of this form
    labeller = Endpoint("http://127.0.0.1:8000/v1", "qwen3-8b")
    answers, counts = ask(labeller, prompts, Answers("answers.jsonl"))

Nothing else of offrl needs a language model. Imported lazily, as local models need torch and transformers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from offrl.labelling.cache import Answers, Counts, Labeller, ask
    from offrl.labelling.config import LabelSettings
    from offrl.labelling.endpoint import Endpoint
    from offrl.labelling.local_model import LocalModel
    from offrl.labelling.prompts import Renderer
    from offrl.labelling.rewards import label_by_score, label_preferences, label_subgoals

_WHERE = {
    "Answers": "cache",
    "Counts": "cache",
    "Endpoint": "endpoint",
    "LabelSettings": "config",
    "Labeller": "cache",
    "LocalModel": "local_model",
    "Renderer": "prompts",
    "ask": "cache",
    "label_by_score": "rewards",
    "label_preferences": "rewards",
    "label_subgoals": "rewards",
}
__all__ = [
    "Answers",
    "Counts",
    "Endpoint",
    "LabelSettings",
    "Labeller",
    "LocalModel",
    "Renderer",
    "ask",
    "label_by_score",
    "label_preferences",
    "label_subgoals",
]


def __getattr__(name: str) -> Any:
    if name in _WHERE:
        import importlib

        return getattr(importlib.import_module(f"offrl.labelling.{_WHERE[name]}"), name)
    raise AttributeError(f"module 'offrl.labelling' has no attribute '{name}'")
