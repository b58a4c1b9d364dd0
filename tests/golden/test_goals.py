"""GCBC, GCIVL, GCIQL, QRL, CRL, HIQL, OTA: each loss in float64 NumPy, and what each gradient may reach."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.func import grad

from offrl import registry, rng
from offrl.algorithm import TrainState
from offrl.data.dataset import DataSpec
from offrl.data.store import StreamSpec
from offrl.errors import UserError
from offrl.nn.representations.quasimetric import Quasimetric, interval_lengths
from offrl.training.setup import check_kind
from tests.support.reference import goals as ref

B, OBS, A, DISCOUNT = 7, 3, 2, 0.9
G = np.random.default_rng(2)
BATCH: dict[str, Tensor] = {
    k: torch.tensor(G.normal(size=(B, OBS)), dtype=torch.float32)
    for k in (
        "observations",
        "next_observations",
        "value_goals",
        "actor_goals",
        "low_goals",
        "high_goals",
        "high_targets",
        "high_target_states",
        "option_goals",
        "option_states",
    )
}
BATCH["actions"] = torch.tensor(G.uniform(-1, 1, (B, A)), dtype=torch.float32)
BATCH["successes"] = torch.tensor([0.0, 1, 0, 0, 1, 0, 0])
BATCH["option_successes"] = torch.tensor([1.0, 0, 0, 0, 1, 0, 0])
X = {k: v.numpy().astype(np.float64) for k, v in BATCH.items()}


def make(name: str, **settings: Any) -> tuple[Any, TrainState]:
    kind = registry.get("algo", name)
    known = {"hidden": [6, 5], "discount": DISCOUNT, **settings}
    if name in ("qrl", "crl"):
        known |= {"latent": 16}
    if name in ("hiql", "ota"):
        known |= {"representation": 4}
    algorithm = kind(kind.Config(**known), DataSpec((OBS,), A, action_low=(-1.0,) * A, action_high=(1.0,) * A))
    state = algorithm.init(3)
    g = torch.Generator().manual_seed(5)
    for tree in (state.params, state.target):
        for name in tree:
            tree[name] = {k: 0.8 * torch.randn(v.shape, generator=g) for k, v in tree[name].items()}
    return algorithm, state


def join(*names: str) -> np.ndarray:
    return np.concatenate([X[n] for n in names], 1)


def weight(advantage: np.ndarray, temperature: float) -> np.ndarray:
    return np.minimum(np.exp(temperature * advantage), 100.0)


def test_gcbc() -> None:
    algorithm, state = make("gcbc")
    mean = ref.mlp(state.params["actor"], join("observations", "actor_goals"), "net.")
    loss, _ = algorithm.actor_loss(state.params["actor"], state, BATCH)
    assert float(loss) == pytest.approx(-ref.log_density(mean, X["actions"]).mean(), rel=1e-5)
    actor = algorithm.actor(state)
    carry = actor.set_goal(actor.start(B), BATCH["actor_goals"])
    found, _ = actor.act(carry, BATCH["observations"], rng.make_key(0), explore=False)
    np.testing.assert_allclose(found, np.clip(mean, -1, 1), atol=1e-5)


@pytest.mark.parametrize("expectile", [0.5, 0.9])
def test_gcivl(expectile: float) -> None:
    algorithm, state = make("gcivl", expectile=expectile, temperature=2.0)
    online, target = state.params["value"], state.target["value"]
    v = lambda p, s, g: ref.twins(p, join(s, g))[..., 0]  # noqa: E731
    now, before = (v(p, "observations", "value_goals") for p in (online, target))
    after = v(target, "next_observations", "value_goals")
    loss, _ = algorithm.value_loss(online, state, BATCH)
    assert float(loss) == pytest.approx(ref.ivl(now, before, after, X["successes"], DISCOUNT, expectile), rel=1e-5)

    advantage = v(online, "next_observations", "actor_goals").mean(0) - v(online, "observations", "actor_goals").mean(0)
    mean = ref.mlp(state.params["actor"], join("observations", "actor_goals"), "net.")
    expected = -(weight(advantage, 2.0) * ref.log_density(mean, X["actions"])).mean()
    assert float(algorithm.actor_loss(state.params["actor"], state, BATCH)[0]) == pytest.approx(expected, rel=1e-5)


def test_gciql() -> None:
    algorithm, state = make("gciql", expectile=0.8, bc_weight=0.3)
    state.params["value"]["head.bias"] -= 1.3  # advantages of both signs
    critic = lambda p, g, a: ref.twins(p, np.concatenate([X["observations"], X[g], a], 1))[..., 0]  # noqa: E731
    value = lambda s, g: ref.mlp(state.params["value"], join(s, g))[:, 0]  # noqa: E731
    u = critic(state.target["critic"], "value_goals", X["actions"]).min(0) - value("observations", "value_goals")
    assert (u > 0).any() and (u < 0).any()
    expected = (np.where(u < 0, 0.2, 0.8) * u**2).mean()
    assert float(algorithm.value_loss(state.params["value"], state, BATCH)[0]) == pytest.approx(expected, rel=1e-5)

    y = X["successes"] - 1.0 + DISCOUNT * (1.0 - X["successes"]) * value("next_observations", "value_goals")
    q = critic(state.params["critic"], "value_goals", X["actions"])
    assert float(algorithm.critic_loss(state.params["critic"], state, BATCH)[0]) == pytest.approx(
        ((q - y) ** 2).mean(1).sum(), rel=1e-5
    )

    mean = ref.mlp(state.params["actor"], join("observations", "actor_goals"), "net.")
    q = critic(state.params["critic"], "actor_goals", np.clip(mean, -1, 1)).min(0)
    density = ref.log_density(mean, X["actions"]).mean()
    expected = -q.mean() / (np.abs(q).mean() + 1e-6) - 0.3 * density
    assert float(algorithm.actor_loss(state.params["actor"], state, BATCH)[0]) == pytest.approx(expected, rel=1e-5)

    weighted, _ = make("gciql", learner="awr", temperature=2.0)
    q = critic(state.params["critic"], "actor_goals", X["actions"]).min(0)
    expected = -(weight(q - value("observations", "actor_goals"), 2.0) * ref.log_density(mean, X["actions"])).mean()
    assert float(weighted.actor_loss(state.params["actor"], state, BATCH)[0]) == pytest.approx(expected, rel=1e-5)


def test_the_scale_of_q_is_no_part_of_the_gradient() -> None:
    """d/da of -mean(q) / |mean q|: constant scale, so the gradient is that of q times a number."""
    algorithm, state = make("gciql", bc_weight=0.0)
    whole = grad(lambda p: algorithm.actor_loss(p, state, BATCH)[0])(state.params["actor"])
    goals = BATCH["actor_goals"]

    def q(p: Any) -> Tensor:
        return algorithm.q(state, BATCH["observations"], goals, algorithm.policy.mode(algorithm.imitation(p, BATCH)[0]))

    plain = grad(lambda p: -q(p).mean())(state.params["actor"])
    scale = q(state.params["actor"]).abs().mean() + 1e-6
    for k in whole:
        torch.testing.assert_close(whole[k], plain[k] / scale, rtol=1e-4, atol=1e-6)


def test_interval_lengths_and_quasimetrics() -> None:
    x, y = torch.randn(40, 3, 8, dtype=torch.float64), torch.randn(40, 3, 8, dtype=torch.float64)
    pairs = zip(x.reshape(120, 8).numpy(), y.reshape(120, 8).numpy(), strict=True)
    expected = np.array([ref.union_length(a, np.maximum(a, b)) for a, b in pairs]).reshape(40, 3)
    np.testing.assert_allclose(interval_lengths(x, y), expected, atol=1e-12)
    # by hand: [0, 2] and [1, 3] overlap, [5, 5] is empty
    assert float(interval_lengths(torch.tensor([0.0, 1.0, 5.0]), torch.tensor([2.0, 3.0, 4.0]))) == 3.0
    x.requires_grad_(True)
    y.requires_grad_(True)
    torch.autograd.gradcheck(interval_lengths, (x[:2], y[:2]))
    for kind in ("iqe", "mrn"):
        d = Quasimetric(kind, 24).double()
        a, b, c = (torch.randn(500, 24, dtype=torch.float64) for _ in range(3))
        with torch.no_grad():
            assert float((d(a, c) - d(a, b) - d(b, c)).max()) <= 1e-9, "the triangle inequality"
            assert float(d(a, a).abs().max()) <= 1e-5 and float(d(a, b).min()) > 0
            assert not torch.allclose(d(a, b), d(b, a)), "not symmetric"


def test_qrl() -> None:
    algorithm, state = make("qrl", bc_weight=0.2, slack=0.05)
    p = state.params["value"]
    alpha, log_multiplier = float(p["distance.alpha"]), float(p["log_multiplier"])
    encode = lambda s: ref.mlp(p, X[s], "encoder.")  # noqa: E731
    between = lambda a, b: np.array([ref.iqe(i, j, 8, alpha) for i, j in zip(a, b, strict=True)])  # noqa: E731
    here, there, goal = encode("observations"), encode("next_observations"), encode("value_goals")
    far, step = between(here, goal), between(here, there)
    apart = (100 * np.log1p(np.exp(5 - far / 100))).mean()
    excess, lam = (np.maximum(step - 1, 0) ** 2).mean(), np.exp(log_multiplier)
    moved = here + ref.mlp(p, np.concatenate([here, X["actions"]], 1), "moves.")
    dynamics = 0.5 * (between(moved, there) + between(there, moved)).mean()
    loss, _ = algorithm.value_loss(p, state, BATCH)
    assert float(loss) == pytest.approx(apart + lam * excess + lam * (0.05 - excess) + dynamics, rel=1e-5)
    slope = grad(lambda q: algorithm.value_loss(q, state, BATCH)[0])(p)
    assert float(slope["log_multiplier"]) == pytest.approx(lam * (0.05 - excess), rel=1e-4), (
        "rises while the step is too long"
    )

    mean = ref.mlp(state.params["actor"], join("observations", "actor_goals"), "net.")
    moved = here + ref.mlp(p, np.concatenate([here, np.clip(mean, -1, 1)], 1), "moves.")
    q = -between(moved, encode("actor_goals"))
    expected = -q.mean() / (np.abs(q).mean() + 1e-6) - 0.2 * ref.log_density(mean, X["actions"]).mean()
    assert float(algorithm.actor_loss(state.params["actor"], state, BATCH)[0]) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("contrast", ["binary", "infonce"])
@pytest.mark.parametrize("energy", ["dot", "l2"])
def test_crl(contrast: str, energy: str) -> None:
    algorithm, state = make("crl", contrast=contrast, energy=energy)
    p = state.params["critic"]
    phi, psi = ref.twins(p, join("observations", "actions"), "near."), ref.twins(p, X["value_goals"], "far.")
    logits = np.zeros((2, B, B))
    for e in range(2):
        for i in range(B):
            for j in range(B):
                gap = np.sqrt(((phi[e, i] - psi[e, j]) ** 2).sum())
                logits[e, i, j] = phi[e, i] @ psi[e, j] / 4.0 if energy == "dot" else -gap
    own = logits[:, np.arange(B), np.arange(B)]
    if contrast == "binary":
        losses = np.log1p(np.exp(logits))
        losses[:, np.arange(B), np.arange(B)] -= own
        expected = losses.mean()
    else:
        partition = np.log(np.exp(logits).sum(-1))
        expected = (partition - own).mean() + 0.1 * (partition**2).mean()
    found, _ = algorithm.contrastive_loss(p, state, "critic", BATCH, BATCH["value_goals"])
    assert float(found) == pytest.approx(expected, rel=1e-4)
    q = algorithm.q(state, BATCH["observations"], BATCH["value_goals"], BATCH["actions"])
    np.testing.assert_allclose(q, own.min(0), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("energy", "floor"), [("dot", float(np.log(1e-6))), ("dot", None), ("l2", -1.0)])
def test_what_the_actor_of_crl_learns_from_may_have_a_floor(energy: str, floor: float | None) -> None:
    """OGBench's code had log(max(exp(energy), 1e-6)) until June 2025, and has none since; it is one of products."""
    algorithm, state = make("crl", energy=energy, energy_floor=floor, learner="awr", temperature=0.1)
    for name, size in (("critic", 2), ("value", 1)):
        assert [v.shape[0] for k, v in state.params[name].items() if k.endswith("head.weight")] == [size] * 2
        state.params[name] = {k: 4.0 * v if k.endswith("head.weight") else v for k, v in state.params[name].items()}
    energies = {}
    for name, x in (("critic", join("observations", "actions")), ("value", X["observations"])):
        twice = {k: v.expand(2, *v.shape[1:]) for k, v in state.params[name].items()}  # the reference has two of each
        phi, psi = ref.twins(twice, x, "near."), ref.twins(twice, X["actor_goals"], "far.")
        energies[name] = (phi * psi).sum(-1) / 4.0 if energy == "dot" else -np.sqrt(((phi - psi) ** 2).sum(-1))
    least = energies["critic"].min(0)
    assert (
        all((v < np.log(1e-6)).any() and (v > np.log(1e-6)).any() for v in (least, energies["value"])) or energy == "l2"
    )
    floor = -np.inf if floor is None or energy == "l2" else floor
    expected = np.maximum(least, floor) - np.maximum(energies["value"][0], floor)
    np.testing.assert_allclose(algorithm.advantage(state, BATCH), expected, rtol=1e-4, atol=1e-4)

    slope = grad(lambda a: algorithm.q(state, BATCH["observations"], BATCH["actor_goals"], a).sum())(BATCH["actions"])
    np.testing.assert_array_equal(slope.norm(dim=-1) > 0, least > floor)  # no gradient below
    below = algorithm.energy(state, BATCH["observations"], BATCH["actor_goals"], BATCH["actions"])
    np.testing.assert_allclose(below, least, rtol=1e-4, atol=1e-4)  # pictures of distances go on below


