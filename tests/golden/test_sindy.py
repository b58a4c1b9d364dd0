"""SINDy: systems whose equations are known, the solver against pysindy and by hand, and the model as a function of
tensors.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from offrl.errors import UserError
from offrl.nn import sparse
from offrl.system import files as checkpoint
from offrl.world_models.sindy import regression as sindy
from offrl.world_models.sindy.regression import SindyConfig, Tree

Data = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]

A = np.array([[0.9, 0.1, 0.0, 0.0], [-0.2, 0.8, 0.0, 0.05], [0.0, 0.3, 0.95, 0.0], [0.0, 0.0, -0.1, 0.7]])
B = np.array([[0.0, 0.0], [0.5, 0.0], [0.0, 0.0], [0.0, 0.2]])


def linear(rows: int = 2000, noise: float = 0.0) -> Data:
    """s' = A s + B a, with observations of very different sizes."""
    g = np.random.default_rng(0)
    s, a = g.normal(size=(rows, 4)) * [1.0, 10.0, 0.1, 30.0], g.uniform(-1, 1, (rows, 2))
    return s, a, -(s[:, 0] ** 2) - 0.1 * a[:, 0] ** 2, s @ A.T + a @ B.T + noise * g.normal(size=s.shape)


def van_der_pol(rows: int = 2000, noise: float = 0.0) -> Data:
    """Euler's method with a step of 0.02: d x = 0.02 v, d v = 0.02 (2 (1 - x^2) v - x + u)."""
    g = np.random.default_rng(1)
    s, a = g.uniform(-3, 3, (rows, 2)), g.uniform(-1, 1, (rows, 1))
    change = 0.02 * np.stack([s[:, 1], 2 * (1 - s[:, 0] ** 2) * s[:, 1] - s[:, 0] + a[:, 0]], 1)
    return s, a, -(s[:, 0] ** 2), s + change + noise * g.normal(size=s.shape)


def pendulum(rows: int = 3000) -> Data:
    """Gymnasium's Pendulum without the limit on its speed: (cos, sin, w), the angle moved with the new speed."""
    g = np.random.default_rng(2)
    angle, w, u = g.uniform(-np.pi, np.pi, rows), g.uniform(-4, 4, rows), g.uniform(-2, 2, rows)
    faster = w + 0.75 * np.sin(angle) + 0.15 * u
    later = angle + 0.05 * faster
    s = np.stack([np.cos(angle), np.sin(angle), w], 1).astype(np.float32)
    return (
        s,
        u[:, None].astype(np.float32),
        -(w**2),
        np.stack([np.cos(later), np.sin(later), faster], 1).astype(np.float32),
    )


def coefficient(tree: Tree, output: int, *variables: int) -> float:
    """Of the product of variables, numbered from 1: observations, then actions."""
    terms = tree["dynamics"]["factors"]
    wanted = torch.tensor(sorted(variables) + [0] * (terms.shape[1] - len(variables)))
    at = torch.nonzero((terms.sort(1).values == wanted.sort().values).all(1)).squeeze(-1)
    assert len(at) == 1
    return float(tree["dynamics"]["median"][output, at[0]])


# ---- systems with known equations


@pytest.mark.parametrize("target", ["delta", "next"])
def test_a_linear_system(target: str) -> None:
    tree, notes = sindy.fit(*linear(), SindyConfig(threshold=1e-5, target=target))
    truth = np.concatenate([A - np.eye(4), B], 1)
    found = np.array([[coefficient(tree, i, j + 1) for j in range(6)] for i in range(4)])
    np.testing.assert_allclose(found, truth, atol=1e-9)
    support = (tree["dynamics"]["median"].abs() > 1e-12).sum(1).tolist()  # nothing besides, among 23 terms
    assert support == (truth != 0).sum(1).tolist()
    assert notes == []
    lines = sindy.equations(tree)
    assert lines[2] == "d obs[2] = 0.3 obs[1] - 0.05 obs[2]" and lines[4] == "reward = -obs[0]^2 - 0.1 act[0]^2"


def test_noise_is_not_explained() -> None:
    """Values within 1e-3 of each observation's own scale, and no spurious term, from noisy data and with the bagging of
    terms.
    """
    tree, _ = sindy.fit(*linear(10_000, noise=0.01), SindyConfig(threshold=2e-4))
    found = np.array([[coefficient(tree, i, j + 1) for j in range(6)] for i in range(4)])
    truth = np.concatenate([A - np.eye(4), B], 1)
    np.testing.assert_allclose(found[:, [0, 1, 3, 4, 5]], truth[:, [0, 1, 3, 4, 5]], atol=1e-3)
    np.testing.assert_allclose(found[:, 2], truth[:, 2], atol=1e-2)  # of an observation ten times smaller
    assert ((found != 0) == (truth != 0)).all()
    assert (tree["dynamics"]["median"] != 0).sum() == (truth != 0).sum()
    np.testing.assert_allclose(tree["dynamics"]["residual"], 0.01, rtol=0.05)


