"""Random numbers: known answers, distribution, independence, and the same integers everywhere."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.func import vmap

from offrl import rng

M64 = (1 << 64) - 1
GAMMA = 0x9E3779B97F4A7C15


def unsigned(x: Tensor) -> list[int]:
    return [v & M64 for v in x.flatten().tolist()]


def splitmix64(seed: int, count: int) -> list[int]:
    """The published C code, in Python's exact integers."""
    out = []
    for _ in range(count):
        seed = (seed + GAMMA) & M64
        z = seed
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & M64
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & M64
        out.append(z ^ (z >> 31))
    return out


def key_of_word(word: int) -> Tensor:
    """The key whose first 64-bit word is `word`: SplitMix64 backwards."""
    z = word
    z ^= (z >> 31) ^ (z >> 62)
    z = z * pow(0x94D049BB133111EB, -1, 1 << 64) & M64
    z ^= (z >> 27) ^ (z >> 54)
    z = z * pow(0xBF58476D1CE4E5B9, -1, 1 << 64) & M64
    z ^= (z >> 30) ^ (z >> 60)
    key = (z - GAMMA) & M64
    return torch.tensor(key - (1 << 64) if key >> 63 else key)


def chi_square(counts: Tensor, expected: Tensor | float) -> float:
    """How many standard deviations the chi-square statistic lies above its mean (its number of cells less one)."""
    freedom = counts.numel() - 1
    return float((((counts - expected) ** 2 / expected).sum() - freedom) / math.sqrt(2 * freedom))


def test_known_answers() -> None:
    published = [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]
    assert unsigned(rng.bits(torch.tensor(1234567), (5,))) == published == splitmix64(1234567, 5)
    for seed in (0, 1, -1, 1 << 62, -(1 << 63), 0x123456789ABCDEF):
        assert unsigned(rng.bits(torch.tensor(seed), (3, 2))) == splitmix64(seed & M64, 6)


def test_streams_are_frozen() -> None:
    """A change of these numbers changes every run that anyone has recorded."""
    key = rng.make_key(0)
    assert [rng.make_key(s).item() for s in (0, 1, -1)] == [
        7693236706760674463,
        -8248713972426653981,
        5051166515907053146,
    ]
    assert rng.fold_in(key, 7).item() == -6777275430917563391
    assert [k.item() for k in rng.split(key)] == [7094905645110172254, -3860539749626061630]
    assert rng.randint(key, (6,), 1000).tolist() == [640, 25, 188, 255, 76, 123]
    np.testing.assert_allclose(
        rng.uniform(key, (3,)), [0.6407484412193298, 0.025274336338043213, 0.18876540660858154], rtol=0, atol=0
    )
    np.testing.assert_allclose(
        rng.normal(key, (3,)), [-0.9397704601287842, -0.38699793815612793, -1.7526427507400513], rtol=1e-5
    )


def test_fold_in_takes_integers_and_tensors_alike() -> None:
    key = rng.make_key(5)
    for data in (0, 1, -1, 2**40, -(2**63)):
        assert rng.fold_in(key, data).item() == rng.fold_in(key, torch.tensor(data)).item()
    index = torch.arange(-3, 3)
    assert rng.fold_in(key, index).tolist() == [rng.fold_in(key, int(i)).item() for i in index]
    assert [k.item() for k in rng.split(key, 4)] == [rng.fold_in(key, i).item() for i in range(4)]
    assert rng.make_key(2**63 + 5).item() == rng.make_key(5 - 2**63).item()  # seeds are taken modulo 2**64


def test_shape_does_not_change_the_stream() -> None:
    key = rng.make_key(1)
    assert torch.equal(rng.bits(key, (2, 3, 4)).flatten(), rng.bits(key, (24,)))
    assert torch.equal(rng.bits(key, (24,))[:7], rng.bits(key, (7,)))
    assert rng.bits(key, ()).shape == () and rng.normal(key, (0, 3)).shape == (0, 3)