@pytest.mark.parametrize("name", ["fb", "breeze"])
def test_images_are_refused(name: str) -> None:
    kind = registry.get("algo", name)
    images = DataSpec((0,), A, name="visual-antmaze-medium-navigate-v0", streams=(StreamSpec("pixels", (64, 64, 3)),))
    with pytest.raises(UserError, match=rf"{name} reads the numbers of observations, and {images.name} has pixels"):
        check_kind(kind, name, SimpleNamespace(spec=images))  # type: ignore[arg-type]
    numbers = DataSpec((64, 64, 3), A, name="floats")
    with pytest.raises(UserError, match=rf"{name} learns from vectors.* numbers of shape \[64, 64, 3\]"):
        check_kind(kind, name, SimpleNamespace(spec=numbers))  # type: ignore[arg-type]


def represent(p: Any, observations: str, goals: str) -> np.ndarray:
    z = ref.mlp(p, join(observations, goals), "represent.")
    return np.asarray(z / np.sqrt((z**2).sum(1, keepdims=True)) * 2.0)  # sqrt(4)


def level_value(p: Any, observations: str, goals: str, head: str = "low") -> np.ndarray:
    x = np.concatenate([X[observations], represent(p, observations, goals)], 1)
    return ref.twins(p, x, f"heads.{head}.")[..., 0]


