"""ReBRAC: each term in float64 NumPy, LayerNorm and its switch, and whole updates against an implementation of its
own.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from offrl import registry, rng
from offrl.algorithm import TrainState, stack
from offrl.data.arrays import from_arrays
from offrl.settings.presets import finetune_settings
from offrl.training.step import Step
from tests.support.golden import KEY, OBS, A, B, critics, double, q_values, redraw, single, spec, transitions
from tests.support.reference import layer_norm as norm
from tests.support.reference import mlp as ref

LR, DISCOUNT, POLYAK, ACTOR_BC, CRITIC_BC = 0.01, 0.9, 0.1, 0.3, 0.7
G = np.random.default_rng(4)
BATCH = transitions(G, next_scale=3.0) | single({"next_actions": G.uniform(-1, 1, (B, A))})
X = double(BATCH)
NOISE = 4 * G.normal(size=(B, A))  # times 0.2, most of it is beyond the clip at 0.5


@pytest.fixture(autouse=True)
def known_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """The generator has tests of its own; here the noise is known, and large."""
    monkeypatch.setattr(rng, "normal", lambda key, shape: torch.tensor(NOISE, dtype=torch.float32).reshape(shape))


def make(**settings: Any) -> tuple[Any, TrainState]:
    kind = registry.get("algo", "rebrac")
    defaults = {
        "hidden": [6, 5],
        "learning_rate": LR,
        "discount": DISCOUNT,
        "polyak": POLYAK,
        "actor_bc": ACTOR_BC,
        "critic_bc": CRITIC_BC,
    }
    algorithm = kind(kind.Config(**{**defaults, **settings}), spec())
    state = algorithm.init(3)
    g = torch.Generator().manual_seed(2)  # larger than initial weights: values of both signs, actions beyond the bounds
    for name in ("critic", "actor"):
        for params in (state.params[name], state.target[name]):
            redraw(params, g)
    return algorithm, state


def differ(q: np.ndarray) -> bool:
    """Whether each of two critics is the smaller one somewhere."""
    return bool((q[0] < q[1]).any() and (q[0] > q[1]).any())


def td_target(
    target_actor: ref.Net, targets: list[Any], critic_bc: float = CRITIC_BC, kind: Any = norm, alternate: bool = False
) -> np.ndarray:
    mode = np.tanh(ref.forward(target_actor, X["next_observations"])[0])
    noise = np.clip(0.2 * NOISE, -0.5, 0.5)
    action = np.clip(mode + noise, -1, 1)
    assert (np.abs(0.2 * NOISE) > 0.5).any() and (np.abs(mode + noise) > 1).any()
    next_q = q_values(targets, X["next_observations"], action, kind)
    assert not alternate or differ(next_q)
    penalty = ((action - X["next_actions"]) ** 2).sum(1)
    return X["rewards"] + DISCOUNT * X["masks"] * (next_q.min(0) - critic_bc * penalty)


@pytest.mark.parametrize("critic_bc", [CRITIC_BC, 0.0])
@pytest.mark.parametrize("layer_norm", [True, False])
def test_critic_loss(layer_norm: bool, critic_bc: float) -> None:
    """The penalty of the noisy target action is a sum over dimensions, discounted, and gone at terminals. LayerNorm
    comes after ReLU.
    """
    algorithm, state = make(layer_norm=layer_norm, critic_bc=critic_bc)
    kind: Any = norm if layer_norm else ref
    y = td_target(ref.net(state.target["actor"], "net."), critics(state.target["critic"], kind), critic_bc, kind, True)
    q = q_values(critics(state.params["critic"], kind), X["observations"], X["actions"], kind)
    loss, metrics = algorithm.critic_loss(state.params["critic"], state, BATCH, KEY)
    assert float(loss) == pytest.approx(((q - y) ** 2).mean(1).sum(), rel=1e-5)  # mean over the batch, sum over critics
    assert float(metrics["critic/td_error"]) == pytest.approx(np.abs(q - y).mean(), rel=1e-4)


@pytest.mark.parametrize(("actor_bc", "actor_q"), [(ACTOR_BC, 1.0), (0.0, 1.0), (2.0, 0.5), (1.0, 0.0)])
def test_actor_loss(actor_bc: float, actor_q: float) -> None:
    algorithm, state = make(actor_bc=actor_bc, actor_q=actor_q)
    action = np.tanh(ref.forward(ref.net(state.params["actor"], "net."), X["observations"])[0])
    both = q_values(critics(state.params["critic"], norm), X["observations"], action, norm)
    q = both.min(0)  # of both online critics
    assert (q < 0).any() and (q > 0).any() and differ(both)
    distance = ((action - X["actions"]) ** 2).sum(1)
    loss, metrics = algorithm.actor_loss(state.params["actor"], state, BATCH)
    assert float(loss) == pytest.approx((actor_bc * distance - actor_q * q / np.abs(q).mean()).mean(), rel=1e-4)
    assert float(metrics["actor/bc"]) == pytest.approx(distance.mean(), rel=1e-4)
    assert float(metrics["actor/q"]) == pytest.approx(q.mean(), rel=1e-4)


class Reference:
    """ReBRAC in float64.

    at_once: the critics' loss is their mean, the actor's is of the critics of before and its Adam goes on with a
    gradient of 0 in between, and the targets follow what was before.
    """

    def __init__(self, state: TrainState, at_once: bool) -> None:
        self.at_once = at_once
        self.actor, self.target_actor = ref.net(state.params["actor"], "net."), ref.net(state.target["actor"], "net.")
        self.critics, self.targets = critics(state.params["critic"], norm), critics(state.target["critic"], norm)
        self.adam = {k: ref.Adam(lambda t: LR) for k in ("actor", "critic0", "critic1")}

    def update(self, t: int) -> None:
        y = td_target(self.target_actor, self.targets)
        both = np.concatenate([X["observations"], X["actions"]], 1)
        old_critics, old_actor = list(self.critics), self.actor
        for e, critic in enumerate(self.critics):
            out, seen = norm.forward(critic, both)
            grads, _ = norm.backward(critic, seen, (1 if self.at_once else 2) * (out - y[:, None]) / B)
            self.critics[e] = norm.unflat(self.adam[f"critic{e}"].step(norm.flat(critic), grads))
        judges = old_critics if self.at_once else self.critics
        if t % 2 == 0:
            if self.at_once:
                self.actor = ref.unflat(
                    self.adam["actor"].step(ref.flat(self.actor), [0.0 * x for x in ref.flat(self.actor)])
                )
            return
        z, inputs = ref.forward(self.actor, X["observations"])
        action = np.tanh(z)
        runs = [norm.forward(c, np.concatenate([X["observations"], action], 1)) for c in judges]
        q = np.stack([out[:, 0] for out, _ in runs])
        scale = 1.0 / np.abs(q.min(0)).mean()
        grad = ACTOR_BC * 2 * (action - X["actions"]) / B
        for e, (_, seen) in enumerate(runs):  # through the critic that is the smaller one in each row
            mine = (q.argmin(0) == e).astype(float)[:, None]
            grad = grad + norm.backward(judges[e], seen, -scale / B * mine)[1][:, OBS:]
        grads, _ = ref.backward(self.actor, inputs, grad * (1 - action**2))
        self.actor = ref.unflat(self.adam["actor"].step(ref.flat(self.actor), grads))
        self.target_actor = ref.polyak(self.target_actor, old_actor if self.at_once else self.actor, POLYAK)
        self.targets = [norm.polyak(x, o, POLYAK) for x, o in zip(self.targets, judges, strict=True)]


@pytest.mark.parametrize("order", ["sequential", "simultaneous"])
def test_updates(order: str) -> None:
    algorithm, state = make(update_order=order)
    mine = Reference(state, order == "simultaneous")
    for t in range(6):
        before = state
        state, metrics = algorithm.update(state, BATCH, KEY, phase=t % 2)
        assert ("actor/loss" in metrics) == (t % 2 == 1)
        if t % 2 == 0:
            assert state.target["critic"] is before.target["critic"]
            assert (state.params["actor"] is before.params["actor"]) == (order == "sequential")
        mine.update(t)
        ref.close(mine.actor, state.params["actor"], "net.")
        ref.close(mine.target_actor, state.target["actor"], "net.")
        for e in range(2):
            norm.close(mine.critics[e], state.params["critic"], member=e)
            norm.close(mine.targets[e], state.target["critic"], member=e)


def test_layer_norm_bounds_what_critics_say_far_from_the_data() -> None:
    """Why it is there: without it values grow with the input, with it they stay below sum |w| sqrt(width)."""
    growth = {}
    for layer_norm in (True, False):
        algorithm, state = make(layer_norm=layer_norm)
        assert any("scales" in k for k in state.params["critic"]) == layer_norm
        critic, actions = state.params["critic"], BATCH["actions"]
        near, far = (
            algorithm.critic.q(critic, s * BATCH["observations"], actions).abs().max() for s in (10.0, 10_000.0)
        )
        growth[layer_norm] = float(far / near)
    assert growth[True] < 1.5 and growth[False] > 500.0


def test_the_actor_has_layer_norm_only_when_asked() -> None:
    algorithm, state = make()
    assert not any("norms" in k for k in state.params["actor"])
    algorithm, state = make(actor_layer_norm=True)
    action = np.tanh(norm.forward(norm.net(state.params["actor"], "net."), X["observations"])[0])
    ours, _ = algorithm.actor(state).act(None, BATCH["observations"], KEY, explore=False)
    np.testing.assert_allclose(ours, action, atol=1e-5)


def test_initial_weights() -> None:
    kind = registry.get("algo", "rebrac")
    algorithm = kind(kind.Config(), spec())
    state = algorithm.init(0)
    for name, prefix, edge in (("actor", "net.", 1e-3), ("critic", "", 3e-3)):
        p = state.params[name]
        assert all(bool((p[f"{prefix}layers.{i}.bias"] == 0.1).all()) for i in range(3))
        wide = p[f"{prefix}layers.1.weight"].abs().max()
        assert 0.9 * 256**-0.5 < float(wide) <= 256**-0.5
        for part in ("weight", "bias"):
            assert 0.0 < float(p[f"{prefix}head.{part}"].abs().max()) <= edge


def test_next_actions_come_from_the_data() -> None:
    """Trained on data whose actions count upwards, the penalty looks at the action of the row after."""
    n = 30
    actions = np.stack([np.linspace(-1, 1, n), np.zeros(n)], 1)
    ends = np.arange(n) % 10 == 9
    bounds: Any = {"action_low": [-1.0, -1.0], "action_high": [1.0, 1.0]}
    dataset = from_arrays(
        np.arange(n * OBS).reshape(n, OBS) / n, actions, np.zeros(n), ends, np.zeros(n, bool), **bounds
    )
    algorithm, _ = make(hidden=[4])
    sampler = algorithm.sampler()
    source = sampler.prepare(dataset)
    batch = sampler(source, KEY, 200)
    row = ((batch["actions"][:, 0] + 1) * (n - 1) / 2).round().long()
    follows = batch["masks"] > 0
    expected = torch.tensor(actions, dtype=torch.float32)[row + follows.long()]
    assert follows.any() and (~follows).any()
    torch.testing.assert_close(batch["next_actions"][follows], expected[follows])
    assert bool(batch["next_actions"].isfinite().all())
    state, step = stack([algorithm.init(0)]), Step(algorithm, source, batch_size=B, replicas=1)
    _, metrics = step.run(state, {}, 0, 4)
    assert float(metrics["critic/loss"][0]) > 0.0


def test_published_defaults_and_what_changes_online() -> None:
    kind = registry.get("algo", "rebrac")
    c = kind.Config()
    published = {
        "learning_rate": 1e-3,
        "batch_size": 1024,
        "discount": 0.99,
        "polyak": 0.005,
        "policy_noise": 0.2,
        "noise_clip": 0.5,
    }
    assert {k: getattr(c, k) for k in published} == published
    assert (
        c.hidden == [256, 256, 256]
        and c.layer_norm
        and not c.actor_layer_norm
        and c.init == "fixed_bias"
        and c.critics == 2
    )
    names = {f.name for f in dataclasses.fields(kind.Config)}
    assert finetune_settings("rebrac") == {"critic_bc": 0.0, "noise": 0.0, "anneal": {"actor_bc": [1.0, 0.5, 0.5]}}
    assert names >= {"critic_bc", "actor_bc"}
