"""MR.Q: windows that end in terminals, its bins, targets and losses by hand, and what a refresh changes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from offrl import losses, rng
from offrl.algorithm import TrainState
from offrl.algorithms.mrq import MRQ, MRQConfig
from offrl.algorithms.mrq.networks import HEAD
from offrl.data.arrays import from_arrays
from offrl.data.dataset import Dataset, DataSpec
from offrl.data.samplers.states import StateSampler, going_on, in_time
from offrl.data.samplers.tables import Experience

OBS, A, LATENT, B, H = 3, 2, 6, 8, 4
SPEC = DataSpec((OBS,), A, action_low=(-1.0,) * A, action_high=(1.0,) * A)
SMALL: dict[str, Any] = {
    "latent": LATENT,
    "hidden": [5, 7],
    "action_latent": 4,
    "horizon": H,
    "discount": 0.9,
    "episodic": True,
    "target_every": 2,
}


def make(**settings: Any) -> tuple[MRQ, TrainState]:
    """The algorithm and a state in which targets differ from what they follow and scales from 1."""
    algorithm = MRQ(MRQConfig(**{**SMALL, **settings}), SPEC)
    state, g = algorithm.init(2), torch.Generator().manual_seed(1)
    for params in (*state.params.values(), *state.target.values()):
        params.update({k: v + 0.2 * torch.randn(v.shape, generator=g) for k, v in params.items()})
    return algorithm, state.with_extra(scale=torch.tensor(2.0), target_scale=torch.tensor(3.0))


def data() -> Dataset:
    """Episodes of six rows, by turns with a terminal and a time-out; successors are known."""
    g, n = np.random.default_rng(0), 48
    last = np.arange(n) % 6 == 5
    terminal = last & (np.arange(n) % 12 == 5)
    states = g.normal(size=(n, OBS))
    more = {"next_observations": np.where(last[:, None], 2.0, np.roll(states, -1, 0))}
    return from_arrays(states, g.uniform(-1, 1, (n, A)), 5 * g.normal(size=n), terminal,
                       last & ~terminal, action_low=[-1.0] * A, action_high=[1.0] * A, **more)  # fmt: skip


def a_batch() -> dict[str, Tensor]:
    """Windows with the steps first, some of which run past a terminal."""
    sampler = StateSampler(H + 1, past_end=True)
    batch = in_time(sampler(sampler.prepare(data()), rng.make_key(5), B))
    assert batch["is_terminal"][1].any() and not batch["is_terminal"].any(0).all()
    return batch


# ---- windows, bins, returns


def test_windows_run_past_terminals_and_not_past_time_outs() -> None:
    """Of a terminal episode of 3 rows every row begins a window of 4 states, of a time-out the first alone."""
    t = np.tile(np.arange(3), 2)
    observations = (100.0 * np.repeat([0, 1], 3) + t)[:, None].astype(np.float32)
    last, terminal = t == 2, np.arange(6) == 2
    dataset = from_arrays(observations, t[:, None] / 10.0, t + 1.0, terminal, last & ~terminal, action_low=[-1.0],
                          action_high=[1.0], next_observations=observations + 1.0)  # fmt: skip
    sampler = StateSampler(4, past_end=True)
    batch = sampler(sampler.prepare(dataset), rng.make_key(0), 4000)
    begins, counts = batch["observations"][:, 0, 0].unique(return_counts=True)
    assert begins.tolist() == [0, 1, 2, 100] and float(((counts.double() - 1000) ** 2 / 1000).sum()) < 16.3
    row = int(torch.nonzero(batch["observations"][:, 0, 0] == 2)[0])
    assert batch["observations"][row, :, 0].tolist() == [2, 3, 3, 3]
    assert batch["is_terminal"][row].tolist() == [False, True, True, True]
    assert going_on(in_time(batch))[:, row].tolist() == [1, 0, 0, 0]
    row = int(torch.nonzero(batch["observations"][:, 0, 0] == 100)[0])
    assert batch["observations"][row, :, 0].tolist() == [100, 101, 102, 103]
    assert going_on(in_time(batch))[:, row].tolist() == [1, 1, 1, 1]


def test_windows_that_were_played_count_as_far_as_the_buffer_is_filled() -> None:
    """Of three windows two are there, whose first steps earned 1 and -3."""
    rewards = torch.tensor([[1.0, 9.0], [-3.0, 9.0], [100.0, 9.0]])
    source = Experience({}, {"rewards": rewards, "observations/camera": rewards[..., None]}, torch.tensor(2))
    assert float(source.mean_size("rewards")) == 2.0
    batch: Any = StateSampler(2, past_end=True)(source, rng.make_key(0), 1000)
    begins, counts = batch["rewards"][:, 0].unique(return_counts=True)
    assert begins.tolist() == [-3.0, 1.0] and abs(int(counts[0]) - 500) < 80
    assert torch.equal(batch["observations"]["camera"][..., 0], batch["rewards"])


def test_bins_of_rewards() -> None:
    values = HEAD.values(torch.zeros(()))
    torch.testing.assert_close(values[32:36], torch.tensor([0.0, 0.366838, 0.868246, 1.553589]), rtol=1e-5, atol=1e-6)
    for y, shares in (
        (1.0, {34: 0.807755, 35: 0.192245}),
        (5.0, {37: 0.297596, 38: 0.702404}),
        (-3.7, {27: 0.944757, 28: 0.055243}),
        (0.0, {32: 1.0}),
        (1e9, {64: 1.0}),
        (-1e9, {0: 1.0}),
    ):
        expected = torch.zeros(65)
        for i, share in shares.items():
            expected[i] = share
        torch.testing.assert_close(HEAD.project(torch.tensor(y), None), expected, rtol=1e-4, atol=1e-5)
    assert float(HEAD.mean(torch.zeros(65))) == 0.0


def test_returns_of_n_steps() -> None:
    """Rewards 1, 2, 4, and a terminal after the second: 1 + 0.9 * 2, where the authors' code has 1 + 0.81 * 4; without
    one 1 + 1.8 + 3.24 + 0.729 * 10.
    """
    rewards, value = torch.tensor([[1.0, 1], [2, 2], [4, 4]]), torch.tensor([10.0, 10.0])
    alive = torch.tensor([[1.0, 1], [1, 1], [0, 1], [0, 1]])
    torch.testing.assert_close(losses.n_step_target(rewards, alive, 0.9, value), torch.tensor([2.8, 13.33]))


# ---- losses beside plain torch


def perceptron(params: dict[str, Tensor], prefix: str, x: Tensor, activation: Any = F.elu) -> Tensor:
    for i in range(2):
        x = F.linear(x, params[f"{prefix}layers.{i}.weight"], params[f"{prefix}layers.{i}.bias"])
        x = activation((x - x.mean(-1, keepdim=True)) / (x.var(-1, correction=0, keepdim=True) + 1e-5).sqrt())
    return F.linear(x, params[f"{prefix}head.weight"], params[f"{prefix}head.bias"])


def encode(params: dict[str, Tensor], x: Tensor) -> Tensor:
    return F.elu(F.layer_norm(perceptron(params, "net.", x), (LATENT,)))


def pair(params: dict[str, Tensor], z: Tensor, a: Tensor) -> Tensor:
    a = F.elu(F.linear(a, params["action.weight"], params["action.bias"]))
    return perceptron(params, "net.", torch.cat([z, a], -1))


def values(params: dict[str, Tensor], x: Tensor) -> Tensor:
    """Both critics' [2, B], which have a hidden layer more."""
    found = []
    for m in range(2):
        y = x
        for i in range(3):
            y = y @ params[f"net.layers.{i}.weight"][m] + params[f"net.layers.{i}.bias"][m]
            y = F.elu(F.layer_norm(y, y.shape[-1:]))
        found.append((y @ params["net.head.weight"][m] + params["net.head.bias"][m]).squeeze(-1))
    return torch.stack(found)


