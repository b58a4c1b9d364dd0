"""Networks that a stranger's file describes, drawn before they are built: shapes without memory (torch's meta device),
compared with the tensors that the file holds. A few bytes of settings can ask for terabytes of layers, or for a billion
of them."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from offrl.data.containers.guard import words
from offrl.errors import UserError
from offrl.settings.field import shown_value

OPERATIONS = 100_000  # calls that drawing networks may take; 500 critics of two layers take 12,000
FREE = 1_000_000_000  # bytes that networks may take which no file holds, such as the critics beside a policy
ACTING = 1_000_000_000  # bytes that an action in one state may take
GROWTH = 20  # times what the file holds, that networks larger than this may take
_stored: ContextVar[int | None] = ContextVar("stored", default=None)


class _Count(TorchFunctionMode):
    """Refuses to go on after `OPERATIONS` calls of torch."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where, self.calls = where, 0

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        if self.calls > OPERATIONS:
            raise UserError(
                f"{self.where}: its settings describe networks of more layers than any that are trained here; it is "
                "not read"
            )
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def outline(where: str) -> Iterator[None]:
    """Within it, new tensors have a shape, a type and no memory, and modules are only drawn. where: the file, for
    messages.

    Raises UserError where drawing takes more than `OPERATIONS` calls.
    """
    with warnings.catch_warnings(), torch.device("meta"), _Count(where):
        warnings.simplefilter("ignore")  # that loading into tensors without memory does nothing
        yield


@contextlib.contextmanager
def of_file(tensors: Mapping[str, Tensor]) -> Iterator[None]:
    """Within it, `check_memory` compares with what a file holds."""
    token = _stored.set(sum(t.numel() * t.element_size() for t in tensors.values()))
    try:
        yield
    finally:
        _stored.reset(token)


def check_acting(config: Any, names: Iterable[str], size: float, most: float = ACTING) -> None:
    """Raises UserError where an action in one state takes more than `most` bytes: about `size`, by the settings
    `names` of the algorithm.
    """
    if size > most:
        settings = ", ".join(f"algo.{name}={shown_value(getattr(config, name))}" for name in names)
        raise UserError(
            f"{settings}: each action would take {words(int(size))} of memory for every state, and {words(int(most))} "
            "at most is allowed: lower one of them"
        )


def check_memory(where: str, modules: Iterable[nn.Module]) -> None:
    """Raises UserError where drawn modules would take memory out of all proportion to what the file that is read holds
    (`of_file`).
    """
    if (stored := _stored.get()) is None:
        return
    tensors = {id(t): t for m in modules for t in (*m.parameters(), *m.buffers()) if t.is_meta}
    size = sum(t.numel() * t.element_size() for t in tensors.values())
    if size > max(FREE, GROWTH * stored):
        raise UserError(
            f"{where}: its settings describe networks of {words(size)}, of which the file holds {words(stored)}; it is "
            "damaged, or made to exhaust memory, and is not read"
        )
