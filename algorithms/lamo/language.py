"""The choice of the language model that is LaMo's trunk: the one of the settings, or the one that a run noted."""

from __future__ import annotations

from typing import Any

from torch import nn

from offrl.errors import UserError, warn
from offrl.lm.models import pretrained as languages
from offrl.lm.models.pretrained import SCRATCH, Language


def load_model(config: Any, typed: bool = True) -> Language:
    """The language model that the settings name; typed: a person named it, see `languages.find`. Raises UserError."""
    if config.lm != SCRATCH:
        try:
            return languages.find(config.lm, typed=typed)
        except UserError as error:
            if not config.lm_fallback:
                raise
            warn(f"{error}; going on from scratch (algo.lm_fallback=true)")
    return languages.scratch(config.width, config.layers, config.heads, config.activation)


def model_of_run(config: Any) -> Language:
    """The language model of a run or a policy file by its identity; without one, that which the settings name. Raises
    UserError.
    """
    language = languages.known(config.lm_id)
    if language is None:
        language = load_model(config, typed=False)
        if config.lm_id and language.identity != config.lm_id:
            raise UserError(
                f"algo.lm={config.lm} is not the language model that was trained with ({language.identity}, not "
                f"{config.lm_id})"
            )
    return language


def describe(language: Language, actor: nn.Module, config: Any) -> str:
    """A note about the trunk, its size and its trained share."""
    trainable = sum(p.numel() for p in actor.parameters())
    c = config
    if language.identity.startswith(SCRATCH):
        state = "frozen (algo.tune=all lets them learn)" if c.tune == "adapters" else "learnt from these data alone"
        return (
            f"LaMo-scratch: without a pre-trained language model. Its trunk is a GPT-2 of random weights ({c.layers} "
            f"layers of width {language.width}), {state}; results published for LaMo do not apply. {trainable:,} "
            "numbers learn"
        )
    state = "frozen, with LoRA" if c.tune == "adapters" else "all of it learning"
    return (
        f"language model {language.place or language.identity} ({language.config.model_type}, {language.parameters:,} "
        f"numbers, {state}); {trainable:,} numbers learn"
    )