@pytest.mark.parametrize("name", ["hiql", "ota"])
def test_two_levels(name: str) -> None:
    algorithm, state = make(name, low_temperature=2.0, high_temperature=1.5, expectile=0.7)
    p = state.params["value"]
    # one phi for both
    target = {k: p[k] if k.startswith("represent.") else v for k, v in state.target["value"].items()}
    o, n, g = "observations", "next_observations", "value_goals"
    expected = ref.ivl(
        level_value(p, o, g), level_value(target, o, g), level_value(target, n, g), X["successes"], DISCOUNT, 0.7
    )
    head = "low"
    if name == "ota":
        head, after, g = "high", "option_states", "option_goals"
        now, before, later = (
            level_value(p, o, g, head),
            level_value(target, o, g, head),
            level_value(target, after, g, head),
        )
        expected += ref.ivl(now, before, later, X["option_successes"], DISCOUNT, 0.7)
    assert float(algorithm.value_loss(p, state, BATCH)[0]) == pytest.approx(expected, rel=1e-5)

    advantage = (level_value(p, n, "low_goals") - level_value(p, o, "low_goals")).mean(0)
    mean = ref.mlp(state.params["actor"], np.concatenate([X[o], represent(p, o, "low_goals")], 1), "net.")
    expected = -(weight(advantage, 2.0) * ref.log_density(mean, X["actions"])).mean()
    assert float(algorithm.low_loss(state.params["actor"], state, BATCH)[0]) == pytest.approx(expected, rel=1e-5)

    advantage = (level_value(p, "high_target_states", "high_goals", head) - level_value(p, o, "high_goals", head)).mean(
        0
    )
    mean = ref.mlp(state.params["high"], join(o, "high_goals"), "net.")
    expected = -(weight(advantage, 1.5) * ref.log_density(mean, represent(p, o, "high_targets"))).mean()
    assert float(algorithm.high_loss(state.params["high"], state, BATCH)[0]) == pytest.approx(expected, rel=1e-5)

    z = mean / np.sqrt((mean**2).sum(1, keepdims=True)) * 2.0
    action = np.clip(ref.mlp(state.params["actor"], np.concatenate([X[o], z], 1), "net."), -1, 1)
    actor = algorithm.actor(state)
    carry = actor.set_goal(actor.start(B), BATCH["high_goals"])
    np.testing.assert_allclose(actor.act(carry, BATCH[o], rng.make_key(0), explore=False)[0], action, atol=1e-5)


