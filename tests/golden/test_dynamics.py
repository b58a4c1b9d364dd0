"""Ensembles of dynamics models: bounds, every term of the loss in float64 NumPy, bootstrap samples, early stopping,
inputs and splits.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from offrl import rng
from offrl.algorithm import TrainState
from offrl.algorithms.dynamics import Dynamics
from offrl.data.arrays import from_arrays
from offrl.data.dataset import Dataset
from offrl.settings.field import check
from offrl.world_models import ensemble
from offrl.world_models.dynamics import DynamicsSettings, split, targets
from offrl.world_models.ensemble import Raw
from offrl.world_models.model import WorldModel, input_table
from tests.support.reference import mlp as ref

OBS, A, E = 3, 2, 4
D = OBS + 1
G = np.random.default_rng(8)


def arrays(episodes: int = 20, steps: int = 10) -> Dataset:
    """Noise; every second episode ends in a termination."""
    n, g = episodes * steps, np.random.default_rng(1)
    last = np.arange(n) % steps == steps - 1
    ends = last & (np.arange(n) // steps % 2 == 0)
    observations, actions = g.normal(size=(n, OBS)) * [1.0, 5.0, 0.1] + 2.0, g.uniform(-1, 1, (n, A))
    return from_arrays(observations, actions, g.normal(size=n), ends, last & ~ends, action_low=-1.0, action_high=1.0)


DATA = arrays()


def make(dataset: Dataset = DATA, **settings: Any) -> tuple[Any, TrainState, Any]:
    """The algorithm, its state before the first update, and what it learns from."""
    small: dict[str, Any] = {
        "members": E,
        "elites": 2,
        "hidden": [6, 5],
        "activation": "relu",
        "batch_size": 16,
        "test_share": 0.0,
        "termination": "never",
    }
    algorithm = Dynamics(Dynamics.fit_config(DynamicsSettings(**{**small, **settings}), dataset), dataset.spec)
    algorithm.runtime.source = algorithm.sampler().prepare(dataset)
    state, _ = algorithm.refresh(algorithm.init(0), algorithm.runtime.source, rng.make_key(0), step=0)
    return algorithm, state, algorithm.runtime.source


def wide(x: Tensor) -> np.ndarray:
    return x.numpy().astype(np.float64)


def softplus(x: np.ndarray) -> np.ndarray:
    return np.logaddexp(0.0, x)


# ---- the pieces


def test_bounds() -> None:
    raw, low, high = G.normal(size=(5, D)) * 20, np.full(D, -10.0), np.full(D, 0.5)
    bent = high - softplus(high - raw)
    expected = low + softplus(bent - low)
    found = ensemble.bounded(*(torch.tensor(x, dtype=torch.float32) for x in (raw, low, high)))
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    extreme = ensemble.bounded(torch.tensor([-1e4, 1e4]), torch.tensor([-10.0]), torch.tensor([0.5]))
    np.testing.assert_allclose(extreme, [-10.0, 0.5], atol=1e-3)
    assert float(ensemble.bounded(torch.tensor(-4.0), torch.tensor(-10.0), torch.tensor(0.5))) == pytest.approx(
        -4.0, abs=0.02
    )


@pytest.mark.parametrize("own", [False, True])
def test_losses_of_each_member(own: bool) -> None:
    """With targets for all members, or of each member's own."""
    mean, log_var, target = (
        G.normal(size=(E, 7, D)),
        G.normal(size=(E, 7, D)),
        G.normal(size=(E, 7, D) if own else (7, D)),
    )
    scale, weight = G.uniform(0, 3, (7, D)), np.array([1.0, 1, 0, 1, 0, 0, 1])
    tensors = [torch.tensor(x, dtype=torch.float32) for x in (mean, log_var, target)]
    each = (mean - target) ** 2 * np.exp(-log_var) + log_var
    np.testing.assert_allclose(ensemble.gaussian_loss(*tensors), each.mean((1, 2)), rtol=1e-4, atol=1e-5)
    few, masked = torch.tensor(weight, dtype=torch.float32).expand(E, 7), each.copy()
    masked[:, weight == 0, :-1] = 0.0  # without a next observation the reward alone counts
    np.testing.assert_allclose(ensemble.gaussian_loss(*tensors, few), masked.mean((1, 2)), rtol=1e-4, atol=1e-5)
    square = (mean - target) ** 2
    np.testing.assert_allclose(ensemble.squared_loss(tensors[0], tensors[2]), square.mean((1, 2)), rtol=1e-5)
    scaled = ensemble.squared_loss(tensors[0], tensors[2], torch.tensor(scale, dtype=torch.float32))
    np.testing.assert_allclose(scaled, (scale * square).mean((1, 2)), rtol=1e-5)


