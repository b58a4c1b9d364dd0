"""Value heads against sums, loops and error functions in float64 that know nothing of offrl."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from offrl.nn import BINNED, Bootstrap, make_head
from offrl.nn.heads import SymexpTwoHot, SymlogTwoHot, symexp, symlog

G = np.random.default_rng(0)
RANGES = [(5, -2.0, 3.0), (11, 0.0, 1.0), (101, -117.4, 456.3), (51, 990.0, 1010.0)]


def f32(x: object) -> Tensor:
    return torch.tensor(np.asarray(x), dtype=torch.float32)


def softmax(z: np.ndarray) -> np.ndarray:
    p = np.exp(z - z.max(-1, keepdims=True))
    return p / p.sum(-1, keepdims=True)


def centres(name: str, bins: int, low: float, high: float) -> np.ndarray:
    """HL-Gauss's bins tile the range; the others' first and last bin lie at its ends."""
    if name != "hl_gauss":
        return np.linspace(low, high, bins)
    edges = np.linspace(low, high, bins + 1)
    return (edges[1:] + edges[:-1]) / 2


def two_hot(y: float, bins: int, low: float, high: float) -> np.ndarray:
    p, place = np.zeros(bins), (min(max(y, low), high) - low) / (high - low) * (bins - 1)
    left = min(int(place), bins - 2)
    p[left], p[left + 1] = left + 1 - place, place - left
    return p


def hl_gauss(y: float, bins: int, low: float, high: float, sigma: float) -> np.ndarray:
    """Equation 6 of arXiv 2403.03950, by the normal distribution function of each edge; sigma in widths."""
    y, s = min(max(y, low), high), sigma * (high - low) / bins
    phi = [0.5 * (1 + math.erf((e - y) / (math.sqrt(2) * s))) for e in np.linspace(low, high, bins + 1)]
    return np.array([b - a for a, b in zip(phi[:-1], phi[1:], strict=True)]) / (phi[-1] - phi[0])


def c51(p: np.ndarray, reward: float, discount: float, low: float, high: float) -> np.ndarray:
    """Algorithm 1 of arXiv 1707.06887, line by line."""
    bins = len(p)
    width, m = (high - low) / (bins - 1), np.zeros(len(p))
    for j in range(bins):
        z = min(max(reward + discount * (low + j * width), low), high)
        b = (z - low) / width
        lower, upper = math.floor(b), math.ceil(b)
        if lower == upper:  # the paper's lines lose the mass of an atom that falls on a bin
            m[min(lower, bins - 1)] += p[j]
            continue
        m[lower] += p[j] * (upper - b)
        m[min(upper, bins - 1)] += p[j] * (b - lower)
    return m


def expected(name: str, targets: np.ndarray, bins: int, low: float, high: float) -> np.ndarray:
    one = (
        (lambda y: hl_gauss(y, bins, low, high, 0.75))
        if name == "hl_gauss"
        else (lambda y: two_hot(y, bins, low, high))
    )
    return np.stack([one(float(y)) for y in targets])


@pytest.mark.parametrize("name", BINNED)
@pytest.mark.parametrize(("bins", "low", "high"), RANGES)
def test_projection_cross_entropy_mean_and_gradient(name: str, bins: int, low: float, high: float) -> None:
    head = make_head(name, bins, low, high)
    span = high - low
    targets = np.concatenate(
        [
            [low, high, low - span, high + span, (low + high) / 2],
            G.uniform(low, high, 20),
            centres(name, bins, low, high),
        ]
    )
    targets = targets.astype(np.float32).astype(np.float64)
    p = expected(name, targets, bins, low, high)
    # a float32 target near 1000 is known to 6e-5, which is a share of a bin's width
    atol = 2e-6 + 2 * float(np.spacing(np.float32(max(abs(low), abs(high))))) / (span / bins)
    np.testing.assert_allclose(head.project(f32(targets), None), p, atol=atol)  # type: ignore[attr-defined]
    np.testing.assert_allclose(head.project(f32(targets), None).sum(-1), 1.0, atol=2e-6)  # type: ignore[attr-defined]

    z = 3 * G.normal(size=(len(targets), bins))
    logits = f32(z).requires_grad_()
    z = logits.detach().double().numpy()
    loss = head.loss(logits, f32(targets))
    np.testing.assert_allclose(loss.detach(), -(p * np.log(softmax(z))).sum(-1), rtol=1e-5, atol=20 * atol)
    loss.sum().backward()
    np.testing.assert_allclose(logits.grad, softmax(z) - p, atol=2 * atol)
    value = (softmax(z) * centres(name, bins, low, high)).sum(-1)
    np.testing.assert_allclose(head.mean(f32(z)), value, atol=1e-6 * span + np.spacing(np.float32(high)))


@pytest.mark.parametrize("name", BINNED)
def test_the_gradient_of_the_mean(name: str) -> None:
    """What an actor climbs: d mean / d logit_i = p_i (z_i - mean)."""
    head, z = make_head(name, 7, -1.0, 2.0), G.normal(size=(4, 7))
    logits = f32(z).requires_grad_()
    head.mean(logits).sum().backward()
    p, atoms = softmax(z), centres(name, 7, -1.0, 2.0)
    np.testing.assert_allclose(logits.grad, p * (atoms - (p * atoms).sum(-1, keepdims=True)), atol=1e-6)


@pytest.mark.parametrize("name", ["two_hot", "c51"])
def test_the_mean_of_a_projected_target_is_the_target(name: str) -> None:
    head = make_head(name, 13, -3.0, 9.0)
    y = f32(G.uniform(-3, 9, 100))
    torch.testing.assert_close(head.mean(head.project(y, None).log()), y, atol=1e-5, rtol=0)  # type: ignore[attr-defined]


def test_the_mean_of_a_gaussian_target_is_the_target_within_the_margin() -> None:
    """Three sigma and more from the ends; at an end half of the Gaussian is cut off."""
    head = make_head("hl_gauss", 101, -20.0, 120.0)
    y = f32(np.linspace(-15, 115, 200))
    torch.testing.assert_close(head.mean(head.project(y, None).log()), y, atol=0.01, rtol=0)  # type: ignore[attr-defined]
    ends = head.mean(head.project(f32([-20.0, 120.0]), None).log())  # type: ignore[attr-defined]
    width = 140 / 101
    assert 0.3 * width < float(ends[0]) + 20 < width and 0.3 * width < 120 - float(ends[1]) < width


def test_targets_beyond_the_range_are_clipped_and_counted() -> None:
    inside, outside = f32([0.0, 0.5, 1.0]), f32([-1e-3, 1.5, -7.0])
    for name in BINNED:
        head = make_head(name, 5, 0.0, 1.0)
        ends = head.project(f32([0.0, 1.0, 0.0]), None)  # type: ignore[attr-defined]
        assert torch.equal(head.project(outside, None), ends)  # type: ignore[attr-defined]
        share = head.saturation(torch.cat([inside, outside]))
        assert share is not None and float(share) == 0.5
        assert float(head.saturation(inside)) == 0.0  # type: ignore[arg-type]
    scalar = make_head("scalar")
    assert scalar.saturation(outside) is None and scalar.out_dim == 1
    np.testing.assert_allclose(scalar.loss(f32([[1.0], [2.0]]), f32([0.5, -1.0])), [0.25, 9.0])


# ---- C51


def test_algorithm_1_by_hand() -> None:
    """Atoms 0, 1, 2 with p = (.2, .3, .5); r = 0.5, discount 0.5: they move to 0.5, 1, 1.5.

    0.5 gives .1 each to 0 and 1, 1 stays, 1.5 gives .25 each to 1 and 2: (.1, .65, .25).
    """
    head, p = make_head("c51", 3, 0.0, 2.0), f32([0.2, 0.3, 0.5])
    mean = 1.3
    got = head.project(f32([0.5 + 0.5 * mean]), Bootstrap(p.log()[None], f32([0.5])))  # type: ignore[attr-defined]
    np.testing.assert_allclose(got, [[0.1, 0.65, 0.25]], atol=1e-6)


@pytest.mark.parametrize(("bins", "low", "high"), RANGES[:3])
def test_projection_against_the_papers_loop(bins: int, low: float, high: float) -> None:
    head, n = make_head("c51", bins, low, high), 40
    z, rewards = 2 * G.normal(size=(n, bins)), (high - low) * G.normal(size=n) / 4
    discounts = np.where(G.random(n) < 0.3, 0.0, 0.9)  # of which some are terminal
    p = softmax(f32(z).double().numpy())
    mean = (p * np.linspace(low, high, bins)).sum(-1)
    want = np.stack([c51(p[i], rewards[i], discounts[i], low, high) for i in range(n)])
    bootstrap = Bootstrap(f32(z), f32(discounts))
    got = head.project(f32(rewards + discounts * mean), bootstrap)  # type: ignore[attr-defined]
    np.testing.assert_allclose(got, want, atol=2e-5)
    for i in np.flatnonzero(discounts == 0.0):  # nothing follows: all mass at the reward
        np.testing.assert_allclose(got[i], two_hot(rewards[i], bins, low, high), atol=2e-5)
    logits = G.normal(size=(2, n, bins))  # of two critics against one target
    loss = head.loss(f32(logits), f32(rewards + discounts * mean), bootstrap)
    np.testing.assert_allclose(loss, -(want * np.log(softmax(logits))).sum(-1), rtol=1e-4)


def test_what_an_objective_adds_shifts_the_next_distribution() -> None:
    """Entropy or a penalty x in the target: r + discount (Z - x), so every atom moves by discount * x."""
    head, z = make_head("c51", 21, -5.0, 5.0), G.normal(size=(6, 21))
    p, atoms, x = softmax(f32(z).double().numpy()), np.linspace(-5, 5, 21), G.uniform(0, 1, 6)
    mean = (p * atoms).sum(-1)
    got = head.project(f32(0.3 + 0.9 * (mean - x)), Bootstrap(f32(z), f32([0.9] * 6)))  # type: ignore[attr-defined]
    want = np.stack([c51(p[i], 0.3 - 0.9 * x[i], 0.9, -5.0, 5.0) for i in range(6)])
    np.testing.assert_allclose(got, want, atol=1e-5)


def test_a_target_that_is_the_distribution_itself() -> None:
    """V towards Q in IQL: scale 1 and the mean as the target leave the distribution as it is."""
    head, z = make_head("c51", 9, 0.0, 4.0), f32(G.normal(size=(5, 9)))
    got = head.project(head.mean(z), Bootstrap(z, torch.ones(5)))  # type: ignore[attr-defined]
    torch.testing.assert_close(got, z.softmax(-1), atol=1e-6, rtol=0)


# ---- arithmetic


@pytest.mark.parametrize("sigma", [1e-3, 0.02, 0.3, 5.0, 200.0])
def test_narrow_and_wide_gaussians_in_float32(sigma: float) -> None:
    head, low, high, bins = make_head("hl_gauss", 201, -100.0, 0.0, sigma), -100.0, 0.0, 201
    y = np.concatenate([np.linspace(low, high, 50), np.linspace(low, high, bins + 1)[[1, 100, -2]]]).astype(np.float32)
    got = head.project(f32(y), None).double().numpy()  # type: ignore[attr-defined]
    np.testing.assert_allclose(got.sum(-1), 1.0, atol=1e-4)
    assert (got >= 0).all()
    width, steep = (high - low) / bins, 1 / (math.sqrt(2 * math.pi) * sigma)
    known = float(np.spacing(np.float32(100))) / width + 3e-5  # what float32 knows of a place among 201 bins, in widths
    want = np.stack([hl_gauss(float(v), bins, low, high, sigma) for v in y])
    np.testing.assert_allclose(got, want, atol=1e-5 + min(1.0, steep * known))
    assert head.loss(torch.zeros(len(y), bins), f32(y)).isfinite().all()


@pytest.mark.parametrize("name", BINNED)
def test_extreme_logits_and_targets_stay_finite(name: str) -> None:
    head = make_head(name, 11, 0.0, 1.0)
    logits = torch.tensor([[-1e4] * 10 + [1e4], [1e4] + [-1e4] * 10]).requires_grad_()
    loss = head.loss(logits, f32([float("inf"), -1e30]))
    loss.sum().backward()
    assert loss.isfinite().all() and logits.grad is not None and logits.grad.isfinite().all()
    assert head.loss(torch.zeros(1, 11), f32([float("nan")])).isnan().all(), "a diverged target must show"


@pytest.mark.parametrize("name", BINNED)
def test_bfloat16_outputs(name: str) -> None:
    """Under autocast the network's outputs are bfloat16; values and losses are computed from them in float32."""
    head, x, w = make_head(name, 51, -10.0, 50.0), f32(G.normal(size=(8, 6))), f32(G.normal(size=(6, 51)))
    y = f32(G.uniform(-10, 50, 8))
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        logits = x @ w
        assert logits.dtype == torch.bfloat16
        value, loss = (
            head.mean(logits),
            head.loss(logits, y, Bootstrap(logits, torch.full((8,), 0.9)) if name == "c51" else None),
        )
    assert value.dtype == loss.dtype == torch.float32
    p = softmax(logits.double().numpy())
    atoms = centres(name, 51, -10.0, 50.0)
    np.testing.assert_allclose(value, (p * atoms).sum(-1), atol=1e-4)
    if name == "c51":
        mean = (p * atoms).sum(-1)
        q = np.stack([c51(p[i], float(y[i]) - 0.9 * mean[i], 0.9, -10.0, 50.0) for i in range(8)])
    else:
        q = expected(name, y.double().numpy(), 51, -10.0, 50.0)
    np.testing.assert_allclose(loss, -(q * np.log(p)).sum(-1), rtol=1e-4)


