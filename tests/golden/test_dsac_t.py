"""DSAC-T's loss by hand, and its targets."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from offrl import registry, rng
from offrl.algorithm import TrainState
from offrl.algorithms.dsac_t import DSACT, distribution_loss
from offrl.data.dataset import DataSpec
from offrl.errors import UserError
from offrl.settings.field import check

SPEC = DataSpec((2,), 1, action_low=(-1.0,), action_high=(1.0,))


def number(x: float) -> Tensor:
    return torch.tensor(x, dtype=torch.float64)


@pytest.mark.parametrize(
    ("sample", "exact", "loss", "slope"),
    # w = 4 / 4.1; y_b = 4: H = 4.5; y_b = 7: H = 18, where 1 + 3 * 2 cuts 12 off; exact: 9
    [(4.0, False, -0.342625, -0.232288), (12.0, False, None, -6.504065), (4.0, True, None, 4 / 4.1 * (4 - 9) / 2.1)],
)
def test_the_loss(sample: float, exact: bool, loss: float | None, slope: float) -> None:
    q, sigma = number(1.0).requires_grad_(), number(2.0).requires_grad_()
    result = distribution_loss(q, sigma, number(1.5), number(sample), number(2.0), exact)
    result.backward()
    if loss is not None:
        assert float(result.detach()) == pytest.approx(loss, abs=1e-6)
    assert q.grad is not None and sigma.grad is not None
    assert float(q.grad) == pytest.approx(-0.487805, abs=1e-6)
    assert float(sigma.grad) == pytest.approx(slope, abs=1e-6)


def make() -> tuple[DSACT, TrainState, dict[str, Tensor]]:
    kind = registry.get("algo", "dsac_t")
    algorithm = kind(kind.Config(hidden=[8], polyak=0.25), SPEC)
    draw = torch.Generator().manual_seed(0)
    batch = {
        "observations": torch.randn(4, 2, generator=draw),
        "actions": torch.rand(4, 1, generator=draw) * 2 - 1,
        "rewards": torch.randn(4, generator=draw),
        "next_observations": torch.randn(4, 2, generator=draw),
        "masks": torch.tensor([1.0, 0.0, 1.0, 1.0]),
    }
    return algorithm, algorithm.init(0), batch


def test_targets_are_of_the_critic_with_the_smaller_mean() -> None:
    algorithm, state, batch = make()
    key = rng.make_key(5)
    target, sample = algorithm.targets(state, batch, key)
    action, log_p = algorithm.sample(state.target["actor"], batch["next_observations"], key)
    logits = algorithm.critic.logits(state.target["critic"], batch["next_observations"], action)
    noise = rng.normal(rng.fold_in(key, 101), (4,)).clamp(-3, 3)
    weight = state.params["entropy"]["log"].exp()
    assert float(weight) == pytest.approx(2.718282, abs=1e-5)
    for b in range(4):
        means, stds = logits[:, b, 0], torch.nn.functional.softplus(logits[:, b, 1])
        i = int(means.argmin())
        for value, result in ((means[i], target[b]), (means[i] + stds[i] * noise[b], sample[b])):
            expected = batch["rewards"][b] + 0.99 * batch["masks"][b] * (value - weight * log_p[b])
            assert float(result) == pytest.approx(float(expected), rel=1e-5, abs=1e-5)
    assert target[1] == sample[1] == batch["rewards"][1]


def test_the_width_is_a_running_mean_and_the_actor_moves_every_second_time() -> None:
    algorithm, state, batch = make()
    std = algorithm.critic.head.std(  # type: ignore[attr-defined]
        algorithm.critic.logits(state.params["critic"], batch["observations"], batch["actions"])
    ).mean(-1)
    first, _ = algorithm.update(state, batch, rng.make_key(1), phase=0)
    torch.testing.assert_close(first.extra["width"], std)  # of the first batch
    assert all(torch.equal(v, first.params["actor"][k]) for k, v in state.params["actor"].items())
    assert all(torch.equal(v, first.target["critic"][k]) for k, v in state.target["critic"].items())
    after = algorithm.critic.head.std(  # type: ignore[attr-defined]
        algorithm.critic.logits(first.params["critic"], batch["observations"], batch["actions"])
    ).mean(-1)
    second, metrics = algorithm.update(first, batch, rng.make_key(2), phase=1)
    torch.testing.assert_close(second.extra["width"], 0.75 * std + 0.25 * after)
    assert not any(torch.equal(v, second.params["actor"][k]) for k, v in first.params["actor"].items())
    assert not torch.equal(first.params["entropy"]["log"], second.params["entropy"]["log"])
    assert {"critic/width", "entropy/weight", "actor/loss"} <= set(metrics)


def test_another_head_and_windows_are_refused() -> None:
    kind = registry.get("algo", "dsac_t")
    with pytest.raises(UserError, match="value_head=scalar is not allowed; choose one of gaussian"):
        check(kind.Config(value_head="scalar"))
    with pytest.raises(UserError, match="dsac_t looks one step ahead with one action"):
        kind(kind.Config(n_step=3), SPEC)
