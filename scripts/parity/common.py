"""What the comparisons share: our side in float64, the same random numbers on both sides, and the outcome.

A comparison is a function that is handed the path of a checkout of the reference's repository. It imports the
reference's own classes from there, gives both sides the same initial weights and the same batches, makes `UPDATES`
updates on each, and returns an `Outcome`. Both sides compute in float64, so that what remains is a difference of method
and not of rounding.
"""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from peers.checkouts import imported as imported
from torch import Tensor

from offrl import registry, rng
from offrl.data.dataset import DataSpec

UPDATES = 5
BATCH, OBSERVATION, ACTION = 32, 5, 3
Arrays = dict[str, np.ndarray]


@dataclass
class Outcome:
    """The numbers of both sides, ours first."""

    losses: list[dict[str, tuple[float, float]]] = field(default_factory=list)  # of each update, by name
    # after the last update, by network and tensor
    parameters: dict[str, tuple[np.ndarray, np.ndarray]] = field(default_factory=dict)

    def loss_difference(self) -> float:
        """The largest |ours - reference| of a loss, relative to the reference's where that is above 1."""
        return max(
            (abs(a - b) / max(1.0, abs(b)) for update in self.losses for a, b in update.values()), default=float("nan")
        )

    def parameter_difference(self) -> float:
        """The largest |ours - reference| of a parameter, relative to the reference's where that is above 1."""
        gaps = (np.abs(a - b) / np.maximum(1.0, np.abs(b)) for a, b in self.parameters.values())
        return max((float(gap.max()) for gap in gaps if gap.size), default=float("nan"))


@dataclass(frozen=True)
class Case:
    """A method of ours beside one reference."""

    method: str  # name in offrl, with what distinguishes a variant: "iql", "cql, lagrange"
    repository: str  # owner/name on GitHub
    commit: str  # the commit that was compared
    aligned: str  # what was made equal for the comparison, beyond weights, batches and random numbers; "": nothing
    remains: str  # what differs where the method is used as it comes, and why
    needs: tuple[str, ...]  # packages that the reference imports beyond ours
    compare: Callable[[Path], Outcome]


CASES: list[Case] = []


def case(
    method: str,
    repository: str,
    commit: str,
    *,
    aligned: str = "",
    remains: str = "nothing",
    needs: tuple[str, ...] = (),
) -> Callable[[Callable[[Path], Outcome]], Callable[[Path], Outcome]]:
    """Decorator that adds a comparison to the table."""

    def add(compare: Callable[[Path], Outcome]) -> Callable[[Path], Outcome]:
        CASES.append(Case(method, repository, commit, aligned, remains, needs, compare))
        return compare

    return add


def batches(
    seed: int = 0, count: int = UPDATES, rows: int = BATCH, **more: Callable[[np.random.Generator], np.ndarray]
) -> list[Arrays]:
    """Noise in the form of transitions, float64: observations, next_observations [B, O], actions in (-1, 1) [B, A],
    rewards, masks [B].
    """
    g = np.random.default_rng(seed)
    columns: dict[str, Callable[[np.random.Generator], np.ndarray]] = {
        "observations": lambda g: g.normal(size=(rows, OBSERVATION)),
        "actions": lambda g: g.uniform(-0.95, 0.95, (rows, ACTION)),
        "rewards": lambda g: g.normal(size=rows),
        "masks": lambda g: (g.random(rows) > 0.2).astype(np.float64),
        "next_observations": lambda g: g.normal(size=(rows, OBSERVATION)),
        **more,
    }
    return [{name: draw(g) for name, draw in columns.items()} for _ in range(count)]


def tensors(batch: Mapping[str, np.ndarray]) -> dict[str, Tensor]:
    """The columns as tensors of their own dtype."""
    return {k: torch.as_tensor(v) for k, v in batch.items()}


def pattern(shape: Sequence[int], kind: str = "normal", number: int = 0) -> np.ndarray:
    """Fixed noise, the same wherever as many numbers are drawn under the same number: standard normal, or uniform in
    [0, 1).
    """
    shape = tuple(int(n) for n in shape)
    g = np.random.default_rng([int(np.prod(shape)), KINDS.index(kind), number])
    return g.normal(size=shape) if kind == "normal" else g.random(shape)


