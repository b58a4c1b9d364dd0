"""Networks with LayerNorm after each activation (`first`: before it), and their gradients, in float64 NumPy. It knows
nothing of offrl.
"""

from __future__ import annotations

from typing import Any

import numpy as np

# (W [in, out], b [out], scale [out], shift [out]) of hidden layers; the last has W and b only
Net = list[tuple[np.ndarray, ...]]
EPS = 1e-6  # flax's


def net(params: dict[str, Any], prefix: str = "", member: int | None = None) -> Net:
    """The layers of an MLP's parameters, or of one member of an ensemble's."""
    p = {k: v.numpy().astype(np.float64) for k, v in params.items()}
    depth = sum(k.startswith(prefix + "layers.") and k.endswith(".weight") for k in p)
    layers: Net = []
    for i in range(depth):
        name = f"{prefix}layers.{i}"
        if member is None:
            norm = f"{prefix}norms.{i}"
            layers.append((p[name + ".weight"].T, p[name + ".bias"], p[norm + ".weight"], p[norm + ".bias"]))
        else:
            norms = (p[f"scales.{i}"][member, 0], p[f"shifts.{i}"][member, 0])
            layers.append((p[name + ".weight"][member], p[name + ".bias"][member, 0], *norms))
    w, b = p[f"{prefix}head.weight"], p[f"{prefix}head.bias"]
    return [*layers, (w.T, b) if member is None else (w[member], b[member, 0])]


def forward(layers: Net, x: np.ndarray, first: bool = False) -> tuple[np.ndarray, list[Any]]:
    """Outputs [B, out], and what `backward` needs."""
    seen: list[Any] = []
    for w, b, scale, shift in layers[:-1]:
        y = x @ w + b
        on = y > 0.0
        y = y if first else np.maximum(y, 0.0)
        std = np.sqrt(y.var(1, keepdims=True) + EPS)
        unit = (y - y.mean(1, keepdims=True)) / std
        out = unit * scale + shift
        seen.append((x, out > 0.0 if first else on, unit, std))
        x = np.maximum(out, 0.0) if first else out
    w, b = layers[-1]
    return x @ w + b, [*seen, x]


def backward(
    layers: Net, seen: list[Any], grad: np.ndarray, first: bool = False
) -> tuple[list[np.ndarray], np.ndarray]:
    """Gradients in the order of `flat`, and with respect to the input, from the gradient at the output."""
    grads = [seen[-1].T @ grad, grad.sum(0)]
    grad = grad @ layers[-1][0].T
    for (w, _, scale, _), (x, on, unit, std) in zip(reversed(layers[:-1]), reversed(seen[:-1]), strict=True):
        grad = grad * on if first else grad
        norms = [(grad * unit).sum(0), grad.sum(0)]
        g = grad * scale
        g = (g - g.mean(1, keepdims=True) - unit * (g * unit).mean(1, keepdims=True)) / std * (1.0 if first else on)
        grads = [x.T @ g, g.sum(0), *norms, *grads]
        grad = g @ w.T
    return grads, grad


def flat(layers: Net) -> list[np.ndarray]:
    return [x for layer in layers for x in layer]


def unflat(values: list[np.ndarray]) -> Net:
    hidden = [tuple(values[i : i + 4]) for i in range(0, len(values) - 2, 4)]
    return [*hidden, tuple(values[-2:])]


def polyak(target: Net, online: Net, rate: float) -> Net:
    return unflat([(1 - rate) * t + rate * o for t, o in zip(flat(target), flat(online), strict=True)])


def close(ours: Net, params: dict[str, Any], prefix: str = "", member: int | None = None, atol: float = 5e-5) -> None:
    """Assert that a network's float32 parameters equal these."""
    for i, (a, b) in enumerate(zip(flat(ours), flat(net(params, prefix, member)), strict=True)):
        np.testing.assert_allclose(b, a, rtol=1e-4, atol=atol, err_msg=f"{prefix} member {member}, array {i}")
