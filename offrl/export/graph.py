"""A policy as one module: raw observations in (and goals, if it takes any), actions in the environment's range out,
random numbers as inputs. The memory of a policy that has one goes in and comes out.

What a policy draws while it acts becomes an input of the graph, one for each draw, so that a stochastic file is a pure
function that can be repeated and compared number by number. This needs nothing of an algorithm: its `act` is run with
`offrl.rng`'s functions replaced by ones that hand out the inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from offrl.actor import BoundParams, Carry, bind
from offrl.errors import UserError, first_line
from offrl.evaluation import streams
from offrl.evaluation.past import window_moments
from offrl.evaluation.policy import TrainedPolicy
from offrl.evaluation.predict import numbered
from offrl.evaluation.shield import ShieldedPolicy
from offrl.export.draws import GOALS, MEMORY, PREVIOUS, Draw, Undrawable, inputs_for_draws, recording
from offrl.nn.encoders.streams import ENCODER
from offrl.tasks.entries import VECTOR

PROBES = (3, 5)  # batch sizes that distinguish the batch's dimension of a draw from the others


def chunked(policy: TrainedPolicy) -> bool:
    """True for a policy that decides on several actions at once, which an exported file then gives."""
    return getattr(policy.actor, "length", 1) > 1 and hasattr(policy.actor, "chunk")


def answer(
    policy: TrainedPolicy,
    observations: np.ndarray,
    goals: np.ndarray | None,
    explore: bool,
    previous: np.ndarray | None = None,
    memory: Carry = None,
) -> tuple[np.ndarray, Carry]:
    """What an exported file gives, by the policy itself: its first actions [B, A] or [B], or of a policy of chunks
    those [B, h, A], and its memory after them. Of images observations hold whole stacks of frames, and of windows
    these. previous [B, A]: what a shield takes for the actions before. memory: of B episodes; None: they begin.
    """
    if chunked(policy):
        return policy.chunk(observations, explore), None
    actor = policy.actor  # behind the encoder stacks are no memory
    start = actor.inner.start if isinstance(actor, streams.EncodingActor) else policy.start
    carry = policy.set_goal(start(len(observations)) if memory is None else memory, goals)
    if previous is not None:
        carry = replace(carry, previous=torch.from_numpy(previous))
    actions, carry = policy.step(carry, observations, 0, explore)
    return numbered(policy, actions), carry


def remembers(policy: TrainedPolicy) -> bool:
    """True for a policy whose shield looks at the actions before, which an exported file then takes."""
    return isinstance(policy, ShieldedPolicy) and policy.shield.remembers


def memory_of(policy: TrainedPolicy) -> list[Tensor]:
    """The parts of the memory of one episode that begins, [1, ...], which an exported file takes and gives: of a policy
    that may begin single episodes anew.
    """
    actor = policy.actor.inner if isinstance(policy.actor, streams.EncodingActor) else policy.actor
    return parts_of(actor.start(1)) if actor.resettable and not hasattr(actor, "graph") else []


def parts_of(memory: Carry) -> list[Tensor]:
    """The tensors of a memory; none without one."""
    return [] if memory is None else pytree.tree_leaves(memory)


def inputs_of(observations: np.ndarray) -> list[np.ndarray]:
    """The graph's inputs for observations: themselves, or each stream."""
    return [np.ascontiguousarray(observations[n]) for n in observations.dtype.names or ()] or [observations]


def observation_names(policy: TrainedPolicy) -> list[str]:
    """The names of these inputs."""
    return list(streams.kind_of(policy.spec).names or ()) if policy.spec.streams else ["observations"]


