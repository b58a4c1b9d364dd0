"""PPO on a residual: advantages, densities and rates by hand, one update in float64 NumPy, and where its passes end."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch

from offrl import rng
from offrl.algorithm import TrainState
from offrl.algorithms.bc import BCConfig
from offrl.data.dataset import DataSpec
from offrl.families.on_policy import ppo
from offrl.families.on_policy.residual import Residual, ResidualConfig
from offrl.finetuning.on_policy.rollout import RolloutStep, batch_of

ONES = torch.ones(3)


def close(value: torch.Tensor, *expected: float, atol: float = 1e-7) -> None:
    torch.testing.assert_close(
        value.double(), torch.tensor(expected, dtype=torch.float64).reshape(value.shape), rtol=1e-6, atol=atol
    )


def advantages(terminated: list[bool], over: list[bool], decay: float = 0.95) -> torch.Tensor:
    """Of three steps with values .5, .25, .1 and a reward in the second; what follows them is worth .25, .1 and .8."""
    r, v, nexts = (torch.tensor(x, dtype=torch.float64) for x in ([0.0, 1.0, 0.0], [0.5, 0.25, 0.1], [0.25, 0.1, 0.8]))
    return ppo.generalised_advantages(r, v, nexts, torch.tensor(terminated), torch.tensor(over), 0.999, decay)


# ---- advantages


def test_advantages_by_hand() -> None:
    a = advantages([False, True, False], [False, True, False])
    # .999 * .8 - .1; 1 - .25; .999 * .25 - .5 + .999 * .95 * .75
    close(a, 0.4615375, 0.75, 0.6992)
    close(a + torch.tensor([0.5, 0.25, 0.1]), 0.9615375, 1.0, 0.7992)
    close(advantages([False, True, True], [False, True, True])[2], -0.1)
    # a cut episode goes on with its last state's value, and takes nothing of the next episode's advantages
    close(advantages([False] * 3, [False, True, False])[1], 1 + 0.999 * 0.1 - 0.25)
    close(advantages([False] * 3, [False, False, False])[1], 1 + 0.999 * 0.1 - 0.25 + 0.999 * 0.95 * 0.6992)
    close(ppo.normalised(a, torch.ones(3, dtype=torch.float64)), -1.1388838, 0.7343893, 0.4044945)


def test_what_blew_up_counts_for_nothing() -> None:
    weight, a = torch.tensor([1.0, 1.0, 0.0, 1.0]), torch.tensor([0.3, 0.9, 777.0, 0.6])
    close(ppo.normalised(a, weight)[[0, 1, 3]], -1.0, 1.0, 0.0)
    rows = torch.tensor([0.0, 1.0, math.nan]), torch.zeros(3), torch.tensor([0.0, 0.0, math.nan])
    over, none = torch.tensor([False, False, True]), torch.zeros(3, dtype=torch.bool)
    result = ppo.generalised_advantages(*rows, none, over, 0.5, 1.0, torch.tensor([1.0, 1.0, 0.0]))
    close(result, 0.5, 1.0, 0.0)


def test_the_clipped_loss_by_hand() -> None:
    ratio = torch.tensor([1.3, 0.9, 0.7])
    a = torch.tensor([-1.1388838, 0.7343893, 0.4044945])
    # max(1.3, 1.2) * 1.1388838; -.9 * .7343893; max(-.7, -.8) * .4044945
    close(ppo.clipped_loss(a, ratio, 0.2, ONES), (1.3 * 1.1388838 - 0.9 * 0.7343893 - 0.7 * 0.4044945) / 3)
    advantage = ppo.normalised(advantages([False, True, False], [False, True, False]).float(), ONES)
    close(ppo.clipped_loss(advantage, ratio, 0.2, ONES), 0.1788174767, atol=1e-6)
    close(ppo.divergence(ratio.log(), ONES), 0.0332237317, atol=1e-6)
    assert float(ppo.clipped_loss(torch.tensor([1.0]), torch.tensor([1.5]), 0.2, torch.ones(1))) == pytest.approx(-1.2)


# ---- density, action, rewards, rates


def residual(hidden: tuple[int, ...] = (3,), observations: int = 2, actions: int = 1, **settings: Any) -> Residual:
    spec = DataSpec((observations,), actions, action_low=(-1.0,) * actions, action_high=(1.0,) * actions)
    base = dataclasses.asdict(BCConfig(hidden=[4]))
    return Residual(ResidualConfig(base=base, hidden=list(hidden), **settings), spec)


def test_density_and_action_by_hand() -> None:
    algorithm = residual(actions=2)
    u = torch.tensor([0.5, 0.1])
    # -(.3 e)^2 / 2 - (.2 e)^2 / 2 + 2 - ln 2 pi
    close(algorithm.log_prob(torch.tensor([0.2, -0.1]), u), -0.3181657128)
    close(algorithm.combine(torch.tensor([0.3, -0.4]), u), 0.35, -0.39)
    close(algorithm.combine(torch.tensor([0.98, -1.0]), u), 1.0, -0.99)
    close(
        residual(observation_clip=3.0).features(
            {"mean": 1.0, "std": 2.0},
            {"observations": torch.tensor([9.0, 0.0]), "base_actions": torch.tensor([0.5])},
        ),
        3.0,
        -0.5,
        0.5,
    )
    assert residual(scale=0.5, log_sigma=None).sigma * 0.5 == pytest.approx(0.0368)
    assert residual().sigma * 0.1 == pytest.approx(0.0368, abs=2e-5)


def test_rewards_over_their_running_deviation() -> None:
    moments = ppo.Moments.begin(2).add(torch.tensor([[0.0, 0.0, 0.0, 1.0]] * 2))
    close(moments.variance, 0.1875218744, 0.1875218744)
    close(moments.scaled(torch.tensor([[1.0, 9.0, -9.0]] * 2, dtype=torch.float64), 5.0), *[2.3092663, 5.0, -5.0] * 2)
    values = torch.randn(1, 12, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    parts = ppo.Moments.begin(1).add(values[:, :5]).add(values[:, 5:])
    weight = np.concatenate([values[0].numpy(), [0.0]])  # the beginning: 1e-4 of a value of mean 0 and variance 1
    n = np.append(np.ones(12), 1e-4)
    mean = (weight * n).sum() / n.sum()
    close(parts.variance, ((weight - mean) ** 2 * n).sum() / n.sum() + 1e-4 / n.sum())


def test_rates_over_the_iterations() -> None:
    assert [ppo.rate_factor(i, 1395, 5) for i in (0, 1, 5, 700, 1395)] == pytest.approx([0.0, 0.2, 1.0, 0.5, 0.0])
    assert [ppo.rate_factor(i, 10) for i in (0, 5, 10)] == pytest.approx([1.0, 0.5, 0.0])


def test_the_joint_norm_is_clipped() -> None:
    grads = {"actor": {"w": torch.tensor([3.0])}, "critic": {"w": torch.tensor([4.0])}}
    small = ppo.clipped_together(grads, 1.0)
    close(torch.stack([small["actor"]["w"], small["critic"]["w"]]), 0.6, 0.8, atol=1e-6)
    assert ppo.clipped_together(grads, 9.0)["actor"]["w"].item() == 3.0


# ---- an update


def begin(algorithm: Residual) -> tuple[TrainState, dict[str, torch.Tensor]]:
    """A state whose residual is not 0, and ten rows that another policy played."""
    g = torch.Generator().manual_seed(3)
    state = algorithm.init(0)
    state.params["actor"].update({k: 0.5 * torch.randn(v.shape, generator=g) for k, v in state.params["actor"].items()})
    batch = {
        "observations": 2.0 * torch.randn(10, 2, generator=g),
        "base_actions": torch.rand(10, 1, generator=g) - 0.5,
    }
    batch["u"] = 0.6 * torch.randn(10, 1, generator=g)
    batch["log_prob"] = -1.0 + 0.3 * torch.randn(10, generator=g)
    batch["advantages"], batch["returns"] = torch.randn(10, generator=g), torch.randn(10, generator=g)
    batch["weight"] = torch.tensor([1.0] * 9 + [0.0])
    return state, batch


def numpy_loss(
    params: dict[str, dict[str, np.ndarray]], batch: dict[str, np.ndarray], sigma: float
) -> tuple[float, float, float]:
    """(loss of both, KL estimate, share outside of the clip)."""

    def net(p: dict[str, np.ndarray], x: np.ndarray) -> np.ndarray:
        return np.maximum(x @ p["0.weight"].T + p["0.bias"], 0.0) @ p["2.weight"].T + p.get("2.bias", 0.0)

    rows = {k: v[:9] for k, v in batch.items()}  # the last one does not count
    x = np.concatenate([np.clip(rows["observations"], -3, 3), rows["base_actions"]], 1)
    mean = net(params["actor"], x)
    density = (-((rows["u"] - mean) ** 2) / (2 * sigma**2) - np.log(sigma * np.sqrt(2 * np.pi))).sum(1)
    ratio = np.exp(density - rows["log_prob"])
    a = (rows["advantages"] - rows["advantages"].mean()) / rows["advantages"].std(ddof=1)
    actor = np.maximum(-a * ratio, -a * np.clip(ratio, 0.8, 1.2)).mean()
    critic = 0.5 * ((net(params["critic"], x)[:, 0] - rows["returns"]) ** 2).mean()
    return actor + critic, (ratio - 1 - np.log(ratio)).mean(), (np.abs(ratio - 1) > 0.2).mean()


def test_an_update_beside_numpy() -> None:
    algorithm = residual()
    state, batch = begin(algorithm)
    new, metrics = algorithm.update(state, batch, rng.make_key(0), phase=0)
    params = {m: {k: v.double().numpy() for k, v in state.params[m].items()} for m in ("actor", "critic")}
    rows = {k: v.double().numpy() for k, v in batch.items()}
    loss, kl, outside = numpy_loss(params, rows, math.exp(-1))
    assert float(metrics["actor/loss"] + metrics["critic/loss"]) == pytest.approx(loss, rel=1e-5)
    assert float(metrics["actor/kl"]) == pytest.approx(kl, rel=1e-5) and float(
        metrics["actor/clipped"]
    ) == pytest.approx(outside)

    grads: dict[str, dict[str, np.ndarray]] = {}
    for m, leaves in params.items():
        grads[m] = {}
        for k, leaf in leaves.items():
            grads[m][k] = slope = np.zeros_like(leaf)
            for i in np.ndindex(leaf.shape):
                before, values = leaf[i], []
                for shift in (1e-6, -1e-6):
                    leaf[i] = before + shift
                    values.append(numpy_loss(params, rows, math.exp(-1))[0])
                leaf[i] = before
                slope[i] = (values[0] - values[1]) / 2e-6
    norm = math.sqrt(sum((g**2).sum() for leaves in grads.values() for g in leaves.values()))
    assert norm > 1.0  # so that the clipping matters
    for m, rate in (("actor", 3e-4), ("critic", 1e-3)):
        for k, g in grads[m].items():
            g = g / norm
            expected = params[m][k] * (1 - rate * 1e-6) - rate * g / (np.abs(g) + 1e-5)  # Adam's first step
            np.testing.assert_allclose(new.params[m][k].numpy(), expected, atol=2e-7)


def test_passes_end_after_the_step_that_went_too_far() -> None:
    algorithm = residual(target_kl=1e-4)
    state, batch = begin(algorithm)
    first, metrics = algorithm.update(state, batch, rng.make_key(0), phase=0)
    assert float(metrics["actor/kl"]) > 1e-4 and float(metrics["learning"]) == 1.0  # it was made,
    assert not torch.equal(first.params["actor"]["2.weight"], state.params["actor"]["2.weight"])
    second, metrics = algorithm.update(first._replace(step=first.step + 1), batch, rng.make_key(1), phase=0)
    for module in ("actor", "critic"):  # and it was the last one
        assert all(torch.equal(first.params[module][k], v) for k, v in second.params[module].items())
        assert torch.equal(first.opt[module]["count"], second.opt[module]["count"])  # type: ignore[arg-type]
    assert not any(float(v) for v in metrics.values()) and int(second.step) == 0  # the step adds 1
    endless = residual(target_kl=None)
    state, batch = begin(endless)
    assert float(endless.update(state, batch, rng.make_key(0), phase=0)[0].extra["learning"]) == 1.0


def test_the_base_never_moves() -> None:
    algorithm = residual()
    state, batch = begin(algorithm)
    new, _ = algorithm.update(state, batch, rng.make_key(0), phase=0)
    for name, leaf in state.extra["base"]["params"]["actor"].items():
        assert new.extra["base"]["params"]["actor"][name] is leaf


# ---- from what was played to a batch


class Known:
    """V is the observation's first number."""

    def __init__(self, **settings: Any) -> None:
        self.algorithm = residual(**settings)

    @staticmethod
    def values(sights: dict[str, torch.Tensor]) -> torch.Tensor:
        return sights["observations"][..., 0]


