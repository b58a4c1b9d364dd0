"""The packages transformers and peft (extra `text`): loaded once, quiet, with the attention that this library needs."""

from __future__ import annotations

import contextlib
import functools
import importlib
import warnings
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from offrl.errors import UserError


@functools.cache
def packages() -> tuple[Any, Any]:
    """(transformers, peft). Raises UserError where they are not installed."""
    modules = []
    for name in ("transformers", "peft"):
        try:
            modules.append(importlib.import_module(name))
        except ImportError as error:
            raise UserError(f"language models need the package {name} ({error}): pip install 'offrl[text]'") from None
    transformers = modules[0]
    transformers.AttentionInterface.register("offrl", _attention)
    return transformers, modules[1]


def _attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor, scaling: float, **rest: Any
) -> tuple[Tensor, Tensor]:
    """GPT-2's attention, with the dropout of its weights in the module that the trunk has replaced."""
    weights = (query @ key.transpose(-1, -2) * scaling + attention_mask).softmax(-1)
    weights = module.attn_dropout(weights.to(value.dtype))
    return (weights @ value).transpose(1, 2), weights


@contextlib.contextmanager
def silent() -> Iterator[None]:
    """A context without progress bars and advice of transformers and peft."""
    log = packages()[0].utils.logging
    level, bars = log.get_verbosity(), log.is_progress_bar_enabled()
    log.set_verbosity_error()
    log.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        log.set_verbosity(level)
        if bars:
            log.enable_progress_bar()
