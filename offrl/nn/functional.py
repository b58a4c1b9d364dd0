"""Modules called with parameters that are handed in."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.func import functional_call

Places = dict[str, tuple[dict[str, Any], str]]
_places: WeakKeyDictionary[nn.Module, Places] = WeakKeyDictionary()


def call(module: nn.Module, params: Mapping[str, Tensor], *x: Any) -> Any:
    """`module(*x)` with `params` by name in place of its own, as `torch.func.functional_call` does it, in a fifth of its time.

    What looks every name up at each call is kept here for each module: its submodules and the names of their parameters must stay as they
    are. Compiled, the two are the same. A module whose parameters have two names (tied weights) is left to torch.
    """
    places = _places.get(module)
    if places is None:
        places = _places[module] = _find(module)
    if torch.compiler.is_compiling() or not places or not params.keys() <= places.keys():
        return functional_call(module, dict(params), x)
    own = [(*places[name], value) for name, value in params.items()]
    before = [owner[name] for owner, name, _ in own]
    try:
        for owner, name, value in own:
            owner[name] = value
        return module(*x)
    finally:
        for (owner, name, _), value in zip(own, before, strict=True):
            owner[name] = value


def _find(module: nn.Module) -> Places:
    """Where each parameter is held; empty where one has two names."""
    tied = len(list(module.named_parameters(remove_duplicate=False))) > len(list(module.named_parameters()))
    held = [] if tied else module.named_modules()
    return {f"{path}.{name}" if path else name: (owner._parameters, name) for path, owner in held for name in owner._parameters}
