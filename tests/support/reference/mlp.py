"""Networks, their gradients and Adam in float64 NumPy, written by hand: what the golden tests compare with. Knows
nothing of offrl.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

Net = list[tuple[np.ndarray, np.ndarray]]  # (W [in, out], b [out]) of each layer; ReLU between layers


def net(params: dict[str, Any], prefix: str = "", member: int | None = None) -> Net:
    """The layers of an MLP's parameters (W stored [out, in]), or of one member of an ensemble's (W [E, in, out], b [E,
    1, out]).
    """
    depth = sum(k.startswith(prefix + "layers.") and k.endswith(".weight") for k in params)
    layers = []
    for name in [*(f"{prefix}layers.{i}" for i in range(depth)), f"{prefix}head"]:
        w, b = params[f"{name}.weight"].numpy().astype(np.float64), params[f"{name}.bias"].numpy().astype(np.float64)
        layers.append((w.T, b) if member is None else (w[member], b[member, 0]))
    return layers


def forward(layers: Net, x: np.ndarray) -> tuple[np.ndarray, list[np.ndarray]]:
    """Outputs [B, out], and each layer's input for `backward`."""
    inputs = []
    for i, (w, b) in enumerate(layers):
        inputs.append(x)
        x = x @ w + b
        if i < len(layers) - 1:
            x = np.maximum(x, 0.0)
    return x, inputs


def backward(layers: Net, inputs: list[np.ndarray], grad: np.ndarray) -> tuple[list[np.ndarray], np.ndarray]:
    """Gradients [W0, b0, W1, b1, ...] and with respect to the input, from the gradient at the output."""
    grads: list[np.ndarray] = []
    for i in reversed(range(len(layers))):
        grads = [inputs[i].T @ grad, grad.sum(0), *grads]
        grad = grad @ layers[i][0].T
        if i > 0:
            grad = grad * (inputs[i] > 0.0)
    return grads, grad


class Adam:
    """Adam of a list of arrays, as in the paper's algorithm 1; `rate(t)` is the learning rate after t updates."""

    def __init__(self, rate: Callable[[int], float]) -> None:
        self.rate, self.t = rate, 0
        self.m: list[Any] = []
        self.v: list[Any] = []

    def step(self, values: list[np.ndarray], grads: list[np.ndarray]) -> list[np.ndarray]:
        if not self.m:
            self.m, self.v = [0.0 * g for g in grads], [0.0 * g for g in grads]
        rate, self.t = self.rate(self.t), self.t + 1
        self.m = [0.9 * m + 0.1 * g for m, g in zip(self.m, grads, strict=True)]
        self.v = [0.999 * v + 0.001 * g**2 for v, g in zip(self.v, grads, strict=True)]
        return [
            x - rate * (m / (1 - 0.9**self.t)) / (np.sqrt(v / (1 - 0.999**self.t)) + 1e-8)
            for x, m, v in zip(values, self.m, self.v, strict=True)
        ]


def flat(layers: Net) -> list[np.ndarray]:
    return [x for layer in layers for x in layer]


def unflat(values: list[np.ndarray]) -> Net:
    return list(zip(values[0::2], values[1::2], strict=True))


def polyak(target: Net, online: Net, rate: float) -> Net:
    return unflat([(1 - rate) * t + rate * o for t, o in zip(flat(target), flat(online), strict=True)])


def close(ours: Net, params: dict[str, Any], prefix: str = "", member: int | None = None, atol: float = 2e-5) -> None:
    """Assert that a network's float32 parameters equal these."""
    for i, (a, b) in enumerate(zip(flat(ours), flat(net(params, prefix, member)), strict=True)):
        np.testing.assert_allclose(b, a, rtol=1e-4, atol=atol, err_msg=f"{prefix} member {member}, array {i}")
