"""Who proposes settings: random and quasi-random numbers, a grid, or Optuna's samplers.

Every call is a function of its arguments: the sampler of a batch is seeded with the tune's seed and the number of
settings that came before, and told all their results anew. A tune that was interrupted therefore asks for the same
settings as one that was not.
"""

from __future__ import annotations

import functools
import importlib.util
import itertools
import math
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from offrl.errors import UserError
from offrl.tuning.config import OPTUNA
from offrl.tuning.search.space import Space, rounded

Values = dict[str, Any]
# settings so far and their results, larger is better; None: diverged
History = Sequence[tuple[Mapping[str, Any], tuple[float, ...] | None]]
TRIES = 200  # draws of an unseen setting before a space counts as used up


def propose(space: Space, proposer: str, count: int, history: History, seed: int) -> list[Values]:
    """`count` settings, none of which was told before, or fewer where a space of listed values has no more.

    The first one of all is what would be trained without a search. history: in the order in which they were proposed.
    Raises UserError where a package is missing.
    """
    first = [dict(space.default)] if not history else []
    known_keys = {key(space, v) for v, _ in history} | {key(space, v) for v in first}
    fresh: list[Values] = list(first)
    most = math.prod(len(d.values) if d.values else 10**9 for d in space.dimensions)
    for values in PROPOSERS[proposer](space, count, history, seed):
        if len(fresh) >= count or len(known_keys) >= most + 1:
            break
        if key(space, values) not in known_keys:
            known_keys.add(key(space, values))
            fresh.append(values)
    return fresh[:count]


def key(space: Space, values: Mapping[str, Any]) -> tuple[Any, ...]:
    """What makes two settings the same."""
    return (*(values[n] for n in space.tensors), *space.program(values))


def fold(*parts: int | str) -> int:
    """A seed made of numbers and texts, the same on every machine."""
    return int(
        np.random.SeedSequence([p if isinstance(p, int) else zlib.crc32(p.encode()) for p in parts]).generate_state(1)[
            0
        ]
    )


def _random(space: Space, count: int, history: History, seed: int) -> Iterator[Values]:
    generator = np.random.Generator(np.random.PCG64(fold(seed, space.algo, len(history))))
    for _ in range(count + TRIES):
        yield {
            d.name: d.at(u)
            for d, u in zip(space.dimensions, generator.random(len(space.dimensions)).tolist(), strict=True)
        }


def _sobol(space: Space, count: int, history: History, seed: int) -> Iterator[Values]:
    """One scrambled sequence for the whole tune, gone on with where it stopped; Owen's scrambling of Sobol's points,
    from torch.
    """
    from torch.quasirandom import SobolEngine

    engine = SobolEngine(len(space.dimensions), scramble=True, seed=fold(seed, space.algo))
    for point in engine.draw(len(history) + count + TRIES)[len(history) :].tolist():
        yield {d.name: d.at(u) for d, u in zip(space.dimensions, point, strict=True)}


def _grid(space: Space, count: int, history: History, seed: int) -> Iterator[Values]:
    """As many levels of each range as `count` settings allow beside the first one, in the middles of equal shares; all
    values of a list.
    """
    free = sum(1 for d in space.dimensions if not d.values)
    fixed = math.prod(len(d.values) for d in space.dimensions if d.values)
    levels = 1
    while free and fixed * (levels + 1) ** free < count:
        levels += 1
    sizes = [len(d.values) or levels for d in space.dimensions]
    for index in itertools.product(*map(range, sizes)):
        yield {d.name: d.at((i + 0.5) / n) for d, i, n in zip(space.dimensions, index, sizes, strict=True)}


def _optuna(sampler: str, space: Space, count: int, history: History, seed: int) -> Iterator[Values]:
    optuna = load_optuna(sampler)
    criteria = max((len(r) for _, r in history if r is not None), default=1)
    study = optuna.create_study(
        directions=["maximize"] * criteria,
        sampler=_sampler(optuna, sampler, fold(seed, space.algo, len(history)), count),
    )
    shapes = distributions(optuna, space)
    for values, result in history:
        if (trial := as_trial(optuna, space, values, result)) is not None:
            study.add_trial(trial)
    for _ in range(count + TRIES):
        params = study.ask(shapes).params
        yield {d.name: d.values[int(params[d.name])] if d.values else rounded(params[d.name]) for d in space.dimensions}


PROPOSERS: dict[str, Callable[[Space, int, History, int], Iterator[Values]]] = {
    "random": _random,
    "sobol": _sobol,
    "grid": _grid,
    **{name: functools.partial(_optuna, name) for name in OPTUNA},
}


# --------------------------------------------------------------------------------------------------------------- Optuna


def load_optuna(proposer: str = "") -> Any:
    """The package, quiet. Raises UserError where it, or what a sampler needs besides, is not installed."""
    prefix = f"proposer={proposer} needs" if proposer else "this needs"
    if importlib.util.find_spec("optuna") is None or (
        proposer == "cmaes" and importlib.util.find_spec("cmaes") is None
    ):
        raise UserError(f"{prefix} pip install 'offrl[tune]'; proposer=sobol and proposer=random need nothing")
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return optuna


def _sampler(optuna: Any, name: str, seed: int, count: int) -> Any:
    import warnings

    samplers = optuna.samplers
    with warnings.catch_warnings():  # of arguments that Optuna calls experimental
        warnings.simplefilter("ignore")
        if name == "tpe":
            return samplers.TPESampler(
                n_startup_trials=10, multivariate=True, group=True, constant_liar=True, seed=seed
            )
        if name == "cmaes":
            return samplers.CmaEsSampler(popsize=max(4, count), seed=seed)
        return samplers.NSGAIISampler(population_size=max(4, count), seed=seed)


def distributions(optuna: Any, space: Space) -> dict[str, Any]:
    """Optuna's distribution of each dimension; of a list, of the place in it."""
    kinds = optuna.distributions
    return {
        d.name: kinds.IntDistribution(0, len(d.values) - 1)
        if d.values
        else kinds.FloatDistribution(d.low, d.high, log=d.log)
        for d in space.dimensions
    }


def as_trial(
    optuna: Any, space: Space, values: Mapping[str, Any], result: tuple[float, ...] | None, **attributes: Any
) -> Any:
    """A finished trial of Optuna's; None for a setting outside the space, as the default may be."""
    params: dict[str, float] = {}
    for d in space.dimensions:
        value = values[d.name]
        if d.values:
            if value not in d.values:
                return None
            params[d.name] = d.values.index(value)
        elif isinstance(value, (int, float)) and rounded(d.low) <= value <= rounded(d.high):
            params[d.name] = min(max(float(value), d.low), d.high)
        else:
            return None
    state = optuna.trial.TrialState
    return optuna.trial.create_trial(
        params=params,
        distributions=distributions(optuna, space),
        state=state.FAIL if result is None else state.COMPLETE,
        values=None if result is None else list(result),
        user_attrs=attributes,
    )