UNUSED = 99  # in `order`: a draw that nothing comes of
KINDS = ("normal", "uniform", "integer")


class Draws:
    """The random numbers of one update on both sides: the n-th draw of so many numbers is the same on both, and no
    other draw is.

    Ours are counted by their keys, so that a key used twice gives one draw; the reference's by their calls. Draws of
    different sizes or kinds may come in any order; where those of one size come in another order than ours, `order`
    says so.
    """

    def __init__(self) -> None:
        self.restart()

    def restart(self, order: Mapping[int, Sequence[int]] | None = None) -> None:
        """Begin another update. order: for draws of so many numbers, which of ours the reference's first, second, ...
        are.
        """
        self.keys: dict[tuple[int, str], list[int]] = {}
        self.calls: Counter[tuple[int, str]] = Counter()
        self.order = order or {}

    def ours(self, key: Tensor, shape: Sequence[int], kind: str = "normal") -> Tensor:
        """The draw of a key of `offrl.rng`."""
        keys, name = self.keys.setdefault((math.prod(shape), kind), []), int(key.item())
        if name not in keys:
            keys.append(name)
        return torch.as_tensor(pattern(shape, kind, keys.index(name)))

    def theirs(self, shape: Sequence[int], kind: str = "normal") -> np.ndarray:
        """The reference's next draw."""
        size = math.prod(shape)
        number = self.calls[size, kind]
        self.calls[size, kind] += 1
        order = self.order.get(size, ())
        return pattern(shape, kind, order[number] if number < len(order) else number)


draws = Draws()


@contextlib.contextmanager
def shared_noise(order: Mapping[int, Sequence[int]] | None = None) -> Iterator[None]:
    """Inside, our generator and torch's functions draw from `draws`, which begins anew: one update of both sides.

    Replaced: offrl.rng.normal, uniform and randint, torch.randn, randn_like, rand, rand_like, randint, normal of a mean
    and a deviation, Tensor.uniform_ and normal_, and with them torch.distributions. order: see `Draws.restart`.
    """

    def ours_uniform(key: Tensor, shape: Any, low: float = 0.0, high: float = 1.0) -> Tensor:
        return low + (high - low) * draws.ours(key, shape, "uniform")

    def ours_integers(key: Tensor, shape: Any, high: Any) -> Tensor:
        return (draws.ours(key, shape, "integer") * high).long()

    def size(shape: Any) -> tuple[int, ...]:
        return tuple(shape[0]) if len(shape) == 1 and not isinstance(shape[0], int) else tuple(shape)

    def theirs(shape: Any, kind: str = "normal") -> Tensor:
        return torch.as_tensor(draws.theirs(shape, kind))

    def integers(*given: Any, size: Any = None, **named: Any) -> Tensor:
        *bounds, shape = (*given, *(() if size is None else (size,)))
        low, high = (0, *bounds)[-2:] if bounds else (named["low"], named["high"])
        return (low + theirs(shape, "integer") * (high - low)).long()

    def normal(mean: Any, std: Any = 1.0, *_: Any, **__: Any) -> Tensor:
        mean, std = torch.as_tensor(mean), torch.as_tensor(std)
        return mean + std * theirs(torch.broadcast_shapes(mean.shape, std.shape))

    patches: list[Any] = [
        mock.patch.object(rng, "normal", draws.ours),
        mock.patch.object(rng, "uniform", ours_uniform),
        mock.patch.object(rng, "randint", ours_integers),
        mock.patch.object(torch, "randn", lambda *s, **_: theirs(size(s))),
        mock.patch.object(torch, "rand", lambda *s, **_: theirs(size(s), "uniform")),
        mock.patch.object(torch, "randn_like", lambda x, **_: theirs(x.shape)),
        mock.patch.object(torch, "rand_like", lambda x, **_: theirs(x.shape, "uniform")),
        mock.patch.object(torch, "randint", integers),
        mock.patch.object(torch, "normal", normal),
        mock.patch.object(torch.distributions.normal, "_standard_normal", lambda s, **_: theirs(s)),
        mock.patch.object(
            Tensor, "uniform_", lambda x, a=0.0, b=1.0: x.copy_(a + (b - a) * theirs(x.shape, "uniform"))
        ),
        mock.patch.object(Tensor, "normal_", lambda x, m=0.0, s=1.0: x.copy_(m + s * theirs(x.shape))),
    ]
    draws.restart(order)
    with contextlib.ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        yield


