"""CrossQ's batch renormalisation by hand, updates in plain torch, and what acts."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import offrl
from offrl import registry, rng
from offrl.algorithm import TrainState
from offrl.algorithms.crossq import CrossQ, networks
from offrl.algorithms.crossq.networks import RenormMLP, corrected
from offrl.errors import UserError
from offrl.evaluation.policy import TrainedPolicy
from offrl.export.graph import PolicyGraph
from offrl.finetuning import summary
from offrl.settings.field import check
from offrl.settings.presets import finetune_settings
from offrl.system import files as checkpoint
from tests.support.golden import A, B, spec, transitions

LR, DISCOUNT, WEIGHT = 0.01, 0.9, 0.4
G = np.random.default_rng(4)
BATCH = transitions(G)
X = {name: x.double() for name, x in BATCH.items()}
NOISE = torch.tensor(G.normal(size=(B, A)))
Params = dict[str, Tensor]


def make(**settings: Any) -> tuple[CrossQ, TrainState]:
    kind = registry.get("algo", "crossq")
    small = {"hidden": [6, 5], "critic_hidden": [8, 7], "learning_rate": LR, "discount": DISCOUNT}
    algorithm = kind(kind.Config(**{**small, "entropy_weight": WEIGHT, **settings}), spec())
    return algorithm, algorithm.init(3)


# ---- batch renormalisation


@pytest.mark.parametrize(
    ("mean", "std", "result"),
    [
        (1.0, 2.0, 5.0),  # x = 3: 1 r + d with r = 4, cut off at 3, and d = 2
        (9.0, 2.0, -4.0),  # -3 r + d with d = 18, cut off at 5
        (-9.0, 0.1, 35.0),  # 120 r + d with r = 1/5, cut off at 1/3, and d = -18, at -5
        (-0.5, 1.0, 6.0),  # 3.5 r + d = 7 - 1: as by running statistics, 3 / 0.5
    ],
)
def test_r_and_d(mean: float, std: float, result: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Running mean 0 and deviation 0.5, at x = 3."""
    monkeypatch.setattr(networks, "EPSILON", 0.0)
    numbers = (torch.tensor(x, dtype=torch.float64) for x in (mean, std**2, 0.0, 0.25))
    new_mean, new_var = corrected(*numbers)
    assert float((3.0 - new_mean) / new_var.sqrt()) == pytest.approx(result)


def test_r_and_d_are_constants_of_the_gradient() -> None:
    """r 2, d 1: the mean moves as the batch's, the variance a fourth as much."""
    mean, var = (torch.tensor(x, dtype=torch.float64, requires_grad=True) for x in (0.5, 1.0))
    new = corrected(mean, var, torch.zeros(()).double(), torch.tensor(0.25).double())
    slopes = [float(*torch.autograd.grad(y, x, retain_graph=True)) for x, y in zip((mean, var), new, strict=True)]
    assert slopes == pytest.approx([1.0, 0.25], rel=5e-3)  # 0.001 is added to variances


@pytest.mark.parametrize(("passes", "result"), [(0, -1.0), (99_999, -1.0), (100_000, 1.0)])
def test_batches_are_corrected_after_the_warm_up(passes: int, result: float) -> None:
    """Of x = 1 and 3 mean and variance are 2 and 1, running ones 0 and 1: -1 becomes -1 + 2. By running statistics
    nothing changes, and they stay as they are.
    """
    net = RenormMLP(None, 1, [], 1, "relu", "lecun")
    torch.nn.init.ones_(net.layers[0].weight)  # type: ignore[arg-type]
    before = net.statistics() | {"passes": torch.tensor(float(passes))}
    x = torch.tensor([[1.0], [3.0]])
    with torch.no_grad():
        outputs, after = net(x, before, True)
        greedy, same = net(x, before)
    assert float(outputs[0]) == pytest.approx(result, abs=2e-3)  # 0.001 is added to variances
    expected = {"passes": passes + 1.0, "mean0": 0.02, "var0": 1.0}
    assert {name: float(value) for name, value in after.items()} == pytest.approx(expected)
    torch.testing.assert_close(greedy, x / math.sqrt(1.001))
    assert all(torch.equal(x, before[name]) for name, x in same.items())


def test_an_activation_that_is_always_the_same_has_a_gradient() -> None:
    """Its variance is 0, at which a root has no slope."""
    net = RenormMLP(2, 3, [4], 1, "tanh", "lecun")
    torch.nn.init.constant_(net.layers[0].bias, -99.0)  # type: ignore[arg-type]
    running = {"passes": torch.tensor(1e5), "mean1": torch.ones(2, 1, 4)}
    outputs, _ = net(X["observations"].float(), net.statistics() | running, True)
    outputs.square().sum().backward()
    assert all(x.grad is not None and bool(x.grad.isfinite().all()) for x in net.parameters())


# ---- updates in plain torch


