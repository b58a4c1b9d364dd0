"""A pre-LN transformer over one sequence without padding, in float64 NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np


def numpy_of(params: dict[str, Any], prefix: str = "") -> dict[str, np.ndarray]:
    """The parameters under `prefix`, without it."""
    return {k[len(prefix) :]: v.detach().double().numpy() for k, v in params.items() if k.startswith(prefix)}


def affine(x: np.ndarray, p: dict[str, np.ndarray], name: str) -> np.ndarray:
    return x @ p[f"{name}.weight"].T + p[f"{name}.bias"]


def norm(x: np.ndarray, p: dict[str, np.ndarray], name: str) -> np.ndarray:
    centred = x - x.mean(-1, keepdims=True)
    return centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5) * p[f"{name}.weight"] + p[f"{name}.bias"]


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def transformer(x: np.ndarray, p: dict[str, np.ndarray], layers: int, heads: int) -> np.ndarray:
    """x [T, D] -> [T, D]; ReLU between the layers of the blocks' MLPs."""
    tokens, width = x.shape
    causal = np.tril(np.ones((tokens, tokens), bool))
    for i in range(layers):
        at = f"blocks.{i}"
        q, k, v = (
            a.reshape(tokens, heads, -1).swapaxes(0, 1)
            for a in np.split(affine(norm(x, p, f"{at}.norm1"), p, f"{at}.qkv"), 3, -1)
        )
        scores = np.where(causal, q @ k.swapaxes(1, 2) / np.sqrt(width // heads), -np.inf)
        x = x + affine((softmax(scores) @ v).swapaxes(0, 1).reshape(tokens, width), p, f"{at}.out")
        x = x + affine(np.maximum(affine(norm(x, p, f"{at}.norm2"), p, f"{at}.up"), 0.0), p, f"{at}.down")
    return norm(x, p, "norm")