class PolicyGraph(nn.Module):
    """forward(observations [B, *O], *noise), or with streams forward(*streams, *noise) -> actions [B, A] in the
    environment's range, or [B] int64: what `TrainedPolicy.step` does for its first step. A policy that sees windows
    takes them in place of observations. One that acts towards a goal takes goals [B, G], raw, or goals of each stream,
    before the noise. One with a memory that may begin single episodes anew takes its parts before the noise, too, and
    gives (actions, *parts). `dtype` is what it calculates in.

    Of a policy of chunks: actions [B, h, A], of which as many are played as its setting `action_steps` says before it
    is asked again."""

    observation_mean: Tensor
    observation_std: Tensor
    action_low: Tensor
    action_high: Tensor

    def __init__(self, policy: TrainedPolicy, explore: bool, dtype: torch.dtype = torch.float32) -> None:
        """`explore`: sample an action instead of taking the greedy one. Raises UserError for a policy with a
        memory that cannot be an input.

        An actor that needs more than one observation may define `graph(explore) -> Module`, from normalised
        observations [B, O] (and noise) to actions in [-1, 1]; it is then used in place of `act`.
        """
        super().__init__()
        algorithm, spec = policy.algorithm, policy.spec
        name = algorithm.config.name
        self.streams = observation_names(policy) if spec.streams else []
        self.kind = streams.kind_of(spec, window=True)
        self.dtype, self.explore, self.discrete, self.first_choice = dtype, explore, spec.discrete, spec.first_choice
        self.encoded = spec.encoder is not None
        self.shape = tuple(spec.observation_shape)
        self.size = spec.observation_dim
        state = bind(algorithm, pytree.tree_map(lambda x: x.to(dtype) if x.is_floating_point() else x, policy.state))
        with torch.no_grad():
            self._actor = algorithm.actor(state)
        make = getattr(self._actor, "graph", None)
        graph_module: nn.Module | None = None if make is None else make(explore)
        start = self._actor.start(1) if graph_module is None else None
        leaves, self.memory = pytree.tree_flatten(() if start is None else start)
        self.parts = len(leaves)
        if start is not None and (
            policy.goal_conditioned or not self._actor.resettable or isinstance(policy, ShieldedPolicy)
        ):
            raise UserError(
                f"a policy of {name} remembers the episode so far: it cannot be exported (an actor with graph() can)"
            )
        self.shield: Callable[..., Any] | None = None
        if isinstance(policy, ShieldedPolicy):
            self.shield = ShieldedPolicy(policy, policy.shield.bound(state, dtype)).guard
            if chunked(policy):
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
        moments = window_moments(spec)
        if moments is not None:
            self.register_buffer("observation_mean", torch.from_numpy(moments[0]).to(dtype))
            self.register_buffer("observation_std", torch.from_numpy(moments[1]).to(dtype))
        self.normalised = moments is not None
        if not self.discrete:
            self.register_buffer("action_low", torch.from_numpy(policy.low).to(dtype))
            self.register_buffer("action_high", torch.from_numpy(policy.high).to(dtype))
        self.eval().requires_grad_(False)

    def forward(self, observations: Tensor, *inputs: Tensor) -> Any:
        if self.streams:
            first = len(self.streams) - 1
            x, inputs = self._encode((observations, *inputs[:first])), inputs[first:]
        else:
            x = observations.to(self.dtype)
            if len(self.shape) != 1:
                x = x.reshape(-1, self.size)
            x = self._normalise(x)
            if self.encoded:
                x = self._actor.apply(ENCODER, {VECTOR: x})
        carry, noise = None, inputs
        if self.aimed:
            count = len(self.streams) if self.streams and not self.own_goals else 1
            goals, noise = inputs[0].to(self.dtype), inputs[count:]
            if not self.own_goals:
                goals = self._encode(inputs[:count]) if self.streams else self._normalise(goals)
            carry = self._actor.set_goal(None, goals)
        previous, noise = (noise[0].to(self.dtype), noise[1:]) if self.remembers else (None, noise)
        if self.parts:
            parts = [x.to(self.dtype) if x.is_floating_point() else x for x in noise[: self.parts]]
            carry, noise = pytree.tree_unflatten(parts, self.memory), noise[self.parts :]
        with inputs_for_draws([x.to(self.dtype) for x in noise]):
            if self.module is not None:
                actions = self.module(x)
            else:
                actions, carry = self._actor.act(carry, x, self._actor.state.key, explore=self.explore)
        if self.discrete:
            actions = actions + self.first_choice if self.first_choice else actions
        else:
            low, high = self.action_low, self.action_high
            actions = torch.clamp(low + (actions + 1.0) * 0.5 * (high - low), low, high)
        if self.shield is not None:
            actions = self._shielded(observations.to(self.dtype), actions, previous)
        return (actions, *pytree.tree_leaves(carry)) if self.parts else actions

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

    def _encode(self, parts: Sequence[Tensor]) -> Any:
        """What the actor takes of all streams, by its encoder a vector [B, Z]; a single frame fills its stack."""
        observed = {}
        for name, part in zip(self.streams, parts, strict=True):
            x, shape = part.to(self.dtype), self.kind[name].shape
            if x.ndim == 4 and x.shape[-1] < shape[-1]:
                x = x.repeat(1, 1, 1, shape[-1] // x.shape[-1])
            observed[name] = self._normalise(x) if name == VECTOR else x
        return observed if self._actor.algorithm.encoder is None else self._actor.apply(ENCODER, observed)

    def _normalise(self, x: Tensor) -> Tensor:
        return (x - self.observation_mean) / self.observation_std if self.normalised else x


def goal_kind(policy: TrainedPolicy) -> np.dtype:
    """The type of one goal: numbers, or where goals are observations with images a field for each stream."""
    spec = policy.spec
    if spec.streams and not spec.goal_dim:
        return streams.kind_of(spec)
    return np.dtype((np.float32, (spec.goal_dim or spec.observation_dim,)))


def draws_of(policy: TrainedPolicy, explore: bool) -> tuple[Draw, ...]:
    """The policy's inputs beside observations: goals, if it is goal-conditioned, the actions before, if its shield
    looks at them, its memory, and the random draws of its actions.

    Raises Undrawable where a draw depends on the batch in another way than by one dimension of its size.
    """
    spec, inputs, kind_of_goals = policy.spec, [], goal_kind(policy)
    for batch in PROBES:
        goals = np.zeros(batch, kind_of_goals)
        with recording() as draws:
            observed = streams.kind_of(spec, window=True)
            answer(policy, np.zeros((batch, *observed.shape), observed.base), goals, explore)
        inputs.append([(kind, tuple(x.shape)) for kind, x in draws])
    first, second = inputs
    if [(kind, len(shape)) for kind, shape in first] != [(kind, len(shape)) for kind, shape in second]:
        raise Undrawable("what it draws depends on the number of observations")
    result = []
    if policy.goal_conditioned:
        for stream in kind_of_goals.names or ("",):
            part = kind_of_goals[stream] if stream else kind_of_goals
            images = part.base == np.uint8
            result.append(Draw(GOALS, (None, *part.shape), stream, torch.uint8 if images else torch.float32))
    result += [Draw(PREVIOUS, (None, spec.action_dim))] if remembers(policy) else []
    result += [Draw(MEMORY, (None, *x.shape[1:]), str(i), x.dtype) for i, x in enumerate(memory_of(policy))]
    for (kind, a), (_, b) in zip(first, second, strict=True):
        shape = tuple(None if (m, n) == PROBES else m if m == n else -1 for m, n in zip(a, b, strict=True))
        if -1 in shape:
            raise Undrawable(f"it draws numbers of shape {a} for {PROBES[0]} observations and {b} for {PROBES[1]}")
        result.append(Draw(kind, shape))
    return tuple(result)