@pytest.mark.parametrize(
    ("bins", "low", "high"),
    [(1, 0.0, 1.0), (5, 1.0, 1.0), (5, 2.0, 1.0), (5, float("nan"), 1.0), (5, 0.0, float("inf"))],
)
def test_an_empty_range_is_refused(bins: int, low: float, high: float) -> None:
    for name in BINNED:
        with pytest.raises(ValueError, match="at least two bins"):
            make_head(name, bins, low, high)


def test_symlog() -> None:
    pairs = {0: 0, 1: 0.693147, -1: -0.693147, 10: 2.397895, 1000: 6.908755, -99: -4.605170}
    x, y = f32(list(pairs)), f32(list(pairs.values()))
    torch.testing.assert_close(symlog(x), y)
    torch.testing.assert_close(symexp(symlog(x)), x, rtol=1e-5, atol=0.0)
    torch.testing.assert_close(symexp(f32([1.0, -2.0, 20.0])), f32([1.718282, -6.389056, 485165194.4]))


@pytest.mark.parametrize(
    ("y", "bins", "read"),
    [
        (5.0, {58: 0.041203, 59: 0.958797}, 5.0),
        (1.0, {53: 0.534264, 54: 0.465736}, 1.0),
        (-3.7, {42: 0.737812, 43: 0.262188}, -3.7),
        (0.0, {50: 1.0}, 0.0),
        (1e5, {100: 1.0}, 22025.466),  # beyond what 10 stands for
    ],
)
def test_two_hot_in_symlog_units(y: float, bins: dict[int, float], read: float) -> None:
    head = SymlogTwoHot(101, 10.0)
    p = head.project(f32(y), None)
    assert {i: pytest.approx(float(v), abs=2e-5) for i, v in enumerate(p) if v > 0} == bins
    assert float(head.mean(p.log())) == pytest.approx(read, rel=1e-5, abs=1e-6)
    assert float(head.mean(torch.full((101,), 0.3))) == 0.0
    assert float(head.saturation(f32([y]))) == (y > 22026)


@pytest.mark.parametrize("head", [SymlogTwoHot(101, 10.0), SymexpTwoHot(255, 20.0)], ids=["symlog", "symexp"])
def test_two_hot_mirrors_what_is_below_0(head: SymlogTwoHot | SymexpTwoHot) -> None:
    y = f32([0.0, 0.3, 1.0, 3.7, 40.0, 1e5, 1e10])
    p = head.project(y, None)
    torch.testing.assert_close(head.project(-y, None), p.flip(-1), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(head.mean(p.flip(-1).log()), -head.mean(p.log()))


def test_the_loss_of_two_hot_in_symlog_units() -> None:
    """Of equal outputs the gradient is softmax - target."""
    head, logits = SymlogTwoHot(101, 10.0), torch.zeros(101, requires_grad=True)
    loss = head.loss(logits, f32(5.0))
    loss.backward()
    assert float(loss.detach()) == pytest.approx(math.log(101), rel=1e-6)
    torch.testing.assert_close(logits.grad, 1 / 101 - head.project(f32(5.0), None), rtol=0.0, atol=1e-6)
