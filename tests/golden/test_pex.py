"""PEX: which of two policies acts, and an update whose policy learns from what was chosen of both. IQL's losses are in
test_iql.py.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from offrl import registry, rng
from offrl.algorithm import TrainState
from offrl.families.critics import Values
from tests.support.golden import KEY, B, redraw, spec, transitions

LR, POLYAK, TEMPERATURE = 0.01, 0.1, 2.0
BATCH = transitions(np.random.default_rng(4))


def make(discrete: int = 0, **settings: Any) -> tuple[Any, TrainState]:
    kind = registry.get("algo", "pex")
    small = {"hidden": [6, 5], "learning_rate": LR, "polyak": POLYAK, "temperature": TEMPERATURE}
    algorithm = kind(kind.Config(**small, actor_schedule="constant", **settings), spec(discrete))
    state = algorithm.init(3)
    g = torch.Generator().manual_seed(5)  # larger than initial weights
    for params in (*state.params.values(), state.target["critic"], state.extra["old"]):
        redraw(params, g)
    return algorithm, state


def test_shares_are_a_softmax_of_ten_times_q(monkeypatch: pytest.MonkeyPatch) -> None:
    algorithm, state = make()
    values = iter([torch.tensor([1.0]), torch.tensor([1.1])])
    monkeypatch.setattr(algorithm.critic, "min_q", lambda *_: Values(next(values)))
    one = torch.zeros(1, 2)
    shares = algorithm.log_shares(state.params["critic"], one, one, one).exp()
    np.testing.assert_allclose(shares, [[0.2689414214, 0.7310585786]], rtol=1e-6)


@pytest.mark.parametrize("discrete", [0, 4])
def test_acting(discrete: int) -> None:
    """Greedily the mode of larger value; exploring the old policy's mode or the new one's sample, by the shares."""
    algorithm, state = make(discrete, inverse_temperature=2.0)
    seen = BATCH["observations"][:2].repeat_interleave(4000, 0)
    actor = algorithm.actor(state)
    dists = [algorithm.apply("actor", params, seen) for params in (state.extra["old"], state.params["actor"])]
    modes = [algorithm.policy.mode(dist) for dist in dists]
    q = [algorithm.critic.q(state.params["critic"], seen, a).amin(0) for a in modes]
    better = (q[1] > q[0]).view(-1, *[1] * (modes[0].ndim - 1))
    greedy, carry = actor.act(None, seen, KEY, explore=False)
    assert carry is None and torch.equal(greedy, torch.where(better, modes[1], modes[0]))

    actions, new = algorithm.choose(state, seen, KEY, True)
    assert torch.equal(actor.act(None, seen, KEY, explore=True)[0], actions)
    assert torch.equal(actions[~new], modes[0][~new]) and actions[new].unique(dim=0).shape[0] > 2
    sample = algorithm.policy.sample(dists[1], rng.split(KEY)[0])
    old_q, new_q = (algorithm.critic.q(state.params["critic"], seen, a).amin(0) for a in (modes[0], sample))
    share = torch.sigmoid(2.0 * (new_q - old_q))
    for half in (slice(None, 4000), slice(4000, None)):
        expected, spread = float(share[half].mean()), 5 * 0.5 / math.sqrt(4000)
        assert abs(float(new[half].float().mean()) - expected) < spread


def step(params: dict[str, Any], loss: Any) -> dict[str, Any]:
    """Adam's first step."""
    gradient = torch.func.grad(loss)(params)
    return {k: v - LR * gradient[k] / (gradient[k].abs() + 1e-8) for k, v in params.items()}


def test_an_update_in_the_order_of_the_authors() -> None:
    """V, critics towards the V of before, targets, and the new policy with the new V and targets, at a fresh choice."""
    algorithm, state = make(expectile=0.8, max_weight=2.0)
    s, s2, a = BATCH["observations"], BATCH["next_observations"], BATCH["actions"]
    value = lambda p, x: algorithm.apply("value", p, x).reshape(-1)  # noqa: E731
    both = lambda p, x, a: algorithm.apply("critic", p, torch.cat([x, a], -1)).squeeze(-1)  # noqa: E731
    old_v, q = state.params["value"], both(state.target["critic"], s, a).amin(0)

    def value_loss(p: Any) -> Any:
        u = q - value(p, s)
        return ((0.8 - (u < 0).float()).abs() * u.square()).mean()

    v = step(old_v, value_loss)
    target = BATCH["rewards"] + 0.99 * BATCH["masks"] * value(old_v, s2)
    critic = step(state.params["critic"], lambda p: (both(p, s, a) - target).square().mean(1).sum())
    moved = {k: (1 - POLYAK) * t + POLYAK * critic[k] for k, t in state.target["critic"].items()}
    now = state._replace(params={**state.params, "critic": critic})
    actions, new = algorithm.choose(now, s, rng.fold_in(KEY, 300), True)
    assert 0 < int(new.sum()) < B
    weight = (TEMPERATURE * (both(moved, s, actions).amin(0) - value(v, s))).exp().clamp(max=2.0)
    assert 0 < int((weight == 2.0).sum()) < B

    def actor_loss(p: Any) -> Any:
        mean, log_std = algorithm.apply("actor", p, s)
        return -(weight * torch.distributions.Normal(mean, log_std.exp()).log_prob(actions).sum(-1)).mean()

    after, metrics = algorithm.update(state, BATCH, KEY, phase=0)
    expected = {"value": v, "critic": critic, "actor": step(state.params["actor"], actor_loss)}
    for name, params in expected.items():
        for k, x in params.items():
            torch.testing.assert_close(after.params[name][k], x, atol=2e-6, rtol=1e-5, msg=f"{name} {k}")
    for k, x in moved.items():
        torch.testing.assert_close(after.target["critic"][k], x, atol=2e-6, rtol=1e-5)
    assert all(torch.equal(x, state.extra["old"][k]) for k, x in after.extra["old"].items())
    assert float(metrics["actor/new"]) == pytest.approx(float(new.float().mean()))
