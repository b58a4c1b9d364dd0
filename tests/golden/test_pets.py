"""PETS: returns of plans against a model written out in float64 NumPy, ends, members, and policies that act without
what they came from.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from offrl import registry, rng
from offrl.algorithm import TrainState, select, stack
from offrl.data.arrays import from_arrays
from offrl.data.dataset import Dataset, DataSpec
from offrl.errors import UserError
from offrl.evaluation.policy import TrainedPolicy
from offrl.settings.train import TrainConfig
from offrl.training.stages import ready
from offrl.training.step import Step
from offrl.world_models.dynamics import DynamicsSettings, data_range
from offrl.world_models.model import Trained, save
from tests.support.reference import mlp as ref

OBS, A, H, PLANS, STATES, PARTICLES, MEMBERS = 2, 1, 4, 7, 2, 3, 4
G = np.random.default_rng(3)
OBSERVATIONS = torch.tensor(G.normal(size=(STATES, OBS)), dtype=torch.float32)
CANDIDATES = torch.tensor(G.uniform(-1, 1, (STATES, PLANS, H, A)), dtype=torch.float32)
KEY, ELITES = rng.make_key(5), torch.tensor([2, 0])
SMALL = {"plan_population": 20, "plan_elites": 5, "plan_iterations": 2, "plan_horizon": 3, "plan_particles": 2}


def make(**settings: Any) -> Any:
    kind = registry.get("algo", "pets")
    defaults = {
        "members": MEMBERS,
        "hidden": [8],
        "activation": "relu",
        "termination": "never",
        "elites": 2,
        "plan_particles": PARTICLES,
    }
    spec = DataSpec((OBS,), A, action_low=(-1.0,) * A, action_high=(1.0,) * A)
    return kind(kind.Config(**{**defaults, "plan_horizon": H, "plan_discount": 0.9, "epoch": 1, **settings}), spec)


def tree_of(algorithm: Any) -> dict[str, Any]:
    """A model of large weights, whose observations reach the edge of its range."""
    g = torch.Generator().manual_seed(1)
    params = {k: 0.5 * torch.randn(v.shape, generator=g) for k, v in algorithm.init(0).params["dynamics"].items()}
    params |= {"max_log_var": torch.tensor([-0.5, 0.2, 0.1]), "min_log_var": torch.tensor([-3.0, -2.0, -4.0])}
    width = algorithm.model.in_dim
    tree = {
        "params": params,
        "mean": torch.randn(width, generator=g),
        "std": torch.rand(width, generator=g) + 0.5,
        "elites": ELITES,
    }
    return {
        **tree,
        "low": torch.tensor([-1.5, -2.0]),
        "high": torch.tensor([2.0, 1.0]),
        "scale": torch.tensor([0.5, 2.0, 1.5]),
    }


def float64(x: Tensor) -> np.ndarray:
    return x.numpy().astype(np.float64)


def softplus(x: np.ndarray) -> np.ndarray:
    return np.log1p(np.exp(x))


def outputs(tree: dict[str, Any], x: np.ndarray, member: int) -> tuple[np.ndarray, np.ndarray, float]:
    """Mean [D], standard deviation [D] and probability of an end (0 where none is learnt) of one member for one
    input.
    """
    layers = ref.net(tree["params"], "net.", member)
    y = ref.forward(layers, ((x - float64(tree["mean"])) / float64(tree["std"]))[None])[0][0]
    high, low = float64(tree["params"]["max_log_var"]), float64(tree["params"]["min_log_var"])
    log_var = high - softplus(high - y[OBS + 1 : 2 * OBS + 2])
    log_var = low + softplus(log_var - low)
    return y[: OBS + 1], np.exp(0.5 * log_var), 1 / (1 + np.exp(-y[-1])) if len(y) % 2 else 0.0


def by_hand(tree: dict[str, Any], c: Any, chosen: np.ndarray, noise: np.ndarray) -> np.ndarray:
    """Returns [STATES, PLANS]. chosen: [H, PARTICLES] members; noise: [H, PARTICLES, D]."""
    found = np.zeros((STATES, PLANS, PARTICLES))
    for b, p, n in np.ndindex(*found.shape):
        s, going, past = float64(OBSERVATIONS[b]), 1.0, np.concatenate([float64(OBSERVATIONS[b]), np.zeros(A)])
        for t in range(H):
            now = np.concatenate([s, float64(CANDIDATES[b, p, t])])
            x = now if c.history == 1 else np.concatenate([past, now])
            mean, std, end = outputs(tree, x, chosen[t, n])
            drawn = mean + std * (float64(tree["scale"]) if c.calibrated else 1.0) * noise[t, n]
            following = s + drawn[:OBS]
            doubt = 0.0
            if c.penalty:
                doubt = max(np.linalg.norm(outputs(tree, x, m)[1]) for m in range(MEMBERS))
            found[b, p, n] += c.plan_discount**t * going * (drawn[OBS] - c.penalty * doubt)
            going *= 1.0 - end
            if c.termination == "inverted_pendulum" and abs(following[1]) > 0.2:
                going = 0.0
            s, past = np.clip(following, float64(tree["low"]), float64(tree["high"])), now
    return found.mean(-1)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"plan_members": "drawn", "history": 2},
        {"termination": "inverted_pendulum", "calibrated": True},
        {"termination": "learned"},
        {"penalty": 0.7, "plan_members": "drawn"},
    ],
    ids=str,
)
def test_returns_of_plans(settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(
        vars(rng), "normal", lambda key, shape: torch.tensor(NOISE[int(key)], dtype=torch.float32).reshape(shape)
    )
    algorithm = make(**settings)
    tree, (assign, noise) = tree_of(algorithm), rng.split(KEY)
    NOISE.clear()
    NOISE.update({int(rng.fold_in(noise, t)): G.normal(size=(PARTICLES, OBS + 1)) for t in range(H)})
    drawn = [members_by_hand(rng.fold_in(assign, t)) for t in range(H)]
    chosen = np.stack(drawn if algorithm.config.plan_members == "drawn" else [drawn[0]] * H)
    assert any((chosen[t] != chosen[0]).any() for t in range(H)) == (algorithm.config.plan_members == "drawn")
    past = algorithm.model.first_past(OBSERVATIONS)
    got = algorithm.returns(tree, OBSERVATIONS, past, CANDIDATES, KEY)
    expected = by_hand(tree, algorithm.config, chosen, np.stack(list(NOISE.values())))
    np.testing.assert_allclose(got.numpy(), expected, rtol=2e-4, atol=2e-4)
    monkeypatch.setattr("offrl.algorithms.pets.returns.CHUNK", 2 * PARTICLES)  # two plans at once
    few = algorithm.returns(tree, OBSERVATIONS, past, CANDIDATES, KEY)
    torch.testing.assert_close(few, got, rtol=1e-5, atol=1e-5)
    alone = algorithm.returns(tree, OBSERVATIONS[1:], past[1:], CANDIDATES[1:], KEY)
    torch.testing.assert_close(alone[0], got[1], rtol=1e-5, atol=1e-5)


NOISE: dict[int, np.ndarray] = {}


def members_by_hand(key: Tensor) -> np.ndarray:
    deal, order = rng.split(key)
    shuffled = ELITES.numpy()[np.argsort(rng.uniform(deal, (2,)).numpy())]
    return shuffled[np.argsort(rng.uniform(order, (PARTICLES,)).numpy()) % 2]


@pytest.mark.parametrize("how", ["fixed", "drawn"])
def test_a_particle_keeps_its_member_or_does_not(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Members that drift left, not at all and right: where a particle gets in H steps tells whom it asked."""
    algorithm = make(members=3, elites=3, plan_members=how, plan_particles=12)
    tree = {
        **tree_of(algorithm),
        "elites": torch.arange(3),
        "low": torch.full((OBS,), -99.0),
        "high": torch.full((OBS,), 99.0),
    }
    tree["params"] = {k: torch.zeros_like(v) for k, v in tree["params"].items()}
    tree["params"]["net.head.bias"][:, 0, 0] = torch.tensor([-1.0, 0.0, 1.0])
    tree["params"] |= {name: torch.full((OBS + 1,), -20.0) for name in ("max_log_var", "min_log_var")}
    reached = []
    to_outcome = algorithm.model.to_outcome
    monkeypatch.setattr(algorithm.model, "to_outcome", lambda *x: reached.append(x[4]) or to_outcome(*x))
    algorithm.returns(tree, torch.zeros(1, OBS), torch.zeros(1, 0, OBS + A), CANDIDATES[:1], KEY)
    ends = reached[-1][..., 0].round()  # [particles, plans]
    assert (ends == ends[:, :1]).all(), "all plans meet the same members"
    count = {x: int((ends[:, 0] == x).sum()) for x in (-4, 0, 4)}
    if how == "fixed":
        assert count == {-4: 4, 0: 4, 4: 4}
    else:
        assert sum(count.values()) < 12
    for step in reached:  # at each step every member is asked by as many
        move = step[..., 0] - (0 if step is reached[0] else before)  # noqa: F821
        assert [int((move[:, 0].round() == x).sum()) for x in (-1, 0, 1)] == [4, 4, 4]
        before = step[..., 0]  # noqa: F841