@pytest.mark.parametrize("noise", [0.0, 0.01])
def test_van_der_pol(noise: float) -> None:
    """Exactly the true terms among 14, also where the noise is a quarter of a step (steps have a standard deviation of
    0.04 and 0.2).
    """
    tree, _ = sindy.fit(*van_der_pol(noise=noise), SindyConfig(degree=3))
    where = {(0, (2,)): 0.02, (1, (1,)): -0.02, (1, (2,)): 0.04, (1, (1, 1, 2)): -0.04, (1, (3,)): 0.02}
    for (output, variables), value in where.items():
        assert coefficient(tree, output, *variables) == pytest.approx(value, abs=1e-9 if noise == 0 else 2e-3)
    assert (tree["dynamics"]["median"].abs() > 1e-12).sum() == len(where)
    if noise == 0:
        assert sindy.equations(tree) == [
            "d obs[0] = 0.02 obs[1]",
            "d obs[1] = -0.04 obs[0]^2 obs[1] + 0.04 obs[1] - 0.02 obs[0] + 0.02 act[0]",
            "reward = -obs[0]^2",
        ]


def test_certainty_is_what_removes_spurious_terms() -> None:
    free, _ = sindy.fit(*van_der_pol(1000, 0.03), SindyConfig(degree=3, min_z_score=0.0))
    strict, _ = sindy.fit(*van_der_pol(1000, 0.03), SindyConfig(degree=3))
    # 5 are true; at three standard deviations of 20 members one of 23 others may still pass
    assert 5 <= (strict["dynamics"]["median"] != 0).sum() <= 6 and (free["dynamics"]["median"] != 0).sum() > 10


def test_a_constant_and_a_large_offset() -> None:
    g = np.random.default_rng(3)
    s, a = 1000.0 + g.normal(size=(2000, 1)), g.uniform(-1, 1, (2000, 1))
    tree, _ = sindy.fit(s, a, np.ones(2000), 0.9 * s + 100.0 + 0.5 * a, SindyConfig())
    assert sindy.equations(tree) == ["d obs[0] = 0.5 act[0] - 0.1 obs[0] + 100", "reward = 1"]


def test_pendulum() -> None:
    """cos^2 + sin^2 = 1 makes terms redundant; the speed's equation is linear in sin and u; cosines and sines stay on
    the circle.
    """
    data = pendulum()
    tree, notes = sindy.fit(*data, SindyConfig())
    assert any("cosine and a sine" in n for n in notes) and any("left out" in n and "obs[1]^2" in n for n in notes)
    assert sindy.equations(tree)[2] == "d obs[2] = 0.75 obs[1] + 0.15 act[0]"
    nexts, _ = sindy.predict(tree, *(torch.tensor(x) for x in data[:2]))
    torch.testing.assert_close(nexts[:, 0] ** 2 + nexts[:, 1] ** 2, torch.ones(len(nexts)))
    error = (nexts - torch.tensor(data[3])).square().mean(0).sqrt()
    # one step is no polynomial
    assert (error / torch.tensor(data[3] - data[0]).std(0) < torch.tensor([0.1, 0.1, 1e-4])).all()


def test_sine_and_cosine_of_an_angle() -> None:
    g = np.random.default_rng(4)
    s, a = g.uniform(-3, 3, (3000, 2)), g.uniform(-1, 1, (3000, 1))
    nexts = s + np.stack([0.1 * s[:, 1], -0.5 * np.sin(s[:, 0]) + 0.2 * np.cos(s[:, 0]) * a[:, 0]], 1)
    tree, _ = sindy.fit(s, a, s[:, 0], nexts, SindyConfig(angles=[0]))
    assert sindy.equations(tree)[:2] == [
        "d obs[0] = 0.1 obs[1]",
        "d obs[1] = -0.5 sin(obs[0]) + 0.2 cos(obs[0]) act[0]",
    ]


