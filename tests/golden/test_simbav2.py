"""SimbaV2: its network and one whole update in plain torch float64, and numbers worked out by hand."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from offrl import registry, rng
from offrl.algorithm import TrainState, with_settings
from offrl.algorithms.simbav2 import divisor
from offrl.data.arrays import from_arrays
from offrl.errors import UserError
from offrl.nn.sphere import SphereBlock, SphereFeatures, projected
from offrl.settings.compose import compose
from offrl.settings.field import check
from offrl.settings.presets import finetune_settings
from tests.support.golden import KEY, OBS, A, B, spec, transitions

LR, DISCOUNT, POLYAK, WEIGHT, BC, DIVISOR = 0.01, 0.9, 0.1, 0.4, 0.3, 2.0
ATOMS = 7
G = np.random.default_rng(4)
BATCH = transitions(G)
X = {name: x.double() for name, x in BATCH.items()}
NOISE = torch.tensor(G.normal(size=(B, A)))
Params = dict[str, Tensor]


@pytest.fixture(autouse=True)
def known_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """The generator has tests of its own; here the noise is known, whatever the key."""
    monkeypatch.setattr(rng, "normal", lambda key, shape: NOISE.float())


def make(**settings: Any) -> tuple[Any, TrainState]:
    kind = registry.get("algo", "simbav2")
    given: dict[str, Any] = {"hidden": [6], "critic_hidden": [4, 4], "learning_rate": LR, "discount": DISCOUNT}
    given |= {"polyak": POLYAK, "entropy_weight": WEIGHT, "bc_weight": BC, "reward_divisor": DIVISOR}
    algorithm = kind(kind.Config(**{**given, "value_bins": ATOMS, "value_range": [-1.0, 2.0], **settings}), spec())
    state = algorithm.init(3)
    g = torch.Generator().manual_seed(22)
    for params in (state.params["critic"], state.target["critic"], state.params["actor"]):
        for (
            name,
            x,
        ) in (
            params.items()
        ):  # learnt vectors and biases away from where they begin; each critic is the smallest somewhere
            moved = x + 0.6 * torch.randn(x.shape, generator=g)
            params[name] = projected({name: moved})[name]
    return algorithm, state


# ---- the network, from its formulas


def n(x: Tensor) -> Tensor:
    return x / x.square().sum(-1, keepdim=True).sqrt()


def features(p: Params, x: Tensor, width: int, blocks: int) -> Tensor:
    h = n(torch.cat([x, torch.full((len(x), 1), 3.0, dtype=x.dtype)], -1))
    h = n(p["features.first.weight"].T.matmul(h.T).T * p["features.scale.vector"])
    for i in range(blocks):
        at = f"features.blocks.{i}."
        hidden = (h @ p[at + "first.weight"] * p[at + "scale.vector"]).clamp(min=0.0) + 1e-8
        alpha = p[at + "share.vector"] / (blocks + 1) * math.sqrt(width)
        h = n(h + alpha * (n(hidden @ p[at + "second.weight"]) - h))
    return h


def head(p: Params, at: str, h: Tensor) -> Tensor:
    return (h @ p[at + "first.weight"] * p[at + "scale.vector"]) @ p[at + "second.weight"] + p[at + "bias"]


def member(p: Params, e: int) -> Params:
    return {k: v[e].squeeze(0) if v.shape[1] == 1 else v[e] for k, v in p.items()}


def distributions(p: Params, observations: Tensor, actions: Tensor) -> Tensor:
    """Logits [2, B, K]."""
    x = torch.cat([observations, actions], -1)
    return torch.stack([head(q, "head.", features(q, x, 4, 2)) for q in (member(p, 0), member(p, 1))])


def values(logits: Tensor) -> Tensor:
    return (logits.softmax(-1) * torch.linspace(-1.0, 2.0, ATOMS, dtype=torch.float64)).sum(-1)


def policy(p: Params, observations: Tensor) -> tuple[Tensor, Tensor]:
    """The sample that NOISE makes, and its log density with log(1 - a^2) written out."""
    h = features(p, observations, 6, 1)
    mean, log_std = head(p, "mean.", h), -10.0 + 6.0 * (1.0 + head(p, "log_std.", h).tanh())
    u = mean + log_std.exp() * NOISE
    log_p = -0.5 * NOISE**2 - log_std - 0.5 * math.log(2 * math.pi) - (1 - u.tanh() ** 2).log()
    return u.tanh(), log_p.sum(-1)


def double(p: Params) -> Params:
    return {k: v.double().requires_grad_() for k, v in p.items()}


def stepped(p: Params, loss: Tensor) -> Params:
    """The first step of Adam, LR g / (|g| + 1e-8), and columns of length 1."""
    new = {}
    for (name, x), g in zip(p.items(), torch.autograd.grad(loss, list(p.values())), strict=True):
        x = (x - LR * g / (g.abs() + 1e-8)).detach()
        new[name] = x / x.square().sum(-2, keepdim=True).sqrt() if name.endswith("weight") else x
    return new


def close(result: Params, expected: Params) -> None:
    assert result.keys() == expected.keys()
    for name, x in expected.items():
        np.testing.assert_allclose(result[name], x, atol=2e-5, err_msg=name)


def projection(p: Tensor, low: float, high: float, atoms: Tensor) -> Tensor:
    """The mass p [K] at `atoms` [K], atom by atom, on K bins over [low, high]."""
    bins, width = len(p), (high - low) / (len(p) - 1)
    result = torch.zeros(bins, dtype=torch.float64)
    for mass, atom in zip(p, atoms.clamp(low, high), strict=True):
        at = (float(atom) - low) / width
        below = min(int(at), bins - 2)
        result[below] += mass * (1.0 - (at - below))
        result[below + 1] += mass * (at - below)
    return result


def test_an_update_in_the_authors_order() -> None:
    """The actor by the old weight of the entropy; the weight by the old actor's entropy; the critics by the new actor
    and the new weight; the targets by the projected critics, not projected themselves.
    """
    algorithm, state = make()
    new, metrics = algorithm.update(state, BATCH, KEY, phase=0)

    actor, critic = double(state.params["actor"]), double(state.params["critic"])
    action, log_p = policy(actor, X["observations"])
    q = values(distributions(critic, X["observations"], action))
    assert len(set(q.argmin(0).tolist())) == 2
    q = q.amin(0)
    imitation = ((action - X["actions"]) ** 2).mean()
    loss = (WEIGHT * log_p - q).mean() + BC * q.detach().abs().mean() * imitation
    assert float(metrics["actor/loss"]) == pytest.approx(float(loss.detach()), rel=1e-4)
    assert float(metrics["actor/bc"]) == pytest.approx(float(imitation.detach()), rel=1e-4)
    new_actor = stepped(actor, loss)
    close(new.params["actor"], new_actor)

    log = torch.tensor(math.log(WEIGHT), dtype=torch.float64, requires_grad=True)
    slope = torch.autograd.grad(log.exp() * (-log_p.detach().mean() + 0.5 * A), log)[0]
    weight = float((log.detach() - LR * slope.sign()).exp())
    assert float(new.params["entropy"]["log"].exp()) == pytest.approx(weight, rel=1e-5)

    with torch.no_grad():
        following, log_p = policy(new_actor, X["next_observations"])
        logits = distributions(
            {k: v.double() for k, v in state.target["critic"].items()}, X["next_observations"], following
        )
        index = values(logits).argmin(0)
        assert len(set(index.tolist())) == 2
        p = logits[index, torch.arange(B)].softmax(-1)
        z = torch.linspace(-1.0, 2.0, ATOMS, dtype=torch.float64)
        atoms = (X["rewards"] / DIVISOR).unsqueeze(-1) + DISCOUNT * X["masks"].unsqueeze(-1) * (
            z - weight * log_p.unsqueeze(-1)
        )
        target = torch.stack([projection(p[b], -1.0, 2.0, atoms[b]) for b in range(B)])
    loss = -(target * distributions(critic, X["observations"], X["actions"]).log_softmax(-1)).sum(-1).mean(-1).sum()
    assert float(metrics["critic/loss"]) == pytest.approx(float(loss.detach()), rel=1e-4)
    new_critic = stepped(critic, loss)
    close(new.params["critic"], new_critic)
    close(
        new.target["critic"],
        {k: POLYAK * v + (1 - POLYAK) * state.target["critic"][k].double() for k, v in new_critic.items()},
    )


def test_the_weight_of_imitation_is_of_the_size_of_values() -> None:
    losses = {}
    for weight in (0.0, 1.0):
        algorithm, state = make(bc_weight=weight)
        losses[weight] = float(algorithm.actor_loss(state.params["actor"], state, BATCH, KEY)[0])
    action, _ = policy(double(state.params["actor"]), X["observations"])
    q = values(distributions(double(state.params["critic"]), X["observations"], action)).amin(0)
    expected = q.abs().mean() * ((action - X["actions"]) ** 2).mean()
    assert losses[1.0] - losses[0.0] == pytest.approx(float(expected.detach()), rel=1e-4)


# ---- numbers by hand


def test_inputs_on_the_sphere() -> None:
    result = SphereFeatures.on_sphere(torch.tensor([[1.0, 2.0]], dtype=torch.float64))
    np.testing.assert_allclose(result[0], [0.2672612, 0.5345225, 0.8017837], atol=1e-7)


def test_a_block_goes_a_share_of_the_way() -> None:
    block = SphereBlock(None, 2, 2, "relu").double()  # of two blocks: a third
    h, branch = (torch.tensor([x], dtype=torch.float64) for x in ([0.6, 0.8], [1.0, 0.0]))
    np.testing.assert_allclose(block.towards(h, branch)[0].detach(), [0.8087361, 0.5881717], atol=1e-7)


def test_learnt_vectors_begin_as_published() -> None:
    p = dict(SphereFeatures(None, 3, 512, 2).named_parameters())
    assert set(p["features.scale.vector".removeprefix("features.")].tolist()) == {0.0625}
    assert set(p["blocks.0.scale.vector"].tolist()) == {0.03125} and len(p["blocks.0.scale.vector"]) == 2048
    np.testing.assert_allclose(p["blocks.1.share.vector"].detach(), 0.0441941738, atol=1e-9)
    assert SphereBlock(None, 512, 2, "relu").share.factor * 0.0441941738 == pytest.approx(1 / 3)


def test_rewards_are_scaled_by_the_spread_of_returns_or_by_the_largest_value() -> None:
    x, actions = np.zeros((3, 2)), np.linspace(-1, 1, 3).reshape(3, 1)
    bounds: dict[str, Any] = {"action_low": -1.0, "action_high": 1.0}
    ended = from_arrays(x, actions, np.array([1.0, 1.0, 2.0]), np.array([False, False, True]), **bounds)
    # G = 1, 1.99, 3.9701; the largest value is 3.9502 and a tenth of the range more
    assert divisor(ended, 0.99, 5.0) == pytest.approx(1.2347914853, rel=1e-3)
    assert divisor(ended, 0.99, 1.0) == pytest.approx(4.15, abs=0.01)
    # a fourth row begins another episode: G = 1, 1.99, 3.9701, 1
    two = from_arrays(
        np.zeros((4, 2)), np.linspace(-1, 1, 4).reshape(4, 1), np.array([1.0, 1.0, 2.0, 1.0]),
        np.array([False, False, True, True]), **bounds,
    )  # fmt: skip
    assert divisor(two, 0.99, 5.0) == pytest.approx(np.std([1, 1.99, 3.9701, 1]), rel=1e-3)


def test_the_divisor_of_data_of_a_grid_and_without_data() -> None:
    kind = registry.get("algo", "simbav2")
    rewards = np.tile([0.0, 1.0], 50)
    data = from_arrays(
        np.zeros((100, OBS)), G.uniform(-1, 1, (100, A)), rewards, np.arange(100) % 10 == 9,
        action_low=-1.0, action_high=1.0,
    )  # fmt: skip
    fitted = kind.fit_config(kind.Config(), data)
    assert fitted.reward_divisor == float(f"{divisor(data, 0.995, 5.0):.4g}") and fitted.value_range == [-5.0, 5.0]
    assert kind.fit_config(fitted, data) is fitted
    assert kind.fit_config(kind.Config(), data, {"discount": [0.5, 0.995]}).reward_divisor == fitted.reward_divisor
    with pytest.raises(UserError, match="simbav2 scales rewards to a range"):
        kind.fit_config(kind.Config(value_range=[]), data)

    algorithm = kind(kind.Config(hidden=[4], critic_hidden=[4]), spec())
    assert algorithm.divisor(algorithm.init(0), None) == pytest.approx(40.0)  # 1 / (1 - 0.995) / 5
    with pytest.raises(UserError, match=r"algo\.discount=1 leaves returns without a bound"):
        kind(kind.Config(discount=1.0), spec())


def test_values_are_told_in_the_rewards_units() -> None:
    algorithm, state = make()
    inputs = state, BATCH["observations"], BATCH["actions"]
    q = values(distributions(double(state.params["critic"]), X["observations"], X["actions"])).amin(0)
    np.testing.assert_allclose(algorithm.q_value(*inputs), DIVISOR * q.detach(), atol=1e-5)
    other = with_settings(algorithm, {"reward_divisor": 6.0})
    torch.testing.assert_close(other.q_value(*inputs), 3.0 * algorithm.q_value(*inputs))


def test_the_projection_of_critics() -> None:
    """Atoms -1, 0, 1: the smaller distribution is the target of both, and a last step's is its reward."""
    p = torch.tensor([[0.2, 0.3, 0.5], [0.4, 0.4, 0.2]], dtype=torch.float64)
    kind = registry.get("algo", "simbav2")
    config = kind.Config(hidden=[4], value_bins=3, value_range=[-1.0, 1.0], discount=0.9, reward_divisor=1.0)
    critic = kind(config, spec()).critic
    batch = {"rewards": torch.tensor([0.1, 0.1]), "masks": torch.tensor([1.0, 0.0])}
    smallest = critic.smallest(p.log().float().unsqueeze(1).expand(2, 2, 3))
    target = critic.td_target(batch, smallest)
    result = critic.head.project(target.value, target.bootstrap)
    np.testing.assert_allclose(result, [[0.32, 0.44, 0.24], [0.0, 0.9, 0.1]], atol=1e-6)