@contextlib.contextmanager
def reused_draws() -> Iterator[None]:
    """Inside, our algorithms make the mistake that `Draws` is there to notice: all keys that are made of one are this
    one.
    """
    with (
        mock.patch.object(rng, "split", lambda key, n=2: (key,) * n),
        mock.patch.object(rng, "fold_in", lambda key, data: key),
    ):
        yield


class Ours:
    """An algorithm of offrl, its state in float64, updated eagerly one seed at a time."""

    def __init__(self, method: str, spec: DataSpec | None = None, seed: int = 0, **settings: Any) -> None:
        kind = registry.get("algo", method)
        self.spec = spec or DataSpec((OBSERVATION,), ACTION, action_low=(-1.0,) * ACTION, action_high=(1.0,) * ACTION)
        self.algorithm = kind(kind.Config(**settings), self.spec)
        self.state = _double(self.algorithm.init(seed))
        self.count = 0

    def mlp(self, network: str, member: int | None = None, prefix: str = "") -> list[tuple[np.ndarray, np.ndarray]]:
        """(weight [in, out], bias [out]) of each layer of a perceptron, the head last; `member` of an ensemble."""
        return self.mlp_of(self.state.params[network], member, prefix)

    @staticmethod
    def mlp_of(
        params: Mapping[str, Tensor], member: int | None = None, prefix: str = ""
    ) -> list[tuple[np.ndarray, np.ndarray]]:
        """`mlp` of a module's parameters."""
        names = [
            k.removesuffix(".weight")
            for k in params
            if k.startswith(prefix) and k.endswith(("layers.weight", "head.weight"))
        ]
        names += [
            k.removesuffix(".weight")
            for k in params
            if k.startswith(prefix) and k.endswith(".weight") and ".layers." in "." + k
        ]
        result = []
        for name in sorted(set(names), key=lambda k: (k.endswith("head"), k)):
            weight, bias = params[name + ".weight"].numpy(), params[name + ".bias"].numpy()
            result.append((weight.T, bias) if member is None else (weight[member], bias[member, 0]))
        return result

    def update(self, batch: Mapping[str, np.ndarray]) -> dict[str, float]:
        """One update; its metrics."""
        algorithm = self.algorithm
        phase = self.count % algorithm.traits.period
        state, metrics = algorithm.update(self.state, tensors(batch), rng.make_key(self.count), phase=phase)
        self.state = state._replace(step=state.step + 1)  # as the loop does
        self.count += 1
        return {k: float(v) for k, v in metrics.items()}


def _double(state: Any) -> Any:
    from torch.utils import _pytree as pytree

    return pytree.tree_map(
        lambda x: x.double().clone() if isinstance(x, Tensor) and x.is_floating_point() else x, state
    )


def fill(linears: Sequence[torch.nn.Linear], layers: Sequence[tuple[np.ndarray, np.ndarray]]) -> None:
    """Give torch's linear layers the weights of `Ours.mlp`."""
    assert len(linears) == len(layers), (len(linears), len(layers))
    with torch.no_grad():
        for linear, (weight, bias) in zip(linears, layers, strict=True):
            linear.weight.copy_(torch.as_tensor(weight.T.copy()))
            linear.bias.copy_(torch.as_tensor(bias.copy()))


def linears(module: torch.nn.Module) -> list[torch.nn.Linear]:
    """The linear layers of a module, in order."""
    return [m for m in module.modules() if isinstance(m, torch.nn.Linear)]


def pair_layers(
    name: str, ours: Sequence[tuple[np.ndarray, np.ndarray]], reference: Sequence[torch.nn.Linear]
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Parameters of both sides for `Outcome.parameters`."""
    pairs = {}
    for i, ((weight, bias), linear) in enumerate(zip(ours, reference, strict=True)):
        pairs[f"{name}/w{i}"] = (weight, linear.weight.detach().numpy().T)
        pairs[f"{name}/b{i}"] = (bias, linear.bias.detach().numpy())
    return pairs