def test_nothing_counts_after_an_end() -> None:
    """The only reward is 1 a step; whoever leaves the bound of 0.2 at the first step earns 1, whoever stays earns H."""
    algorithm = make(termination="inverted_pendulum", plan_discount=1.0)
    tree = {**tree_of(algorithm), "mean": torch.zeros(OBS + A), "std": torch.ones(OBS + A)}
    params = {k: torch.zeros_like(v) for k, v in tree["params"].items()}
    params["net.layers.0.weight"][:, OBS, 0] = 1.0  # a hidden unit is max(action, 0)
    params["net.head.weight"][:, 0, 1] = 1.0  # and moves the angle by that
    params["net.head.bias"][:, 0, OBS] = 1.0
    params |= {name: torch.full((OBS + 1,), -20.0) for name in ("max_log_var", "min_log_var")}
    plans = torch.zeros(1, 3, H, A)
    plans[0, 1, 0], plans[0, 2, 2] = 0.9, 0.9
    got = algorithm.returns({**tree, "params": params}, torch.zeros(1, OBS), torch.zeros(1, 0, OBS + A), plans, KEY)
    np.testing.assert_allclose(got.numpy(), [[H, 1.0, 3.0]], atol=1e-3)


def test_a_broken_model_loses_and_is_not_acted_on() -> None:
    algorithm = make(**SMALL)
    state = select(stack([algorithm.init(0)]), 0)
    broken = {k: torch.full_like(v, torch.nan) for k, v in state.params["dynamics"].items()}
    actor = algorithm.actor(state._replace(params={"dynamics": broken}))
    action, carry = actor.act(actor.start(2), OBSERVATIONS, KEY, explore=False)
    assert torch.equal(action, torch.zeros(2, A)) and torch.equal(carry.mean, torch.zeros(2, 3, A))