# ---- the sphere


def test_weights_stay_on_the_sphere() -> None:
    algorithm, state = make(learning_rate=0.05)
    for i in range(20):
        state, _ = algorithm.update(state, BATCH, rng.make_key(i), phase=0)
    weights = [x for m in ("actor", "critic") for k, x in state.params[m].items() if k.endswith("weight")]
    assert len(weights) == 7 + 7
    for weight in weights:
        np.testing.assert_allclose(weight.double().norm(dim=-2), 1.0, atol=1e-6)
    # the targets are means of points of the sphere, which lie inside it
    assert min(float(x.norm(dim=-2).min()) for k, x in state.target["critic"].items() if k.endswith("weight")) < 0.999


def test_the_length_of_an_observation_counts() -> None:
    """It would not without the constant among the inputs."""
    algorithm, state = make()
    (mean, _), (other, _) = (
        algorithm.apply("actor", state.params["actor"], scale * BATCH["observations"]) for scale in (1.0, 2.0)
    )
    assert float((mean - other).abs().min()) > 1e-4
    q, scaled = (
        algorithm.critic.q(state.params["critic"], scale * BATCH["observations"], BATCH["actions"])
        for scale in (1.0, 2.0)
    )
    assert float((q - scaled).abs().min()) > 1e-6


