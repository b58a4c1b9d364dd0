"""The kinds of shields: a rule of the user's, critics of costs, and a model of the environment with a constraint."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from offrl.algorithm import TrainState
from offrl.errors import UserError
from offrl.evaluation.policy import TrainedPolicy
from offrl.evaluation.shield import Correction, ShieldedPolicy
from offrl.system.user_code import function_of, guarded
from offrl.world_models.model import Trained, load

CANDIDATES, SPREAD = 16, 0.2  # actions near the policy's, and their standard deviation in halves of the range
ROUNDS = 3  # corrections by the linearised constraint
DIFFERENCE = 0.01  # in halves of the range, between actions whose outcomes give the constraint's gradient
REMAINDER = 1e-3  # of a violation, below which it counts as corrected


class Rule:
    """A function of the user's: rule(observations, actions), or rule(observations, actions, previous actions), gives a
    pair of lowest and highest actions, or corrected actions, [E, A] or what broadcasts to it, as tensors.

    Where its bounds lie outside of the environment's range, the safe action is played.
    """

    fault = "it gave NaN, or a lower bound above the upper one"

    def __init__(self, rule: str | Callable[..., Any], policy: TrainedPolicy, safe_action: Tensor) -> None:
        """rule: the function, or file.py:FUNCTION. safe_action [A]. Raises UserError where there is no such
        function."""
        self.rule, self.safe_action = rule, safe_action
        self.low, self.high = torch.from_numpy(policy.low), torch.from_numpy(policy.high)
        self.name = rule if isinstance(rule, str) else getattr(rule, "__name__", type(rule).__name__)
        self.remembers = len(inspect.signature(self.function).parameters) > 2

    def __getstate__(self) -> dict[str, Any]:  # a process of its own reads the file itself
        return {k: v for k, v in self.__dict__.items() if k != "function"}

    @functools.cached_property
    def function(self) -> Callable[..., Any]:
        return function_of(self.rule, "shield") if isinstance(self.rule, str) else self.rule

    def __call__(self, observations: Tensor, actions: Tensor, previous: Tensor) -> Correction:
        inputs = (observations, actions, previous)[: 3 if self.remembers else 2]
        result = guarded(f"shield={self.name}", self.function, *inputs)
        pair = isinstance(result, tuple | list) and len(result) == 2
        low, high = (self._tensor(x, actions) for x in (result if pair else (result, result)))
        faulty = ~(low <= high).all(-1)  # as NaN never is
        outside = ((low > self.high) | (high < self.low)).any(-1)
        unsolved = outside if pair else torch.zeros_like(outside)
        inside = torch.minimum(torch.maximum(actions, low), high)
        safe = torch.where(unsolved.unsqueeze(-1), self.safe_action.to(actions.dtype), inside)
        return Correction(safe, unsolved, faulty)

    def bound(self, state: TrainState, dtype: torch.dtype) -> Rule:
        return self

    def _tensor(self, value: Any, actions: Tensor) -> Tensor:
        """One of the rule's results as [E, A]. Raises UserError."""
        try:
            return torch.as_tensor(value, dtype=actions.dtype).broadcast_to(actions.shape)
        except (TypeError, ValueError, RuntimeError):
            shape = list(getattr(value, "shape", np.shape(value)))
            raise UserError(
                f"shield={self.name}: it gave {type(value).__name__} of shape {shape}; actions of shape "
                f"{list(actions.shape)} are due, or a pair of lowest and highest ones"
            ) from None


