"""RAMBO: the likelihood of imagined transitions where densities underflow, each term of the model's loss in float64
NumPy, and its game.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from offrl import registry, rng
from offrl.algorithm import TrainState, stack
from offrl.algorithms.rambo import MODEL_SETTINGS, log_mixture
from offrl.data.arrays import from_arrays
from offrl.data.dataset import Dataset
from offrl.errors import UserError
from offrl.evaluation.policy import TrainedPolicy
from offrl.settings.field import check
from offrl.settings.train import TrainConfig
from offrl.training.stages import ready
from offrl.training.step import Step
from offrl.world_models.dynamics import DynamicsSettings, data_range
from offrl.world_models.model import WorldModel, load, save
from tests.support.reference import mlp as ref

B, OBS, A, E = 8, 3, 2, 4
D = OBS + 1
G = np.random.default_rng(6)
KEY = rng.make_key(0)
HIDDEN, DECAY = [6, 5], [1e-2, 2e-2, 3e-2]


def arrays(rows: int = 60) -> Dataset:
    """Noise, in episodes of 10 steps, every second of which ends in a termination."""
    g, step = np.random.default_rng(1), np.arange(rows)
    observations, actions = g.normal(size=(rows, OBS)), g.uniform(-1, 1, (rows, A))
    ends, cut = step % 20 == 19, step % 20 == 9
    return from_arrays(observations, actions, g.normal(size=rows), ends, cut, action_low=-1.0, action_high=1.0)


DATA = arrays()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return made(tmp_path_factory.mktemp("model") / "0.safetensors")


def made(path: Path, **settings: Any) -> str:
    """The file of an untrained model with ReLU, which `reference` knows."""
    chosen = {
        "members": E,
        "elites": 2,
        "hidden": HIDDEN,
        "activation": "relu",
        "weight_decay": DECAY,
        "termination": "never",
        **settings,
    }
    torch.manual_seed(3)
    world = WorldModel(DynamicsSettings(**chosen), DATA.spec)
    params = {k: v.detach() + 0.1 * torch.randn_like(v) for k, v in world.network.named_parameters()}
    mean, std = torch.randn(world.in_dim), 0.5 + torch.rand(world.in_dim)
    tree = {
        "params": params,
        "mean": mean,
        "std": std,
        "elites": torch.tensor([2, 0]),
        "scale": torch.ones(D),
        **data_range(DATA),
    }
    save(
        path,
        world,
        tree,
        {"held_out": [0.2, 0.4, 0.1, 0.3], "data": {"name": "arrays", "fingerprint": DATA.fingerprint}},
    )
    return str(path)


def make(model: str, dataset: Dataset = DATA, **settings: Any) -> tuple[Any, TrainState]:
    kind = registry.get("algo", "rambo")
    small: dict[str, Any] = {
        "hidden": [6, 5],
        "batch_size": B,
        "rollouts": 12,
        "horizon": 3,
        "rollout_every": 4,
        "rollout_retain": 2,
        "clone_epochs": 0,
    }
    run = TrainConfig(
        algo=kind.Config(**{**small, "world_model": model, **settings}), device="cpu", quiet=True, compile="eager"
    )
    run, pretrained = ready(dataclasses.replace(run, runs_dir=str(Path(model).parent)), dataset)
    algorithm = kind(run.algo, dataset.spec, pretrained)
    algorithm.runtime.source = algorithm.sampler().prepare(dataset)
    return algorithm, algorithm.refresh(algorithm.init(0), algorithm.runtime.source, KEY, step=0)[0]


def members(tree: dict[str, Any], params: dict[str, Any], inputs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean and log variance [E, B, D] of every member, float64."""
    x = (inputs - wide(tree["mean"])) / wide(tree["std"])
    out = np.stack([ref.forward(ref.net(params, "net.", e), x)[0] for e in range(E)])
    low, high = wide(params["min_log_var"]), wide(params["max_log_var"])
    log_var = high - np.logaddexp(0.0, high - out[..., D : 2 * D])
    return out[..., :D], low + np.logaddexp(0.0, log_var - low)


def wide(x: torch.Tensor) -> np.ndarray:
    return x.numpy().astype(np.float64)


def np_log_mixture(mean: np.ndarray, std: np.ndarray, x: np.ndarray) -> np.ndarray:
    each = (-0.5 * ((x - mean) / std) ** 2 - np.log(std) - 0.5 * np.log(2 * np.pi)).sum(-1)
    return np.logaddexp.reduce(each, 0) - np.log(len(each))