def test_the_encoders_loss() -> None:
    """Row by row: what stands after a terminal counts in no term, the terminal itself does."""
    algorithm, state = make()
    batch, p = a_batch(), state.params
    loss, metrics = algorithm.encoder_loss(p, state, batch)
    parts = dict.fromkeys(("dynamics", "reward", "termination"), 0.0)
    for b in range(B):
        z = encode(p["encoder"], batch["observations"][0, b])
        for t in range(H):
            if batch["is_terminal"][t, b]:
                break
            x = pair(p["pair_encoder"], z, batch["actions"][t, b])
            y = F.linear(x, p["model"]["linear.weight"], p["model"]["linear.bias"])
            z = y[1 : LATENT + 1]
            following = encode(state.target["encoder"], batch["observations"][t + 1, b])
            parts["dynamics"] += float((z - following).square().mean()) / B
            cross = -(HEAD.project(batch["rewards"][t, b], None) * y[LATENT + 1 :].log_softmax(-1)).sum()
            parts["reward"] += float(cross) / B
            parts["termination"] += float(y[0] - batch["is_terminal"][t + 1, b].float()) ** 2 / B
    for name, value in parts.items():
        assert float(metrics[f"model/{name}"]) == pytest.approx(value, rel=1e-4)
    expected = parts["dynamics"] + 0.1 * parts["reward"] + 0.1 * parts["termination"]
    assert float(loss) == pytest.approx(expected, rel=1e-4)
    endless, _ = make(episodic=False)
    assert float(endless.encoder_loss(p, state, batch)[0]) == pytest.approx(
        expected - 0.1 * parts["termination"], rel=1e-4
    )


