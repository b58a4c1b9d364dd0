"""Counter-based random numbers: a key is an int64 tensor, and every draw is a pure function of it.

The generator is SplitMix64 (Steele, Lea and Flood, OOPSLA 2014): `bits(key, n)` is the published stream seeded with
`key`. Integer arithmetic is exact, so a key gives the same bits on any device, compiled or not, alone or under
`torch.func.vmap`. Keys are derived with other mixing constants than the stream's (Stafford's variant 4), so a child key
is no element of its parent's stream.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
import torch
from torch import Tensor


def _signed(x: int) -> int:
    """The int64 with the bits of an unsigned 64-bit constant."""
    return x - (1 << 64) if x >= 1 << 63 else x


_MASK = (1 << 64) - 1
_GAMMA = _signed(0x9E3779B97F4A7C15)
_FOLD = _signed(0xD1B54A32D192ED03)


def _shift(x: Tensor, n: int) -> Tensor:
    """Logical right shift: int64 shifts copy the sign bit, which has to be masked away."""
    return (x >> n) & ((1 << (64 - n)) - 1)


def _mix(x: Tensor) -> Tensor:
    x = (x ^ _shift(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shift(x, 27)) * _signed(0x94D049BB133111EB)
    return x ^ _shift(x, 31)


def _derive(x: Tensor) -> Tensor:
    x = (x ^ _shift(x, 33)) * _signed(0x62A9D9ED799705F5)
    x = (x ^ _shift(x, 28)) * _signed(0xCB24D0A5C88C35B3)
    return x ^ _shift(x, 32)


# `^ 0` keeps Inductor from taking the product for arithmetic of indices, which it does in 32 bits: Triton refuses the
# constant (pytorch issues 175966, 183901, 186057). On a CPU both are operators of their own, below.
def _fold(key: Tensor, data: Tensor) -> Tensor:
    return _derive(_derive(key ^ _FOLD) + (data ^ 0) * _GAMMA + 1)


def _stream(key: Tensor, count: int) -> Tensor:
    counter = torch.arange(1, count + 1, dtype=torch.int64, device=key.device)
    return _mix(key.unsqueeze(-1) + (counter ^ 0) * _GAMMA)


# On CPU the integer arithmetic is an opaque operator: Inductor would otherwise recompute the hash in every kernel that
# reads a random number (once per element of each gathered row), and its C++ multiplies signed integers, whose overflow
# the compiler may assume away. NumPy's unsigned integers do the same sums with a third of the dispatch.
_U64 = np.uint64


def _np_mix(x: np.ndarray, shifts: tuple[int, int, int], factors: tuple[int, int]) -> np.ndarray:
    """x ^= x >> shift and x *= factor in turn, in place."""
    y = np.right_shift(x, _U64(shifts[0]))
    for shift, factor in zip(shifts[1:], factors, strict=True):
        x ^= y
        x *= _U64(factor & _MASK)
        np.right_shift(x, _U64(shift), out=y)
    x ^= y
    return x


def _np_derive(x: np.ndarray) -> np.ndarray:
    return _np_mix(x, (33, 28, 32), (0x62A9D9ED799705F5, 0xCB24D0A5C88C35B3))


def _unsigned(x: Tensor) -> np.ndarray:
    """The bits as uint64, with one axis in front: NumPy warns of overflow in numbers that are no arrays."""
    return x.detach().contiguous().numpy().view(_U64)[None]


def _signed_tensor(x: np.ndarray) -> Tensor:
    return torch.from_numpy(x.view(np.int64)).squeeze(0)


def _cpu_fold(key: Tensor, data: Tensor) -> Tensor:
    inner = _np_derive(_unsigned(key) ^ _U64(_FOLD & _MASK))
    return _signed_tensor(_np_derive(inner + (_unsigned(data) * _U64(_GAMMA & _MASK) + _U64(1))))


@functools.lru_cache(maxsize=64)
def _counter(count: int) -> np.ndarray:
    return np.arange(1, count + 1, dtype=_U64) * _U64(_GAMMA & _MASK)


def _cpu_stream(key: Tensor, count: int) -> Tensor:
    x = _unsigned(key)[..., None] + _counter(count)
    return _signed_tensor(_np_mix(x, (30, 27, 31), (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)))


_library = torch.library.Library("offrl", "DEF")  # torch.library.custom_op does the same, with twice the time per call
_library.define("fold(Tensor key, Tensor data) -> Tensor")
_library.define("stream(Tensor key, int count) -> Tensor")
_library.impl("fold", _cpu_fold, "CPU")
_library.impl("stream", _cpu_stream, "CPU")
_fold_op, _stream_op = torch.ops.offrl.fold.default, torch.ops.offrl.stream.default


@torch.library.register_fake("offrl::fold", lib=_library)
def _(key: Tensor, data: Tensor) -> Tensor:
    return key.new_empty(torch.broadcast_shapes(key.shape, data.shape))


@torch.library.register_fake("offrl::stream", lib=_library)
def _(key: Tensor, count: int) -> Tensor:
    return key.new_empty((*key.shape, count))


@torch.library.register_vmap("offrl::fold", lib=_library)
def _(info: Any, in_dims: tuple[int | None, ...], key: Tensor, data: Tensor) -> tuple[Tensor, int]:
    rank = max(t.ndim - (d is not None) for t, d in zip((key, data), in_dims, strict=True))

    def front(t: Tensor, dim: int | None) -> Tensor:  # batch axis first, then as many axes as the larger operand has
        t = t.unsqueeze(0) if dim is None else t.movedim(dim, 0)
        return t.reshape(t.shape[0], *[1] * (rank + 1 - t.ndim), *t.shape[1:])

    return _fold_op(front(key, in_dims[0]), front(data, in_dims[1])), 0


@torch.library.register_vmap("offrl::stream", lib=_library)
def _(info: Any, in_dims: tuple[int | None, None], key: Tensor, count: int) -> tuple[Tensor, int]:
    assert in_dims[0] is not None
    return _stream_op(key.movedim(in_dims[0], 0), count), 0


def make_key(seed: int, device: torch.device | str | None = None) -> Tensor:
    """The root key of a seed: [] int64."""
    return fold_in(torch.tensor(_signed(seed & _MASK), dtype=torch.int64, device=device), 0)


def fold_in(key: Tensor, data: int | Tensor) -> Tensor:
    """A new key for (key, data); different `data` give independent keys. Shapes broadcast."""
    if not isinstance(data, Tensor):
        data = torch.full((), data, dtype=torch.int64, device=key.device)
    return _fold_op(key, data) if key.device.type == "cpu" else _fold(key, data)


def split(key: Tensor, n: int = 2) -> tuple[Tensor, ...]:
    """`n` independent keys: fold_in(key, 0), ..., fold_in(key, n - 1)."""
    index = torch.arange(n, dtype=torch.int64, device=key.device)
    return fold_in(key.unsqueeze(-1), index).unbind(-1)


def bits(key: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Uniform 64-bit integers [*shape] int64: outputs 0, 1, ... of SplitMix64 seeded with the one key [] int64."""
    count = math.prod(shape)
    return (_stream_op(key, count) if key.device.type == "cpu" else _stream(key, count)).reshape(shape)