# ---- the likelihood


@pytest.mark.parametrize("away", [0.5, 6.0, 300.0])
def test_the_likelihood_equals_float64_where_densities_underflow(away: float) -> None:
    mean, std = G.normal(size=(5, 40, 18)), np.exp(G.uniform(-4, 0, (5, 40, 18)))
    x = mean[0] + away * std[0] * G.choice([-1.0, 1.0], (40, 18))
    found = log_mixture(*(torch.tensor(v, dtype=torch.float32) for v in (mean, std, x)))
    small = [v.astype(np.float32).astype(np.float64) for v in (mean, std, x)]
    np.testing.assert_allclose(found.double().numpy(), np_log_mixture(*small), rtol=1e-5, atol=1e-5)
    each = torch.distributions.Normal(*(torch.tensor(v, dtype=torch.float32) for v in (mean, std))).log_prob(
        torch.tensor(x, dtype=torch.float32)
    )
    naive = each.sum(-1).exp().mean(0).log()
    assert torch.isinf(naive).any() == (away > 1.0), "the case is one that has to be handled"


def test_its_gradient_is_finite_where_densities_underflow() -> None:
    mean = torch.zeros(5, 4, 18, requires_grad=True)
    log_mixture(mean, torch.full((5, 4, 18), 0.01), torch.full((4, 18), 3.0)).sum().backward()
    assert mean.grad is not None and torch.isfinite(mean.grad).all() and (mean.grad > 0).all()  # nearer is likelier


# ---- the loss


@pytest.mark.parametrize("ending", [False, True])
def test_every_term_of_the_models_loss(tmp_path: Path, ending: bool) -> None:
    path = made(tmp_path / "m.safetensors", termination="learned" if ending else "never")
    algorithm, state = make(path, adversarial_weight=0.7, bounds_weight=0.05)
    tree, params = algorithm.runtime.source.tree, state.params["dynamics"]
    inputs, drawn, advantage = (
        torch.tensor(G.normal(size=s), dtype=torch.float32) for s in ((B, OBS + A), (B, D), (B,))
    )
    batches = [algorithm.real(algorithm.runtime.source, rng.make_key(i)) for i in range(20)]
    batch = next(b for b in batches if bool((b["known"] == 0).any()))

    mean, log_var = members(tree, params, wide(inputs))
    elite = [2, 0]
    log_p = np_log_mixture(mean[elite], np.exp(0.5 * log_var[elite]), wide(drawn))
    adversarial = (log_p * wide(advantage)).mean()
    mean, log_var = members(tree, params, wide(batch["inputs"]))
    known = np.ones((B, D))  # of a termination without a next observation the reward, and that it is one, are learnt
    known[:, :-1] = wide(batch["known"])[:, None]
    square = (mean - wide(batch["targets"])) ** 2
    supervised = ((square * np.exp(-log_var) + log_var) * known).mean((1, 2)).sum()
    if ending:
        x = (wide(batch["inputs"]) - wide(tree["mean"])) / wide(tree["std"])
        logit = np.stack([ref.forward(ref.net(params, "net.", e), x)[0][:, -1] for e in range(E)])
        y = wide(batch["ending"])
        supervised += (np.logaddexp(0.0, logit) - y * logit).mean(1).sum()
    layers = [wide(params[n]) for n in ("net.layers.0.weight", "net.layers.1.weight", "net.head.weight")]
    decay = sum(0.5 * d * (w**2).sum() for d, w in zip(DECAY, layers, strict=True))
    bounds = wide(params["max_log_var"]).sum() - wide(params["min_log_var"]).sum()
    expected = 0.7 * adversarial + supervised + decay + 0.05 * bounds

    loss, metrics = algorithm.model_loss(params, state, inputs, drawn, advantage, batch)
    assert float(loss) == pytest.approx(expected, rel=1e-5)
    assert float(metrics["model/adversarial"]) == pytest.approx(adversarial, rel=1e-4)
    assert float(metrics["model/error"]) == pytest.approx((square * known).mean(), rel=1e-5)