def test_actions_that_follow_from_the_observation_are_named() -> None:
    s, a, r, nexts = linear()
    a = np.stack([0.5 * s[:, 0] - s[:, 1], a[:, 1]], 1)
    _, notes = sindy.fit(s, a, r, nexts, SindyConfig(degree=1, control_degree=0))
    assert any("do not tell what act[0] does" in n for n in notes)
    one_hot = np.eye(2)[np.random.default_rng(0).integers(2, size=len(s))]
    _, notes = sindy.fit(s, one_hot, r, nexts, SindyConfig(degree=1, control_degree=0))
    assert not any("do not tell" in n for n in notes)  # of two one-hot columns one always follows from the other


# ---- the solver


def test_thresholding_by_hand() -> None:
    """Orthogonal columns: each coefficient is its own, so the small one leaves and the others stay as they are."""
    columns = torch.tensor([[1.0, 1, 1], [1, -1, -1], [1, 1, -1], [1, -1, 1]], dtype=torch.float64)
    targets = columns @ torch.tensor([[2.0, 0.0], [0.05, 0.3], [-1.0, 0.2]], dtype=torch.float64)
    offered = torch.tensor([[True, True, True], [True, True, False]])
    found = sparse.stlsq(columns, targets, offered, threshold=0.1, ridge=torch.ones(3).double(), iterations=10)
    # without the ridge's shrinking by 4 / 5
    np.testing.assert_allclose(found, [[2.0, 0.0, -1.0], [0.0, 0.3, 0.0]], atol=1e-12)
    ridge = sparse.stlsq(columns, targets, offered, threshold=0.25, ridge=torch.ones(3).double(), iterations=10)
    assert ridge[1, 1] == 0.0  # which chooses: 0.3 * 4 / 5 is below 0.25


def test_one_fit_agrees_with_pysindy() -> None:
    """Terms, coefficients and predictions of pysindy's discrete model, on noisy data where thresholding takes several
    rounds.
    """
    ps = pytest.importorskip("pysindy", reason="pysindy is not installed")
    s, a, r, nexts = van_der_pol(3000, noise=0.02)
    config = SindyConfig(degree=3, joint_library=True, members=1, threshold=0.02, ridge=0.05)
    tree, _ = sindy.fit(s, a, r, nexts, config)
    terms, part = sindy.factors(2, 1, config), tree["dynamics"]
    library = ps.PolynomialLibrary(degree=3)
    theta = np.asarray(library.fit_transform(np.concatenate([s, a], 1)))
    ours = sparse.library(terms, torch.tensor(s), torch.tensor(a), tree["angles"])
    np.testing.assert_allclose(ours, theta, rtol=1e-12)
    # pysindy's thresholds are absolute: the same problem in standardised columns, then in the data's units
    scale = np.where(theta.std(0) > 0, theta.std(0), 1.0)
    for d in range(2):
        unit = (nexts - s)[:, d].std()
        optimizer = ps.STLSQ(threshold=0.02, alpha=0.05)
        optimizer.fit(theta / scale, (nexts - s)[:, d : d + 1] / unit)
        coefficients = optimizer.coef_[0] * unit / scale
        np.testing.assert_allclose(part["median"][d], coefficients, atol=1e-10)
        assert 0 < (coefficients != 0).sum() < len(terms)
    model = ps.DiscreteSINDy(optimizer=ps.STLSQ(threshold=0.0, alpha=0.0), feature_library=library)
    model.fit(s, t=1, x_next=nexts, u=a, feature_names=["x", "v", "u"])
    dense, _ = sindy.fit(s, a, r, nexts, SindyConfig(degree=3, joint_library=True, members=1, threshold=0.0, ridge=0.0))
    np.testing.assert_allclose(
        sindy.predict(dense, torch.tensor(s), torch.tensor(a))[0], model.predict(s, u=a), atol=1e-6
    )
    itself = np.array([[float(np.array_equal(column, s[:, i])) for column in theta.T] for i in range(2)])
    model.optimizer.coef_ = part["median"].numpy() + itself
    np.testing.assert_allclose(
        sindy.predict(tree, torch.tensor(s), torch.tensor(a))[0], model.predict(s, u=a), atol=1e-6
    )


def test_the_library_by_hand() -> None:
    config = SindyConfig(degree=2, control_degree=1, angles=[1])
    terms, s, a = sindy.factors(2, 1, config), torch.tensor([[2.0, 3.0]]), torch.tensor([[5.0]])
    sin, cos = np.sin(3.0), np.cos(3.0)
    expected = [1, 2, 3, sin, cos, 5, 4, 6, 9, 10, 15, 5 * sin, 5 * cos]
    np.testing.assert_allclose(sparse.library(terms, s, a, torch.tensor([1]))[0], expected, rtol=1e-6)
    assert len(terms) == sindy.terms(2, 1, config)
    for config in (
        SindyConfig(degree=3),
        SindyConfig(joint_library=True, degree=4),
        SindyConfig(control_degree=0),
        SindyConfig(control_degree=3),
    ):
        assert len(sindy.factors(3, 2, config)) == sindy.terms(3, 2, config)