def test_an_unknown_terminal_state_is_no_target_of_latents() -> None:
    algorithm, state = make()
    batch = a_batch()
    unseen = {**batch, "valid": ~batch["is_terminal"]}
    moved = {**unseen, "observations": batch["observations"] + 7.0 * batch["is_terminal"].unsqueeze(-1)}
    known, *unknown = (float(algorithm.encoder_loss(state.params, state, b)[0]) for b in (batch, unseen, moved))
    assert unknown[0] == unknown[1] < known


@pytest.mark.parametrize("weight", [0.0, 0.25])
def test_an_update(weight: float) -> None:
    """Targets in units of their own scale, Huber's loss of both critics, and the policy's with the moved critics."""
    algorithm, state = make(bc_weight=weight)
    batch, key = a_batch(), rng.make_key(3)
    p, q = state.params, state.target
    after, metrics = algorithm.update(state, in_time(batch), key, phase=0)
    z = encode(q["encoder"], batch["observations"][3])
    noise = (rng.normal(key, (B, A)) * 0.2).clamp(-0.3, 0.3)
    action = (perceptron(q["actor"], "net.", z, F.relu).tanh() + noise).clamp(-1, 1)
    bootstrap = 3.0 * values(q["critic"], pair(q["pair_encoder"], z, action)).amin(0)
    target = torch.zeros(B)
    for b in range(B):
        for t in range(4):
            if batch["is_terminal"][t, b]:
                break
            target[b] += 0.9**t * (bootstrap[b] if t == 3 else batch["rewards"][t, b]) / 2.0
    torch.testing.assert_close(algorithm.td_target(state, batch, key), target, rtol=1e-4, atol=1e-5)
    z = encode(p["encoder"], batch["observations"][0])
    found = values(p["critic"], pair(p["pair_encoder"], z, batch["actions"][0]))
    assert float(metrics["critic/loss"]) == pytest.approx(float(F.smooth_l1_loss(found, target.expand(2, B))), rel=1e-4)
    assert float(metrics["critic/q"]) == pytest.approx(2.0 * float(found.mean()), rel=1e-4, abs=1e-6)

    x = perceptron(p["actor"], "net.", z, F.relu)
    moved = values(after.params["critic"], pair(p["pair_encoder"], z, x.tanh()))
    loss = 1e-5 * x.square().mean() - moved.mean()
    loss = loss + weight / 2.5 * moved.abs().mean() * (x.tanh() - batch["actions"][0]).square().mean()
    assert float(metrics["actor/loss"]) == pytest.approx(float(loss), rel=1e-4, abs=1e-6)
    observations, actions = batch["observations"][0], batch["actions"][0]
    torch.testing.assert_close(
        algorithm.q_value(state, observations, actions), 2.0 * found.amin(0), rtol=1e-4, atol=1e-5
    )


def test_decoupled_decay_and_one_clip() -> None:
    algorithm, _ = make()
    rates = {name: algorithm.optimizer(name) for name in algorithm.networks}
    assert {n: a.learning_rate for n, a in rates.items()} == {
        **dict.fromkeys(("encoder", "pair_encoder", "model"), 1e-4), **dict.fromkeys(("critic", "actor"), 3e-4)
    }  # fmt: skip
    assert {n for n, a in rates.items() if a.clip_norm == 20.0} == {"critic"}
    assert all(a.weight_decay == 1e-4 for a in rates.values())


def test_a_refresh_copies_targets_then_teaches_the_encoders() -> None:
    """In the authors' order: targets are the parameters of before, and the scale is that of the data's rows."""
    algorithm, state = make()
    source = algorithm.sampler().prepare(data())
    after, _ = algorithm.refresh(state, source, rng.make_key(0), step=0)
    for name, params in after.target.items():
        assert all(torch.equal(v, state.params[name][k]) for k, v in params.items())
    counts = {name: int(opt["count"]) for name, opt in after.opt.items()}  # type: ignore[arg-type]
    assert counts == {"encoder": 2, "pair_encoder": 2, "model": 2, "critic": 0, "actor": 0}
    assert float(after.extra["scale"]) == pytest.approx(float(data().columns["rewards"].abs().mean()), rel=1e-6)
    assert float(after.extra["target_scale"]) == 2.0


def test_initial_weights() -> None:
    """Uniform within sqrt(2) sqrt(6 / (in + out)), biases 0, heads too."""
    algorithm = MRQ(MRQConfig(), SPEC)
    params = algorithm.init(0).params
    for weight in (params["pair_encoder"]["net.head.weight"], params["actor"]["net.layers.1.weight"]):
        bound = (12.0 / sum(weight.shape)) ** 0.5
        assert 0.99 * bound < float(weight.abs().max()) <= bound
    assert all(not v.any() for module in params.values() for k, v in module.items() if k.endswith("bias"))
    assert not any("norms" in k or "scales" in k for module in params.values() for k in module)
