"""Policies' densities against float64 formulas, torch.distributions and numerical integration; samples against their
densities.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch

from offrl import rng
from offrl.nn import Categorical, Deterministic, Gaussian, TanhGaussian, make_policy
from offrl.nn.policies import gaussian_log_prob

OBS = torch.linspace(-2, 2, 12).reshape(4, 3)


def randomised(policy: torch.nn.Module) -> torch.nn.Module:
    g = torch.Generator().manual_seed(0)
    for p in policy.parameters():
        p.data = 0.7 * torch.randn(p.shape, generator=g)
    return policy


def test_gaussian_log_prob_equals_numpy() -> None:
    g = np.random.default_rng(0)
    mean, log_std, x = g.normal(size=(6, 3)), g.uniform(-3, 1, (6, 3)), g.normal(size=(6, 3))
    expected = (-0.5 * ((x - mean) / np.exp(log_std)) ** 2 - np.log(np.exp(log_std) * np.sqrt(2 * np.pi))).sum(-1)
    ours = gaussian_log_prob(*(torch.tensor(v, dtype=torch.float32) for v in (mean, log_std, x)))
    np.testing.assert_allclose(ours, expected, rtol=1e-5, atol=1e-4)


def test_gaussian_policy() -> None:
    policy = randomised(Gaussian(3, 2, [8], log_std_min=-1.0, log_std_max=0.25))
    policy.log_std.data = torch.tensor([0.1, -4.0])  # the second is below the bound
    mean, log_std = policy(OBS)
    assert torch.equal(mean, policy.net(OBS).tanh()) and torch.equal(mean, policy.mode((mean, log_std)))
    torch.testing.assert_close(log_std, torch.tensor([0.1, -1.0]).expand(4, 2))
    actions = torch.linspace(-1, 1, 8).reshape(4, 2)
    normal = torch.distributions.Normal(mean.double(), log_std.double().exp())
    expected = normal.log_prob(actions.double()).sum(-1)  # no correction for clipping or squashing
    torch.testing.assert_close(policy.log_prob((mean, log_std), actions).double(), expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(policy.bc_loss((mean, log_std), actions), -policy.log_prob((mean, log_std), actions))
    policy.log_std.data = torch.tensor([0.1, 4.0])
    torch.testing.assert_close(policy(OBS)[1], torch.tensor([0.1, 0.25]).expand(4, 2))
    defaults = Gaussian(3, 2, [8])
    assert defaults.bounds == (-5.0, 2.0) and not defaults.log_std.any()  # the authors' range, from 0


def test_gaussian_samples_are_clipped_not_squashed() -> None:
    n, policy = 200_000, Gaussian(3, 2, [8])
    mean, log_std = torch.tensor([0.2, -0.9]), torch.tensor([-3.0, 0.0])
    draws = policy.sample((mean.expand(n, 2), log_std.expand(n, 2)), rng.make_key(0))
    assert float(draws.abs().max()) == 1.0
    assert float(draws[:, 0].mean()) == pytest.approx(0.2, abs=1e-3) and float(draws[:, 0].std()) == pytest.approx(
        math.exp(-3), rel=0.01
    )
    below = float((draws[:, 1] == -1.0).double().mean())  # P(N(-0.9, 1) < -1) = Phi(-0.1)
    assert below == pytest.approx(0.46017, abs=0.005)


def test_tanh_gaussian_density_integrates_to_one() -> None:
    """The density of the squashed variable itself, by the trapezoidal rule over (-1, 1); wrong Jacobians give other
    numbers.
    """
    policy = TanhGaussian(3, 1, [8])
    a = torch.linspace(-1, 1, 400_001, dtype=torch.float64)[1:-1]
    for mean, log_std in ((0.0, 0.0), (0.5, -1.0), (-0.8, -0.3)):
        dist = torch.full((len(a), 1), mean), torch.full((len(a), 1), log_std)
        density = policy.log_prob(dist, a.float().unsqueeze(-1)).double().exp()
        assert float(torch.trapezoid(density, a)) == pytest.approx(1.0, abs=3e-3)
        u = torch.distributions.Normal(mean, math.exp(log_std))
        inside = float(torch.trapezoid(density[(a > -0.3) & (a < 0.6)], a[(a > -0.3) & (a < 0.6)]))
        expected = float(u.cdf(torch.tensor(math.atanh(0.6))) - u.cdf(torch.tensor(math.atanh(-0.3))))
        assert inside == pytest.approx(expected, abs=1e-3)


def test_tanh_gaussian_equals_torch_distributions() -> None:
    policy = randomised(TanhGaussian(3, 2, [8]))
    dist = policy(OBS)
    assert torch.equal(policy.mode(dist), dist[0].tanh())
    raw = policy.net(OBS)
    assert torch.equal(dist[0], raw[:, :2]) and torch.equal(dist[1], raw[:, 2:].clamp(-5.0, 2.0))
    normal = torch.distributions.Normal(dist[0].double(), dist[1].double().exp())
    squashed = torch.distributions.TransformedDistribution(normal, torch.distributions.TanhTransform(cache_size=1))
    actions = torch.linspace(-0.99, 0.99, 8).reshape(4, 2)
    torch.testing.assert_close(
        policy.log_prob(dist, actions).double(), squashed.log_prob(actions.double()).sum(-1), rtol=1e-4, atol=1e-3
    )
    sampled, log_prob = policy.sample_with_log_prob(dist, rng.make_key(1))
    assert torch.equal(sampled, policy.sample(dist, rng.make_key(1)))
    inner = sampled.abs().amax(-1) < 0.999  # near the edge a float32 action no longer tells where it came from
    assert inner.any()
    torch.testing.assert_close(log_prob[inner], policy.log_prob(dist, sampled)[inner], rtol=1e-3, atol=1e-2)
    assert policy.log_prob(dist, torch.ones(4, 2)).isfinite().all()  # data at the very edge
    far = (torch.full((1, 1), 30.0), torch.zeros(1, 1))  # 1 - tanh(30)**2 is 0 in float32
    _, value = policy.sample_with_log_prob(far, rng.make_key(1))
    assert value.isfinite().all() and float(value) > 50


def test_tanh_gaussian_samples() -> None:
    n, policy = 200_000, TanhGaussian(3, 1, [8])
    dist = torch.full((n, 1), 0.4), torch.full((n, 1), -0.5)
    draws = policy.sample(dist, rng.make_key(2))
    assert float(draws.abs().max()) < 1.0
    u = torch.atanh(draws.double())
    assert float(u.mean()) == pytest.approx(0.4, abs=0.006) and float(u.std()) == pytest.approx(
        math.exp(-0.5), rel=0.01
    )
    mean = dist[0].clone().requires_grad_()
    # reparametrised: d tanh(u) / d mean = 1 - tanh(u)**2
    policy.sample((mean, dist[1]), rng.make_key(2)).sum().backward()
    assert mean.grad is not None
    torch.testing.assert_close(mean.grad, 1 - draws.square(), rtol=1e-4, atol=1e-5)


def test_deterministic_policy() -> None:
    policy = randomised(Deterministic(3, 2, [8]))
    dist = policy(OBS)
    assert torch.equal(dist[0], policy.net(OBS).tanh()) and torch.equal(
        policy.sample(dist, rng.make_key(0)), policy.mode(dist)
    )
    loss = policy.bc_loss((torch.tensor([[0.5, -0.5]]),), torch.tensor([[0.0, 0.25]]))
    assert loss.tolist() == [(0.25 + 0.5625) / 2]  # the mean over action dimensions
    with pytest.raises(TypeError, match="no density"):
        policy.log_prob(dist, dist[0])


def test_categorical_policy() -> None:
    policy = randomised(Categorical(3, 5, [8]))
    (log_p,) = policy(OBS)
    raw = policy.net(OBS).double()
    expected = raw - raw.exp().sum(-1, keepdim=True).log()
    torch.testing.assert_close(log_p.double(), expected, rtol=1e-5, atol=1e-5)
    actions = torch.tensor([0, 4, 2, 2])
    torch.testing.assert_close(
        policy.log_prob((log_p,), actions).double(), expected[torch.arange(4), actions], rtol=1e-5, atol=1e-5
    )
    assert torch.equal(policy.bc_loss((log_p,), actions), -policy.log_prob((log_p,), actions))
    assert torch.equal(policy.mode((log_p,)), raw.argmax(-1)) and policy.mode((log_p,)).dtype == torch.int64
    n = 100_000
    draws = policy.sample((log_p[0].expand(n, 5),), rng.make_key(0))
    frequencies = torch.bincount(draws, minlength=5).double() / n
    torch.testing.assert_close(frequencies, expected[0].exp().detach(), rtol=0, atol=0.006)


def test_policies_by_name() -> None:
    for name, kind in (("deterministic", Deterministic), ("gaussian", Gaussian), ("tanh_gaussian", TanhGaussian)):
        assert type(make_policy(name, 3, 2, 0, [4])) is kind
        assert type(make_policy(name, 3, 1, 6, [4])) is Categorical  # discrete actions


def test_a_critics_value_in_the_units_of_the_recorded_rewards() -> None:
    from offrl import registry
    from offrl.data.dataset import DataSpec
    from offrl.evaluation.policy import TrainedPolicy

    iql = registry.get("algo", "iql")
    spec = DataSpec((2,), 1, action_low=(-1.0,), action_high=(1.0,), reward_scale=2.0, reward_shift=-1.0)
    algorithm = iql(iql.Config(discount=0.5, hidden=[4]), spec)
    policy = TrainedPolicy(algorithm, algorithm.init(0), 0)
    # recorded rewards r of 3 steps become 2 r - 1: values fall by 1 + 1/2 + 1/4 after they are doubled
    got = policy.in_recorded_units(np.array([5.0, 5.0]), np.array([1, 3]))
    np.testing.assert_allclose(got, [3.0, 3.375])
    undiscounted = TrainedPolicy(iql(iql.Config(discount=1.0, hidden=[4]), spec), algorithm.init(0), 0)
    np.testing.assert_allclose(undiscounted.in_recorded_units(np.array([5.0]), np.array([3])), [4.0])
    # without a shift the length, which may be endless, does not matter
    plain = dataclasses.replace(spec, reward_shift=0.0)
    undiscounted = TrainedPolicy(iql(iql.Config(discount=1.0, hidden=[4]), plain), algorithm.init(0), 0)
    np.testing.assert_allclose(undiscounted.in_recorded_units(np.array([5.0]), np.array([np.inf])), [2.5])