def test_many_actions_for_each_observation_are_one_batch() -> None:
    algorithm, state = make()
    many = torch.tensor(G.uniform(-1, 1, (5, B, A)), dtype=torch.float32)
    q = algorithm.critic.q(state.params["critic"], BATCH["observations"], many)
    for i in range(5):
        torch.testing.assert_close(q[:, i], algorithm.critic.q(state.params["critic"], BATCH["observations"], many[i]))


# ---- settings


def test_learning_rates_fall_in_a_straight_line() -> None:
    algorithm, _ = make(learning_rate=1e-4, decay_to=0.1, decay_steps=900)
    for name in ("actor", "critic", "entropy"):
        rates = [float(algorithm.optimizer(name).rate(torch.tensor(float(i)))) for i in (0, 300, 600, 900, 2000)]
        assert rates == pytest.approx([1e-4, 7e-5, 4e-5, 1e-5, 1e-5], rel=1e-4)
    assert make(decay_to=1.0)[0].optimizer("actor").schedule == "constant"


def test_defaults_are_the_authors() -> None:
    c = registry.get("algo", "simbav2").Config()
    assert (c.hidden, c.critic_hidden, c.critics, c.batch_size) == ([128], [512, 512], 2, 256)
    assert (c.learning_rate, c.decay_to, c.discount, c.polyak) == (1e-4, 0.5, 0.995, 0.005)
    assert (c.entropy_weight, c.value_bins, c.value_range, c.bc_weight) == (0.01, 101, [-5.0, 5.0], 0.0)
    assert make()[0].target_entropy == -0.5 * A
    run = compose({"algo": "simba_bc", "dataset": "-"})
    assert (run.algo.bc_weight, run.algo.decay_to, run.algo.decay_steps, run.steps) == (0.1, 0.1, 195_000, 390_000)
    assert run.label == "simba_bc" and run.dataset.normalize_observations
    assert (
        finetune_settings("simbav2") == {"warmup": 5000, "normalize": "running"}
        and finetune_settings("simbav2", "simba_bc") == {}
    )


def test_settings_of_other_networks_are_refused() -> None:
    kind = registry.get("algo", "simbav2")
    with pytest.raises(UserError, match=r"leave algo\.layer_norm, algo\.spectral_norm as"):
        kind(kind.Config(layer_norm=True, spectral_norm=1.0), spec())
    with pytest.raises(UserError, match="blocks of one width"):
        kind(kind.Config(critic_hidden=[8, 6]), spec())
    for wrong in ({"value_head": "scalar"}, {"init": "torch"}):
        with pytest.raises(UserError, match="is not allowed"):
            check(kind.Config(**wrong))
