"""Networks and losses of forward-backward representations in float64 NumPy, written by hand. Knows nothing of offrl."""

from __future__ import annotations

from typing import Any

import numpy as np

Arrays = dict[str, np.ndarray]


def arrays(params: dict[str, Any]) -> Arrays:
    return {k: v.detach().numpy().astype(np.float64) for k, v in params.items()}


def linear(p: Arrays, name: str, x: np.ndarray) -> np.ndarray:
    return x @ p[f"{name}.weight"].T + p[f"{name}.bias"]


def norm(p: Arrays, name: str, x: np.ndarray) -> np.ndarray:
    x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)
    return x * p[f"{name}.weight"] + p[f"{name}.bias"]


def trunk(p: Arrays, name: str, x: np.ndarray, rectified: bool = False) -> np.ndarray:
    """Linear, LayerNorm, tanh, or linear, ReLU where it has no norm; then linear, ReLU for each further hidden layer;
    then linear.
    """
    for i in range(sum(k.startswith(f"{name}.layers.") and k.endswith("weight") for k in p)):
        x = linear(p, f"{name}.layers.{i}", x)
        x = np.tanh(norm(p, f"{name}.norm", x)) if i == 0 and f"{name}.norm.weight" in p else np.maximum(x, 0.0)
    x = linear(p, f"{name}.head", x)
    return np.maximum(x, 0.0) if rectified else x


def sphere(x: np.ndarray) -> np.ndarray:
    return np.sqrt(x.shape[-1]) * x / np.linalg.norm(x, axis=-1, keepdims=True)


def join(*parts: np.ndarray) -> np.ndarray:
    return np.concatenate(parts, -1)


def forward(p: Arrays, s: np.ndarray, a: np.ndarray, z: np.ndarray) -> np.ndarray:
    """F(s, a, z), twice."""
    x = join(trunk(p, "ahead.action", join(s, a), True), trunk(p, "ahead.task", join(s, z), True))
    result = []
    for k in range(2):
        y, i = x, 0
        while f"ahead.heads.layers.{i}.weight" in p:
            y = np.maximum(y @ p[f"ahead.heads.layers.{i}.weight"][k] + p[f"ahead.heads.layers.{i}.bias"][k, 0], 0.0)
            i += 1
        result.append(y @ p["ahead.heads.head.weight"][k] + p["ahead.heads.head.bias"][k, 0])
    return np.stack(result)


def backward(p: Arrays, s: np.ndarray) -> np.ndarray:
    """B(s)."""
    return sphere(trunk(p, "back.net", s))


def policy(p: Arrays, s: np.ndarray, z: np.ndarray) -> np.ndarray:
    """pi(s, z)."""
    return np.tanh(trunk(p, "net", join(trunk(p, "state", s, True), trunk(p, "task", join(s, z), True))))


def measure_loss(f: np.ndarray, b: np.ndarray, target: np.ndarray, discounts: np.ndarray) -> float:
    """Entry by entry: -sum_k mean_i M_k,ii + 0.5 sum_k mean over i != j of (M_k,ij - discount_i M'_ij)**2."""
    n, loss = len(b), 0.0
    for k in range(2):
        for i in range(n):
            loss -= f[k, i] @ b[i] / n
            for j in range(n):
                if i != j:
                    loss += 0.5 * (f[k, i] @ b[j] - discounts[i] * target[i, j]) ** 2 / (n * (n - 1))
    return loss


def orthonormality(b: np.ndarray) -> float:
    """-2 mean_i B_i.B_i + mean over i != j of (B_i.B_j)**2."""
    n = len(b)
    pairs = [(b[i] @ b[j]) ** 2 for i in range(n) for j in range(n) if i != j]
    return float(np.mean(pairs) - 2.0 * np.mean([x @ x for x in b]))