def test_what_the_model_learns_from_is_the_data(model: str) -> None:
    algorithm, _ = make(model)
    batch = algorithm.real(algorithm.runtime.source, KEY)
    x = {k: wide(v) for k, v in DATA.columns.items() if v.dtype == torch.float32}
    rows = DATA.transition_rows()
    for inputs, target, end, known in zip(
        *(wide(batch[k]) for k in ("inputs", "targets", "ending", "known")), strict=True
    ):
        (row,) = np.nonzero((x["observations"] == inputs[:OBS]).all(1))[0]
        assert (
            row in rows
            and bool(DATA.columns["terminations"][row]) == bool(end)
            and bool(DATA.columns["successor_known"][row]) == bool(known)
        )
        np.testing.assert_allclose(inputs[OBS:], x["actions"][row])
        np.testing.assert_allclose(
            target, [*(x["next_observations"][row] - x["observations"][row]), x["rewards"][row]], atol=1e-6
        )
    assert len(algorithm.runtime.source.extra["table"]) == len(rows) < len(DATA), "not the last row of a time-out"


def test_the_advantage(model: str) -> None:
    algorithm, state = make(model, discount=0.9)
    s, following = (torch.tensor(G.normal(size=(B, OBS)), dtype=torch.float32) for _ in range(2))
    a, r = (
        torch.tensor(G.uniform(-1, 1, (B, A)), dtype=torch.float32),
        torch.tensor(G.normal(size=B), dtype=torch.float32),
    )
    ended = torch.tensor([0, 1, 0, 0, 1, 0, 0, 0], dtype=torch.bool)
    mode = np.tanh(ref.forward(ref.net(state.params["actor"], "net."), wide(following))[0][:, :A])

    def least(observations: np.ndarray, actions: np.ndarray) -> np.ndarray:
        x = np.concatenate([observations, actions], 1)
        return np.stack([ref.forward(ref.net(state.params["critic"], member=e), x)[0][:, 0] for e in range(2)]).min(0)

    expected = wide(r) + 0.9 * (1.0 - ended.numpy()) * least(wide(following), mode) - least(wide(s), wide(a))
    expected = (expected - expected.mean()) / expected.std()
    np.testing.assert_allclose(algorithm.advantage(state, s, a, r, ended, following), expected, rtol=1e-3, atol=1e-4)