def test_uniform_moments_and_range() -> None:
    n = 1_000_000
    u = rng.uniform(rng.make_key(2), (n,))
    assert u.dtype == torch.float32 and float(u.min()) >= 0.0 and float(u.max()) < 1.0
    x = u.double()
    for power in (1, 2, 3, 4):  # E u^k = 1/(k + 1)
        spread = math.sqrt(1 / (2 * power + 1) - 1 / (power + 1) ** 2)
        assert abs(float((x**power).mean()) - 1 / (power + 1)) < 4 * spread / math.sqrt(n)
    assert abs(chi_square(torch.bincount((u * 1000).long(), minlength=1000).double(), n / 1000)) < 4
    low = rng.uniform(rng.make_key(2), (n,), -3.0, 5.0)
    assert float(low.min()) >= -3.0 and float(low.max()) < 5.0
    np.testing.assert_allclose(low, u * 8 - 3, atol=1e-6)


def test_normal_moments_and_quantiles() -> None:
    n = 1_000_000
    z = rng.normal(rng.make_key(3), (n,)).double()
    for power, moment, variance in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96), (6, 15, 10170)):
        assert abs(float((z**power).mean()) - moment) < 4 * math.sqrt(variance / n), power
    # Kolmogorov-Smirnov: the largest distance between the distribution functions is above 1.95 / sqrt(n) once in a
    # thousand times
    distance = (torch.special.ndtr(z.sort().values) - (torch.arange(n) + 0.5) / n).abs().max()
    assert float(distance) < 1.95 / math.sqrt(n)
    assert 4.5 < float(z.abs().max()) < 6.8


def test_extreme_words() -> None:
    """All bits 0 and all bits 1, where logarithms and rounding are at risk."""
    zeros, ones = key_of_word(0), key_of_word(M64)
    assert unsigned(rng.bits(zeros, (1,))) == [0] and unsigned(rng.bits(ones, (1,))) == [M64]
    assert rng.uniform(zeros, (1,)).item() == 0.0 and rng.uniform(ones, (1,)).item() == 1 - 2.0**-24
    assert 6.7 < rng.normal(zeros, (1,)).item() < 6.8 and rng.normal(ones, (1,)).item() == 0.0
    for high in (1, 10, (1 << 53) - 1):
        assert rng.randint(zeros, (1,), high).item() == 0 and rng.randint(ones, (1,), high).item() == high - 1
    for key in (zeros, ones):  # an action of probability 0 is never chosen, whatever the noise
        assert rng.categorical(key, torch.tensor([-math.inf, 0.0])).item() == 1


def test_randint_is_uniform() -> None:
    for high in (2, 7, 1000):
        draws = rng.randint(rng.make_key(high), (500_000,), high)
        assert draws.dtype == torch.int64 and int(draws.min()) == 0 and int(draws.max()) == high - 1
        assert abs(chi_square(torch.bincount(draws).double(), 500_000 / high)) < 4
    assert torch.equal(rng.randint(rng.make_key(0), (50,), torch.tensor(9)), rng.randint(rng.make_key(0), (50,), 9))
    big = rng.randint(rng.make_key(0), (1000,), 3 << 40)  # far above what float32 could tell apart
    assert len(big.unique()) == 1000 and 1 << 40 < int(big.max()) < 3 << 40 and len((big % 2).unique()) == 2


def test_bernoulli_and_categorical_frequencies() -> None:
    n = 200_000
    for p in (0.0, 0.1, 0.75, 1.0):
        share = float(rng.bernoulli(rng.make_key(4), (n,), p).double().mean())
        assert abs(share - p) <= 4 * math.sqrt(p * (1 - p) / n)
    logits = torch.tensor([[0.0, 1.0, -1.0, 2.0], [5.0, 5.0, 5.0, -math.inf]])
    draws = rng.categorical(rng.make_key(5), logits.expand(n, 2, 4))
    assert draws.shape == (n, 2)
    p = logits.double().softmax(-1)
    assert abs(chi_square(torch.bincount(draws[:, 0], minlength=4).double(), n * p[0])) < 4
    assert (
        abs(chi_square(torch.bincount(draws[:, 1], minlength=4)[:3].double(), n / 3)) < 4
        and int(draws[:, 1].max()) == 2
    )
    shifted = rng.categorical(rng.make_key(5), (logits + 100.0).expand(n, 2, 4))  # unnormalised
    assert float((shifted == draws).double().mean()) > 0.999


