"""Measures of uncertainty against float64 NumPy, and against numbers worked out by hand."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from offrl.data.dataset import DataSpec
from offrl.errors import UserError
from offrl.world_models import uncertainty
from offrl.world_models.model import Prediction

E, B, O, A = 4, 6, 3, 2  # noqa: E741
MODEL = SimpleNamespace(members=E, config=SimpleNamespace(loss="likelihood"), spec=DataSpec((O,), A))


@pytest.fixture
def prediction():
    draw = np.random.Generator(np.random.PCG64(0))
    values = [
        draw.normal(size=(E, B, O)),
        draw.uniform(0.1, 2.0, (E, B, O)),
        draw.normal(size=(E, B)),
        draw.uniform(0.1, 2.0, (E, B)),
    ]
    return Prediction(*(torch.from_numpy(x) for x in values))


def ask(name, prediction, tree=None, observations=None, actions=None):
    return uncertainty.measure(name)(MODEL, tree or {}, prediction, observations, actions).numpy()


def test_aleatoric_is_the_largest_norm_of_all_standard_deviations(prediction):
    std, reward = prediction.std.numpy(), prediction.reward_std.numpy()
    expected = [max(np.sqrt((std[e, b] ** 2).sum() + reward[e, b] ** 2) for e in range(E)) for b in range(B)]
    np.testing.assert_allclose(ask("aleatoric", prediction), expected, rtol=1e-12)


def test_ensemble_std_is_the_root_of_the_mean_variance(prediction):
    mean = prediction.mean.numpy()
    expected = [
        np.sqrt(np.mean([np.mean((mean[:, b, d] - mean[:, b, d].mean()) ** 2) for d in range(O)])) for b in range(B)
    ]
    np.testing.assert_allclose(ask("ensemble_std", prediction), expected, rtol=1e-12)


def test_deviation_is_the_largest_distance_from_the_mean(prediction):
    mean = prediction.mean.numpy()
    expected = [max(np.linalg.norm(mean[e, b] - mean[:, b].mean(0)) for e in range(E)) for b in range(B)]
    np.testing.assert_allclose(ask("deviation", prediction), expected, rtol=1e-12)


@pytest.mark.parametrize("members", [1, 2, 3, 4, 7])
def test_disagreement_is_the_largest_distance_of_any_two(members):
    mean = np.random.Generator(np.random.PCG64(members)).normal(size=(members, B, O))
    nothing = torch.zeros(members, B)
    expected = [
        max(np.linalg.norm(mean[i, b] - mean[j, b]) for i in range(members) for j in range(members)) for b in range(B)
    ]
    found = ask("disagreement", Prediction(torch.from_numpy(mean), torch.zeros(members, B, O), nothing, nothing))
    np.testing.assert_allclose(found, expected, rtol=1e-12)


def test_by_hand():
    mean = torch.tensor([[[0.0, 0.0]], [[3.0, 4.0]], [[0.0, 2.0]]])  # mean (1, 2)
    std, reward = torch.tensor([[[3.0, 0.0]], [[1.0, 1.0]], [[0.0, 0.0]]]), torch.tensor([[4.0], [1.0], [4.5]])
    given = Prediction(mean, std, torch.zeros(3, 1), reward)
    assert ask("aleatoric", given) == pytest.approx(5.0)
    assert ask("disagreement", given) == pytest.approx(5.0)
    assert ask("deviation", given) == pytest.approx(np.sqrt(8.0))
    assert ask("ensemble_std", given) == pytest.approx(np.sqrt((2.0 + 8.0 / 3.0) / 2.0))


def test_the_density_score_is_the_inverse_christoffel_function():
    draw = np.random.Generator(np.random.PCG64(1))
    z = draw.normal(size=(500, O + A)) * [1.0, 20.0, 0.1, 1.0, 1.0] + [0.0, 5.0, 0.0, 0.0, 3.0]
    z[:, 1] += 15.0 * z[:, 0] ** 2  # not normal: products matter
    tree = {"density": uncertainty.fit_density(torch.from_numpy(z))}
    points = np.concatenate([z[:20], z[:20] + draw.normal(size=(20, 5)) * [3.0, 60.0, 0.3, 3.0, 3.0]])

    def monomials(
        x,
    ):  # of standardised, not rotated, inputs: the function is the same for every basis of the same polynomials
        x = (x - z.mean(0)) / z.std(0)
        products = [x[:, i] * x[:, j] for i in range(5) for j in range(i, 5)]
        return np.stack([np.ones(len(x)), *x.T, *products], 1)

    v = monomials(z)
    inverse = np.linalg.inv(v.T @ v / len(v))
    expected = np.log1p(np.einsum("bi,ij,bj->b", monomials(points), inverse, monomials(points)) / v.shape[1])
    both = torch.from_numpy(points).float()
    found = ask("density", None, tree, both[:, :O], both[:, O:])
    np.testing.assert_allclose(found, expected, rtol=2e-3)
    raw = np.expm1(ask("density", None, tree, torch.from_numpy(z[:, :O]).float(), torch.from_numpy(z[:, O:]).float()))
    assert raw.mean() == pytest.approx(1.0, rel=1e-3)  # the trace of M^-1 M over the length of v


def test_a_density_of_wide_inputs_is_bounded_and_finite():
    draw = np.random.Generator(np.random.PCG64(2))
    z = draw.normal(size=(2000, 40)) @ draw.normal(size=(40, 300)) + 0.01 * draw.normal(size=(2000, 300))
    z[:, 7] = 4.0  # constant
    fitted = uncertainty.fit_density(torch.from_numpy(z))
    assert fitted["turn"].shape == (300, uncertainty.LINEAR)
    assert len(fitted["whiten"]) == 1 + uncertainty.LINEAR + uncertainty.QUADRATIC * (uncertainty.QUADRATIC + 1) // 2
    outside = torch.from_numpy(z[:200]).float() + 50.0
    points = torch.cat([torch.from_numpy(z[:200]).float(), outside, torch.full((1, 300), 1e30)])
    score = ask("density", None, {"density": fitted}, points[:, :299], points[:, 299:])
    assert np.isfinite(score).all() and score[:200].max() < score[200:].min()


def test_under_vmap_and_compile(prediction):
    draw = torch.Generator().manual_seed(0)
    tree = {"density": uncertainty.fit_density(torch.randn(200, O + A, generator=draw))}
    given = Prediction(*(None if x is None else torch.stack([x, 2.0 * x]).float() for x in prediction))
    o, a = torch.randn(2, B, O, generator=draw), torch.randn(2, B, A, generator=draw)

    def all_of_them(prediction, o, a):
        return torch.stack([uncertainty.measure(name)(MODEL, tree, prediction, o, a) for name in uncertainty.names()])

    each = [Prediction(*(None if x is None else x[i] for x in given)) for i in range(2)]
    expected = torch.stack([all_of_them(each[i], o[i], a[i]) for i in range(2)])
    axes = Prediction(*(None if x is None else 0 for x in given))
    torch.testing.assert_close(torch.vmap(all_of_them, in_dims=(axes, 0, 0))(given, o, a), expected)
    compiled = torch.compile(all_of_them, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(each[0], o[0], a[0]), expected[0])


def test_measures_that_say_nothing_are_refused():
    single = SimpleNamespace(members=1, config=SimpleNamespace(loss="squared"))
    for name, word in (("aleatoric", "loss=squared"), ("disagreement", "has one"), ("density", "")):
        assert word in uncertainty.fault(name, single) and bool(word) == bool(uncertainty.fault(name, single))
    with pytest.raises(UserError, match="density"):
        uncertainty.prepare("deviation", single, {}, None)
    with pytest.raises(UserError, match="Did you mean 'disagreement'"):
        uncertainty.measure("disagrement")