class CriticShield:
    """The policy's action where its cost keeps the limit; else of 16 actions near it the one of the largest Q among
    those that do; of none does, the cheapest.
    """

    name, fault, remembers = "critic", "a critic gave NaN", False

    def __init__(self, policy: TrainedPolicy) -> None:
        """Raises UserError for a policy without critics of costs."""
        part: Any = getattr(policy.algorithm, "constraint", None)
        if part is None:
            raise UserError(
                f"shield=critic compares actions by critics of costs, which this policy of "
                f"{policy.algorithm.config.name} has not: train it with algo.cost_limit=, or write a rule"
            )
        if policy.find_critic is not None:
            policy.state = policy.state._replace(params={**policy.state.params, **policy.find_critic(policy)})
        self.policy, self.part, self.state = policy, part, policy.state
        noise = np.random.default_rng(0).standard_normal((CANDIDATES, policy.spec.action_dim))
        self.offsets = torch.from_numpy(np.concatenate([0.0 * noise[:1], SPREAD * noise]))

    def __call__(self, observations: Tensor, actions: Tensor, previous: Tensor) -> Correction:
        algorithm, count = self.policy.algorithm, len(self.offsets)
        scaled = scale(self.policy, actions)
        near = (scaled.unsqueeze(1) + self.offsets.to(actions.dtype)).clamp(-1.0, 1.0)  # [E, C, A]
        x = normalised(self.policy, observations).repeat_interleave(count, 0)
        q = algorithm.q_value(self.state, x, near.flatten(0, 1))
        assert q is not None
        cost = self.part.cost(self.state.params["cost_critic"], x, near.flatten(0, 1)).reshape(-1, count)
        allowed = cost <= self.part.threshold
        best = torch.where(allowed, q.reshape(-1, count), -torch.inf).argmax(1)
        chosen = torch.where(allowed.any(1), best, cost.argmin(1))
        changed = unscaled(
            self.policy, near.gather(1, chosen.reshape(-1, 1, 1).expand(-1, 1, near.shape[-1])).squeeze(1)
        )
        return Correction(torch.where(allowed[:, :1], actions, changed), ~allowed.any(1), cost.isnan().any(1))

    def bound(self, state: TrainState, dtype: torch.dtype) -> CriticShield:
        other = copy.copy(self)
        other.state = state
        return other


class ModelShield:
    """The nearest action whose next state keeps a constraint h(s') <= 0 in the worst of a model's members.

    Where h is above 0, a' = a - h g / |g|^2 with its gradient g by the action (by central differences), within the
    range, three times over; the safe action where some violation is left.
    """

    name, fault, remembers = "model", "the model or the constraint gave NaN", False

    def __init__(
        self, policy: TrainedPolicy, trained: Trained, constraint: str | Callable[..., Any], safe: Tensor
    ) -> None:
        """constraint: h, of next observations [B, O] in the environment's units, [B]; or file.py:FUNCTION. Raises
        UserError for a model of other data, or one that sees a history."""
        trained.check(policy.spec)
        if trained.model.history > 1:
            raise UserError(
                f"shield=model: {trained.path} sees {trained.model.history} steps; train one with algo.history=1"
            )
        self.policy, self.trained, self.constraint, self.safe_action = policy, trained, constraint, safe
        self.dtype = torch.float32

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in self.__dict__.items() if k != "function"}

    @functools.cached_property
    def function(self) -> Callable[..., Any]:
        return function_of(self.constraint, "constraint") if isinstance(self.constraint, str) else self.constraint

    def __call__(self, observations: Tensor, actions: Tensor, previous: Tensor) -> Correction:
        x, a = normalised(self.policy, observations), scale(self.policy, actions)
        width = a.shape[-1]
        steps = DIFFERENCE * torch.cat([torch.eye(width), -torch.eye(width)]).to(a.dtype).unsqueeze(1)  # [2 A, 1, A]
        first = violation = self.violation(x, a)
        for _ in range(ROUNDS):
            around = (a + steps).flatten(0, 1)
            ahead, behind = self.violation(x.repeat(2 * width, 1), around).reshape(2, width, -1)
            gradient = (ahead - behind).T / (2.0 * DIFFERENCE)
            size = gradient.square().sum(-1, keepdim=True).clamp(min=1e-12)
            a = (a - violation.relu().unsqueeze(-1) * gradient / size).clamp(-1.0, 1.0)
            violation = self.violation(x, a)
        unsolved = violation > REMAINDER * first.relu() + 1e-6
        changed = torch.where(unsolved.unsqueeze(-1), self.safe_action.to(a.dtype), unscaled(self.policy, a))
        return Correction(torch.where((first > 0.0).unsqueeze(-1), changed, actions), unsolved, violation.isnan())

    def violation(self, x: Tensor, a: Tensor) -> Tensor:
        """h(s') [B] of the worst elite, for normalised observations [B, O] and actions [B, A] in [-1, 1]."""
        model, tree = self.trained.model, self.tree
        following = model.predict(tree, x, a, model.first_past(x)).mean[tree["elites"]]
        _, _, following = model.to_dataset_units(x, a, following)
        value = guarded("constraint=", self.function, following.flatten(0, 1))
        return torch.as_tensor(value, dtype=x.dtype).reshape(len(following), -1).amax(0)

    @property
    def tree(self) -> Any:
        """The model's tensors in the precision of the inputs."""
        return pytree.tree_map(lambda t: t.to(self.dtype) if t.is_floating_point() else t, self.trained.tree)

    def bound(self, state: TrainState, dtype: torch.dtype) -> ModelShield:
        other = copy.copy(self)
        other.dtype = dtype
        return other


