"""What a policy draws while it acts, as inputs of its graph: one for each draw."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from offrl import rng

SMALLEST, LARGEST = 2.0**-33, 1.0 - 2.0**-24  # of the uniform numbers that `rng.categorical` draws
# inputs like those that are drawn, before them: the memory of the episode is a tree of tensors
GOALS, PREVIOUS, MEMORY = "goals", "previous_actions", "state"
MEANING = {"normal": "standard normal, independent", "uniform": "uniform in [0, 1), independent"}


class Undrawable(Exception):
    """The policy draws random numbers in a way that cannot become an input."""


@dataclass(frozen=True)
class Draw:
    """One draw of random numbers, the goals, the actions before, or a part of the memory: an input of the graph beside
    the observations.
    """

    kind: str  # a key of MEANING, GOALS, PREVIOUS or MEMORY
    shape: tuple[int | None, ...]  # None: the batch size
    stream: str = ""  # of goals that are observations of several streams: which of them; of memory: the part's number
    dtype: torch.dtype = torch.float32


@contextlib.contextmanager
def _rng(**functions: Callable[..., Any]) -> Iterator[None]:
    """`offrl.rng` with some of its functions replaced, for every thread: nothing may train in this process
    meanwhile.
    """
    old = {name: getattr(rng, name) for name in functions}
    try:
        for name, function in functions.items():
            setattr(rng, name, function)
        yield
    finally:
        for name, function in old.items():
            setattr(rng, name, function)


@contextlib.contextmanager
def recording() -> Iterator[list[tuple[str, Tensor]]]:
    """Gives the list to which each draw of a policy that acts meanwhile is added as (kind, numbers). The policy notices
    nothing.
    """
    draws: list[tuple[str, Tensor]] = []
    normal, uniform, categorical, bits, shift = rng.normal, rng.uniform, rng.categorical, rng.bits, rng._shift

    def record_normal(key: Tensor, shape: tuple[int, ...]) -> Tensor:
        draws.append(("normal", normal(key, shape)))
        return draws[-1][1]

    def record_uniform(key: Tensor, shape: tuple[int, ...], low: float = 0.0, high: float = 1.0) -> Tensor:
        draws.append(("uniform", uniform(key, shape)))
        return uniform(key, shape, low, high)

    def record_categorical(key: Tensor, logits: Tensor) -> Tensor:
        word = bits(key, tuple(logits.shape))
        draws.append(("uniform", ((shift(word, 32).float() + 0.5) * 2.0**-32).clamp(max=LARGEST)))
        return categorical(key, logits)

    with _rng(normal=record_normal, uniform=record_uniform, categorical=record_categorical):
        yield draws


@contextlib.contextmanager
def inputs_for_draws(noise: Sequence[Tensor]) -> Iterator[None]:
    """Policies that act meanwhile get `noise`, in its order, for what they draw; keys mean nothing."""
    unused = list(noise)

    def normal(key: Tensor, shape: tuple[int, ...]) -> Tensor:
        return unused.pop(0)

    def uniform(key: Tensor, shape: tuple[int, ...], low: float = 0.0, high: float = 1.0) -> Tensor:
        return unused.pop(0) * (high - low) + low

    def categorical(key: Tensor, logits: Tensor) -> Tensor:
        return (logits - torch.log(-torch.log(unused.pop(0).clamp(SMALLEST, LARGEST)))).argmax(-1)

    def refuse(*_: Any, **__: Any) -> Any:
        raise Undrawable(
            "it draws whole numbers or bits, and only normal, uniform and categorical draws can become inputs"
        )

    def same(key: Tensor, *_: Any) -> Tensor:
        return key

    def split(key: Tensor, n: int = 2) -> tuple[Tensor, ...]:
        return (key,) * n

    replaced: dict[str, Callable[..., Any]] = {
        "normal": normal,
        "uniform": uniform,
        "categorical": categorical,
        "fold_in": same,
        "split": split,
    }
    with _rng(**replaced, bits=refuse, randint=refuse, randint_at=refuse):
        yield


def later_names(draws: Sequence[Draw]) -> list[str]:
    """The names of the outputs beside the actions: the memory's parts after them."""
    return [f"next_{d.kind}_{d.stream}" for d in draws if d.kind == MEMORY]


def input_names(draws: Sequence[Draw]) -> list[str]:
    """The names of the inputs: `goals`, of several streams `goals_STREAM`, `previous_actions`, `state_0`, `state_1`,
    ..., and `noise`, or `noise_0`, `noise_1`, ...
    """
    names = [f"{d.kind}_{d.stream}" if d.stream else d.kind for d in draws if d.kind not in MEANING]
    num_draws = len(draws) - len(names)
    return names + (["noise"] if num_draws == 1 else [f"noise_{i}" for i in range(num_draws)])
