"""Gradients, and Adam, AdamW and LaProp as pure functions on dictionaries of tensors, with schedules of the learning
rate and clipping.

All functions work on ONE replica's parameters, so under `vmap` each replica is clipped by its own norm and may have its
own learning rate."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

Params = dict[str, Tensor]
OptState = dict[str, dict[str, Tensor] | Tensor]


@dataclass
class Adam:
    """Settings of one optimiser (Kingma and Ba, arXiv 1412.6980; decoupled decay: Loshchilov and Hutter, arXiv
    1711.05101).
    """

    learning_rate: float | Tensor = 3e-4
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0  # AdamW: subtracts learning_rate * weight_decay * parameter,
    decayed: frozenset[str] | None = None  # of the parameters of these names; None: of all
    clip_norm: float = 0.0  # largest norm of the whole gradient; 0: no clipping
    clip_value: float = 0.0  # largest size of each of its entries; 0: no clipping
    # constant | cosine: to 0 after `decay_steps` updates | linear: to 0 | cosine_cycle: to 0 in the `decay_steps` after
    # the warm-up, and then up again, and so on
    schedule: str = "constant"
    decay_steps: int = 0
    schedule_from: int = 0  # updates with the full rate before the schedule begins
    floor: float = 0.0  # the schedule's factor stays at this where it would fall below
    warmup_steps: int = 0  # linear from 0

    def __post_init__(self) -> None:
        if self.schedule not in ("constant", "cosine", "linear", "cosine_cycle"):
            raise ValueError(f"schedule is {self.schedule!r}; it must be constant, cosine, linear or cosine_cycle")
        if self.schedule != "constant" and self.decay_steps <= 0:
            raise ValueError(f"the {self.schedule} schedule needs decay_steps > 0")

    def rate(self, count: Tensor) -> Tensor:
        """The learning rate of the update that comes after `count` updates ([] float32)."""
        factor = torch.ones_like(count)
        if self.schedule != "constant":
            done = (count - self.schedule_from).clamp(min=0.0) if self.schedule_from else count
            progress = (done / self.decay_steps).clamp(max=1.0)
            if self.schedule == "cosine_cycle":
                progress = ((count + 1.0 - self.warmup_steps) / self.decay_steps).clamp(min=0.0)
            factor = 1.0 - progress if self.schedule == "linear" else 0.5 * (1.0 + torch.cos(math.pi * progress))
            if self.floor:
                factor = factor.clamp(min=self.floor)
        if self.warmup_steps:
            factor = factor * ((count + 1.0) / self.warmup_steps).clamp(max=1.0)
        return factor * self.learning_rate

    def init(self, params: Params) -> OptState:
        """First and second moments at zero, and the number of updates so far (float32, exact to 16.7 million)."""
        zeros = {k: torch.zeros_like(v) for k, v in params.items()}
        device = next(iter(params.values())).device
        return {"mu": zeros, "nu": {k: v.clone() for k, v in zeros.items()}, "count": torch.zeros((), device=device)}

    def update(self, params: Params, grads: Params, state: OptState) -> tuple[Params, OptState]:
        """One step; returns new parameters and state and changes nothing in place."""
        mu, nu, count = state["mu"], state["nu"], state["count"]
        assert isinstance(mu, dict) and isinstance(nu, dict) and isinstance(count, Tensor)
        if self.clip_norm:
            grads = clipped(grads, self.clip_norm)
        if self.clip_value:
            grads = {k: g.clamp(-self.clip_value, self.clip_value) for k, g in grads.items()}
        rate = self.rate(count)
        count = count + 1.0
        # expm1(x log b) keeps 1 - b**count accurate in float32 for the first updates
        step_size = once(rate / -torch.expm1(count * math.log(self.beta1)))
        correction = once(torch.rsqrt(-torch.expm1(count * math.log(self.beta2))))
        new_params, new_mu, new_nu = {}, {}, {}
        for k, p in params.items():
            g = grads[k]
            new_mu[k] = m = torch.lerp(mu[k], g, 1.0 - self.beta1)
            new_nu[k] = v = nu[k] * self.beta2 + (1.0 - self.beta2) * g * g
            if self.weight_decay and (self.decayed is None or k in self.decayed):
                p = p * (1.0 - rate * self.weight_decay)
            new_params[k] = p - step_size * m / (v.sqrt() * correction + self.eps)
        return new_params, {"mu": new_mu, "nu": new_nu, "count": count}


@dataclass
class LaProp(Adam):
    """LaProp (Ziyin et al., 2020, arXiv 2002.04839): gradients are normalised before momentum, not after. Before both
    each tensor's is clipped to a share of the tensor's own norm (Brock et al., 2021, arXiv 2102.06171). As in
    DreamerV3's code: the first update of a warm-up moves nothing.
    """

    adaptive_clip: float | Tensor = 0.3

    def update(self, params: Params, grads: Params, state: OptState) -> tuple[Params, OptState]:
        mu, nu, count = state["mu"], state["nu"], state["count"]
        assert isinstance(mu, dict) and isinstance(nu, dict) and isinstance(count, Tensor)
        rate = self.rate(count - 1.0)
        count = count + 1.0
        step_size = once(rate / -torch.expm1(count * math.log(self.beta1)))
        correction = once(torch.rsqrt(-torch.expm1(count * math.log(self.beta2))))
        new_params, new_mu, new_nu = {}, {}, {}
        for k, p in params.items():
            limit = self.adaptive_clip * p.norm().clamp(min=1e-3)
            g = grads[k] / (grads[k].norm() / limit).clamp(min=1.0)
            new_nu[k] = v = nu[k] * self.beta2 + (1.0 - self.beta2) * g * g
            new_mu[k] = m = torch.lerp(mu[k], g / (v.sqrt() * correction + self.eps), 1.0 - self.beta1)
            new_params[k] = p - step_size * m
        return new_params, {"mu": new_mu, "nu": new_nu, "count": count}


def once(scalar: Tensor) -> Tensor:
    """`scalar` itself. When compiled for a CPU it is computed once, where Inductor would compute it anew for each
    element it multiplies.

    The fused kernel of an Adam update would spend most of its time in exponentials of the step count; a reduction is
    never fused into its readers.
    """
    tracer = sys.modules.get("torch.fx.experimental.proxy_tensor")
    traced = torch.compiler.is_compiling() or (tracer is not None and tracer.get_proxy_mode() is not None)
    if traced and scalar.device.type == "cpu":
        return scalar.expand(16).amax()  # of fewer elements the reduction is unrolled, and fused again
    return scalar


def gradient(loss: Tensor, leaves: Params) -> Params:
    """The gradient of a loss [] that was computed from these leaves; zeros where one had no part in it."""
    values = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    return {k: torch.zeros_like(v) if g is None else g for (k, v), g in zip(leaves.items(), values, strict=True)}


def constant(tree: Any) -> Any:
    """The same tree with tensors that carry no gradient."""
    return pytree.tree_map(lambda value: value.detach() if isinstance(value, Tensor) else value, tree)


def clipped(grads: Params, norm: float | Tensor) -> Params:
    """Gradients, scaled down together where their norm is above `norm`."""
    scale = (norm / (global_norm(grads) + 1e-6)).clamp(max=1.0)
    return {k: g * scale for k, g in grads.items()}


def global_norm(tree: Params) -> Tensor:
    """Euclidean norm of all entries together: [] float32."""
    return torch.stack([t.square().sum() for t in tree.values()]).sum().sqrt()