def normalised(policy: TrainedPolicy, observations: Tensor) -> Tensor:
    """Raw observations [B, O] as networks take them, in their own precision."""
    if policy.mean is None or policy.std is None:
        return observations
    return (observations - policy.mean.to(observations.dtype)) / policy.std.to(observations.dtype)


def scale(policy: TrainedPolicy, actions: Tensor) -> Tensor:
    """Actions [B, A] of the environment's range in [-1, 1]."""
    low, high = (torch.from_numpy(x).to(actions.dtype) for x in (policy.low, policy.high))
    return (2.0 * (actions - low) / (high - low).clamp(min=1e-12) - 1.0).clamp(-1.0, 1.0)


def unscaled(policy: TrainedPolicy, actions: Tensor) -> Tensor:
    """The inverse of `scale`."""
    low, high = (torch.from_numpy(x).to(actions.dtype) for x in (policy.low, policy.high))
    return low + (actions + 1.0) * 0.5 * (high - low)


@dataclass(frozen=True)
class ShieldSettings:
    """A shield for the policies of a run."""

    shield: str | Callable[..., Any]  # "critic", "model", file.py:FUNCTION, or the function
    safe_action: tuple[float, ...] = ()  # [A]; (): the middle of the environment's range
    constraint: str | Callable[..., Any] | None = None  # of shield="model"
    world_model: str | None = None  # likewise: a run of algo=dynamics, or one of its models

    def of(self, policy: TrainedPolicy) -> ShieldedPolicy:
        """The policy behind its shield. Raises UserError for one that no shield fits."""
        spec, name = policy.spec, policy.algorithm.config.name
        kinds = {
            "texts": spec.text,
            "discrete actions": spec.discrete,
            "images": spec.streams,
            "windows": spec.windowed,
            "a memory of the actions that it chose": policy.actor.remembers_actions,
        }
        if kind := next((kind for kind, present in kinds.items() if present), ""):
            raise UserError(
                f"shield= is for continuous actions and single vectors as observations; {name} has {kind} here"
            )
        low, high = torch.from_numpy(policy.low), torch.from_numpy(policy.high)
        safe = torch.tensor(self.safe_action, dtype=torch.float32) if self.safe_action else 0.5 * (low + high)
        if safe.shape != low.shape or not bool(((safe >= low) & (safe <= high)).all()):
            raise UserError(
                f"safe_action={list(self.safe_action)} is no action here: {len(low)} numbers from {low.tolist()} to "
                f"{high.tolist()} are due"
            )
        if self.shield != "model" and (self.constraint or self.world_model):
            raise UserError("constraint= and world_model= belong to shield=model")
        if self.shield == "critic":
            return ShieldedPolicy(policy, CriticShield(policy))
        if self.shield == "model":
            if self.constraint is None or self.world_model is None:
                raise UserError(
                    "shield=model needs constraint=file.py:FUNCTION, of next observations, at most 0 where all is "
                    "well, and world_model=RUN, of algo=dynamics"
                )
            return ShieldedPolicy(policy, ModelShield(policy, load(self.world_model), self.constraint, safe))
        return ShieldedPolicy(policy, Rule(self.shield, policy, safe))


def shield_of(
    shield: str | None, safe_action: Sequence[float], constraint: str | None, world_model: str | None
) -> ShieldSettings | None:
    """The shield that a command's settings of these names say. Raises UserError for the others without a shield."""
    if shield is None and (safe_action or constraint or world_model):
        raise UserError(
            "safe_action=, constraint= and world_model= belong to a shield: shield=file.py:FUNCTION, or model"
        )
    return None if shield is None else ShieldSettings(shield, tuple(safe_action), constraint, world_model)
