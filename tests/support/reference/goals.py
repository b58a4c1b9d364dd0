"""Goal-conditioned networks and losses in float64 NumPy, written by hand: OGBench's equations (specification C). Knows
nothing of offrl.
"""

from __future__ import annotations

from typing import Any

import numpy as np

Params = dict[str, Any]
EPSILON = 1e-6  # of LayerNorm, flax's


def gelu(x: np.ndarray) -> np.ndarray:
    return 0.5 * x * (1.0 + np.tanh(np.sqrt(2.0 / np.pi) * (x + 0.044715 * x**3)))


def norm(x: np.ndarray, scale: np.ndarray, shift: np.ndarray) -> np.ndarray:
    mean, var = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
    return (x - mean) / np.sqrt(var + EPSILON) * scale + shift


def f64(params: Params, name: str) -> np.ndarray:
    return np.asarray(params[name].numpy().astype(np.float64))


def mlp(params: Params, x: np.ndarray, prefix: str = "") -> np.ndarray:
    """One network (W stored [out, in]): linear, GELU, LayerNorm where it has one."""
    depth = sum(k.startswith(prefix + "layers.") and k.endswith(".weight") for k in params)
    for i in range(depth):
        x = gelu(x @ f64(params, f"{prefix}layers.{i}.weight").T + f64(params, f"{prefix}layers.{i}.bias"))
        if f"{prefix}norms.{i}.weight" in params:
            x = norm(x, f64(params, f"{prefix}norms.{i}.weight"), f64(params, f"{prefix}norms.{i}.bias"))
    return np.asarray(x @ f64(params, f"{prefix}head.weight").T + f64(params, f"{prefix}head.bias"))


def twins(params: Params, x: np.ndarray, prefix: str = "") -> np.ndarray:
    """Both members of an ensemble (W [E, in, out]): [2, B, out]."""
    result = []
    for e in range(2):
        y, depth = x, sum(k.startswith(prefix + "layers.") and k.endswith(".weight") for k in params)
        for i in range(depth):
            y = gelu(y @ f64(params, f"{prefix}layers.{i}.weight")[e] + f64(params, f"{prefix}layers.{i}.bias")[e, 0])
            if f"{prefix}scales.{i}" in params:
                y = norm(y, f64(params, f"{prefix}scales.{i}")[e, 0], f64(params, f"{prefix}shifts.{i}")[e, 0])
        result.append(y @ f64(params, f"{prefix}head.weight")[e] + f64(params, f"{prefix}head.bias")[e, 0])
    return np.stack(result)


def log_density(mean: np.ndarray, x: np.ndarray) -> np.ndarray:
    """log N(x; mean, I)."""
    return np.asarray((-0.5 * (x - mean) ** 2 - 0.5 * np.log(2.0 * np.pi)).sum(-1))


def ivl(
    now: np.ndarray, before: np.ndarray, after: np.ndarray, success: np.ndarray, discount: float, expectile: float
) -> float:
    """C.2: sum over twins of mean |tau - 1(adv < 0)| (r + g m V_i'(s') - V_i(s))**2, adv = r + g m min V'(s') - mean
    V'(s).
    """
    reward, mask, total = success - 1.0, 1.0 - success, 0.0
    adv = reward + discount * mask * np.minimum(after[0], after[1]) - (before[0] + before[1]) / 2
    weight = np.where(adv < 0, 1 - expectile, expectile)
    for i in range(2):
        total += float((weight * (reward + discount * mask * after[i] - now[i]) ** 2).mean())
    return total


def union_length(begin: np.ndarray, end: np.ndarray) -> float:
    """Length of the union of intervals [begin_k, end_k], by sweeping."""
    total, reach = 0.0, -np.inf
    for b, e in sorted(zip(begin.tolist(), end.tolist(), strict=True)):
        total += max(0.0, e - max(b, reach))
        reach = max(reach, e)
    return total


def iqe(x: np.ndarray, y: np.ndarray, component: int, alpha: float) -> float:
    """Interval quasimetric embedding of two latents (arXiv 2211.15120): mean and maximum over components, mixed by
    sigmoid(alpha).
    """
    lengths = [
        union_length(x[i : i + component], np.maximum(x[i : i + component], y[i : i + component]))
        for i in range(0, len(x), component)
    ]
    share = 1.0 / (1.0 + np.exp(-alpha))
    return float(share * np.mean(lengths) + (1.0 - share) * np.max(lengths))