def test_decay_is_stretched_over_the_layers() -> None:
    listed = [2.5e-5, 5e-5, 7.5e-5, 7.5e-5, 1e-4]
    assert ensemble.decay_of_layers(listed, 5) == listed
    np.testing.assert_allclose(ensemble.decay_of_layers(listed, 3), [2.5e-5, 7.5e-5, 1e-4])
    np.testing.assert_allclose(ensemble.decay_of_layers([0.0, 1.0], 5), [0.0, 0.25, 0.5, 0.75, 1.0])
    assert ensemble.decay_of_layers([3e-5], 4) == [3e-5] * 4
    np.testing.assert_allclose(ensemble.decay_of_layers(listed, 1), [2.5e-5])


def test_initial_weights() -> None:
    torch.manual_seed(0)
    net = ensemble.GaussianEnsemble(3, 100, 4, [400])
    w = net.net.layers[0].weight.detach()
    bound = 1 / (2 * 100**0.5)
    # a normal cut off at two deviations
    assert float(w.abs().max()) <= 2 * bound and float(w.std()) == pytest.approx(0.88 * bound, rel=0.02)
    assert not net.net.layers[0].bias.any() and not net.net.head.bias.any()
    assert (net.max_log_var == 0.5).all() and (net.min_log_var == -10).all()


# ---- the loss


def outputs(algorithm: Any, state: TrainState, inputs: np.ndarray) -> np.ndarray:
    """[E, B, width] of the networks for inputs [E, B, I], float64."""
    x = (inputs - wide(state.extra["mean"])) / wide(state.extra["std"])
    return np.stack([ref.forward(ref.net(state.params["dynamics"], "net.", e), x[e])[0] for e in range(E)])


@pytest.mark.parametrize("loss", ["likelihood", "squared"])
@pytest.mark.parametrize("termination", ["never", "learned"])
def test_every_term_of_the_loss(loss: str, termination: str) -> None:
    decay = [1e-2, 2e-2, 3e-2]
    algorithm, state, _ = make(loss=loss, termination=termination, weight_decay=decay, bounds_weight=0.3)
    params = {k: v + 0.1 * torch.randn_like(v) for k, v in state.params["dynamics"].items()}
    state = state._replace(params={"dynamics": params})
    batch = algorithm.draw(state)
    x = {k: wide(v) for k, v in batch.items()}
    assert x["inputs"].shape == (E, 16, OBS + A) and x["targets"].shape == (E, 16, D)
    out = outputs(algorithm, state, x["inputs"])
    error = (out[..., :D] - x["targets"]) ** 2
    # of a termination without a next observation the reward, and that it is one, are learnt
    known = np.ones((E, 16, D))
    known[..., :-1] = x["known"][..., None]
    assert known.min() == 0.0

    def mean(values: np.ndarray) -> np.ndarray:
        return (values * known).mean((1, 2))

    each = mean(error)
    if loss == "likelihood":
        low, high = wide(params["min_log_var"]), wide(params["max_log_var"])
        log_var = low + softplus(high - softplus(high - out[..., D : 2 * D]) - low)
        each = mean(error * np.exp(-log_var) + log_var)
    if termination == "learned":
        logit = out[..., -1]
        each = each + (softplus(logit) - x["ending"] * logit).mean(1)
    layers = [wide(params[n]) for n in ("net.layers.0.weight", "net.layers.1.weight", "net.head.weight")]
    expected = each.sum() + sum(0.5 * d * (w**2).sum() for d, w in zip(decay, layers, strict=True))
    if loss == "likelihood":
        expected += 0.3 * (high - low).sum()
    else:
        assert not {"max_log_var", "min_log_var"} & set(params), "no variance is learnt"
    found, metrics = algorithm.loss(params, state, batch)
    assert float(found) == pytest.approx(expected, rel=1e-5)
    np.testing.assert_allclose([float(metrics[f"dynamics/member {e}: loss"]) for e in range(E)], each, rtol=1e-4)


