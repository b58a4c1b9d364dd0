"""Trying one update of a grid before a run begins."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from offrl.algorithm import Algorithm, with_settings
from offrl.errors import UserError, warn
from offrl.settings.field import marked
from offrl.settings.replicas import Replica, hyper
from offrl.training.engine import Plan, first_state
from offrl.training.step import make_step


class _Used(TorchFunctionMode):
    """Notes which settings of `config` take part in an operation, while they are tensors."""

    def __init__(self, config: Any, names: Sequence[str]) -> None:
        super().__init__()
        self.config, self.names = config, names
        self.names_used: set[str] = set()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        operands = {id(x) for x in pytree.tree_leaves((args, kwargs))}
        self.names_used |= {name for name in self.names if id(getattr(self.config, name)) in operands}
        return func(*args, **kwargs)


def try_update(plan: Plan, source: Any, replicas: Sequence[Replica], device: torch.device) -> None:
    """Raise UserError where the algorithm cannot be trained with the grid's settings side by side: an update is tried,
    and dropped. Warns of settings that make no difference."""
    columns = hyper(replicas)
    values = {name: torch.tensor(column[:2], dtype=torch.float32, device=device) for name, column in columns.items()}
    if not values or len(replicas) < 2:
        return
    algorithm = plan.algorithm
    step = make_step(algorithm, source, batch_size=plan.batch_size, replicas=2, hyper=values, precision=plan.precision)
    state = pytree.tree_map(lambda x: x.to(device), first_state(algorithm, replicas[:2]))
    used = _Used(step.algorithm.config, list(values))
    try:
        with used:
            state, _ = step.run(state, {}, 0, algorithm.traits.period)
            if algorithm.every:
                step.run(state, {}, algorithm.every, algorithm.traits.period)
    except UserError:
        raise
    except Exception as error:  # whatever a third-party update does with a number that is now a tensor
        names = " or ".join(f"grid.{name}" for name in values)
        raise UserError(
            f"{names}: the update of {plan.algorithm.config.name} cannot take a value of its own for each replica "
            f"({type(error).__name__}: {str(error).splitlines()[0]}); train each value by itself: "
            f"algo.{next(iter(values))}=VALUE"
        ) from error
    looked_at = {*used.names_used, *marked(algorithm.config, "acting")}
    for name, column in columns.items():
        if name not in looked_at and not _begins_with(algorithm, name, column):
            warn(
                f"grid.{name}: no update of {algorithm.config.name} with these settings looks at algo.{name}, so its "
                "values train alike"
            )


def _begins_with(algorithm: Algorithm, name: str, column: Sequence[float]) -> bool:
    """True where the state before the first update depends on a setting, as it does on the first value of a weight that
    is learnt.
    """
    states = [
        pytree.tree_leaves(with_settings(algorithm, {name: value}).init(0)) for value in (min(column), max(column))
    ]
    return not all(map(torch.equal, *states))
