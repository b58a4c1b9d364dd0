"""Balanced replay: the loss of the density ratio, the priorities, and which rows a batch is made of."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.func import vmap

from offrl import rng
from offrl.finetuning.replay import balanced
from offrl.finetuning.replay.balanced import Density, density_loss, priorities, resampled

# w of rows of the data and of play
DATA, PLAY = torch.tensor([[0.2, 0.5], [2.0, 3.0]], dtype=torch.float64)


def test_loss_of_the_ratio() -> None:
    """-(log(2/1.2) + log(2/1.5)) / 2 - (log(4/3) + log(6/4)) / 2, but for the 1e-10 inside of logarithms."""
    expected = -(math.log(2 / 1.2) + math.log(2 / 1.5) + math.log(4 / 3) + math.log(6 / 4)) / 2
    assert expected == pytest.approx(-0.7458274385, abs=1e-9)
    assert float(density_loss(DATA, PLAY)) == pytest.approx(expected, abs=1e-8)
    one = torch.ones(3)
    assert float(density_loss(one, one)) == pytest.approx(0.0, abs=1e-6)
    assert float(density_loss(one, 0.0 * one)) == pytest.approx(23.026, abs=1e-3)  # play that is taken for data
    # least at p_play / p_data: two rows of the data and all of play in one place, the data's third elsewhere
    w = torch.tensor([3.0 / 2.0, 0.0], dtype=torch.float64, requires_grad=True)
    density_loss(w[[0, 0, 1]], w[[0, 0, 0]]).backward()
    assert w.grad is not None and w.grad[1] > 0
    assert float(w.grad[0]) == pytest.approx(0.0, abs=1e-9)


def test_priorities() -> None:
    expected = {"play": (PLAY, [1.4400760, 1.5617217]), "data": (DATA, [0.9086265, 1.0913735])}
    for weights, values in expected.values():
        np.testing.assert_allclose(priorities(weights, DATA, 5.0).numpy(), values, rtol=1e-6)
    np.testing.assert_allclose(priorities(PLAY, DATA, 1.0).numpy(), (PLAY / 0.35).numpy(), rtol=1e-6)
    extremes = priorities(torch.tensor([0.0, 1e9]), torch.tensor([1e-9, 1.0]), 1.0)
    np.testing.assert_allclose(extremes.numpy(), [1e-3, 1e3], rtol=1e-6)
    assert priorities(torch.zeros(2), torch.zeros(2), 5.0).tolist() == pytest.approx([1e-3, 1e-3])  # a dead network


@pytest.mark.parametrize("rows_of_play, tolerance", [(0.5, 0.002), (0.01, 0.05 * 0.0122)])
def test_play_has_the_share_that_the_weights_say(rows_of_play: float, tolerance: float) -> None:
    """Data N(0, 1) and play N(1, 1), whose ratio is e^(x - 1/2): the mean of w^(1/5) is e^(.02 - .1) over the data and
    e^(.2 + .02 - .1) over play. Half of the candidates are play's, and yet its share is theirs.
    """
    data, play = (1 - rows_of_play) * math.exp(-0.08), rows_of_play * math.exp(0.12)
    share = play / (data + play)
    assert share == pytest.approx({0.5: 0.5498, 0.01: 0.0122}[rows_of_play], abs=5e-5)
    key, count = rng.make_key(0), 1_000_000
    keys = rng.split(key, 3)
    x = [mean + rng.normal(k, (count, 2)) for mean, k in zip((0.0, 1.0), keys, strict=False)]
    weights = [(values - 0.5).exp() for values in x]
    sides = [n * priorities(w, weights[0], 5.0) for n, w in zip((1 - rows_of_play, rows_of_play), weights, strict=True)]
    chosen, effective = resampled(keys[2], *sides)
    found = float((chosen >= 2).double().mean())
    assert abs(found - share) < tolerance
    assert 1.9 < float(effective.mean()) < 4.0
    # and of a side the likelier ones: the mean of data's rows moves from 0 to 1/5
    rows = torch.cat(x, 1).gather(1, chosen.unsqueeze(1))[chosen < 2]
    assert 0.0 < float(rows.mean()) < 0.2


def test_a_replica_learns_the_same_alone_and_among_others() -> None:
    keys = torch.stack([rng.make_key(seed) for seed in (0, 1, 2)])
    g = torch.Generator().manual_seed(0)
    data, play = torch.randn(3, 40, 4, generator=g), 1.0 + torch.randn(3, 40, 4, generator=g)

    def learnt(which: list[int]) -> Tensor:
        density = Density(4, keys[which])
        for _ in range(5):
            density.params, density.opt, loss = vmap(density.descend)(
                density.params, density.opt, data[which], play[which]
            )
            assert loss.shape == (len(which),)
        return vmap(density.weights)(density.params, play[which])

    together = learnt([0, 1, 2])
    assert not torch.equal(Density(4, keys).params["head.weight"][0], Density(4, keys).params["head.weight"][1])
    for n in range(3):
        torch.testing.assert_close(learnt([n])[0], together[n], rtol=1e-5, atol=1e-6)


def test_the_network_learns_the_ratio(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of N(0, 1) and N(1, 1) in one number: from w = 1 everywhere to e^(x - 1/2)."""
    monkeypatch.setattr(balanced, "WIDTHS", (32, 32))
    density = Density(1, torch.stack([rng.make_key(seed) for seed in range(4)]))
    density.adam.learning_rate = 3e-3
    x = torch.tensor([-0.5, 0.5, 1.5]).reshape(3, 1).expand(4, 3, 1)
    begin = vmap(density.weights)(density.params, x)
    torch.testing.assert_close(begin, torch.ones(4, 3), atol=0.02, rtol=0.0)
    for step in range(150):
        keys = rng.split(rng.fold_in(rng.make_key(1), step))
        data, play = (mean + rng.normal(k, (4, 256, 1)) for mean, k in zip((0.0, 1.0), keys, strict=True))
        density.params, density.opt, _ = vmap(density.descend)(density.params, density.opt, data, play)
    low, middle, high = vmap(density.weights)(density.params, x).T
    # 0.37, 1 and 2.72; over eight seeds the deviations are 0.08, 0.06 and 0.11
    assert ((low > 0.1) & (low < 0.8)).all()
    assert ((middle - 1.0).abs() < 0.3).all() and ((high - 2.72).abs() < 0.6).all()