def test_what_raises_the_value_becomes_less_likely(model: str) -> None:
    algorithm, state = make(model, adversarial_weight=1.0)
    inputs, drawn = torch.randn(B, OBS + A), torch.randn(B, D)
    advantage = torch.tensor([1.0, -1.0] * (B // 2))
    batch = algorithm.real(algorithm.runtime.source, KEY)

    def gap(params: dict[str, torch.Tensor]) -> float:
        raw = algorithm.runtime.source.model.raw(params, algorithm.runtime.source.tree, inputs)
        mean, std = (
            x[algorithm.runtime.source.tree["elites"]] for x in algorithm.moments(algorithm.runtime.source.tree, raw)
        )
        log_p = log_mixture(mean, std, drawn)
        return float(log_p[advantage > 0].mean() - log_p[advantage < 0].mean())

    params = state.params["dynamics"]
    pull = {
        w: torch.func.grad(lambda p, w=w: make_loss(algorithm, w)(p, state, inputs, drawn, advantage, batch)[0])(params)
        for w in (0.0, 1.0)
    }
    moved = {k: v - 1e-3 * (pull[1.0][k] - pull[0.0][k]) for k, v in params.items()}
    assert gap(moved) < gap(params)


def make_loss(algorithm: Any, weight: float) -> Any:
    own = registry.get("algo", "rambo")(
        dataclasses.replace(algorithm.config, adversarial_weight=weight), algorithm.spec
    )
    own.runtime.source = algorithm.runtime.source
    return own.model_loss


# ---- the game


def test_an_update_of_the_model_follows_the_definition(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Noise 0: what is imagined is the mean of the member that the row asks, and states go on from there."""
    algorithm, state = make(model, range_margin=100.0)
    monkeypatch.setattr(rng, "normal", lambda key, shape: torch.zeros(shape))
    given: dict[str, Any] = {}
    loss = type(algorithm).model_loss

    def spy(self: Any, params: Any, state: Any, inputs: Any, drawn: Any, advantage: Any, batch: Any) -> Any:
        given.update(inputs=inputs, drawn=drawn, advantage=advantage)
        return loss(self, params, state, inputs, drawn, advantage, batch)

    monkeypatch.setattr(type(algorithm), "model_loss", spy)
    new, _ = algorithm.oppose(state, KEY)
    s = wide(state.extra["imagined"]["observations"])
    a = np.tanh(ref.forward(ref.net(state.params["actor"], "net."), s)[0][:, :A])
    np.testing.assert_allclose(given["inputs"], np.concatenate([s, a], 1), atol=1e-5)
    mean, _ = members(algorithm.runtime.source.tree, state.params["dynamics"], np.concatenate([s, a], 1))
    drawn = wide(given["drawn"])
    asked = [int(np.abs(mean[:, i] - drawn[i]).sum(-1).argmin()) for i in range(B)]
    assert set(asked) == {0, 2}, "the elites, both"
    np.testing.assert_allclose(drawn, mean[asked, np.arange(B)], atol=1e-5)
    np.testing.assert_allclose(new.extra["imagined"]["observations"], s + drawn[:, :OBS], atol=1e-5)
    assert float(given["advantage"].mean()) == pytest.approx(0.0, abs=1e-5) and float(
        given["advantage"].std(unbiased=False)
    ) == pytest.approx(1, 1e-3)


def starts_in_the_data(observations: torch.Tensor) -> torch.Tensor:
    return (observations.unsqueeze(1) == DATA.columns["observations"]).all(-1).any(-1)


def test_imagined_states_begin_anew_after_horizon_steps_and_where_an_episode_ends(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    algorithm, state = make(model)
    assert starts_in_the_data(state.extra["imagined"]["observations"]).all()
    for step in range(7):
        state, _ = algorithm.oppose(state._replace(step=torch.tensor(step)), rng.fold_in(KEY, step))
        fresh = starts_in_the_data(state.extra["imagined"]["observations"])
        assert bool(fresh.all()) == (step % 3 == 2) and bool(fresh.any()) == (step % 3 == 2)
    to_outcome = WorldModel.to_outcome
    ends = torch.tensor([True, False] * (B // 2))
    monkeypatch.setattr(WorldModel, "to_outcome", lambda self, *x: to_outcome(self, *x)._replace(terminations=ends))
    state, _ = algorithm.oppose(state._replace(step=torch.tensor(3)), KEY)
    assert torch.equal(starts_in_the_data(state.extra["imagined"]["observations"]), ends)


def test_each_replica_trains_a_model_of_its_own_and_the_shared_one_stays(model: str) -> None:
    algorithm, _ = make(model)
    before = {k: v.clone() for k, v in algorithm.runtime.source.tree["params"].items()}
    step = Step(algorithm, algorithm.runtime.source, batch_size=B, replicas=2)
    state, _ = step.run(stack([algorithm.init(s) for s in (0, 1)]), {}, 0, 5)
    for name, value in state.params["dynamics"].items():
        assert torch.equal(algorithm.runtime.source.tree["params"][name], before[name])
        # Adam at 3e-4
        assert not torch.equal(value[0], value[1]) and float((value[0] - before[name]).abs().max()) < 5 * 3.1e-4
    assert float(state.opt["dynamics"]["count"][0]) == 5  # type: ignore[index]


def test_a_model_that_does_not_learn_stays_the_shared_one(model: str) -> None:
    """At rate 0 it is not even asked; beside other rates of a grid an update leaves it as it is. At weight 0 alone it
    goes on learning.
    """
    rates = {"model_learning_rate": torch.tensor([0.0, 3e-4])}
    shared = None
    for settings, grid in (({"model_learning_rate": 0.0}, {}), ({"adversarial_weight": 0.0}, {}), ({}, rates)):
        algorithm, _ = make(model, **settings)
        shared = algorithm.runtime.source.tree["params"]
        step = Step(algorithm, algorithm.runtime.source, batch_size=B, replicas=2, hyper=grid)
        state, sums = step.run(stack([algorithm.init(s) for s in (0, 1)]), {}, 0, 3)
        same = [all(torch.equal(v[n], shared[k]) for k, v in state.params["dynamics"].items()) for n in (0, 1)]
        frozen = "model_learning_rate" in settings
        assert same == ([True, True] if frozen else [True, False] if grid else [False, False])
        assert ("model/loss" in sums) != frozen


def test_roll_outs_are_those_of_its_own_model(model: str) -> None:
    algorithm, state = make(model)
    other = {k: v + 1.0 if k == "net.head.bias" else v for k, v in state.params["dynamics"].items()}
    moved = state._replace(params={**state.params, "dynamics": other})
    mine, theirs = (algorithm.roll(s, algorithm.runtime.source, KEY) for s in (state, moved))
    torch.testing.assert_close(
        theirs.next_observations[0] - mine.next_observations[0], torch.ones(12, OBS), atol=2.0, rtol=0
    )
    assert float((theirs.rewards[0] - mine.rewards[0]).mean()) > 0.4
    algorithm, state = make(model, random_rollouts=True, rollouts=2000, horizon=1)
    actions = algorithm.roll(state, algorithm.runtime.source, KEY).actions
    assert float(actions.abs().max()) <= 1.0 and float(actions.var()) == pytest.approx(1 / 3, rel=0.05)


# ---- the warm start


def test_the_actor_clones_the_data_first(model: str) -> None:
    g, n = np.random.default_rng(0), 200
    s = g.uniform(-1, 1, (n, OBS))
    best = np.stack([0.5 * s[:, 0], -0.5 * s[:, 1]], 1)
    data = from_arrays(
        s, best, np.zeros(n), np.zeros(n, bool), np.arange(n) % 20 == 19, action_low=-1.0, action_high=1.0
    )
    error = []
    for epochs in (0, 10):
        algorithm, state = make(model, data, hidden=[32, 32], clone_epochs=epochs, clone_learning_rate=1e-2)
        actions, _ = algorithm.actor(state).act(None, data.columns["observations"], KEY, explore=False)
        error.append(float((actions - data.columns["actions"]).square().mean()))
    assert error[1] < 0.02 < error[0]


def test_the_clone_is_trained_for_so_many_times_through_the_data(model: str) -> None:
    kind = registry.get("algo", "rambo")
    config = kind.Config(world_model=model, batch_size=B, clone_epochs=3)
    assert kind.requires(TrainConfig(algo=config), DATA)["behaviour"].steps == int(
        np.ceil(3 * len(DATA.transition_rows()) / B)
    )


def test_another_network_is_no_clone(model: str) -> None:
    algorithm, state = make(model, clone_epochs=1)
    clone = algorithm.pretrained["behaviour"].state.params["actor"]
    assert all(torch.equal(value, clone[name]) for name, value in state.params["actor"].items())
    with pytest.raises(UserError, match="its policy's network is not this one's"):
        make(model, behaviour=algorithm.config.behaviour, hidden=[7])


# ---- which model


def test_models_that_have_no_likelihood_are_refused(tmp_path: Path) -> None:
    path = made(tmp_path / "m.safetensors", loss="squared")
    with pytest.raises(UserError, match="loss=squared; rambo goes on training"):
        make(path)


def test_a_policy_is_read_where_the_model_is_gone(tmp_path: Path) -> None:
    path = made(tmp_path / "m.safetensors", members=E, termination="learned", history=2)
    algorithm, state = make(path)
    assert algorithm.config.world_model_shape == [E, 2, 1, *HIDDEN] and load(path).model.members == E
    TrainedPolicy(algorithm, state, 0).save(tmp_path / "policy.safetensors")
    Path(path).unlink()
    policy = TrainedPolicy.load(tmp_path / "policy.safetensors")
    expected, _ = algorithm.actor(state).act(None, torch.zeros(1, OBS), KEY, explore=False)
    np.testing.assert_allclose(policy.act(np.zeros(OBS)), expected[0].numpy(), atol=1e-6)


def test_published_defaults() -> None:
    kind = registry.get("algo", "rambo")
    c = kind.Config()
    check(c)
    published = {
        "actor_learning_rate": 1e-4,
        "learning_rate": 3e-4,
        "model_learning_rate": 3e-4,
        "clone_learning_rate": 1e-4,
        "clone_epochs": 50,
        "discount": 0.99,
        "polyak": 0.005,
        "batch_size": 256,
        "hidden": [256, 256],
        "critics": 2,
        "actor_schedule": "constant",
        "real_share": 0.5,
        "rollout_every": 250,
        "rollouts": 50_000,
        "rollout_retain": 20,
        "horizon": 5,
        "penalty": 0.0,
        "adversarial_weight": 3e-4,
        "bounds_weight": 0.001,
    }
    assert {k: getattr(c, k) for k in published} == published
    assert MODEL_SETTINGS == {"learning_rate": 3e-4, "patience": 10, "bounds_weight": 0.001}