@pytest.mark.parametrize("name", ["hiql", "ota"])
def test_targets_see_the_representation_of_before_the_update(name: str) -> None:
    """Shifting phi moves the targets, its own Polyak copy does not, and what is being trained is no part of them."""
    algorithm, state = make(name, expectile=0.7)
    trained, heads = state.params["value"], state.target["value"]
    shifted = {k: v + 0.5 if k.startswith("represent.") else v for k, v in trained.items()}
    mixed = {k: shifted[k] if k.startswith("represent.") else v for k, v in heads.items()}
    pairs = [("low", "next_observations", "value_goals", "successes")]
    pairs += [("high", "option_states", "option_goals", "option_successes")] if name == "ota" else []
    expected = 0.0
    for head, after, g, ends in pairs:
        asked = ((trained, "observations"), (mixed, "observations"), (mixed, after))
        now, before, later = (level_value(p, s, g, head) for p, s in asked)
        expected += ref.ivl(now, before, later, X[ends], DISCOUNT, 0.7)

    def loss(**trees: Any) -> float:
        other = state._replace(**{k: {**getattr(state, k), "value": v} for k, v in trees.items()})
        return float(algorithm.value_loss(trained, other, BATCH)[0])

    assert loss(params=shifted) == pytest.approx(expected, rel=1e-5) and abs(expected - loss()) > 0.01
    assert loss(target={k: v + 9.0 if k.startswith("represent.") else v for k, v in heads.items()}) == loss()


