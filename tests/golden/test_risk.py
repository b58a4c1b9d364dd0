"""Distributions of returns and their tails, by hand; and a short cut that the tail forbids."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from bench import risk
from torch import Tensor

from offrl import registry
from offrl.data.dataset import DataSpec
from offrl.errors import UserError
from offrl.families.critics import Critic
from offrl.families.critics.value import check_risk
from offrl.nn import Bootstrap, make_head
from offrl.nn.heads import GaussianValues, quantile_loss


def f32(x: object) -> Tensor:
    return torch.tensor(np.asarray(x), dtype=torch.float32)


def test_quantile_losses() -> None:
    for error, expected in ((2.0, (0.15, 0.75, 1.35)), (-2.0, (1.35, 0.75, 0.15)), (0.5, (0.0125, 0.0625, 0.1125))):
        torch.testing.assert_close(quantile_loss(f32(error), f32([0.1, 0.5, 0.9])), f32(expected))


def test_the_quantile_head_sums_over_quantiles_and_averages_over_samples() -> None:
    draw = np.random.default_rng(0)
    logits, following = draw.normal(size=(2, 3, 4)) * 2, draw.normal(size=(3, 4)) * 2
    target, scale = draw.normal(size=3), np.array([0.9, 0.0, 0.5])
    head = make_head("quantile", quantiles=4)
    result = head.loss(f32(logits), f32(target), Bootstrap(f32(following), f32(scale)))
    for e in range(2):
        for b in range(3):
            samples = [target[b] + scale[b] * (z - following[b].mean()) for z in following[b]]
            total = 0.0
            for i, z in enumerate(logits[e, b]):
                for y in samples:
                    u = y - z
                    h = u * u / 2 if abs(u) <= 1 else abs(u) - 0.5
                    total += abs((i + 0.5) / 4 - (u < 0)) * h / len(samples)
            assert float(result[e, b]) == pytest.approx(total, rel=1e-5)
    # a number in place of a distribution: all samples are that number
    alone = head.loss(f32(logits), f32(target))
    torch.testing.assert_close(alone[:, 1], result[:, 1])
    torch.testing.assert_close(head.mean(f32(logits)), f32(logits.mean(-1)))


def test_the_gradients_of_the_gaussian_head() -> None:
    """(q - y), and with sg of softplus's own: (sigma^2 - (y - q)^2 - (c sigma')^2) / (sigma + .1)."""
    raw = f32([1.0, math.log(math.expm1(2.0))]).requires_grad_()  # sigma = 2
    following = f32([0.0, math.log(math.expm1(3.0))])
    loss = GaussianValues().loss(raw, f32(4.0), Bootstrap(following, f32(0.5)))
    loss.backward()
    v = 9.0 + 0.25 * 9.0
    assert raw.grad is not None
    assert float(loss.detach()) == pytest.approx(4.5 + 2.0 * (4.0 - v) / 2.1, rel=1e-5)
    slope = 1.0 - math.exp(-2.0)  # of softplus, where it is 2
    torch.testing.assert_close(raw.grad, f32([-3.0, (4.0 - v) / 2.1 * slope]), rtol=1e-5, atol=1e-5)


def test_tails() -> None:
    gaussian = f32([[5.0, math.log(math.expm1(2.0))]])
    for level, factor in ((0.1, 1.754983), (0.25, 1.271106)):
        assert float(make_head("gaussian").cvar(gaussian, level)) == pytest.approx(5.0 - 2.0 * factor, abs=1e-5)
    quantiles = make_head("quantile", quantiles=4)
    # crossed ones are sorted, the last counts in part: 1.5 of them are .375
    for level, expected in ((0.25, 0.0), (0.375, 1 / 3), (0.5, 0.5), (1.0, 1.5)):
        assert float(quantiles.cvar(f32([[3.0, 1.0, 2.0, 0.0]]), level)) == pytest.approx(expected, abs=1e-6)
    bins = make_head("c51", 3, -10.0, 10.0)
    for level, expected in ((0.05, -10.0), (0.1, -10.0), (0.3, -10 / 3), (0.75, 1.5 / 0.75), (1.0, 4.0)):
        assert float(bins.cvar(f32(np.log([[0.1, 0.4, 0.5]])), level)) == pytest.approx(expected, abs=1e-5)
    assert float(make_head("scalar").cvar(f32([[3.0]]), 0.1)) == 3.0


@pytest.mark.parametrize("head", ["quantile", "gaussian", "c51"])
def test_a_risk_of_1_is_the_mean_to_the_bit(head: str) -> None:
    kind = registry.get("algo", "td3_bc").Config
    config = kind(value_head=head, value_range=[-3.0, 7.0], hidden=[8])
    critic = Critic(config, DataSpec((2,), 1, action_low=(-1.0,), action_high=(1.0,)))
    logits = torch.randn(2, 5, critic.head.out_dim)
    mean = critic.head.mean(logits)
    assert torch.equal(critic.at_risk(logits), mean)
    config.risk = torch.tensor(1.0)  # of a grid
    assert torch.equal(critic.at_risk(logits), mean)
    config.risk = torch.tensor(0.1)
    torch.testing.assert_close(critic.at_risk(logits), critic.head.cvar(logits, 0.1))
    assert (critic.at_risk(logits) < mean).all()


def test_a_risk_without_a_distribution() -> None:
    config = registry.get("algo", "td3_bc").Config(risk=0.1)
    with pytest.raises(UserError, match=r"algo\.risk needs .* algo\.value_head=scalar learns none: take .*quantile or"):
        check_risk(config, None)
    config = registry.get("algo", "td3_bc").Config(value_head="hl_gauss")
    check_risk(config, {"risk": [1.0]})
    with pytest.raises(UserError, match=r"algo\.value_head=hl_gauss learns none"):
        check_risk(config, {"risk": [1.0, 0.1]})


# ---- a chain with a risky short cut


@pytest.mark.nightly
def test_the_tail_avoids_the_short_cut_that_the_mean_takes(tmp_path: Path) -> None:
    """Both in one program, as replicas of a grid; the worst tenth is the predicted one."""
    run = risk.train(str(tmp_path))
    start = risk.RiskyChain().reset(seed=0)[0]
    evaluation = run.evaluate(episodes=200)
    for replica, returns in zip(run.replicas, evaluation.returns, strict=True):
        level = dict(replica.values)["risk"]
        assert run.policy(replica.seed, risk=level).act(start) == (level == 1.0)
        mean, tail = risk.predicted(run, replica.seed, level)
        assert mean == pytest.approx(returns.mean(), abs=1.5)
        assert tail == pytest.approx(risk.worst(returns), abs=1.5)