@pytest.mark.parametrize("family", ["steps of one seed", "children of one key", "seeds", "first children of seeds"])
def test_neighbouring_keys_are_independent(family: str) -> None:
    """Rows of the table are streams of neighbouring keys: rows and columns look alike, and no two are related."""
    n, width = 20_000, 16
    index = torch.arange(n)
    seeds = rng.fold_in(index, 0)  # make_key of each
    assert seeds[:3].tolist() == [rng.make_key(i).item() for i in range(3)]
    keys = {
        "steps of one seed": lambda: rng.fold_in(rng.make_key(0), index),
        "children of one key": lambda: torch.stack(rng.split(rng.fold_in(rng.make_key(1), 3), n)),
        "seeds": lambda: seeds,
        "first children of seeds": lambda: rng.split(rng.fold_in(seeds, 0))[0],
    }[family]()
    u = vmap(lambda k: rng.uniform(k, (width,)))(keys).double()  # [n, width]
    for column in (0, 1, width - 1):  # the same draw of neighbouring keys
        assert abs(chi_square(torch.bincount((u[:, column] * 50).long(), minlength=50).double(), n / 50)) < 4
        for lag in (1, 2, 64):
            pairs = (u[:-lag, column] * 16).long() * 16 + (u[lag:, column] * 16).long()
            assert abs(chi_square(torch.bincount(pairs, minlength=256).double(), (n - lag) / 256)) < 4.5, (column, lag)
    z = (u - 0.5) * math.sqrt(12)
    correlation = z.T @ z / n
    assert float((correlation - torch.eye(width)).abs().max()) < 4.5 / math.sqrt(n)  # draws of one key
    diagonal = z[:-1].T @ z[1:] / n
    assert float(diagonal.abs().max()) < 4.5 / math.sqrt(n)  # draws of one key with those of the next, at any shift


def test_two_children_share_nothing() -> None:
    batch, update = zip(*(rng.split(rng.fold_in(rng.make_key(9), step)) for step in range(2000)), strict=True)
    a, b = (vmap(lambda k: rng.bits(k, (100,)))(torch.stack(keys)) for keys in (batch, update))
    assert len(torch.cat([a.flatten(), b.flatten()]).unique()) == 400_000
    u, v = ((x.flatten() >> 40) & 0xFFFFFF for x in (a, b))
    assert abs(float(torch.corrcoef(torch.stack([u.double(), v.double()]))[0, 1])) < 4 / math.sqrt(200_000)


def test_no_duplicate_keys_and_no_key_in_its_parents_stream() -> None:
    root = rng.make_key(0)
    steps = rng.fold_in(root, torch.arange(200_000))
    pairs = rng.fold_in(steps.unsqueeze(-1), torch.arange(2)).flatten()
    other = rng.fold_in(rng.make_key(1), torch.arange(200_000))
    everything = torch.cat([steps, pairs, other, rng.bits(root, (200_000,)), torch.arange(200_000)])
    assert len(everything.unique()) == len(everything)


def test_flipping_a_bit_of_the_input_flips_half_of_the_output() -> None:
    keys = rng.bits(rng.make_key(11), (500,))
    for flipped in (
        [rng.fold_in(keys, 3) ^ rng.fold_in(keys ^ (1 << b), 3) for b in range(63)],
        [rng.fold_in(keys, 3) ^ rng.fold_in(keys, 3 ^ (1 << b)) for b in range(63)],
    ):
        ones = sum(((torch.stack(flipped) >> i) & 1).double() for i in range(64)) / 64  # type: ignore[union-attr]
        assert (
            abs(float(ones.mean()) - 0.5) < 0.003
            and float(ones.mean(1).min()) > 0.48
            and float(ones.mean(1).max()) < 0.52
        )


