"""GELU networks of flows, critics and V, and flow matching, in float64 NumPy, written by hand. Knows nothing of
offrl.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

Arrays = dict[str, np.ndarray]


def arrays(params: dict[str, Any]) -> Arrays:
    """Parameters in float64."""
    return {k: v.detach().double().numpy() for k, v in params.items()}


def gelu(x: np.ndarray) -> np.ndarray:
    """By its tanh approximation."""
    return 0.5 * x * (1.0 + np.tanh(np.sqrt(2.0 / np.pi) * (x + 0.044715 * x**3)))


def normed(x: np.ndarray, scale: np.ndarray, shift: np.ndarray) -> np.ndarray:
    """LayerNorm with flax's epsilon."""
    return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-6) * scale + shift


def depth(p: Arrays, prefix: str = "") -> int:
    return sum(k.startswith(f"{prefix}layers.") and k.endswith(".weight") for k in p)


def field(p: Arrays, *x: np.ndarray) -> np.ndarray:
    """A velocity of inputs that stand side by side: GELU after each hidden layer."""
    y = np.concatenate(x, -1)
    for i in range(depth(p, "net.")):
        y = gelu(y @ p[f"net.layers.{i}.weight"].T + p[f"net.layers.{i}.bias"])
    return y @ p["net.head.weight"].T + p["net.head.bias"]


def value(p: Arrays, s: np.ndarray) -> np.ndarray:
    """V [B]: GELU, then LayerNorm, after each hidden layer."""
    for i in range(depth(p)):
        s = gelu(s @ p[f"layers.{i}.weight"].T + p[f"layers.{i}.bias"])
        s = normed(s, p[f"norms.{i}.weight"], p[f"norms.{i}.bias"])
    return (s @ p["head.weight"].T + p["head.bias"])[..., 0]


def critics(p: Arrays, s: np.ndarray, a: np.ndarray) -> np.ndarray:
    """Q [E, B]: GELU, then LayerNorm, after each hidden layer."""
    y = np.concatenate([s, a], -1)[None]
    for i in range(depth(p)):
        y = normed(gelu(y @ p[f"layers.{i}.weight"] + p[f"layers.{i}.bias"]), p[f"scales.{i}"], p[f"shifts.{i}"])
    return (y @ p["head.weight"] + p["head.bias"])[..., 0]


def integrate(velocity: Callable[[np.ndarray, np.ndarray], np.ndarray], z: np.ndarray, steps: int) -> np.ndarray:
    """Euler steps from noise, cut off at the end."""
    for i in range(steps):
        z = z + velocity(z, np.full((len(z), 1), i / steps)) / steps
    return z.clip(-1.0, 1.0)


def expectile(u: np.ndarray, tau: float) -> np.ndarray:
    return np.where(u < 0, 1.0 - tau, tau) * u**2