def test_without_a_learnt_variance_predictions_have_that_of_the_held_out_errors() -> None:
    algorithm, state, _ = make(loss="squared")
    scale = torch.tensor([0.1, 0.2, 0.3, 0.4])
    tree = {**algorithm.tree(state), "scale": scale}
    found = algorithm.model.predict(tree, torch.zeros(5, OBS), torch.zeros(5, A), torch.zeros(5, 0, OBS + A))
    torch.testing.assert_close(found.std, scale[:-1].expand(E, 5, OBS))
    torch.testing.assert_close(found.reward_std, scale[-1].expand(E, 5))


# ---- what is drawn


def test_every_member_goes_through_a_bootstrap_sample_of_its_own_in_each_epoch() -> None:
    n = len(DATA.transition_rows()) - make()[2].held_out["inputs"].shape[0]
    algorithm, state, source = make(batch_size=10, epoch=-(-n // 10))
    updates = algorithm.every
    assert source.count == n and make(batch_size=10)[0].every == 250, "epochs of small data are no shorter than that"
    rows = wide(source.table.table[:, : OBS + A])

    def epoch(number: int) -> np.ndarray:
        """[E, n]: the rows in the order of the epoch."""
        drawn = [
            algorithm.draw(state._replace(step=torch.tensor(number * updates + i)))["inputs"] for i in range(updates)
        ]
        inputs = wide(torch.cat(drawn, 1))[:, :n]
        return np.array([[int(np.abs(rows - x).sum(1).argmin()) for x in member] for member in inputs])

    first, second = epoch(0), epoch(1)
    for e in range(E):
        assert len(set(first[e])) / n == pytest.approx(1 - np.exp(-1), abs=0.12), "with replacement"
        share = np.mean(np.sort(first[e]) == np.sort(second[e]))
        assert share > 0.9 and not np.array_equal(first[e], second[e]), "the same sample in another order"
        assert np.mean(first[e] == second[e]) < 0.1
    assert not np.array_equal(np.sort(first[0]), np.sort(first[1])), "members differ"
    other = make(batch_size=10)[0].init(1)
    assert not torch.equal(algorithm.draw(state)["inputs"], algorithm.draw(state._replace(key=other.key))["inputs"])


def test_inputs_are_standardised_by_the_training_rows() -> None:
    algorithm, state, source = make()
    parts = split(DATA, algorithm.config)
    train = torch.cat([parts.train, parts.ends])
    x = np.concatenate([wide(DATA.columns[k][train]) for k in ("observations", "actions")], 1)
    np.testing.assert_allclose(source.mean, x.mean(0), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(state.extra["std"], x.std(0), rtol=1e-5)
    flat = arrays()
    flat.columns["observations"][:, 1] = 4.0
    assert float(make(flat)[2].std[1]) == 1.0  # what never changes is not divided by 0


# ---- early stopping


def reviewed(
    algorithm: Any, state: TrainState, source: Any, monkeypatch: pytest.MonkeyPatch, root: list[float]
) -> tuple[TrainState, dict[str, Tensor]]:
    """`review` where the held-out error of member e is root[e]^2."""
    target = source.held_out["targets"]
    mean = torch.stack([target + r for r in root])
    monkeypatch.setattr(algorithm.model, "raw", lambda params, tree, x: Raw(mean, torch.full_like(mean, -4.0), None))
    return algorithm.refresh(state, source, rng.make_key(0), step=algorithm.every)


def marked(state: TrainState, value: float) -> TrainState:
    """All parameters set to `value`, to see later which are remembered."""
    return state._replace(
        params={"dynamics": {k: torch.full_like(v, value) for k, v in state.params["dynamics"].items()}}
    )


def remembered(state: TrainState) -> list[float]:
    """Of each member the value that it is remembered with; all its layers agree."""
    found = []
    for e in range(E):
        values = {float(x) for k, v in state.extra["best"].items() if k.startswith("net.") for x in v[e].unique()}
        assert len(values) == 1
        found.append(values.pop())
    return found


def test_members_are_remembered_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    algorithm, state, source = make(patience=2)
    state, metrics = reviewed(algorithm, marked(state, 1.0), source, monkeypatch, [1.0, 2.0, 3.0, 4.0])
    assert remembered(state) == [1, 1, 1, 1] and int(state.extra["stale"]) == 0 and int(state.extra["epochs"]) == 1
    np.testing.assert_allclose(state.extra["error"], [1, 4, 9, 16], rtol=1e-4)
    assert float(metrics["dynamics/held-out error"]) == pytest.approx(2.5, rel=1e-4)  # of the elites
    # member 1 a lot better, member 2 by less than 1%, member 0 worse, member 3 by a little more than 1%
    state, _ = reviewed(algorithm, marked(state, 2.0), source, monkeypatch, [1.1, 1.5, 2.99, 3.97])
    assert remembered(state) == [1, 2, 1, 2] and int(state.extra["stale"]) == 0
    np.testing.assert_allclose(state.extra["error"], [1, 2.25, 9, 3.97**2], rtol=1e-4)
    assert not bool(algorithm.finished(state))
    # small steps are measured from what is remembered: 2.99 -> 2.98 is more than 1% below 3
    state, _ = reviewed(algorithm, marked(state, 3.0), source, monkeypatch, [1.1, 1.5, 2.98, 4.0])
    assert remembered(state) == [1, 2, 3, 2]
    for epoch in (1, 2):
        state, _ = reviewed(algorithm, marked(state, 4.0), source, monkeypatch, [1.0, 1.5, 2.98, 3.97])
        assert int(state.extra["stale"]) == epoch and bool(algorithm.finished(state)) == (epoch == 2)
    # where training is over nothing counts any more
    state, _ = reviewed(algorithm, marked(state, 5.0), source, monkeypatch, [0.1, 0.1, 0.1, 0.1])
    assert remembered(state) == [1, 2, 3, 2] and int(state.extra["epochs"]) == 5 and bool(algorithm.finished(state))
    tree = algorithm.tree(state)
    assert tree["elites"].tolist() == [0, 1] and float(tree["params"]["net.head.bias"][2].mean()) == 3.0


def test_training_ends_after_max_epochs_and_a_member_of_nan_is_never_remembered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    algorithm, state, source = make(max_epochs=2)
    state, metrics = reviewed(algorithm, marked(state, 1.0), source, monkeypatch, [1.0, float("nan"), 3.0, 4.0])
    assert not bool(algorithm.finished(state)) and torch.isinf(state.extra["error"][1])
    assert torch.isnan(metrics["dynamics/member 1: held-out error"])
    state, _ = reviewed(algorithm, marked(state, 2.0), source, monkeypatch, [1.0, 0.5, 3.0, 4.0])
    assert bool(algorithm.finished(state)) and remembered(state) == [1, 2, 1, 1]
    assert algorithm.tree(state)["elites"].tolist() == [1, 0]


def test_a_variance_that_explodes_is_no_better_member(monkeypatch: pytest.MonkeyPatch) -> None:
    algorithm, state, source = make()
    target = source.held_out["targets"]
    log_var = torch.full((E, *target.shape), -4.0)
    log_var[2] = 20.0
    monkeypatch.setattr(
        algorithm.model, "raw", lambda params, tree, x: Raw(target.expand(E, *target.shape) + 1.0, log_var, None)
    )
    _, metrics = algorithm.review(state, source)
    assert [bool(torch.isnan(metrics[f"dynamics/member {e}: held-out error"])) for e in range(E)] == [
        False,
        False,
        True,
        False,
    ]


# ---- inputs and targets


def test_history_is_stacked_oldest_first_and_never_reaches_over_an_episodes_start() -> None:
    model = WorldModel(DynamicsSettings(history=3, termination="never"), DATA.spec)
    x = {k: wide(DATA.columns[k]) for k in ("observations", "actions")}
    # the first, second and third of the second episode, its eighth, and the last of all
    rows = torch.tensor([10, 11, 12, 17, 199])
    found = input_table(model, DATA, rows)
    for i, row in enumerate(rows.tolist()):
        start, expected = row // 10 * 10, []
        for back in (2, 1, 0):
            at = row - back
            expected += [*x["observations"][max(at, start)], *(x["actions"][at] if at >= start else np.zeros(A))]
        np.testing.assert_allclose(found[i], expected, rtol=1e-6)
    # and a rollout builds the same inputs step by step
    observations, actions = DATA.columns["observations"], DATA.columns["actions"]
    past = model.first_past(observations[10:11])
    for row in (10, 11, 12):
        np.testing.assert_allclose(
            model.inputs(observations[row : row + 1], actions[row : row + 1], past)[0], found[row - 10], rtol=1e-6
        )
        past = model.later_past(past, observations[row : row + 1], actions[row : row + 1])


@pytest.mark.parametrize("delta", [True, False])
def test_targets_and_predictions_are_changes_or_values(delta: bool) -> None:
    rows = torch.tensor([0, 3, 14])
    found = targets(DATA, rows, delta)
    s, following, r = (DATA.columns[k][rows] for k in ("observations", "next_observations", "rewards"))
    torch.testing.assert_close(found, torch.cat([following - s if delta else following, r.unsqueeze(-1)], -1))
    model = WorldModel(DynamicsSettings(delta=delta, termination="never", members=2), DATA.spec)
    perfect = Raw(found.expand(2, 3, D), torch.zeros(2, 3, D), None)
    prediction = model.to_prediction({"scale": torch.ones(D)}, perfect, s)
    torch.testing.assert_close(prediction.mean, following.expand(2, 3, OBS))
    torch.testing.assert_close(prediction.reward, r.expand(2, 3))


def test_learnt_terminations_are_drawn_with_their_probability() -> None:
    model = WorldModel(DynamicsSettings(termination="learned", members=1), DATA.spec)
    n = 4000
    logit = torch.tensor([-20.0, -1.0, 0.0, 20.0]).repeat_interleave(n // 4)
    s = torch.zeros(n, OBS)
    prediction = model.to_prediction(
        {"scale": torch.ones(D)}, Raw(torch.zeros(1, n, D), torch.full((1, n, D), -10.0), logit.unsqueeze(0)), s
    )
    tree = {"low": torch.full((OBS,), -100.0), "high": torch.full((OBS,), 100.0)}
    ended = (
        model.outcome(tree, prediction, s, torch.zeros(n, A), rng.make_key(0))
        .terminations.reshape(4, -1)
        .float()
        .mean(1)
    )
    np.testing.assert_allclose(ended, [0.0, 1 / (1 + np.e), 0.5, 1.0], atol=0.05)


# ---- which rows are for what


def test_no_row_of_a_test_episode_is_trained_on() -> None:
    data = arrays(100, 10)
    found = split(data, DynamicsSettings(test_share=0.1, held_out=50))
    assert len(found.test) == 10 and len(found.ends)
    tested = {row for e in found.test.tolist() for row in range(int(data.episode_start[e]), int(data.episode_end[e]))}
    train, held = set(found.train.tolist()), set(found.held_out.tolist())
    assert len(held) == 50 and not train & held and not (train | held) & tested
    assert not set(found.ends.tolist()) & tested
    known = set(torch.nonzero(data.columns["successor_known"]).squeeze(-1).tolist())
    assert train | held == known - tested
    again = split(data, DynamicsSettings(test_share=0.1, held_out=50))
    assert torch.equal(found.train, again.train) and torch.equal(found.test, again.test)
    assert len(split(data, DynamicsSettings(test_share=0.0)).test) == 0
    # at most a fifth
    assert (
        len(split(DATA, DynamicsSettings(test_share=0.0)).held_out)
        == len(torch.nonzero(DATA.columns["successor_known"])) // 5
    )


def test_published_defaults() -> None:
    c = DynamicsSettings()
    check(c)
    published = {
        "members": 7,
        "elites": 5,
        "hidden": [200] * 4,
        "activation": "silu",
        "learning_rate": 1e-3,
        "batch_size": 256,
        "weight_decay": [2.5e-5, 5e-5, 7.5e-5, 7.5e-5, 1e-4],
        "bounds_weight": 0.01,
        "held_out": 1000,
        "patience": 5,
        "tolerance": 0.01,
        "delta": True,
        "history": 1,
    }
    assert {k: getattr(c, k) for k in published} == published
