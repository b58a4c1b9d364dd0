"""Image encoders and the random shift in float64 NumPy, images HWC throughout: what the golden tests compare with.
Knows nothing of offrl.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import numpy as np

Params = dict[str, np.ndarray]


def convolution(
    x: np.ndarray, weight: np.ndarray, bias: Any = 0.0, *, stride: int = 1, pad: int | None = None
) -> np.ndarray:
    """x [B, H, W, I], weight [O, I, K, K] -> [B, H', W', O]; pad: zeros on all sides, None: half the width."""
    size = weight.shape[-1]
    pad = size // 2 if pad is None else pad
    x = np.pad(x, ((0, 0), (pad, pad), (pad, pad), (0, 0)))
    height, width = ((n - size) // stride + 1 for n in x.shape[1:3])
    y = np.zeros((len(x), height, width, len(weight)))
    for i, j in product(range(size), repeat=2):
        patch = x[:, i : i + stride * (height - 1) + 1 : stride, j : j + stride * (width - 1) + 1 : stride]
        y += patch @ weight[:, :, i, j].T
    return y + bias


def largest(x: np.ndarray, *, same: bool) -> np.ndarray:
    """Windows 3x3 two pixels apart, one by one. same: XLA's SAME, which pads by (out - 1) * 2 + 3 - in pixels, the
    smaller half of them in front; else one pixel on all sides."""
    height, width = x.shape[1:3]
    sizes = [(n + 1) // 2 for n in (height, width)]
    first = [((2 * (o - 1) + 3 - n) // 2 if same else 1) for o, n in zip(sizes, (height, width), strict=True)]
    y = np.empty((len(x), *sizes, x.shape[-1]))
    for i, j in np.ndindex(*sizes):
        top, left = 2 * i - first[0], 2 * j - first[1]
        y[:, i, j] = x[:, max(top, 0) : top + 3, max(left, 0) : left + 3].max((1, 2))
    return y


def relu(x: np.ndarray) -> np.ndarray:
    return np.maximum(x, 0.0)


def flat(x: np.ndarray) -> np.ndarray:
    """[B, H, W, C] -> [B, C * H * W], channel by channel."""
    return x.transpose(0, 3, 1, 2).reshape(len(x), -1)


def drq(p: Params, images: np.ndarray) -> np.ndarray:
    x = images / 255.0 - 0.5
    for i, stride in enumerate((2, 1, 1, 1)):
        x = relu(convolution(x, p[f"layers.{i}.weight"], p[f"layers.{i}.bias"], stride=stride, pad=0))
    return flat(x)


def elu(x: np.ndarray) -> np.ndarray:
    return np.where(x > 0.0, x, np.expm1(np.minimum(x, 0.0)))


def tdmpc2(p: Params, images: np.ndarray) -> np.ndarray:
    x = images / 255.0 - 0.5
    for i, stride in enumerate((2, 2, 2, 1)):
        x = convolution(x if i == 0 else relu(x), p[f"layers.{i}.weight"], p[f"layers.{i}.bias"], stride=stride, pad=0)
    return flat(x)


def mrq(p: Params, images: np.ndarray) -> np.ndarray:
    x = images / 255.0 - 0.5
    for i, stride in enumerate((2, 2, 2, 1)):
        x = elu(convolution(x, p[f"layers.{i}.weight"], p[f"layers.{i}.bias"], stride=stride, pad=0))
    return flat(x)


def impala(p: Params, images: np.ndarray) -> np.ndarray:
    def layer(name: str, x: np.ndarray) -> np.ndarray:
        return convolution(x, p[f"{name}.weight"], p[f"{name}.bias"])

    x = images / 255.0
    for i in range(3):
        x = largest(layer(f"entries.{i}", x), same=True)
        for block in sorted({name.rsplit(".", 2)[0] for name in p if name.startswith(f"blocks.{i}.")}):
            x = x + layer(f"{block}.second", relu(layer(f"{block}.first", relu(x))))
    y = flat(relu(x)) @ p["head.weight"].T + p["head.bias"]
    return 0.5 * y * (1.0 + np.tanh(np.sqrt(2.0 / np.pi) * (y + 0.044715 * y**3)))


def dreamer(p: Params, images: np.ndarray) -> np.ndarray:
    x = images / 255.0 - 0.5
    for i in range(sum(name.endswith("bias") for name in p)):
        x = convolution(x, p[f"layers.{i}.weight"], p[f"layers.{i}.bias"])
        height, width = (n // 2 for n in x.shape[1:3])
        corners = [x[:, a : 2 * height : 2, b : 2 * width : 2] for a, b in product(range(2), repeat=2)]
        x = np.max(corners, 0)
        x = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-4) * p[f"scales.{i}"]
        x = x / (1.0 + np.exp(-x))
    return flat(x)


def resnet18(p: Params, images: np.ndarray) -> np.ndarray:
    def layer(name: str, x: np.ndarray, stride: int = 1) -> np.ndarray:
        y = convolution(x, p[f"{name}.convolution.weight"], stride=stride)
        groups = y.reshape(len(y), -1, y.shape[-1] // 16, 16)
        mean = groups.mean((1, 3), keepdims=True)
        groups = (groups - mean) / np.sqrt(((groups - mean) ** 2).mean((1, 3), keepdims=True) + 1e-5)
        return groups.reshape(y.shape) * p[f"{name}.scale"] + p[f"{name}.shift"]

    x = largest(relu(layer("entry", images / 127.5 - 1.0, 2)), same=False)
    for i in range(8):
        stride = 2 if i in (2, 4, 6) else 1
        y = layer(f"blocks.{i}.second", relu(layer(f"blocks.{i}.first", x, stride)))
        x = relu(y + (layer(f"blocks.{i}.skip", x, stride) if stride == 2 else x))
    return x.mean((1, 2))


def crops(image: np.ndarray, pad: int) -> Iterator[np.ndarray]:
    """All (2 pad + 1)^2 crops, of the image's own size, of the image [H, W, C] padded by its edge."""
    height, width = image.shape[:2]
    padded = np.pad(image, ((pad, pad), (pad, pad), (0, 0)), mode="edge")
    for i, j in product(range(2 * pad + 1), repeat=2):
        yield padded[i : i + height, j : j + width]