# ---- policies


def data() -> Dataset:
    """Points that are pushed about, and paid for being near 0."""
    g, n = np.random.default_rng(1), 400
    x, u = g.uniform(-1, 1, (n, OBS)), g.uniform(-1, 1, (n, A))
    flags = np.zeros(n, bool), np.arange(n) % 20 == 19
    for i in range(n - 1):
        if not flags[1][i]:
            x[i + 1] = 0.9 * x[i] + 0.3 * u[i]
    return from_arrays(x, u, -(x**2).sum(1), *flags, action_low=-1.0, action_high=1.0)


def trained(history: int = 1, **settings: Any) -> tuple[Any, TrainState, Dataset]:
    dataset, kind = data(), registry.get("algo", "pets")
    config = kind.Config(
        **{"members": 3, "elites": 2, "hidden": [8], "epoch": 10, "history": history, **SMALL, **settings}
    )
    algorithm = kind(kind.fit_config(config, dataset), dataset.spec)
    return algorithm, run(algorithm, dataset, 40), dataset


def run(algorithm: Any, dataset: Dataset, updates: int) -> TrainState:
    step = Step(algorithm, algorithm.sampler().prepare(dataset), batch_size=32, replicas=1)
    return select(step.run(stack([algorithm.init(0)]), {}, 0, updates)[0], 0)


def walk(policy: TrainedPolicy, steps: int = 5) -> np.ndarray:
    """Actions for a fixed walk of two observations."""
    rows = np.random.default_rng(2).normal(size=(steps, 2, OBS)).astype(np.float32)
    return np.stack([policy.act(x) for x in rows])