# ---- the model as a function


@pytest.fixture(scope="module")
def model() -> Tree:
    return sindy.fit(*pendulum(1000), SindyConfig(members=5))[0]


def pairs(rows: int = 6) -> tuple[torch.Tensor, torch.Tensor]:
    return tuple(torch.tensor(x[:rows]) for x in pendulum(1000)[:2])  # type: ignore[return-value]


def test_members_and_their_median(model: Tree) -> None:
    s, a = pairs()
    nexts, rewards = sindy.predict_members(model, s, a)
    assert nexts.shape == (5, 6, 3) and rewards.shape == (5, 6) and nexts.dtype == s.dtype
    theta = sparse.library(model["dynamics"]["factors"], s.double(), a.double(), model["angles"]).numpy()
    change = np.einsum("edt,bt->ebd", model["dynamics"]["coefficients"].numpy(), theta)
    np.testing.assert_allclose(nexts[..., 2], s.numpy()[:, 2] + change[..., 2], rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(model["dynamics"]["median"], np.median(model["dynamics"]["coefficients"], 0))
    assert float(nexts.std(0).max()) > 0.0


def test_under_vmap_and_compile(model: Tree) -> None:
    s, a = pairs()
    expected = sindy.predict(model, s, a)
    torch.testing.assert_close(torch.vmap(lambda x, y: sindy.predict(model, x, y))(s, a), expected)
    stacked = torch.utils._pytree.tree_map(lambda t: torch.stack([t, t]), model)  # a model for each of two replicas
    twice = torch.vmap(sindy.predict, in_dims=(0, None, None))(stacked, s, a)
    torch.testing.assert_close(twice[0][1], expected[0])
    compiled: Callable[..., tuple[torch.Tensor, torch.Tensor]] = torch.compile(
        sindy.predict, fullgraph=True, backend="eager"
    )
    torch.testing.assert_close(compiled(model, s, a), expected)


def test_derivatives(model: Tree) -> None:
    """What a planner needs: finite, also where an observation is 0, and right."""
    s, a = (
        torch.zeros(1, 3, dtype=torch.float64, requires_grad=True),
        torch.zeros(1, 1, dtype=torch.float64, requires_grad=True),
    )
    (jacobian,) = torch.autograd.grad(sindy.predict(model, s, a)[0][0, 2], a)
    assert float(jacobian) == pytest.approx(0.15, abs=1e-4)
    grads = torch.autograd.grad(sindy.predict(model, s, a)[0].sum(), [s, a])
    assert all(torch.isfinite(g).all() for g in grads)


def test_the_same_seed_gives_the_same_model_and_files_hold_it(model: Tree, tmp_path: object) -> None:
    again = sindy.fit(*pendulum(1000), SindyConfig(members=5))[0]
    flat = checkpoint.flatten(model)
    assert all(torch.equal(t, checkpoint.flatten(again)[k]) for k, t in flat.items())
    other = sindy.fit(*pendulum(1000), SindyConfig(members=5), seed=1)[0]
    assert not torch.equal(other["dynamics"]["coefficients"], model["dynamics"]["coefficients"])
    path = tmp_path / "model.safetensors"  # type: ignore[operator]
    checkpoint.write(path, flat, {})
    loaded = checkpoint.unflatten(model, checkpoint.read(path)[0], "model")
    assert sindy.equations(loaded) == sindy.equations(model)


# ---- mistakes


def test_mistakes() -> None:
    s, a, r, nexts = van_der_pol(200)
    with pytest.raises(
        UserError, match=r"71,270 terms for 376 observations and 17 actions.*degree=1 control_degree=0 has 394"
    ):
        sindy.factors(376, 17, SindyConfig(control_degree=0, max_terms=400))
    with pytest.raises(UserError, match=r"angles names observation 2, and there are 2: 0 to 1"):
        sindy.fit(s, a, r, nexts, SindyConfig(angles=[2]))
    with pytest.raises(UserError, match=r"10 rows are too few to choose among 9 terms"):
        sindy.fit(s[:10], a[:10], r[:10], nexts[:10], SindyConfig())
    with pytest.raises(UserError, match=r"rewards holds NaN or infinity in row 7"):
        sindy.fit(s, a, np.where(np.arange(200) == 7, np.nan, r), nexts, SindyConfig())