def uniform(key: Tensor, shape: tuple[int, ...], low: float = 0.0, high: float = 1.0) -> Tensor:
    """Uniform float32 in [low, high), on a grid of 2**-24 (high - low). Rounding can give `high` itself where 0 <
    low.
    """
    return _shift(bits(key, shape), 40).float() * (2.0**-24 * (high - low)) + low


def normal(key: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Standard normal float32 (Box-Muller, one 64-bit word per number); the largest magnitude is 6.8."""
    word = bits(key, shape)
    u = (_shift(word, 32).float() + 0.5) * 2.0**-32  # the half keeps the logarithm finite
    angle = (word & 0xFFFFFFFF).float() * (2.0**-32 * 2.0 * math.pi)
    return torch.sqrt(-2.0 * torch.log(u)) * torch.cos(angle)


def randint(key: Tensor, shape: tuple[int, ...], high: int | Tensor) -> Tensor:
    """Uniform integers in [0, high), int64. The bias is below high * 2**-53."""
    return (_shift(bits(key, shape), 11).double() * 2.0**-53 * high).long()


def randint_at(key: Tensor, index: Tensor, high: int) -> Tensor:
    """Elements `index` of a fixed endless list of uniform integers in [0, high), one list for each key; int64, shapes
    broadcast.

    Nothing is stored. With uniform `index` below n it draws from a bootstrap sample of size n.
    """
    return (_shift(fold_in(key, index), 11).double() * 2.0**-53 * high).long()


def permuted(key: Tensor, index: Tensor, high: int) -> Tensor:
    """`index` under a random permutation of 0, ..., high - 1, one for each key; int64, shapes broadcast. Nothing is
    stored.

    A Feistel network over pairs (l, r) with l < m, r < n, m * n >= high, walked on a second time where it leaves the
    range (Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002). As m * n exceeds high by less than m, a
    third walk would be needed by one index in `high`; `index` itself is given then.
    """
    m = max(1, math.isqrt(high))
    n = -(-high // m)
    keys, image = split(key, 4), index
    for walk in range(2):
        left, right = torch.div(image, n, rounding_mode="floor"), image % n
        for turn in (0, 2):
            left = (left + randint_at(keys[turn], right, m)) % m
            right = (right + randint_at(keys[turn + 1], left, n)) % n
        moved = left * n + right
        image = moved if walk == 0 else torch.where(image < high, image, moved)
    return torch.where(image < high, image, index)


def bernoulli(key: Tensor, shape: tuple[int, ...], probability: float) -> Tensor:
    """True with the given probability; bool [*shape]."""
    return uniform(key, shape) < probability


def keep(key: Tensor, shape: tuple[int, ...], rate: float) -> Tensor:
    """False for a share `rate` of the entries, to a multiple of 2**-16; bool [*shape].

    Four entries share one word: for large dropout masks.
    """
    count = math.prod(shape)
    words = bits(key, (-(-count // 4),))
    parts = torch.stack([words & 0xFFFF, _shift(words, 16) & 0xFFFF, _shift(words, 32) & 0xFFFF, _shift(words, 48)], -1)
    return (parts.flatten()[:count] >= round(rate * (1 << 16))).reshape(shape)


def gumbel(key: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Standard Gumbel noise, float32: log-probabilities plus it are largest at a draw."""
    noise = (_shift(bits(key, shape), 32).float() + 0.5) * 2.0**-32
    # rounded up to 1 the noise would be infinite, and choose what has probability 0
    noise = noise.clamp(max=1.0 - 2.0**-24)
    return -torch.log(-torch.log(noise))


def categorical(key: Tensor, logits: Tensor) -> Tensor:
    """One draw per row of unnormalised log-probabilities [..., K], by the Gumbel trick; int64 [...]."""
    return (logits + gumbel(key, tuple(logits.shape))).argmax(-1)