def played(over: int, terminated: bool) -> list[RolloutStep]:
    """Three steps of one environment that see .5, .25, .1; its episode is over after step `over`, at .3, and the last
    state is .8.
    """
    rows = []
    for t, value in enumerate((0.5, 0.25, 0.1)):
        flag, zero = torch.tensor([[t == over]]), torch.zeros(1, 1)
        sights, draws = _sights(value), {"u": zero[..., None], "log_prob": zero}
        row = RolloutStep(sights, draws, zero + float(t == 1), flag & terminated, flag, zero + 1)
        after = 0.8 if t == 2 else 0.3 if t == over else None
        rows.append(row if after is None else dataclasses.replace(row, after=_sights(after)))
    return rows


def _sights(value: float) -> dict[str, torch.Tensor]:
    return {"observations": torch.tensor([[[value, 9.0]]]), "base_actions": torch.zeros(1, 1, 1)}


@pytest.mark.parametrize(
    ("terminated", "settings", "second"),
    [(True, {}, 1 - 0.25), (False, {}, 1 + 0.999 * 0.3 - 0.25), (False, {"time_limits": "end"}, 1 - 0.25)],
)
def test_a_cut_episode_is_worth_its_true_last_state(terminated: bool, settings: dict[str, Any], second: float) -> None:
    batch = batch_of(played(1, terminated), Known(**settings))  # type: ignore[arg-type]
    third = 0.999 * 0.8 - 0.1
    close(batch["advantages"], 0.999 * 0.25 - 0.5 + 0.999 * 0.95 * second, second, third)
    close(batch["returns"], 0.999 * 0.25 + 0.999 * 0.95 * second, second + 0.25, third + 0.1)
    assert batch["observations"].shape == (1, 3, 2) and batch["u"].shape == (1, 3, 1)