def network(p: Params, running: Params, x: Tensor, learn: bool) -> tuple[Tensor, Params]:
    """torch's batch normalisation, by the batch's statistics or by running ones; and these after the batch."""
    after = {"passes": running["passes"] + 1.0}
    for i in range(3):
        x = x.relu() if i else x
        mean, var = (running[f"{name}{i}"].reshape(-1) for name in ("mean", "var"))
        after[f"mean{i}"] = 0.99 * mean + 0.01 * x.detach().mean(0)
        after[f"var{i}"] = 0.99 * var + 0.01 * (x - x.mean(0)).detach().square().mean(0)
        scale, shift = p[f"scales.{i}"].reshape(-1), p[f"shifts.{i}"].reshape(-1)
        x = F.batch_norm(x, *((None, None) if learn else (mean, var)), scale, shift, learn, eps=1e-3)
        weight, bias = p[f"layers.{i}.weight"], p[f"layers.{i}.bias"]
        x = F.linear(x, weight, bias) if bias.ndim == 1 else x @ weight + bias
    return x, after


def policy(p: Params, running: Params, observations: Tensor, learn: bool) -> tuple[Tensor, Tensor, Params]:
    """The sample that NOISE makes, its log density with log(1 - a^2) written out, and the statistics afterwards."""
    outputs, after = network(p, running, observations, learn)
    mean, log_std = outputs.chunk(2, -1)
    log_std = log_std.clamp(-20.0, 2.0)
    u = mean + log_std.exp() * NOISE
    log_p = -0.5 * NOISE**2 - log_std - 0.5 * math.log(2 * math.pi) - (1 - u.tanh() ** 2).log()
    return u.tanh(), log_p.sum(-1), after


def double(tree: Any) -> Any:
    return {k: v.double().clone().requires_grad_() for k, v in tree.items()}


def close(result: Params, expected: Params) -> None:
    assert result.keys() == expected.keys()
    for name, x in expected.items():
        np.testing.assert_allclose(result[name].flatten(), x.detach().flatten(), atol=2e-5, err_msg=name)


def test_three_updates_in_plain_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Critics learn at each: from one batch of 2 B rows, whose second half gives the targets. Then, at the third, the
    policy by its batch's statistics and the critics' running ones, and the entropy's weight by the policy before.
    """
    monkeypatch.setattr(rng, "normal", lambda key, shape: NOISE.float())
    algorithm, state = make()
    actor = double({k.removeprefix("body."): v for k, v in state.params["actor"].items()})
    members = [double({k: v[e] for k, v in state.params["critic"].items()}) for e in range(2)]
    log = torch.tensor(math.log(WEIGHT), dtype=torch.float64, requires_grad=True)
    running = {k: v.double() for k, v in state.extra["actor"].items()}
    each = [{k: v[e].double() if v.ndim else v for k, v in state.extra["critic"].items()} for e in range(2)]
    adam = {
        "critic": torch.optim.Adam([v for p in members for v in p.values()], LR, (0.5, 0.999)),
        "actor": torch.optim.Adam(actor.values(), LR, (0.5, 0.999)),
        "entropy": torch.optim.Adam([log], LR),
    }

    def descend(name: str, loss: Tensor) -> None:
        adam[name].zero_grad()
        loss.backward()
        adam[name].step()

    for phase in range(3):
        state, metrics = algorithm.update(state, BATCH, rng.make_key(phase), phase=phase)
        with torch.no_grad():
            action, log_p, _ = policy(actor, running, X["next_observations"], False)
        pairs = [(X["observations"], X["actions"]), (X["next_observations"], action)]
        inputs = torch.cat([torch.cat(pair, -1) for pair in pairs])
        outputs = [network(p, known, inputs, True) for p, known in zip(members, each, strict=True)]
        q = torch.stack([x.squeeze(-1) for x, _ in outputs])
        following = q[:, B:].detach().amin(0) - log.detach().exp() * log_p
        target = X["rewards"] + DISCOUNT * X["masks"] * following
        loss = ((q[:, :B] - target) ** 2).mean(-1).sum()
        assert float(metrics["critic/loss"]) == pytest.approx(float(loss.detach()), rel=1e-4)
        descend("critic", loss)
        each = [after for _, after in outputs]
        if phase == 2:
            action, log_p, after = policy(actor, running, X["observations"], True)
            inputs = torch.cat([X["observations"], action], -1)
            values = torch.stack([network(p, k, inputs, False)[0] for p, k in zip(members, each, strict=True)])
            loss = (log.detach().exp() * log_p - values.squeeze(-1).amin(0)).mean()
            assert float(metrics["actor/loss"]) == pytest.approx(float(loss.detach()), rel=1e-4)
            descend("actor", loss)
            running = after
            descend("entropy", log.exp() * (-log_p.detach().mean() + A))
        assert ("actor/loss" in metrics) == (phase == 2)
        expected = {f"body.{k}": x for k, x in actor.items()}
        close(state.params["actor"], expected)
        close(state.extra["actor"], running)
        for e in range(2):
            close({k: x[e] for k, x in state.params["critic"].items()}, members[e])
            close({k: x[e] if x.ndim else x for k, x in state.extra["critic"].items()}, each[e])
    assert float(state.params["entropy"]["log"]) == pytest.approx(float(log.detach()), abs=1e-5)
    assert state.target == {}


def test_processes_share_their_statistics() -> None:
    """Each normalises its part of the batch by itself; running statistics are the mean of all processes'."""
    algorithm, state = make()
    alone, _ = algorithm.update(state, BATCH, rng.make_key(0), phase=2)
    algorithm.runtime.reduce_gradients = lambda x: {name: 2.0 * value for name, value in x.items()}
    shared, _ = algorithm.update(state, BATCH, rng.make_key(0), phase=2)
    torch.testing.assert_close(shared.extra["critic"]["mean0"], 2.0 * alone.extra["critic"]["mean0"])
    torch.testing.assert_close(shared.extra["actor"]["var0"], 2.0 * alone.extra["actor"]["var0"])


