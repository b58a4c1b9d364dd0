"""A policy as one module without memory: raw observations in (and goals, if it takes any), actions in the environment's
range out, random numbers as inputs.

What a policy draws while it acts becomes an input of the graph, one for each draw, so that a stochastic file is a pure
function that can be repeated and compared number by number. This needs nothing of an algorithm: its `act` is run with
`offrl.rng`'s functions replaced by ones that hand out the inputs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from offrl import rng
from offrl.actor import BoundParams, bind
from offrl.errors import UserError, first_line
from offrl.evaluation import streams
from offrl.evaluation.policy import TrainedPolicy
from offrl.evaluation.predict import numbered
from offrl.evaluation.shield import ShieldedPolicy
from offrl.nn.stream_encoder import ENCODER
from offrl.tasks.entries import VECTOR

SMALLEST, LARGEST = 2.0**-33, 1.0 - 2.0**-24  # of the uniform numbers that `rng.categorical` draws
GOALS, PREVIOUS = "goals", "previous_actions"  # inputs like those that are drawn, before them
MEANING = {"normal": "standard normal, independent", "uniform": "uniform in [0, 1), independent"}
PROBES = (3, 5)  # batch sizes that distinguish the batch's dimension of a draw from the others


class Undrawable(Exception):
    """The policy draws random numbers in a way that cannot become an input."""


@dataclass(frozen=True)
class Draw:
    """One draw of random numbers, the goals, or the actions before: an input of the graph beside the observations."""

    kind: str  # a key of MEANING, GOALS or PREVIOUS
    shape: tuple[int | None, ...]  # None: the batch size


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
def _handing_out(noise: Sequence[Tensor]) -> Iterator[None]:
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


def chunked(policy: TrainedPolicy) -> bool:
    """True for a policy that decides on several actions at once, which an exported file then gives."""
    return getattr(policy.actor, "length", 1) > 1 and hasattr(policy.actor, "chunk")


def answer(
    policy: TrainedPolicy,
    observations: np.ndarray,
    goals: np.ndarray | None,
    explore: bool,
    previous: np.ndarray | None = None,
) -> np.ndarray:
    """What an exported file gives, by the policy itself: its first actions [B, A] or [B], or of a policy of chunks
    those [B, h, A]. Of images observations hold whole stacks of frames. previous [B, A]: what a shield takes for the
    actions before.
    """
    if chunked(policy):
        return policy.chunk(observations, explore)
    actor = policy.actor  # behind the encoder stacks are no memory
    start = actor.inner.start if isinstance(actor, streams.EncodingActor) else policy.start
    carry = policy.set_goal(start(len(observations)), goals)
    if previous is not None:
        carry = replace(carry, previous=torch.from_numpy(previous))
    return numbered(policy, policy.step(carry, observations, 0, explore)[0])


def remembers(policy: TrainedPolicy) -> bool:
    """True for a policy whose shield looks at the actions before, which an exported file then takes."""
    return isinstance(policy, ShieldedPolicy) and policy.shield.remembers


def inputs_of(observations: np.ndarray) -> list[np.ndarray]:
    """The graph's inputs for observations: themselves, or each stream."""
    return [np.ascontiguousarray(observations[n]) for n in observations.dtype.names or ()] or [observations]


def observation_names(policy: TrainedPolicy) -> list[str]:
    """The names of these inputs."""
    return list(streams.kind_of(policy.spec).names or ()) if policy.spec.streams else ["observations"]


