"""Numbers as tokens: bins by hand, and against the published rule where no two samples are equal."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.func import vmap

from offrl.algorithms.tt.discretizer import Bins, choices, decode, encode, fit, stack

G = np.random.default_rng(0)


def back(column: np.ndarray, bins: Bins) -> np.ndarray:
    x = torch.tensor(column, dtype=torch.float32).unsqueeze(-1)
    return decode(encode(x, bins.edges), bins.values).squeeze(-1).numpy()


def tokens(column: np.ndarray, bins: Bins) -> list[int]:
    return encode(torch.tensor(column, dtype=torch.float32).unsqueeze(-1), bins.edges).squeeze(-1).tolist()


def test_quantiles_by_hand() -> None:
    """10 samples in 4 bins begin at the samples number 0, 2, 5 and 7."""
    x = np.array([0, 1, 2, 4, 6, 10, 20, 30, 40, 100.0])
    b = fit(G.permutation(x), 4)
    assert b.edges.tolist() == [[1.5, 8.0, 25.0]]
    assert b.values.tolist() == [[0.5, 4.0, 15.0, 65.0]] and b.occupied.all()
    assert tokens(np.array([-9, 1.4, 1.6, 8, 24, 26, 1e9]), b) == [0, 0, 1, 2, 2, 3, 3]
    assert fit(x, 4, meaning="mean").values[0].tolist() == pytest.approx([0.5, 4.0, 15.0, 170 / 3])


def test_the_published_tokens_where_no_two_samples_are_equal() -> None:
    n, bins = 3000, 100
    x = G.normal(size=n).astype(np.float32)
    thresholds = np.append(np.sort(x)[:: n // bins], x.max())
    theirs = np.array([min(int(np.flatnonzero(value >= thresholds)[-1]), bins - 1) for value in x])
    b = fit(x, bins)
    assert tokens(x, b) == theirs.tolist()
    middles = 0.5 * (thresholds[theirs] + thresholds[theirs + 1])
    gap = np.diff(np.sort(x))
    # there a bin ends with the next one's first sample
    np.testing.assert_allclose(back(x, b), middles, atol=0.5 * gap.max() + 1e-6)
    width = np.array([np.ptp(x[theirs == k]) for k in range(bins)])
    error = np.abs(back(x, b) - x)
    assert (error <= 0.5 * width[theirs] + 1e-6).all() and error.max() > 0
    assert (
        abs(float(back(x, fit(x, bins, meaning="mean")).astype(np.float64).mean() - x.astype(np.float64).mean())) < 1e-7
    )


@pytest.mark.parametrize("method", ["quantile", "uniform"])
@pytest.mark.parametrize(
    "x",
    [
        np.repeat([0.0, 1.0], [999, 1]),  # a rare reward
        np.full(50, -3.7),
        np.array([2.0]),
        np.arange(100.0),
        G.choice([-100.0, 0.1, 0.3, 7e8], 500),
    ],
)
def test_few_values_come_back_exactly(x: np.ndarray, method: str) -> None:
    b = fit(x, 100, method)
    assert np.array_equal(back(x, b), x.astype(np.float32)) and int(b.occupied.sum()) == len(np.unique(x))
    rounded = (x * (1 + 3e-7)).astype(np.float32)  # rewards that went through other arithmetic
    assert tokens(rounded, b) == tokens(x, b)


def test_a_value_that_fills_a_bin_has_it_for_itself() -> None:
    """Saturated actions: the published rule gives -1 the middle between it and the next threshold."""
    x = np.clip(G.normal(size=5000), -1, 1)
    b = fit(x, 100)
    assert set(back(x[x == 1], b)) == {1.0} and set(back(x[x == -1], b)) == {-1.0}
    inner = np.abs(x) < 1
    assert np.abs(back(x, b) - x)[inner].max() < 0.04 and 0 < np.abs(back(x[inner], b)).max() < 1
    middle = np.where(G.random(5000) < 0.5, 0.25, x)  # amid the others
    assert set(back(np.array([0.25]), fit(middle, 100))) == {0.25}


def test_values_that_must_be_told_apart() -> None:
    """A fall that costs 100 is too rare to fill a bin of its own: with the ordinary rewards beside it, it would come
    back as -49.
    """
    x = np.where(np.arange(20_000) % 1000 == 0, -100.0, G.normal(1.0, 0.1, 20_000))
    assert back(np.array([-100.0]), fit(x, 100))[0] > -60
    b = fit(x, 100, singletons=[-100.0])
    found = back(x, b)
    assert (found[x == -100] == -100).all() and np.abs(found - x).max() < 0.3
    assert fit(x, 100, singletons=[5.0]).edges.tolist() == fit(x, 100).edges.tolist()  # which does not occur


def test_uniform_by_hand() -> None:
    x = np.array([0.0, 0.1, 0.2, 3.0, 3.5, 4.0])
    b = fit(x, 4, "uniform")
    assert b.edges.tolist() == [[1, 2, 3]] and b.values.tolist() == [[0.5, 1.5, 2.5, 3.5]]
    assert b.occupied.tolist() == [[True, False, False, True]] and tokens(x, b) == [0, 0, 0, 3, 3, 3]
    assert fit(x, 4, "uniform", "mean").values[0].tolist() == pytest.approx([0.1, 1.5, 2.5, 3.5])


def test_choices() -> None:
    b = choices(3, 5, np.array([0, 2, 2]))
    assert tokens(np.array([0, 1, 2]), b) == [0, 1, 2] and b.values.tolist() == [[0, 1, 2, 2, 2]]
    assert b.occupied.tolist() == [[True, False, True, False, False]] and choices(3, 5).occupied.sum() == 3
    with pytest.raises(ValueError, match="6 choices do not fit into 5 bins"):
        choices(6, 5)


def test_several_dimensions_and_replicas() -> None:
    columns = [G.normal(size=400), np.repeat([0.0, 1.0], 200), G.exponential(size=400)]
    b = stack([fit(c, 10) for c in columns])
    x = torch.tensor(np.stack(columns, -1), dtype=torch.float32).reshape(20, 20, 3)
    found = encode(x, b.edges)
    assert (
        found.shape == x.shape
        and found[..., 1].unique().tolist() == [0, 1]
        and found[..., 2].unique().tolist() == list(range(10))
    )
    for d, c in enumerate(columns):
        assert found[..., d].flatten().tolist() == tokens(c, fit(c, 10))
    two = vmap(lambda x, e, v: decode(encode(x, e), v))(
        torch.stack([x, x + 1]), torch.stack([b.edges] * 2), torch.stack([b.values] * 2)
    )
    assert torch.equal(two[0], decode(found, b.values)) and torch.equal(
        two[1], decode(encode(x + 1, b.edges), b.values)
    )


def test_no_samples_are_refused() -> None:
    with pytest.raises(ValueError, match="1 bins of 3 samples"):
        fit(np.zeros(3), 1)
    with pytest.raises(ValueError, match="4 bins of 0 samples"):
        fit(np.zeros(0), 4)