@pytest.mark.parametrize(
    "settings",
    [{"history": 2}, {"planner": "mppi", "penalty": 1.0, "uncertainty": "density", "plan_members": "drawn"}],
    ids=str,
)
def test_a_policy_acts_alone_as_with_its_model(settings: dict[str, Any], tmp_path: Path) -> None:
    algorithm, state, dataset = trained(**settings)
    assert torch.equal(state.extra["low"], dataset.columns["observations"].amin(0))  # filled in from the data
    policy = TrainedPolicy(algorithm, state, 0)
    expected = walk(policy)
    assert len(np.unique(expected.round(4))) > 5
    policy.save(tmp_path / "policy.safetensors")
    assert np.array_equal(walk(TrainedPolicy.load(tmp_path / "policy.safetensors")), expected)

    # and as one that was handed the model
    path, tree = (
        tmp_path / "model.safetensors",
        {**algorithm.tree(state), **data_range(dataset), "scale": torch.ones(OBS + 1)},
    )
    save(
        path,
        algorithm.model,
        tree,
        {"data": {"name": "x", "fingerprint": "y"}, "held_out": state.extra["error"].tolist(), "seed": 0},
    )
    kind = type(algorithm)
    other = kind.Config(world_model=str(path), **{k: v for k, v in settings.items() if k != "history"}, **SMALL)
    config, pretrained = ready(TrainConfig(algo=other), dataset)
    other = config.algo
    shared = [f.name for f in dataclasses.fields(DynamicsSettings) if f.name != "name"]
    assert other.world_model_id and all(getattr(other, k) == getattr(algorithm.config, k) for k in shared)
    given = kind(other, dataset.spec, pretrained)
    assert not bool(given.finished(given.init(0)))
    begun = run(given, dataset, 1)
    assert bool(given.finished(begun)), "there is nothing to train"
    shapes = [[x.shape for x in pytree.tree_leaves(y)] for y in (begun, given.init(0))]
    assert shapes[0] == shapes[1], "a file's names come in another order"
    path.unlink()
    assert np.array_equal(walk(TrainedPolicy(given, begun, 0)), expected)


def test_what_a_user_gets_wrong(tmp_path: Path) -> None:
    algorithm, state, dataset = trained()
    kind, path = type(algorithm), tmp_path / "model.safetensors"
    tree = {**algorithm.tree(state), **data_range(dataset), "scale": torch.ones(OBS + 1)}
    save(
        path, algorithm.model, tree, {"data": {"name": "x", "fingerprint": "y"}, "held_out": [1.0, 2.0, 3.0], "seed": 0}
    )

    def asked(**settings: Any) -> Any:
        return ready(TrainConfig(algo=kind.Config(**settings)), dataset)[0].algo

    with pytest.raises(UserError, match=r"algo.members=4, but .* is trained and has 3"):
        asked(world_model=str(path), members=4)
    with pytest.raises(UserError, match="needs a finished model"):
        asked(calibrated=True)
    assert asked(world_model=str(path), calibrated=True).calibrated and asked(world_model=str(path)).hidden == [8]
    with pytest.raises(UserError, match="learnt variances"):
        kind.fit_config(kind.Config(loss="squared", penalty=1.0), dataset)
    with pytest.raises(UserError, match="learnt variances"):
        kind.fit_config(kind.Config(loss="squared"), dataset, {"penalty": [0.0, 1.0]})
    with pytest.raises(UserError, match="plan_elites=30 is more"):
        make(plan_population=20, plan_elites=30)


def test_other_kinds_of_models_are_refused() -> None:
    """SINDy's model has an ensemble's methods, but no networks to plan in."""
    from offrl.algorithms.pets import settings as pets
    from offrl.world_models.sindy.model import SindyModel, SindySettings

    spec = DataSpec((2,), 1, action_low=(-1.0,), action_high=(1.0,))
    model = SindyModel(SindySettings(termination="never"), spec)
    with pytest.raises(UserError, match="of kind sindy"):
        pets.with_model(pets.PETSConfig(world_model="x"), Trained(model, {}, {"model": "sindy"}, Path("x")))
