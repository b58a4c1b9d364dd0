"""PPO: time-outs, divergences, rates and clipped values by hand; an update beside plain torch; and where passes leave
the actor as it is.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from offrl import rng
from offrl.algorithm import TrainState, select, stack
from offrl.algorithms.ppo import PPO, PPOConfig
from offrl.data.dataset import DataSpec
from offrl.families.on_policy import ppo
from offrl.training.step import Step

FLOAT64: dict[str, Any] = {"dtype": torch.float64}


def number(value: torch.Tensor, expected: float, tolerance: float = 1e-9) -> None:
    assert float(value) == pytest.approx(expected, abs=tolerance)


def make(observations: int = 3, actions: int = 2, **settings: Any) -> PPO:
    spec = DataSpec((observations,), actions, action_low=(-1.0,) * actions, action_high=(1.0,) * actions)
    return PPO(PPOConfig(**{"hidden": [5], **settings}), spec)


# ---- by hand


def test_a_time_out_is_worth_the_true_next_value() -> None:
    """r 1, V(s) 5, V(s') 8, gamma .99: rsl_rl's gamma V(s) in place of gamma V(s') would give .95, an end -4."""

    def delta(next_value: float, terminated: bool) -> torch.Tensor:
        r, v, after = (torch.tensor([x], **FLOAT64) for x in (1.0, 5.0, next_value))
        return ppo.generalised_advantages(r, v, after, torch.tensor([terminated]), torch.tensor([True]), 0.99, 0.95)

    number(delta(8.0, False), 3.92)
    number(delta(5.0, False), 0.95)
    number(delta(8.0, True), -4.0)


def test_the_divergence_of_gaussians_by_hand() -> None:
    old, new = ((0.0, 0.5), (1.0, 0.5)), ((0.1, 0.4), (0.9, 0.5))
    rows = [torch.tensor([x], **FLOAT64) for x in (old[0], old[1], new[0], new[1])]
    kl = ppo.gaussian_divergence(rows[0], rows[1].log(), rows[2], rows[3].log())
    number(kl, 0.0380962745, 1e-10)
    assert not ppo.gaussian_divergence(rows[0], rows[1].log(), rows[0], rows[1].log())


def test_the_rate_follows_the_divergence() -> None:
    def rate(value: float, kl: float) -> float:
        return float(ppo.adapted_rate(torch.tensor(value, **FLOAT64), torch.tensor(kl, **FLOAT64), 0.01))

    assert rate(1e-3, 0.0380962745) == pytest.approx(1e-3 / 1.5)
    assert rate(1e-3, 0.004) == pytest.approx(1.5e-3)
    assert rate(1e-3, 0.0) == rate(1e-3, 0.01) == 1e-3  # the policy that played; within the band
    assert rate(1.2e-5, 1.0) == pytest.approx(1e-5) and rate(9e-3, 0.001) == pytest.approx(1e-2)


def test_a_clipped_value_by_hand() -> None:
    old, new, target = (torch.tensor([x], **FLOAT64) for x in (1.0, 1.5, 2.0))
    number(ppo.clipped_value_errors(new, old, target, 0.2), 0.64)  # unclipped .25
    number(ppo.clipped_value_errors(old + 0.1, old, target, 0.2), 0.81)


# ---- an update


def played(algorithm: PPO, seed: int = 0, rows: int = 12) -> tuple[TrainState, dict[str, torch.Tensor]]:
    """A state away from its start, and rows that a policy near it played; the last one does not count."""
    g = torch.Generator().manual_seed(3)
    state = algorithm.init(seed)
    params = {
        name: {k: v + 0.3 * torch.randn(v.shape, generator=g) for k, v in module.items()}
        for name, module in state.params.items()
    }
    state = state._replace(params=params)
    observations = torch.randn(rows, 3, generator=g)
    means = algorithm.apply("actor", params["actor"], observations)[0].detach()
    means = means + 0.1 * torch.randn(means.shape, generator=g)
    log_std = params["actor"]["log_std"].expand_as(means) - 0.05
    u = means + log_std.exp() * torch.randn(means.shape, generator=g)
    density = torch.distributions.Normal(means, log_std.exp()).log_prob(u).sum(-1)
    batch = {"observations": observations, "u": u, "log_prob": density, "means": means, "log_std": log_std}
    for name in ("advantages", "returns", "values"):
        batch[name] = torch.randn(rows, generator=g)
    return state, {**batch, "weight": torch.tensor([1.0] * (rows - 1) + [0.0])}


def plain(algorithm: PPO, state: TrainState, batch: dict[str, torch.Tensor]) -> tuple[Any, Any, Any]:
    """(modules after one step of torch.optim.Adam, loss, mean divergence), as CleanRL writes it."""
    c, rows = algorithm.config, {k: v[:-1] for k, v in batch.items()}
    sizes = [3, *c.hidden]
    nets = {}
    for name, outputs in (("actor", 2), ("critic", 1)):
        net = torch.nn.Sequential(torch.nn.Linear(*sizes), torch.nn.Tanh(), torch.nn.Linear(sizes[-1], outputs))
        prefix, leaves = "net." if name == "actor" else "", state.params[name]
        net[0].weight.data, net[0].bias.data = (leaves[f"{prefix}layers.0.{k}"].clone() for k in ("weight", "bias"))
        net[2].weight.data, net[2].bias.data = (leaves[f"{prefix}head.{k}"].clone() for k in ("weight", "bias"))
        nets[name] = net
    log_std = torch.nn.Parameter(state.params["actor"]["log_std"].clone())
    policy = torch.distributions.Normal(nets["actor"](rows["observations"]), log_std.exp())
    ratio = (policy.log_prob(rows["u"]).sum(1) - rows["log_prob"]).exp()
    a = rows["advantages"]
    if c.normalise_over == "batch":
        a = (a - a.mean()) / (a.std() + 1e-8)
    value = nets["critic"](rows["observations"]).squeeze(1)
    errors, moved = (value - rows["returns"]) ** 2, (value - rows["values"]).clamp(-c.clip, c.clip)
    if c.value_clip:
        errors = torch.max(errors, (rows["values"] + moved - rows["returns"]) ** 2)
    loss = torch.max(-a * ratio, -a * ratio.clamp(1 - c.clip, 1 + c.clip)).mean()
    loss = loss - c.entropy_weight * policy.entropy().sum(1).mean() + c.value_weight * errors.mean()
    groups = {"actor": [*nets["actor"].parameters(), log_std], "critic": [*nets["critic"].parameters()]}
    everything = [p for group in groups.values() for p in group]
    loss.backward()
    kl = torch.distributions.kl_divergence(torch.distributions.Normal(rows["means"], rows["log_std"].exp()), policy)
    kl = kl.sum(1).mean().item()
    rate = c.learning_rate
    if c.schedule == "adaptive":
        rate = rate / 1.5 if kl > 2 * c.desired_kl else min(1e-2, 1.5 * rate) if 0 < kl < c.desired_kl / 2 else rate
    for parameters in [everything] if c.joint_norm else groups.values():
        assert torch.nn.utils.clip_grad_norm_(parameters, c.gradient_norm) > c.gradient_norm  # so that it matters
    torch.optim.Adam(everything, rate, eps=1e-5).step()
    return (nets, log_std), loss.item(), kl


@pytest.mark.parametrize(
    "settings",
    [
        {"value_clip": True},
        {"schedule": "adaptive", "desired_kl": 1e-3, "entropy_weight": 0.01, "value_weight": 1.0},
        {
            "schedule": "adaptive",
            "value_clip": True,
            "desired_kl": 0.5,
            "joint_norm": False,
            "normalise_over": "iteration",
        },
    ],
    ids=["cleanrl", "adaptive", "rsl_rl"],
)
def test_an_update_beside_plain_torch(settings: dict[str, Any]) -> None:
    algorithm = make(gradient_norm=0.1, normalise_observations=False, **settings)
    state, batch = played(algorithm)
    new, metrics = algorithm.update(state, batch, rng.make_key(0), phase=0)
    (nets, log_std), loss, kl = plain(algorithm, state, batch)
    c = algorithm.config
    entropy = float((state.params["actor"]["log_std"] + 0.5 * math.log(2 * math.pi * math.e)).sum())
    total = metrics["actor/loss"] - c.entropy_weight * entropy + c.value_weight * metrics["critic/loss"]
    assert float(total) == pytest.approx(loss, rel=1e-4)
    if c.schedule == "adaptive":
        assert float(metrics["actor/exact_kl"]) == pytest.approx(kl, rel=1e-4)
        assert float(new.extra["rate"]) != pytest.approx(float(state.extra["rate"]))
    for name, prefix in (("actor", "net."), ("critic", "")):
        for layer, key in ((0, "layers.0"), (2, "head")):
            for kind in ("weight", "bias"):
                expected = getattr(nets[name][layer], kind).detach()
                torch.testing.assert_close(new.params[name][f"{prefix}{key}.{kind}"], expected, rtol=0, atol=2e-7)
    torch.testing.assert_close(new.params["actor"]["log_std"], log_std.detach(), rtol=0, atol=2e-7)


def test_advantages_of_an_iteration_are_normalised_once() -> None:
    _, batch = played(make())
    a, counts = batch["advantages"], batch["advantages"][:-1]
    expected = (a - counts.mean()) / (counts.std() + 1e-8)
    torch.testing.assert_close(make(normalise_over="iteration").prepared(batch)["advantages"], expected)
    assert make().prepared(batch)["advantages"] is a


def test_while_the_value_warms_up_the_actor_stands_still() -> None:
    algorithm = make(value_warmup=2)
    assert [algorithm.flags(i)["moving"] for i in range(4)] == [0.0, 0.0, 1.0, 1.0]
    state, batch = played(algorithm)
    state = state.with_extra(moving=torch.zeros(()))
    new, _ = algorithm.update(state, batch, rng.make_key(0), phase=0)
    assert all(torch.equal(v, state.params["actor"][k]) for k, v in new.params["actor"].items())
    assert float(new.opt["actor"]["count"]) == 0.0  # type: ignore[arg-type]
    assert not torch.equal(new.params["critic"]["head.weight"], state.params["critic"]["head.weight"])


def test_rates_over_the_iterations() -> None:
    assert [make().rates(i, 4)["learning_rate"] for i in range(4)] == pytest.approx([3e-4, 2.25e-4, 1.5e-4, 0.75e-4])
    assert make(schedule="constant").rates(3, 4) == {"learning_rate": 3e-4}


def test_the_density_is_of_what_was_drawn_not_of_what_was_played() -> None:
    algorithm = make(std_start=3.0)
    actor = algorithm.init(0).params["actor"]
    x = torch.zeros(64, 3)
    actions, draws = algorithm.draw(actor, x, {}, rng.make_key(1))
    means, log_std = algorithm.apply("actor", actor, x)
    assert float(actions.abs().max()) == 1.0 < float(draws["u"].abs().max())
    expected = torch.distributions.Normal(means, log_std.exp()).log_prob(draws["u"]).sum(-1)
    torch.testing.assert_close(draws["log_prob"], expected)
    assert float(log_std[0, 0]) == pytest.approx(math.log(3.0))


def test_observations_are_cut_off_only_where_they_are_normalised() -> None:
    extra, sights = (
        {"mean": torch.ones(3), "std": torch.full((3,), 2.0)},
        {"observations": torch.tensor([5.0, 99.0, -3])},
    )
    assert make().features(extra, sights).tolist() == [2.0, 10.0, -2.0]
    assert make(normalise_observations=False).features(extra, sights).tolist() == [5.0, 99.0, -3.0]


# ---- replicas


@pytest.mark.parametrize("schedule", ["linear", "adaptive"])
def test_an_update_alone_is_that_among_others(schedule: str) -> None:
    algorithm = make(schedule=schedule, value_clip=True, target_kl=0.5)
    cases = [played(algorithm, seed) for seed in range(3)]
    states, batches = (stack([case[i] for case in cases]) for i in range(2))  # type: ignore[misc]

    class Same:
        @staticmethod
        def get(step: int) -> Any:
            return batches

    together, _ = Step(algorithm, None, batch_size=12, replicas=3, batches=Same()).run(states, {}, 0, 4)
    for n, (state, batch) in enumerate(cases):
        for step in range(4):
            state, _ = algorithm.update(state, batch, rng.make_key(step), phase=0)
            state = state._replace(step=state.step + 1)
        for name in ("actor", "critic"):
            for k, v in select(together, n).params[name].items():
                torch.testing.assert_close(v, state.params[name][k], rtol=0, atol=1e-5)
        torch.testing.assert_close(together.extra["rate"][n], state.extra["rate"])
