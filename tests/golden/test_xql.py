"""XQL: the Gumbel and Huber losses with their gradients, what enters V's batch, and whole updates in float64 NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.func import grad

from offrl import losses, registry, rng
from offrl.algorithm import TrainState
from offrl.families.in_sample import huber_objective, value_batch
from tests.support.golden import KEY, OBS, A, B, critics, double, q_values, redraw, spec, transitions
from tests.support.reference import layer_norm as norm
from tests.support.reference import mlp as ref
from tests.support.reference.losses import gumbel

LR, DISCOUNT, POLYAK, BETA, CLIP, TEMPERATURE, DELTA = 0.01, 0.9, 0.1, 0.8, 1.5, 2.0, 0.7
G = np.random.default_rng(2)
BATCH = transitions(G)
X = double(BATCH)


def make(discrete: int = 0, **settings: Any) -> tuple[Any, TrainState]:
    kind = registry.get("algo", "xql")
    own = {
        "hidden": [6, 5],
        "learning_rate": LR,
        "discount": DISCOUNT,
        "polyak": POLYAK,
        "init": "torch",
        "actor_schedule": "constant",
    }
    steep = {"gumbel_temperature": BETA, "gumbel_clip": CLIP, "temperature": TEMPERATURE, "huber_delta": DELTA}
    algorithm = kind(kind.Config(**{**own, **steep, **settings}), spec(discrete))
    state = algorithm.init(3)
    g = torch.Generator().manual_seed(5)  # larger than initial weights: z of both signs, some of them beyond the clip
    for params in (state.params["critic"], state.params["value"], state.params["actor"], state.target["critic"]):
        redraw(params, g)
    state.params["value"]["head.bias"] = state.params["value"]["head.bias"] - 2.0
    return algorithm, state


def huber(x: np.ndarray, delta: float) -> tuple[np.ndarray, np.ndarray]:
    return np.where(abs(x) <= delta, 0.5 * x**2, delta * (abs(x) - 0.5 * delta)), np.clip(x, -delta, delta)


@pytest.mark.parametrize("shift", [0.0, 3.0, -9.0, 200.0])  # the last two: no z above -1, and every z clipped
def test_gumbel_loss_and_its_gradient(shift: float) -> None:
    u = np.array([-5.0, -1.0, 0.0, 0.3, 2.0, 3.9, 4.1, 8.0]) + shift
    expected, slope = gumbel(u, 2.0, 2.0)
    tensor = torch.tensor(u, dtype=torch.float32)
    np.testing.assert_allclose(losses.gumbel(tensor, 2.0, 2.0), expected, rtol=1e-5, atol=1e-6)
    ours = grad(lambda v: losses.gumbel(tensor - v, 2.0, 2.0).sum())(torch.zeros(8))
    np.testing.assert_allclose(ours, slope, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(
        losses.gumbel(tensor, torch.tensor(2.0), torch.tensor(2.0)), losses.gumbel(tensor, 2.0, 2.0)
    )


def test_the_rescaled_loss_is_the_plain_one_times_a_constant() -> None:
    u = torch.linspace(-3.0, 2.0, 11)
    torch.testing.assert_close(losses.gumbel(u, 1.0, 7.0), (u.exp() - u - 1.0) * np.exp(-2.0))
    algorithm, state = make(gumbel_temperature=1.0, gumbel_clip=1.5, gumbel_rescaled=False)
    torch.testing.assert_close(
        losses.gumbel(u, 1.0, 1.5, rescaled=False), u.clamp(max=1.5).exp() - u.clamp(max=1.5) - 1.0
    )
    q = torch.linspace(-1.0, 3.0, B)
    v = algorithm.value(state.params["value"], BATCH["observations"]).mean
    plain = losses.gumbel(q - v, 1.0, 1.5, rescaled=False).mean()
    torch.testing.assert_close(algorithm.value_loss(state.params["value"], state, BATCH, q)[0], plain)


def test_its_minimum_is_the_soft_maximum() -> None:
    q = torch.tensor([0.0, 1.0, 3.0])
    v = torch.linspace(0.0, 3.0, 3001)
    plain = torch.stack(
        [losses.gumbel(q - x, 0.5, 50.0).mean() * ((q - x) / 0.5).max().clamp(min=-1.0).exp() for x in v]
    )
    assert float(v[plain.argmin()]) == pytest.approx(float(0.5 * (q / 0.5).exp().mean().log()), abs=2e-3)


def test_huge_advantages_stay_finite() -> None:
    u = torch.tensor([-1e6, 0.0, 1e6])
    assert losses.gumbel(u, 1e-3, 7.0).isfinite().all()
    assert grad(lambda v: losses.gumbel(u - v, 1e-3, 7.0).sum())(torch.zeros(3)).isfinite().all()


def test_huber_loss_and_its_gradient() -> None:
    x = np.array([-30.0, -20.0, -1.0, 0.0, 0.5, 20.0, 25.0])
    expected, slope = huber(x, 20.0)
    tensor = torch.tensor(x, dtype=torch.float32)
    np.testing.assert_allclose(losses.huber(tensor, 20.0), expected, rtol=1e-6)
    np.testing.assert_allclose(grad(lambda e: losses.huber(e, 20.0).sum())(tensor), slope, rtol=1e-6)


def test_value_loss_and_what_shows_spikes() -> None:
    algorithm, state = make()
    q = q_values(critics(state.target["critic"]), X["observations"], X["actions"]).min(0)
    v = norm.forward(norm.net(state.params["value"]), X["observations"], True)[0][:, 0]
    assert ((q - v) / BETA > CLIP).any() and (q < v).any()
    rows, _ = gumbel(q - v, BETA, CLIP)
    ours = algorithm.critic.min_q(
        algorithm.critic.target_critics(state, KEY), BATCH["observations"], BATCH["actions"]
    ).mean
    loss, metrics = algorithm.value_loss(state.params["value"], state, BATCH, ours)
    assert float(loss) == pytest.approx(rows.mean(), rel=1e-4)
    assert float(metrics["value/largest"]) == pytest.approx(rows.max(), rel=1e-4)
    assert float(metrics["value/gap"]) == pytest.approx(abs(q - v).max(), rel=1e-4)


def test_value_loss_of_a_binned_head_is_that_of_its_mean() -> None:
    algorithm, state = make(value_head="hl_gauss", value_range=[-3.0, 3.0], value_bins=11)
    q = torch.linspace(-1.0, 1.0, B)
    logits = algorithm.apply("value", state.params["value"], BATCH["observations"])
    expected = losses.gumbel(q - algorithm.critic.head.mean(logits), BETA, CLIP).mean()
    torch.testing.assert_close(algorithm.value_loss(state.params["value"], state, BATCH, q)[0], expected)
    # its critics learn by cross-entropy, which knows no Huber
    assert huber_objective(algorithm.config, algorithm.critic) is None


def test_layer_norm_is_in_v_alone_before_its_activation() -> None:
    algorithm, state = make()
    x, p = BATCH["observations"].double().numpy(), {k: v.double().numpy() for k, v in state.params["value"].items()}
    for i in range(2):
        y = x @ p[f"layers.{i}.weight"].T + p[f"layers.{i}.bias"]
        y = (y - y.mean(-1, keepdims=True)) / np.sqrt(y.var(-1, keepdims=True) + 1e-5)
        x = np.maximum(y * p[f"norms.{i}.weight"] + p[f"norms.{i}.bias"], 0.0)
    expected = x @ p["head.weight"].T + p["head.bias"]
    np.testing.assert_allclose(
        algorithm.apply("value", state.params["value"], BATCH["observations"]), expected, rtol=1e-4, atol=1e-5
    )
    assert any("norms" in k for k in state.params["value"]) and not any("scales" in k for k in state.params["critic"])
    assert not any("norms" in k for k in make(value_layer_norm=False)[1].params["value"])
    assert any("norms" in k for k in make(value_layer_norm=False, layer_norm=True)[1].params["value"])


def test_the_values_batch_with_noise_and_random_actions() -> None:
    algorithm, state = make(random_actions=2, action_noise=0.3)
    q = algorithm.critic.min_q(
        algorithm.critic.target_critics(state, KEY), BATCH["observations"], BATCH["actions"]
    ).mean
    batch, values = value_batch(algorithm.config, algorithm.critic, state.target["critic"], BATCH, q, KEY)
    assert batch["observations"].shape == (3 * B, OBS) and values.shape == (3 * B,)
    np.testing.assert_array_equal(batch["observations"], np.tile(X["observations"], (3, 1)).astype(np.float32))
    noise, random = rng.split(KEY)
    near = (
        (BATCH["actions"] + (0.3 * rng.normal(noise, (B, A))).clamp(-0.5, 0.5)).clamp(-1, 1).numpy().astype(np.float64)
    )
    far = rng.uniform(random, (2 * B, A), -1.0, 1.0).numpy().astype(np.float64)
    twice = np.tile(X["observations"], (2, 1))
    targets = critics(state.target["critic"])
    expected = np.concatenate([q_values(targets, X["observations"], near).min(0), q_values(targets, twice, far).min(0)])
    np.testing.assert_allclose(values, expected, atol=1e-5)
    assert abs(near - X["actions"]).max() > 0.1  # and neither option changes what the policy imitates
    _, metrics = algorithm.update(state, BATCH, KEY, phase=0)
    plain, before = make()
    _, others = plain.update(before, BATCH, KEY, phase=0)
    assert metrics["critic/q"] == others["critic/q"] and metrics["value/loss"] != others["value/loss"]


def test_random_discrete_actions_are_any_of_them() -> None:
    algorithm, state = make(discrete=4, random_actions=1, action_noise=0.3)  # noise is for continuous actions
    batch = {**BATCH, "actions": torch.tensor([0, 3, 1, 1, 2, 0, 3, 2])}
    q = algorithm.critic.min_q(
        algorithm.critic.target_critics(state, KEY), batch["observations"], batch["actions"]
    ).mean
    _, values = value_batch(algorithm.config, algorithm.critic, state.target["critic"], batch, q, KEY)
    every = np.stack([ref.forward(ref.net(state.target["critic"], member=e), X["observations"])[0] for e in range(2)])
    drawn = rng.randint(rng.split(KEY)[1], (B,), 4).numpy()
    np.testing.assert_allclose(values, np.concatenate([q, every[:, np.arange(B), drawn].min(0)]), atol=1e-5)


class Reference:
    """XQL in float64: V (as often as asked), the actor with the new V, Q with the new V, the targets."""

    def __init__(self, state: TrainState, value_updates: int) -> None:
        self.value_updates = value_updates
        self.value, self.actor = norm.net(state.params["value"]), ref.net(state.params["actor"], "net.")
        self.log_std = state.params["actor"]["log_std"].numpy().astype(np.float64)
        self.critics, self.targets = critics(state.params["critic"]), critics(state.target["critic"])
        self.adam = {k: ref.Adam(lambda t: LR) for k in ("value", "actor", "critic0", "critic1")}

    def update(self) -> float:
        """Returns the norm of V's last gradient."""
        both = np.concatenate([X["observations"], X["actions"]], 1)
        q = np.stack([ref.forward(n, both)[0][:, 0] for n in self.targets]).min(0)
        for _ in range(self.value_updates):
            v, seen = norm.forward(self.value, X["observations"], True)
            grads, _ = norm.backward(self.value, seen, (gumbel(q - v[:, 0], BETA, CLIP)[1] / B)[:, None], True)
            self.value = norm.unflat(self.adam["value"].step(norm.flat(self.value), grads))
        size = float(np.sqrt(sum((g**2).sum() for g in grads)))

        advantage = q - norm.forward(self.value, X["observations"], True)[0][:, 0]
        weight = np.minimum(np.exp(TEMPERATURE * advantage), 100.0)[:, None]
        z, inputs = ref.forward(self.actor, X["observations"])
        mean, std = np.tanh(z), np.exp(self.log_std)
        error = (mean - X["actions"]) / std
        grads, _ = ref.backward(self.actor, inputs, weight * error / std / B * (1 - mean**2))
        grads.append((weight * (1 - error**2)).sum(0) / B)
        *values, self.log_std = self.adam["actor"].step([*ref.flat(self.actor), self.log_std], grads)
        self.actor = ref.unflat(values)

        y = X["rewards"] + DISCOUNT * X["masks"] * norm.forward(self.value, X["next_observations"], True)[0][:, 0]
        for e, critic in enumerate(self.critics):
            out, inputs = ref.forward(critic, both)
            grads, _ = ref.backward(critic, inputs, huber(out - y[:, None], DELTA)[1] / B)
            self.critics[e] = ref.unflat(self.adam[f"critic{e}"].step(ref.flat(critic), grads))
        self.targets = [ref.polyak(t, o, POLYAK) for t, o in zip(self.targets, self.critics, strict=True)]
        return size


@pytest.mark.parametrize("value_updates", [1, 3])
def test_updates_in_the_authors_order(value_updates: int) -> None:
    algorithm, state = make(value_updates=value_updates)
    mine = Reference(state, value_updates)
    for _ in range(4):
        state, metrics = algorithm.update(state, BATCH, KEY, phase=0)
        assert float(metrics["value/gradient"]) == pytest.approx(mine.update(), rel=1e-3)
        norm.close(mine.value, state.params["value"])
        ref.close(mine.actor, state.params["actor"], "net.", atol=5e-5)
        for e in range(2):
            ref.close(mine.critics[e], state.params["critic"], member=e, atol=5e-5)
            ref.close(mine.targets[e], state.target["critic"], member=e, atol=5e-5)


def test_published_defaults() -> None:
    c = registry.get("algo", "xql").Config()
    published = {
        "gumbel_temperature": 2.0,
        "gumbel_clip": 7.0,
        "batch_size": 256,
        "temperature": 3.0,
        "huber_delta": 20.0,
    }
    assert {k: getattr(c, k) for k in published} == published
    assert (
        c.value_layer_norm
        and not c.layer_norm
        and c.value_updates == 1
        and c.random_actions == 0
        and c.action_noise == 0.0
    )
