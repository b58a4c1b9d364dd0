"""Flows by hand, and FQL's losses, its order and its targets in float64 NumPy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from offrl import rng
from offrl.algorithm import select, stack
from offrl.algorithms.fql import FQL, FQLConfig
from offrl.data.arrays import from_arrays
from offrl.nn import flow
from offrl.training.step import Step

SMALL = {"hidden": [16, 16], "flow_steps": 3}


# ---- flows


def test_interpolation_by_hand() -> None:
    x, velocity = flow.interpolate(torch.tensor([[1.0, -0.5]]), torch.tensor([[0.25, -0.75]]), torch.tensor([[0.3]]))
    torch.testing.assert_close(x, torch.tensor([[0.775, -0.575]]))
    torch.testing.assert_close(velocity, torch.tensor([[-0.75, -0.25]]))
    assert float(velocity.square().mean()) == pytest.approx(0.3125)  # the loss of a field of zeros


def test_euler_steps_by_hand() -> None:
    c, z = torch.tensor([[0.2, 0.4]]), torch.tensor([[1.0, -0.5]])
    x = flow.integrate(lambda x, t: c - x, z, 10)
    torch.testing.assert_close(x, c + (z - c) * 0.9**10, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(x, torch.tensor([[0.47894275, 0.0861894]]), rtol=1e-6, atol=1e-7)
    # the time of a step is its beginning: 2 (0 + .1 + ... + .9) / 10
    assert float(flow.integrate(lambda x, t: 2.0 * t, torch.zeros(1, 1), 10)) == pytest.approx(0.9)
    assert float(
        flow.integrate(lambda x, t: c - x, torch.full((1, 1), 9.0), 1, low=None, high=None)[0, 0]
    ) == pytest.approx(0.2)


def test_points_are_cut_off_at_the_end_or_at_every_step() -> None:
    def five_then_back(x: Tensor, t: Tensor) -> Tensor:
        return torch.where(t < 0.5, 5.0, -2.0)

    zero = torch.zeros(1, 1)
    assert float(flow.integrate(lambda x, t: torch.full_like(x, 5.0), zero, 10)) == 1.0
    assert float(flow.integrate(five_then_back, zero, 2)) == 1.0  # 2.5 - 1 = 1.5
    assert float(flow.integrate(five_then_back, zero, 2, None, None)) == 1.5


def test_best_of_candidates() -> None:
    candidates = torch.tensor([[-1.0], [0.4], [0.9], [0.4]]).unsqueeze(1).expand(4, 2, 1)
    scores = -(candidates.squeeze(-1) - 0.5).square()
    assert flow.best_of(scores, candidates).tolist() == [[pytest.approx(0.4)]] * 2
    indexed = torch.arange(4.0).reshape(4, 1, 1).expand(4, 2, 1)
    assert flow.best_of(scores, indexed).tolist() == [[1.0], [1.0]]  # the first of equal ones
    assert flow.repeated(torch.tensor([[1], [2]]), 2).tolist() == [[1], [2], [1], [2]]


# ---- FQL, beside NumPy


def gelu(x: np.ndarray) -> np.ndarray:
    return 0.5 * x * (1.0 + np.tanh(np.sqrt(2.0 / np.pi) * (x + 0.044715 * x**3)))


def plain(p: dict[str, np.ndarray], x: np.ndarray) -> np.ndarray:
    """A field: GELU after each of two hidden layers."""
    for i in range(2):
        x = gelu(x @ p[f"net.layers.{i}.weight"].T + p[f"net.layers.{i}.bias"])
    return x @ p["net.head.weight"].T + p["net.head.bias"]


def critics(p: dict[str, np.ndarray], x: np.ndarray) -> np.ndarray:
    """[E, B]: GELU, then LayerNorm, after each hidden layer."""
    y = np.broadcast_to(x, (2, *x.shape))
    for i in range(2):
        y = gelu(y @ p[f"layers.{i}.weight"] + p[f"layers.{i}.bias"])
        y = (y - y.mean(-1, keepdims=True)) / np.sqrt(y.var(-1, keepdims=True) + 1e-6)
        y = y * p[f"scales.{i}"] + p[f"shifts.{i}"]
    return (y @ p["head.weight"] + p["head.bias"])[..., 0]


def numbers(params: dict[str, Tensor]) -> dict[str, np.ndarray]:
    return {k: v.double().numpy() for k, v in params.items()}


def problem(**settings: object) -> tuple[FQL, dict[str, Tensor]]:
    g = np.random.default_rng(0)
    s, a = g.normal(size=(40, 3)), g.uniform(-1, 1, (40, 2))
    data = from_arrays(s, a, g.normal(size=40), np.arange(40) % 10 == 9, action_low=-1.0, action_high=1.0)
    algorithm = FQL(FQLConfig(**{**SMALL, **settings}), data.spec)  # type: ignore[arg-type]
    sampler = algorithm.sampler()
    return algorithm, sampler(sampler.prepare(data), rng.make_key(1), 16)


@pytest.mark.parametrize("pessimism", ["mean", "min", "std"])
def test_losses(pessimism: str) -> None:
    algorithm, batch = problem(pessimism=pessimism, alpha=3.0, discount=0.9)
    state, key = algorithm.init(5), rng.make_key(9)
    # targets of their own
    state = state._replace(target={"critic": {k: v + 0.01 for k, v in state.params["critic"].items()}})
    s, a, r, m, s1 = (
        batch[k].double().numpy() for k in ("observations", "actions", "rewards", "masks", "next_observations")
    )
    actor, field, critic, target = (
        numbers(p) for p in (*(state.params[k] for k in ("actor", "flow", "critic")), state.target["critic"])
    )

    z = algorithm.noise(batch["observations"], key).double().numpy()
    next_action = plain(actor, np.concatenate([s1, z], 1)).clip(-1, 1)
    q = critics(target, np.concatenate([s1, next_action], 1))
    value = {"mean": q.mean(0), "min": q.min(0), "std": q.mean(0) - 0.5 * q.std(0)}[pessimism]
    error = critics(critic, np.concatenate([s, a], 1)) - (r + 0.9 * m * value)
    loss, _ = algorithm.critic_loss(state.params["critic"], state, batch, key)
    assert float(loss) == pytest.approx((error**2).mean(), rel=1e-5)  # the mean over critics

    noise_key, time_key = rng.split(key)
    x0 = rng.normal(noise_key, (16, 2)).double().numpy()
    t = rng.uniform(time_key, (16, 1)).double().numpy()
    error = plain(field, np.concatenate([s, (1 - t) * x0 + t * a, t], 1)) - (a - x0)
    loss, _ = algorithm.flow_loss(state.params["flow"], state, batch, key)
    assert float(loss) == pytest.approx((error**2).mean(), rel=1e-5)

    x = z
    for i in range(3):
        x = x + plain(field, np.concatenate([s, x, np.full((16, 1), i / 3)], 1)) / 3
    action = plain(actor, np.concatenate([s, z], 1))
    distillation = ((action - x.clip(-1, 1)) ** 2).mean()
    # always the mean, and of the online critics
    q = critics(critic, np.concatenate([s, action.clip(-1, 1)], 1)).mean(0)
    loss, metrics = algorithm.actor_loss(state.params["actor"], state, batch, key)
    assert float(loss) == pytest.approx(3.0 * distillation - q.mean(), rel=1e-5)
    assert float(metrics["actor/distillation"]) == pytest.approx(distillation, rel=1e-5)

    normalised, _ = problem(normalize_q=True, alpha=3.0)
    loss, _ = normalised.actor_loss(state.params["actor"], state, batch, key)
    assert float(loss) == pytest.approx(3.0 * distillation - q.mean() / np.abs(q).mean(), rel=1e-5)


def test_all_losses_of_an_update_read_what_was_before_it() -> None:
    """Each module moves as if it were the only one, and the targets follow the critics of before."""
    algorithm, batch = problem(polyak=0.5)
    state, key = algorithm.init(0), rng.make_key(3)
    state = state._replace(target={"critic": {k: v + 1.0 for k, v in state.params["critic"].items()}})
    after, _ = algorithm.update(state, batch, key, phase=0)
    keys = rng.split(key, 3)
    losses = {"critic": algorithm.critic_loss, "flow": algorithm.flow_loss, "actor": algorithm.actor_loss}
    for (name, loss), own in zip(losses.items(), keys, strict=True):
        alone, _ = algorithm.descend(state, name, loss, batch, own)
        for k, v in alone.params[name].items():
            torch.testing.assert_close(after.params[name][k], v, rtol=0.0, atol=0.0)
            assert not torch.equal(v, state.params[name][k]) or "scales" in k or "shifts" in k
        assert int(after.opt[name]["count"]) == 1  # type: ignore[call-overload]
    for k, v in after.target["critic"].items():
        torch.testing.assert_close(v, state.params["critic"][k] + 0.5)


@pytest.mark.slow
def test_a_large_alpha_distils_the_flow_and_a_small_one_climbs_q() -> None:
    """With alpha the policy follows what the flow does; without, it leaves the data for where Q promises more."""
    g = np.random.default_rng(0)
    s, a = g.normal(size=(512, 2)), np.where(g.random((512, 1)) < 0.5, -0.6, 0.2) + 0.02 * g.normal(size=(512, 1))
    # rewards that grow beyond the data
    data = from_arrays(s, a, a[:, 0], np.ones(512, bool), action_low=-1.0, action_high=1.0)
    found = {}
    for alpha in (0.0, 100.0):
        config = FQLConfig(hidden=[64, 64], alpha=alpha, learning_rate=3e-3, flow_steps=5)
        algorithm = FQL(config, data.spec)
        source = algorithm.sampler().prepare(data)
        step = Step(algorithm, source, batch_size=128, replicas=1)
        state, _ = step.run(stack([algorithm.init(0)]), {}, 0, 300)
        actions, _ = algorithm.actor(select(state, 0)).act(None, torch.zeros(256, 2), rng.make_key(7), explore=False)
        found[alpha] = actions.mean().item(), (actions < -0.2).float().mean().item()
    assert found[0.0][0] > 0.7  # at the end of the range, where no action of the data lies
    assert found[100.0][0] < 0.35 and found[100.0][1] > 0.2  # both modes are still played