class PolicyGraph(nn.Module):
    """forward(observations [B, *O], *noise), or with streams forward(*streams, *noise) -> actions [B, A] in the
    environment's range, or [B] int64: what `TrainedPolicy.step` does for its first step. A policy that acts towards a
    goal takes goals [B, G], raw, before the noise. `dtype` is what it calculates in.

    Of a policy of chunks: actions [B, h, A], of which as many are played as its setting `action_steps` says before it
    is asked again."""

    observation_mean: Tensor
    observation_std: Tensor
    action_low: Tensor
    action_high: Tensor

    def __init__(self, policy: TrainedPolicy, explore: bool, dtype: torch.dtype = torch.float32) -> None:
        """`explore`: sample an action instead of taking the greedy one. Raises UserError for a policy with a memory.

        An actor that needs more than one observation may define `graph(explore) -> Module`, from normalised
        observations [B, O] (and noise) to actions in [-1, 1]; it is then used in place of `act`.
        """
        super().__init__()
        algorithm, spec = policy.algorithm, policy.spec
        name = algorithm.config.name
        if spec.streams and policy.goal_conditioned and not spec.goal_dim:
            raise UserError(
                f"a policy of {name} whose goals are images cannot be exported; policy.act(..., goal=) takes them"
            )
        self.streams = observation_names(policy) if spec.streams else []
        vector = np.dtype((np.float32, spec.observation_shape))
        self.kind = streams.kind_of(spec, spec.frames) if spec.streams else vector
        self.dtype, self.explore, self.discrete, self.first_choice = dtype, explore, spec.discrete, spec.first_choice
        self.shape = tuple(spec.observation_shape)
        self.size = spec.observation_dim
        state = bind(algorithm, pytree.tree_map(lambda x: x.to(dtype) if x.is_floating_point() else x, policy.state))
        with torch.no_grad():
            self._actor = algorithm.actor(state)
        make = getattr(self._actor, "graph", None)
        graph_module: nn.Module | None = None if make is None else make(explore)
        if graph_module is None and self._actor.start(1) is not None:
            raise UserError(
                f"a policy of {name} remembers the episode so far, and an exported file maps one observation to one "
                "action: it cannot be exported (an actor that defines graph() can)"
            )
        self.shield: Callable[..., Any] | None = None
        if isinstance(policy, ShieldedPolicy):
            self.shield = ShieldedPolicy(policy, policy.shield.bound(state, dtype)).guard
        if isinstance(policy, ShieldedPolicy) and chunked(policy):
            raise UserError(
                f"shield={policy.shield.name} looks at each step, and an exported file of {name} gives chunks of "
                "actions for one observation: it cannot be exported"
            )
        self.remembers = remembers(policy)
        self.aimed = graph_module is None and policy.goal_conditioned
        self.own_goals = spec.goal_dim > 0  # not observations, and never normalised
        self.module = graph_module
        bound = {name: params.module for name, params in state.params.items() if isinstance(params, BoundParams)}
        self.nets = nn.ModuleDict(bound if graph_module is None else {})
        if policy.mean is not None and policy.std is not None:
            self.register_buffer("observation_mean", policy.mean.to(dtype))
            self.register_buffer("observation_std", policy.std.to(dtype))
        self.normalised = policy.mean is not None and policy.std is not None
        if not self.discrete:
            self.register_buffer("action_low", torch.from_numpy(policy.low).to(dtype))
            self.register_buffer("action_high", torch.from_numpy(policy.high).to(dtype))
        self.eval().requires_grad_(False)

    def forward(self, observations: Tensor, *inputs: Tensor) -> Tensor:
        if self.streams:
            observed = {n: x.to(self.dtype) for n, x in zip(self.streams, (observations, *inputs), strict=False)}
            inputs = inputs[len(self.streams) - 1 :]
            if VECTOR in observed:
                observed[VECTOR] = self._normalise(observed[VECTOR])
            x = self._actor.apply(ENCODER, observed)
        else:
            x = observations.to(self.dtype)
            if len(self.shape) != 1:
                x = x.reshape(-1, self.size)
            x = self._normalise(x)
        carry, noise = None, inputs
        if self.aimed:
            goals, noise = inputs[0].to(self.dtype), inputs[1:]
            carry = self._actor.set_goal(None, goals if self.own_goals else self._normalise(goals))
        previous, noise = (noise[0].to(self.dtype), noise[1:]) if self.remembers else (None, noise)
        with _handing_out([x.to(self.dtype) for x in noise]):
            if self.module is not None:
                actions = self.module(x)
            else:
                actions, _ = self._actor.act(carry, x, self._actor.state.key, explore=self.explore)
        if self.discrete:
            return actions + self.first_choice if self.first_choice else actions
        low, high = self.action_low, self.action_high
        actions = torch.clamp(low + (actions + 1.0) * 0.5 * (high - low), low, high)
        return actions if self.shield is None else self._shielded(observations.to(self.dtype), actions, previous)

    def _shielded(self, observations: Tensor, actions: Tensor, previous: Tensor | None) -> Tensor:
        assert self.shield is not None
        try:
            return self.shield(observations.reshape(-1, self.size), actions, previous).actions
        except UserError as error:
            reason = first_line(error.__cause__ or error)
            raise UserError(f"the shield cannot be exported, for it is not of torch alone ({reason})") from None

    def examples(self, count: int) -> tuple[Tensor, ...]:
        """Observations to trace the graph with: zeros."""
        return tuple(torch.from_numpy(x) for x in inputs_of(np.zeros((count, *self.kind.shape), self.kind.base)))

    def _normalise(self, x: Tensor) -> Tensor:
        return (x - self.observation_mean) / self.observation_std if self.normalised else x


def draws_of(policy: TrainedPolicy, explore: bool) -> tuple[Draw, ...]:
    """The policy's inputs beside observations: goals, if it is goal-conditioned, the actions before, if its shield
    looks at them, and the random draws of its actions.

    Raises Undrawable where a draw depends on the batch in another way than by one dimension of its size.
    """
    spec, inputs = policy.spec, []
    width = spec.goal_dim or spec.observation_dim
    for batch in PROBES:
        goals = np.zeros((batch, width), np.float32)
        with recording() as draws:
            observed = streams.kind_of(spec, spec.frames)
            rows = np.zeros(batch, observed) if spec.streams else np.zeros((batch, spec.observation_dim), np.float32)
            answer(policy, rows, goals, explore)
        inputs.append([(kind, tuple(x.shape)) for kind, x in draws])
    first, second = inputs
    if [(kind, len(shape)) for kind, shape in first] != [(kind, len(shape)) for kind, shape in second]:
        raise Undrawable("what it draws depends on the number of observations")
    result = [Draw(GOALS, (None, width))] if policy.goal_conditioned else []
    result += [Draw(PREVIOUS, (None, spec.action_dim))] if remembers(policy) else []
    for (kind, a), (_, b) in zip(first, second, strict=True):
        shape = tuple(None if (m, n) == PROBES else m if m == n else -1 for m, n in zip(a, b, strict=True))
        if -1 in shape:
            raise Undrawable(f"it draws numbers of shape {a} for {PROBES[0]} observations and {b} for {PROBES[1]}")
        result.append(Draw(kind, shape))
    return tuple(result)


def input_names(draws: Sequence[Draw]) -> list[str]:
    """The names of the inputs: `goals`, `previous_actions`, `noise`, or `noise_0`, `noise_1`, ..."""
    known = [d.kind for d in draws if d.kind in (GOALS, PREVIOUS)]
    num_draws = len(draws) - len(known)
    return known + (["noise"] if num_draws == 1 else [f"noise_{i}" for i in range(num_draws)])