@pytest.mark.parametrize("learner", ["ddpg_bc", "awr"])
def test_qrl_learns_latent_dynamics_where_the_policy_climbs_them(learner: str) -> None:
    algorithm, state = make("qrl", learner=learner)
    p = state.params["value"]
    _, metrics = algorithm.value_loss(p, state, BATCH)
    assert any(k.startswith("moves.") for k in p) == ("value/dynamics" in metrics) == (learner == "ddpg_bc")
    encode = lambda s: ref.mlp(p, X[s], "encoder.")  # noqa: E731
    between = lambda a, b: np.array([ref.iqe(i, j, 8, float(p["distance.alpha"])) for i, j in zip(a, b, strict=True)])  # noqa: E731
    if learner == "awr":
        here, there = encode("observations"), encode("next_observations")
        far, step = between(here, encode("value_goals")), between(here, there)
        lam = np.exp(float(p["log_multiplier"]))
        # the multiplier's two terms in the excess cancel
        expected = (100 * np.log1p(np.exp(5 - far / 100))).mean() + lam * 0.05
        assert (step > 1).any() and float(algorithm.value_loss(p, state, BATCH)[0]) == pytest.approx(expected, rel=1e-5)
        goal = encode("actor_goals")
        advantage = algorithm.advantage(state, BATCH)
        np.testing.assert_allclose(advantage, between(here, goal) - between(there, goal), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["gcivl", "gciql", "qrl", "crl", "hiql"])
def test_every_loss_looks_at_parameters_of_before_the_update(name: str) -> None:
    """OGBench takes one gradient of the sum of all losses: each module's step must be the one that its loss alone asks
    for at first.
    """
    algorithm, state = make(name)
    after, _ = algorithm.update(state, BATCH, rng.make_key(0), phase=0)
    losses = {
        "gcivl": {"actor": "actor_loss", "value": "value_loss"},
        "gciql": {"actor": "actor_loss", "critic": "critic_loss", "value": "value_loss"},
        "qrl": {"actor": "actor_loss", "value": "value_loss"},
        "crl": {"actor": "actor_loss"},
        "hiql": {"actor": "low_loss", "high": "high_loss", "value": "value_loss"},
    }[name]
    for module, loss in losses.items():
        alone, _ = algorithm.descend(state, module, getattr(algorithm, loss), BATCH)
        for k in alone.params[module]:
            assert torch.equal(alone.params[module][k], after.params[module][k]), (module, k)


@pytest.mark.parametrize("name", ["gcivl", "gciql", "hiql", "ota"])
@pytest.mark.parametrize("step", ["before", "after"])
def test_targets_move_towards_the_parameters_of_before_or_after_the_update(name: str, step: str) -> None:
    """OGBench's code averages the parameters that the update began with; that is the default."""
    algorithm, state = make(
        name, polyak=0.3, learning_rate=0.1, **({} if step == "before" else {"target_update": step})
    )
    after, _ = algorithm.update(state, BATCH, rng.make_key(0), phase=0)
    (module,) = state.target
    online, other = (state, after) if step == "before" else (after, state)
    for k, target in after.target[module].items():
        torch.testing.assert_close(target, 0.7 * state.target[module][k] + 0.3 * online.params[module][k])
    assert any(not torch.allclose(v, other.params[module][k]) for k, v in online.params[module].items())