# ---- policies


def test_policies_act_by_running_statistics() -> None:
    """One observation alone as among others; and so does an exported file."""
    algorithm, state = make()
    for phase in range(3):
        state, _ = algorithm.update(state, BATCH, rng.make_key(phase), phase=phase)
    kept = {name: x.clone() for name, x in state.extra["actor"].items()}
    policy = TrainedPolicy(algorithm, state, 0)
    raw = 3.0 * BATCH["observations"].numpy()
    among = policy.act(raw)
    alone = np.stack([policy.act(x) for x in raw])
    np.testing.assert_allclose(among, alone, atol=1e-6)
    np.testing.assert_allclose(PolicyGraph(policy, False)(torch.from_numpy(raw)).numpy(), among, atol=1e-6)
    actor = {k.removeprefix("body."): v for k, v in state.params["actor"].items()}
    expected = network(actor, kept, torch.from_numpy(raw), False)[0].chunk(2, -1)[0].tanh()
    np.testing.assert_allclose(among, expected.numpy(), atol=1e-6)
    assert all(torch.equal(x, kept[name]) for name, x in policy.state.extra["actor"].items())


def test_it_learns_in_an_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replicas and policies' files have statistics of their own."""
    monkeypatch.setattr(summary, "picture", lambda *a, **k: False)
    settings = {"algo.hidden": [8], "algo.critic_hidden": [8], "algo.batch_size": 8, "eval.workers": 0}
    run = offrl.finetune(
        None, algo="crossq", seeds=2, env=lambda: gym.make("Pendulum-v1"), steps=60, warmup=30, mixing="auto",
        quiet=True, max_steps=8, device="cpu", compile="eager", runs_dir=str(tmp_path),
        settings={**settings, "eval.episodes": 1, "eval.every": 0},
    )  # fmt: skip
    tensors, meta = checkpoint.load_latest(run.dir) or ({}, {})
    assert meta["updates"] == 30
    passes = {n.split("/")[-2]: x.tolist() for n, x in tensors.items() if n.endswith("/passes")}
    assert passes == {"actor": [10.0, 10.0], "critic": [30.0, 30.0]}
    means = [run.policy(seed).state.extra["actor"]["mean0"] for seed in (0, 1)]
    assert not torch.equal(*means) and bool((means[0] != 0.0).all())


# ---- settings


def test_defaults_are_the_authors() -> None:
    kind = registry.get("algo", "crossq")
    c = kind.Config()
    assert (c.hidden, c.critic_hidden, c.critics, c.batch_size) == ([256, 256], [2048, 2048], 2, 256)
    assert (c.learning_rate, c.entropy_weight, c.discount, c.n_step) == (1e-3, 1.0, 0.99, 1)
    assert finetune_settings("crossq") == {"mixing": 0, "warmup": 5000}
    assert (networks.MOMENTUM, networks.EPSILON, networks.WARM_UP) == (0.99, 1e-3, 100_000)
    algorithm, _ = make()
    assert [algorithm.optimizer(name).beta1 for name in ("actor", "critic", "entropy")] == [0.5, 0.5, 0.9]
    assert algorithm.traits.period == 3 and algorithm.target_entropy == -A


@pytest.mark.parametrize(
    "name", ["target_critics", "max_target_actions", "layer_norm", "residual", "critic_dropout", "spectral_norm"]
)
def test_settings_of_targets_and_other_layers_are_refused(name: str) -> None:
    with pytest.raises(UserError, match=rf"leave algo\.{name} as it is") as error:
        make(**{name: 2})
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("name", "value"), [("polyak", 0.005), ("lipschitz", 1.0), ("value_head", "c51")])
def test_values_that_have_no_effect_are_refused(name: str, value: Any) -> None:
    kind = registry.get("algo", "crossq")
    with pytest.raises(UserError, match=f"{name}={value} is "):
        check(kind.Config(**{name: value}))