def test_batched_equals_alone() -> None:
    keys = torch.stack([rng.make_key(s) for s in range(5)])
    data = torch.arange(10, 15)
    draws = {
        "bits": lambda k: rng.bits(k, (3, 2)),
        "uniform": lambda k: rng.uniform(k, (7,), -1.0, 2.0),
        "normal": lambda k: rng.normal(k, (7,)),
        "randint": lambda k: rng.randint(k, (7,), 123),
        "split": lambda k: torch.stack(rng.split(k, 3)),
        "categorical": lambda k: rng.categorical(k, torch.linspace(0, 1, 12).reshape(4, 3)),
        "fold_in a number": lambda k: rng.fold_in(k, 4),
        "nested": lambda k: vmap(lambda i: rng.bits(rng.fold_in(k, i), (2,)))(torch.arange(3)),
    }
    for name, draw in draws.items():
        together = vmap(draw)(keys)
        assert all(torch.equal(together[i], draw(k)) for i, k in enumerate(keys)), name
    expected = torch.tensor([[rng.fold_in(k, d).item() for d in data] for k in keys])
    assert torch.equal(vmap(rng.fold_in)(keys, data), expected.diagonal())
    assert torch.equal(vmap(rng.fold_in, in_dims=(0, None))(keys, data), expected)
    assert torch.equal(vmap(rng.fold_in, in_dims=(None, 0), out_dims=1)(keys, data), expected)
    grid = torch.arange(6).reshape(3, 2)
    assert torch.equal(vmap(rng.fold_in, in_dims=(None, 1))(keys[0], grid)[1], rng.fold_in(keys[0], grid[:, 1]))
    assert torch.equal(vmap(lambda k: rng.bits(k, (4,)), in_dims=1)(keys.reshape(1, 5))[2], rng.bits(keys[2], (4,)))


def test_the_operators_of_cpu_equal_the_plain_functions_of_gpus() -> None:
    keys = rng.bits(rng.make_key(0), (4, 3))
    assert torch.equal(rng.fold_in(keys, torch.arange(3)), rng._fold(keys, torch.arange(3)))
    assert torch.equal(rng.bits(keys[0, 0], (9,)), rng._stream(keys[0, 0], 9))
    torch.library.opcheck(rng._fold_op, (keys, torch.arange(3)), test_utils=("test_schema", "test_faketensor"))
    torch.library.opcheck(rng._stream_op, (keys[0], 5), test_utils=("test_schema", "test_faketensor"))


def test_compiled_equals_eager_bit_for_bit() -> None:
    def draw(key: Tensor, step: Tensor) -> tuple[Tensor, ...]:
        first, second = rng.split(rng.fold_in(key, step))
        plain = rng._stream(rng._fold(first, step), 6)  # what a GPU would run, traced
        return (
            rng.bits(first, (3, 5)),
            rng.randint(second, (64,), 1000),
            rng.uniform(first, (9,)),
            rng.fold_in(second, 3),
            plain,
        )

    compiled = torch.compile(draw, fullgraph=True, backend="aot_eager")
    batched = torch.compile(vmap(draw, in_dims=(0, None)), fullgraph=True, backend="aot_eager")
    keys = torch.stack([rng.make_key(s) for s in range(3)])
    for step in (torch.tensor(0), torch.tensor(12345)):
        for i, key in enumerate(keys):
            for a, b, c in zip(draw(key, step), compiled(key, step), batched(keys, step), strict=True):
                assert torch.equal(a, b) and torch.equal(a, c[i])


def test_randint_at_is_a_fixed_list_for_each_key() -> None:
    """Drawn at uniform places it is a bootstrap: of n rows a share 1 - 1/e appears."""
    keys = torch.stack(rng.split(rng.make_key(5), 3))
    index = torch.arange(20_000)
    rows = rng.randint_at(keys.unsqueeze(-1), index, 20_000)
    assert rows.shape == (3, 20_000) and rows.dtype == torch.int64
    assert torch.equal(rng.randint_at(keys[1], index[[7, 7, 19_999]], 20_000), rows[1, [7, 7, 19_999]])
    for row in rows:
        assert int(row.min()) >= 0 and int(row.max()) < 20_000
        assert abs(len(row.unique()) / 20_000 - (1 - math.exp(-1))) < 0.01
    assert len(torch.cat([rows[0], rows[1]]).unique()) > len(rows[0].unique())  # members differ


@pytest.mark.parametrize("high", [1, 2, 3, 7, 10, 97, 1000, 4095, 12_345])
def test_permuted_is_a_permutation_but_for_at_most_two_numbers(high: int) -> None:
    index = torch.arange(high)
    for seed in range(20):
        found = rng.permuted(rng.make_key(seed), index, high)
        assert int(found.min()) >= 0 and int(found.max()) < high and len(found.unique()) >= high - 2
        assert torch.equal(rng.permuted(rng.make_key(seed), index[high // 2 :], high), found[high // 2 :])
    if high >= 1000:
        assert int((found == index).sum()) < 20 and not torch.equal(found, rng.permuted(rng.make_key(99), index, high))
        assert abs(float(torch.corrcoef(torch.stack([found, index]).double())[0, 1])) < 0.1
