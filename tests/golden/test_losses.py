"""Shared losses against numbers worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch

from offrl import losses


def test_expectile() -> None:
    u = torch.tensor([-2.0, -1.0, 0.0, 1.0, 3.0])
    assert losses.expectile(u, 0.7).tolist() == pytest.approx([0.3 * 4, 0.3, 0.0, 0.7, 0.7 * 9])
    torch.testing.assert_close(losses.expectile(u, 0.5), losses.expectile(-u, 0.5))  # symmetric: half the squared error
    torch.testing.assert_close(losses.expectile(u, 0.5), 0.5 * u.square())
    torch.testing.assert_close(losses.expectile(u, torch.tensor(0.9)), losses.expectile(u, 0.9))
    # the minimiser over a constant v of the mean of expectile(x - v): x in {0, 1}, so (1 - t) v = t (1 - v)
    v = torch.linspace(0, 1, 1001)
    value = losses.expectile(torch.tensor([[0.0], [1.0]]) - v, 0.8).mean(0)
    assert float(v[value.argmin()]) == pytest.approx(0.8, abs=1e-3)


def test_advantage_weight() -> None:
    a = torch.tensor([-1.0, 0.0, 0.5, 1.5351, 10.0, 1e4])
    assert losses.advantage_weight(a, 3.0).tolist() == pytest.approx(
        [math.exp(-3), 1.0, math.exp(1.5), 100.0, 100.0, 100.0], rel=1e-3
    )
    assert losses.advantage_weight(a, 0.0).tolist() == [1.0] * 6
    assert float(losses.advantage_weight(torch.tensor(2.0), 3.0, 5.0)) == 5.0


def test_td_target() -> None:
    y = losses.td_target(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 0.0]), 0.9, torch.tensor([10.0, 10.0]))
    assert y.tolist() == [10.0, 2.0]
