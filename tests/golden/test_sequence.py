"""The Decision Transformer and its descendants against float64 NumPy and numbers worked out by hand."""

from __future__ import annotations

import copy
import dataclasses
import math
import pickle
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from offrl import registry, rng
from offrl.algorithms.modt import kmeans, shortest
from offrl.algorithms.qdt import relabel
from offrl.data.arrays import from_arrays
from offrl.data.dataset import Dataset
from offrl.data.samplers.sequences import SequenceSampler, windows
from offrl.data.transforms.columns import scale_rewards
from offrl.errors import UserError
from offrl.evaluation.policy import TrainedPolicy
from offrl.nn import Transformer
from offrl.nn.transformer import visible
from offrl.settings.train import TrainConfig
from offrl.training import stages

LENGTHS = (3, 6, 2)


@pytest.fixture(autouse=True)
def _same_weights() -> None:
    torch.manual_seed(0)


def data(discrete: bool = False, **more: Any) -> Dataset:
    """Episodes of 3, 6 and 2 rows; the first two end in a terminal, the last by time."""
    g, n = np.random.default_rng(0), sum(LENGTHS)
    ends = np.cumsum(LENGTHS) - 1
    terminations, truncations = np.zeros(n, bool), np.zeros(n, bool)
    terminations[ends[:2]], truncations[ends[2]] = True, True
    actions = g.integers(0, 3, n) if discrete else g.uniform(-1, 1, (n, 2))
    bounds: dict[str, Any] = {"num_actions": 3} if discrete else {"action_low": -1.0, "action_high": 1.0}
    rewards = np.arange(n, dtype=float)
    return from_arrays(g.normal(size=(n, 3)), actions, rewards, terminations, truncations, **bounds, **more)


def make(name: str, dataset: Dataset, **settings: Any) -> Any:
    kind = registry.get("algo", name)
    small = {"width": 8, "layers": 2, "heads": 2, "context": 4, "dropout": 0.0, "warmup_steps": 0, "batch_size": 5}
    return kind(kind.fit_config(kind.Config(**{**small, **settings}), dataset), dataset.spec)


def batch_of(algorithm: Any, dataset: Dataset, begin: list[int]) -> dict[str, Tensor]:
    sampler = algorithm.sampler()
    return windows(sampler.prepare(dataset), torch.tensor(begin), sampler.length, sampler.left_padded)


# ---- the transformer


def layer_norm(x: np.ndarray, p: dict[str, np.ndarray], name: str) -> np.ndarray:
    centred = x - x.mean(-1, keepdims=True)
    return centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5) * p[f"{name}.weight"] + p[f"{name}.bias"]


def affine(x: np.ndarray, p: dict[str, np.ndarray], name: str) -> np.ndarray:
    return x @ p[f"{name}.weight"].T + p[f"{name}.bias"]


def reference(
    x: np.ndarray,
    p: dict[str, np.ndarray],
    layers: int,
    heads: int,
    valid: np.ndarray,
    post_norm: bool = False,
    shown: Any = None,
) -> np.ndarray:
    """Token by token, head by head. shown: which tokens of a batch are attended to at all."""
    batch, tokens, width = x.shape
    size = width // heads
    for i in range(layers):
        at = f"blocks.{i}"
        qkv = affine(x if post_norm else layer_norm(x, p, f"{at}.norm1"), p, f"{at}.qkv")
        seen = np.zeros_like(x)
        for b in range(batch):
            for t in range(tokens):
                may = [s for s in range(t + 1) if (valid[b, s] or s == t) and (shown is None or shown[b, s])]
                for h in range(heads):
                    part = slice(h * size, (h + 1) * size)
                    q = qkv[b, t, part]
                    k, v = (
                        qkv[b, may][:, offset + h * size : offset + (h + 1) * size] for offset in (width, 2 * width)
                    )
                    scores = np.exp(k @ q / math.sqrt(size))
                    seen[b, t, part] = scores / scores.sum() @ v
        x = x + affine(seen, p, f"{at}.out")
        if post_norm:
            x = layer_norm(x, p, f"{at}.norm1")
        up = np.maximum(affine(x if post_norm else layer_norm(x, p, f"{at}.norm2"), p, f"{at}.up"), 0.0)
        x = x + affine(up, p, f"{at}.down")
        if post_norm:
            x = layer_norm(x, p, f"{at}.norm2")
    return x if post_norm else layer_norm(x, p, "norm")


def scramble(module: torch.nn.Module, seed: int = 0) -> dict[str, np.ndarray]:
    """Parameters far from their small initial values, also as NumPy's."""
    g = torch.Generator().manual_seed(seed)
    for parameter in module.parameters():
        parameter.data += 0.3 * torch.randn(parameter.shape, generator=g)
    return {name: v.detach().double().numpy() for name, v in module.named_parameters()}


@pytest.mark.parametrize("post_norm", [False, True])
def test_transformer(post_norm: bool) -> None:
    net = Transformer(8, 2, 2, activation="relu", post_norm=post_norm)
    p = scramble(net)
    x = torch.randn(3, 5, 8, generator=torch.Generator().manual_seed(1))
    valid = torch.tensor([[True] * 5, [True, True, False, False, False], [False, False, True, True, True]])
    out = net(x, visible(valid, 5))
    expected = reference(x.double().numpy(), p, 2, 2, valid.numpy(), post_norm)
    np.testing.assert_allclose(out.detach().numpy()[valid], expected[valid.numpy()], atol=2e-5)
    net.zero_grad()  # under the transforms of training attention is written out: the same
    slow = torch.func.functional_call(net, dict(net.named_parameters()), (x, visible(valid, 5)))
    plain = torch.func.vmap(lambda v: net(v.unsqueeze(0), visible(torch.ones(1, 5, dtype=torch.bool), 5)))(x)
    torch.testing.assert_close(slow, out)
    torch.testing.assert_close(plain[0, 0], out[0], atol=1e-5, rtol=0)


@pytest.mark.parametrize("post_norm", [False, True])
def test_the_last_block_may_be_asked_for_some_tokens_only(post_norm: bool) -> None:
    net = Transformer(8, 3, 2, post_norm=post_norm)
    scramble(net)
    x = torch.randn(3, 6, 8, generator=torch.Generator().manual_seed(1))
    valid = torch.tensor([[True] * 6, [True, True, True, False, False, False], [False, False, False, True, True, True]])
    params, rows = dict(net.named_parameters()), slice(1, None, 3)

    def loss(p: Any, read: bool) -> Tensor:
        mask = visible(valid, 6)
        y = torch.func.functional_call(net, p, (x, mask), {"rows": rows} if read else {})
        return ((y if read else y[:, rows]) * torch.arange(8.0)).square().mean()

    (one, some), (all_, full) = (torch.func.grad_and_value(loss)(params, read)[::-1] for read in (True, False))
    torch.testing.assert_close(one, all_)
    torch.testing.assert_close(some, full, atol=1e-5, rtol=1e-4)


def test_cached_decoding_is_full_recomputation() -> None:
    net = Transformer(16, 3, 4)
    scramble(net)
    x = torch.randn(2, 11, 16, generator=torch.Generator().manual_seed(0))
    whole, parts, cache = net(x), [], ()
    for first, last in ((0, 4), (4, 5), (5, 9), (9, 11)):
        y, cache = net.extend(x[:, first:last], cache)
        parts.append(y)
    torch.testing.assert_close(torch.cat(parts, 1), whole, atol=1e-5, rtol=0)


def test_dropout_has_its_rate_and_its_key() -> None:
    keep = rng.keep(rng.make_key(1), (301, 401), 0.1)
    assert float((~keep).float().mean()) == pytest.approx(0.1, abs=0.005)
    net, x = Transformer(8, 1, 1, dropout=0.5), torch.randn(3, 8).expand(2, 3, 8)
    scramble(net)
    a, b, other = (net(x, None, rng.make_key(seed)) for seed in (0, 0, 1))
    assert torch.equal(a, b) and not torch.equal(a, other) and not torch.equal(a[0], a[1])


# ---- windows


def test_windows_stay_in_their_episode() -> None:
    dataset = data()
    returns = [3, 3, 2, 33, 30, 26, 21, 15, 8, 19, 10]  # of rewards 0 1 2 | 3 4 5 6 7 8 | 9 10
    for left in (False, True):
        sampler = SequenceSampler(4, left_padded=left)
        batch = windows(sampler.prepare(dataset), torch.tensor([1, 3, 7, 10]), 4, left)
        rows = [[1, 2], [3, 4, 5, 6], [7, 8], [10]]
        for b, expected in enumerate(rows):
            at = (
                [False] * (4 - len(expected)) + [True] * len(expected)
                if left
                else [True] * len(expected) + [False] * (4 - len(expected))
            )
            assert batch["valid"][b].tolist() == at
            mask = batch["valid"][b]
            assert batch["returns_to_go"][b][mask].tolist() == [returns[r] for r in expected]
            assert batch["rewards"][b][mask].tolist() == expected
            assert batch["timesteps"][b][mask].tolist() == [r - (0 if r < 3 else 3 if r < 9 else 9) for r in expected]
            assert torch.equal(batch["observations"][b][mask], dataset.columns["observations"][expected])
            for name, column in batch.items():
                if name != "valid":
                    assert not column[b][~mask].any(), name


def test_returns_are_of_recorded_rewards_and_whole_episodes() -> None:
    dataset = scale_rewards(data(), 0.5, -1.0)
    batch = windows(SequenceSampler(1).prepare(dataset), torch.tensor([3]), 1)
    assert float(batch["returns_to_go"]) == 33.0 and float(batch["rewards"]) == 0.5
    cut = dataclasses.replace(data(), complete=torch.tensor([True, False, True]))
    source = SequenceSampler(2).prepare(cut)
    assert source.count == 5 and windows(source, torch.tensor([3]), 2)["rewards"].tolist() == [[9.0, 10.0]]


def test_rows_are_drawn_by_the_weight_of_their_episode() -> None:
    dataset = dataclasses.replace(data(), weights=torch.tensor([2.0, 0.0, 1.0], dtype=torch.float64))
    sampler = SequenceSampler(1)
    batch = sampler(sampler.prepare(dataset), rng.make_key(0), 8000)
    share = torch.bincount(batch["rewards"].flatten().long(), minlength=11) / 8000
    np.testing.assert_allclose(share[:3], 0.25, atol=0.02)
    np.testing.assert_allclose(share[3:9], 0.0)
    np.testing.assert_allclose(share[9:], 0.125, atol=0.02)
    with pytest.raises(UserError, match="no whole episode has a weight above 0"):
        sampler.prepare(dataclasses.replace(dataset, weights=torch.zeros(3, dtype=torch.float64)))


# ---- DT


def dt_actions(p: dict[str, np.ndarray], batch: dict[str, Tensor], scale: float) -> np.ndarray:
    """tanh of the head at each observation's token, [B, K, A], by NumPy."""
    b = {k: v.double().numpy() for k, v in batch.items()}
    time = p["steps.time.weight"][batch["timesteps"].numpy()]
    kinds = (
        ("return", b["returns_to_go"][..., None] / scale),
        ("observation", b["observations"]),
        ("action", b["actions"]),
    )
    tokens = [affine(x, p, f"steps.embed.{kind}") + time for kind, x in kinds]
    x = layer_norm(np.stack(tokens, 2).reshape(len(time), -1, time.shape[-1]), p, "steps.norm")
    trunk = {k.removeprefix("steps.trunk."): v for k, v in p.items()}
    h = reference(x, trunk, 2, 2, np.repeat(b["valid"] > 0, 3, 1))
    return np.tanh(affine(h[:, 1::3], p, "head.net.head"))


def test_dt_loss() -> None:
    dataset = data()
    algorithm = make("dt", dataset)
    assert (
        algorithm.config.target_return == 33.0 == algorithm.config.return_scale and algorithm.config.max_timestep == 6
    )
    p = scramble(algorithm.networks["actor"])
    params = {k: torch.tensor(v, dtype=torch.float32) for k, v in p.items()}
    batch = batch_of(algorithm, dataset, [0, 1, 4, 8, 10])
    loss, _ = algorithm.actor_loss(params, algorithm.init(0), batch, None)
    error = ((dt_actions(p, batch, 33.0) - batch["actions"].numpy()) ** 2).mean(-1)
    assert float(loss) == pytest.approx(error[batch["valid"].numpy()].mean(), rel=1e-4)


@pytest.mark.parametrize("name", ["dt", "edt", "modt"])
def test_no_action_sees_itself_or_what_comes_later(name: str) -> None:
    dataset = data()
    algorithm = make(name, dataset)
    scramble(algorithm.networks["actor"])
    state = algorithm.init(0)
    state = state._replace(params={"actor": {k: v.detach() for k, v in algorithm.networks["actor"].named_parameters()}})
    batch = batch_of(algorithm, dataset, [3, 4])

    def actions(changed: dict[str, Tensor]) -> Tensor:
        out = algorithm.apply(
            "actor", state.params["actor"], algorithm.tokens(changed), changed["timesteps"], changed["valid"], None
        )
        return (out[0] if isinstance(out[0], tuple) else out)[0].detach()

    before = actions(batch)
    for name_, step in (("actions", 2), ("observations", 3), ("returns_to_go", 3), ("rewards", 2)):
        other = {**batch, name_: batch[name_].clone()}
        other[name_][:, step] += 1.0
        after = actions(other)
        first = step if name_ in ("observations", "returns_to_go") else step + 1
        assert torch.equal(before[:, :first], after[:, :first]), name_
        if name_ in algorithm.sizes() or name_ != "rewards":
            assert not torch.allclose(before[:, 3], after[:, 3], atol=1e-6), name_


@pytest.mark.parametrize("name", ["dt", "edt", "modt"])
@pytest.mark.parametrize("discrete", [False, True])
def test_acting_is_the_forward_of_training(name: str, discrete: bool) -> None:
    """Step by step through an episode longer than the context, the policy gives what the network gives for the whole
    window, padded on either side."""
    dataset = data(discrete)
    if discrete and name == "modt":
        pytest.skip("continuous actions only")
    # one length of history: all of it
    algorithm = make(name, dataset, **({"stride": 99, "expert_temperature": 0.0} if name == "edt" else {}))
    scramble(algorithm.networks["actor"])
    actor = {k: v.detach() for k, v in algorithm.networks["actor"].named_parameters()}
    state = algorithm.init(0)._replace(params={"actor": actor})
    policy = TrainedPolicy(algorithm, state, 0)
    observations, rewards = dataset.columns["observations"][3:9].numpy(), dataset.columns["rewards"][3:9].numpy()
    carry, left = policy.start(1), float(getattr(algorithm.config, "target_return", 0.0))
    past: list[dict[str, Tensor]] = []
    for t in range(6):
        action, after = policy.step(carry, observations[t : t + 1], t)
        row = {name_: column[:, -1] for name_, column in after.window.items()}
        assert float(row["returns_to_go"]) == pytest.approx(left)
        past.append(row)
        recent = past[-4:]
        for leading in (False, True):
            batch = {}
            for key in row:
                column = torch.stack([r[key] for r in recent], 1)
                padding = column.new_zeros(1, 4 - len(recent), *column.shape[2:])
                batch[key] = torch.cat([padding, column] if leading else [column, padding], 1)
            batch["valid"] = torch.tensor([[False] * (4 - len(recent)) + [True] * len(recent)])
            batch["valid"] = batch["valid"] if leading else batch["valid"].flip(1)
            out = algorithm.apply("actor", actor, algorithm.tokens(batch), batch["timesteps"], batch["valid"], None)
            if name == "edt":  # asks for what its first answer promises
                batch["returns_to_go"] = out[1] * algorithm.config.return_scale
                out = algorithm.apply("actor", actor, algorithm.tokens(batch), batch["timesteps"], batch["valid"], None)
            dist = out[0] if isinstance(out[0], tuple) else out
            expected = algorithm.policy.mode(tuple(x[:, -1 if leading else len(recent) - 1] for x in dist))
            np.testing.assert_allclose(action, expected.numpy(), atol=1e-5)
        carry = policy.observe_reward(after, rewards[t : t + 1])
        past[-1]["rewards"] = torch.tensor(rewards[t : t + 1])
        left -= float(rewards[t])


def test_a_policy_that_was_asked_for_a_return_wants_to_know_its_rewards() -> None:
    algorithm = make("dt", scale_rewards(data(), 2.0, 1.0), target_return=10.0)
    policy = TrainedPolicy(algorithm, algorithm.init(0), 0)
    assert policy.uses_rewards
    policy.act(np.zeros(3))
    with pytest.raises(UserError, match=r"reward=\.\.\."):
        policy.act(np.zeros(3))
    policy.act(np.zeros(3), reward=4.0)  # as recorded
    policy.act(np.zeros(3), reward=1.0)
    assert policy._carry.window["returns_to_go"].tolist() == [[10.0, 6.0, 5.0]]
    policy.reset()
    policy.act(np.zeros(3))
    assert policy._carry.window["returns_to_go"].tolist() == [[10.0]]


# ---- descendants


def test_edt_losses() -> None:
    dataset = data()
    algorithm = make("edt", dataset, return_expectile=0.9, return_bins=5)
    assert algorithm.config.return_range == [2.0, 33.0]
    assert algorithm.config.return_scale == 33.0
    returns = torch.tensor([2.0, 33.0, 17.5, -5.0, 40.0, 17.4, 32.9])
    assert algorithm.bin_of(returns).tolist() == [0, 4, 2, 0, 4, 1, 3]
    net = algorithm.networks["actor"]
    scramble(net)
    actor = {k: v.detach() for k, v in net.named_parameters()}
    batch = batch_of(algorithm, dataset, [0, 4])
    tokens = algorithm.tokens(batch)
    (mean,), best, bins, following = algorithm.apply("actor", actor, tokens, batch["timesteps"], batch["valid"], None)
    loss, metrics = algorithm.actor_loss(actor, algorithm.init(0), batch, None)
    valid, returns = batch["valid"].numpy(), batch["returns_to_go"].double().numpy()
    share = ((returns - 2.0) / 31.0).clip(0.0, 1.0)
    index = np.floor(share * 4).astype(int)
    np.testing.assert_allclose(tokens["return"][..., 0][valid], ((index - 2.5) / 2.5)[valid], atol=1e-6)
    error = returns / 33.0 - best.double().numpy()
    promise = (np.where(error > 0, 0.9, 0.1) * error**2)[valid].mean()
    logits = bins.double().numpy()
    entropy = np.log(np.exp(logits).sum(-1)) - np.take_along_axis(logits, index[..., None], -1)[..., 0]
    imitation = ((mean - batch["actions"]).double().numpy() ** 2).mean(-1)[valid].mean()
    gap = ((following[:, :-1] - batch["observations"][:, 1:]).double().numpy() ** 2).mean(-1)
    model = gap[valid[:, 1:] & valid[:, :-1]].mean()
    for name, value in (
        ("loss", imitation),
        ("return", promise),
        ("return_bins", entropy[valid].mean()),
        ("next", model),
    ):
        assert float(metrics[f"actor/{name}"]) == pytest.approx(value, rel=1e-4), name
    assert float(loss) == pytest.approx(imitation + 0.5 * promise + 0.001 * entropy[valid].mean() + model, rel=1e-4)


@pytest.mark.parametrize("ends", [[-20.272305, 3234.3], [1.629008, 4592.3], [-280.178953, 12135.0]])
def test_edt_asks_for_the_bin_that_it_drew(ends: list[float]) -> None:
    algorithm = make("edt", data(), return_range=ends)
    every = torch.arange(60)
    assert algorithm.bin_of(algorithm.in_bin(every)).tolist() == every.tolist()


def test_edt_draws_good_returns() -> None:
    """The logits, more for better bins; those below the quantile are never drawn (the authors' `expert_sampling`)."""
    algorithm = make("edt", data(), return_bins=6, expert_temperature=2.0, expert_cut=0.5)
    policy = algorithm.actor(algorithm.init(0))
    bins = torch.tensor([1.0, -3.0, 0.5, 1.2, 0.0, -1.0])
    drawn = algorithm.bin_of(
        policy.requested_returns(torch.zeros(1, 1, 6000), bins.expand(1, 1, 6000, 6), rng.make_key(0))
    )[0]
    logits = bins.numpy() + 2.0 * np.linspace(0.0, 1.0, 6)
    kept = logits >= np.quantile(logits, 0.5)
    assert kept.sum() == 3
    p = np.where(kept, np.exp(logits), 0.0)
    np.testing.assert_allclose(np.bincount(drawn[0].numpy(), minlength=6) / 6000, p / p.sum(), atol=0.03)
    assert bool((torch.bincount(drawn[0], minlength=6)[~torch.from_numpy(kept)] == 0).all())


def test_edt_draws_by_the_seed_and_the_step() -> None:
    algorithm = make("edt", data())
    scramble(algorithm.networks["actor"])
    actor = {k: v.detach() for k, v in algorithm.networks["actor"].named_parameters()}
    observations = torch.randn(16, 3, generator=torch.Generator().manual_seed(0))

    def act(seed: int, explore: bool) -> Tensor:
        policy = algorithm.actor(algorithm.init(seed)._replace(params={"actor": actor}))
        return policy.act(policy.start(16), observations, rng.make_key(int(explore)), explore=explore)[0]

    assert torch.equal(act(0, False), act(0, True)), "the policy of a step is deterministic"
    assert not torch.equal(act(0, False), act(1, False)), "but not the return that it is asked for"


@pytest.mark.parametrize("padding", ["right", "left"])
def test_edt_hides_returns_but_the_first(padding: str) -> None:
    """As in the authors' mask: nothing attends to the return of a later step, also not that return itself."""
    dataset = data()
    algorithm = make("edt", dataset, activation="relu", padding=padding)
    p = scramble(algorithm.networks["actor"])
    actor = {k: torch.tensor(v, dtype=torch.float32) for k, v in p.items()}
    batch = batch_of(algorithm, dataset, [3, 1, 7])  # windows of 4, 2 and 2 steps
    valid = batch["valid"].numpy()

    def outputs(batch: dict[str, Tensor]) -> tuple[np.ndarray, np.ndarray]:
        (mean,), _, _, following = algorithm.apply(
            "actor", actor, algorithm.tokens(batch), batch["timesteps"], batch["valid"], None
        )
        return mean.numpy(), following.numpy()

    time = p["steps.time.weight"][batch["timesteps"].numpy()]
    tokens = [
        affine(x.double().numpy(), p, f"steps.embed.{kind}") + time for kind, x in algorithm.tokens(batch).items()
    ]
    x = layer_norm(np.stack(tokens, 2).reshape(3, -1, 8), p, "steps.norm")
    shown = np.ones((3, 4, 4), bool)
    shown[:, :, 1] = valid & (valid.cumsum(1) == 1)
    shown[~valid] = True  # padding is looked at by padding only
    trunk = {k.removeprefix("steps.trunk."): v for k, v in p.items()}
    h = reference(x, trunk, 2, 2, np.repeat(valid, 4, 1), post_norm=True, shown=shown.reshape(3, 16))
    mean, following = outputs(batch)
    np.testing.assert_allclose(mean[valid], np.tanh(affine(h[:, 1::4], p, "head.net.head"))[valid], atol=2e-5)
    np.testing.assert_allclose(following[valid], affine(h[:, 3::4], p, "next_observation")[valid], atol=5e-5)
    # of the window of 4 steps: the first return tells of all that comes, a later one of its own action
    for step in range(4):
        moved = {**batch, "returns_to_go": batch["returns_to_go"].clone()}
        moved["returns_to_go"][0, step] = 2.0
        changed = np.abs(outputs(moved)[0] - mean)[0].max(-1) > 1e-6
        assert changed.tolist() == ([True] * 4 if step == 0 else [i == step for i in range(4)])


def test_edt_takes_the_history_that_promises_most() -> None:
    dataset = data()
    algorithm = make("edt", dataset, stride=1, expert_temperature=0.0)
    scramble(algorithm.networks["actor"])
    actor = {k: v.detach() for k, v in algorithm.networks["actor"].named_parameters()}
    state = algorithm.init(0)._replace(params={"actor": actor})
    g = torch.Generator().manual_seed(0)
    shapes = {"observations": (8, 4, 3), "actions": (8, 4, 2), "rewards": (8, 4), "returns_to_go": (8, 4)}
    window = {k: torch.randn(shape, generator=g) for k, shape in shapes.items()} | {
        "timesteps": torch.arange(4).expand(8, 4)
    }
    (mean,), looked = algorithm.actor(state).search(window, rng.make_key(0))
    chosen = set()

    def answer(short: dict[str, Tensor]) -> Any:
        return algorithm.apply("actor", actor, algorithm.tokens(short), short["timesteps"], None, None)

    for e in range(8):
        promises, actions = [], []
        for length in (4, 3, 2, 1):  # alone, and cut off in fact
            short = {k: v[e : e + 1, 4 - length :] for k, v in window.items()}
            short["returns_to_go"] = answer(short)[1] * algorithm.config.return_scale
            (action,), estimate, *_ = answer(short)
            promises.append(float(estimate[0, -1]))
            actions.append(action[0, -1])
        best = int(np.argmax(promises))
        np.testing.assert_allclose(mean[e], actions[best], atol=1e-5)
        assert looked[e].tolist() == [i >= best for i in range(4)]
        chosen.add(best)
    assert len(chosen) > 1


def test_shortest_combination_of_gradients() -> None:
    """Of two orthogonal gradients of lengths 1 and 2 the point of the segment nearest to 0 has weights 0.8 and 0.2."""
    np.testing.assert_allclose(shortest(torch.tensor([[1.0, 0.0], [0.0, 2.0]])), [0.8, 0.2], atol=1e-5)
    np.testing.assert_allclose(shortest(torch.tensor([[1.0, 0.0], [3.0, 0.0], [2.0, 1.0]])), [1.0, 0.0, 0.0], atol=1e-5)
    # a slope of zeros is of a loss that no row of the batch speaks of
    np.testing.assert_allclose(shortest(torch.tensor([[1.0, 0.0], [0.0, 2.0], [0.0, 0.0]])), [0.8, 0.2, 0.0], atol=1e-5)
    assert shortest(torch.tensor([[1.0, 1.0], [0.0, 0.0], [0.0, 0.0]])).tolist() == [1.0, 0.0, 0.0]
    slopes = torch.randn(3, 10, generator=torch.Generator().manual_seed(0))
    weights = shortest(slopes, 500)
    combined = weights @ slopes
    assert float(weights.sum()) == pytest.approx(1.0, abs=1e-5) and bool((weights >= 0).all())
    assert bool((slopes @ combined >= combined @ combined - 1e-2).all())  # no loss grows along it


def test_modt_learns_actions_where_nothing_follows() -> None:
    """With a context of one step no next observation is in a window; the action is learnt all the same."""
    algorithm = make("modt", data(), context=1)
    state = algorithm.init(0)
    loss, metrics = algorithm.actor_loss(
        state.params["actor"], state, batch_of(algorithm, data(), [0, 1, 4, 8]), rng.make_key(0)
    )
    assert float(metrics["actor/weight"]) == 1.0
    assert float(loss) == pytest.approx(float(metrics["actor/loss"]))


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("edt", {"return_range": [5.0, -5.0]}, "two numbers, the smaller one first"),
        ("edt", {"return_range": [1.0]}, "two numbers"),
        ("modt", {"weights": [1.0, 1.0]}, "three numbers"),
        ("modt", {"weights": [0.0, 0.0, 0.0]}, "not all 0"),
    ],
)
def test_lists_that_make_no_sense(name: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        make(name, data(), **settings)


def test_regions_are_clusters() -> None:
    g = torch.Generator().manual_seed(0)
    means = torch.tensor([[-0.8, -0.8], [0.8, 0.8], [0.8, -0.8]])
    points = torch.cat([m + 0.05 * torch.randn(100, 2, generator=g) for m in means])
    centres = kmeans(points, 3)
    order = torch.cdist(means, centres).argmin(-1)
    assert sorted(order.tolist()) == [0, 1, 2]
    np.testing.assert_allclose(centres[order], means, atol=0.03)
    assert torch.equal(kmeans(points, 3), centres)


def test_qdt_mends_returns() -> None:
    rewards = np.array([1.0, 0.0, 0.0, 2.0, 5.0])
    values = np.array([9.0, 4.0, 1.0, 0.0, 3.0])
    found = relabel(rewards, values, np.array([0, 3]), np.array([3, 5]))
    # from the end: 0; 0 + max(0, 1); 1 + max(1, 4) | 5; 2 + max(5, 3)
    assert found.tolist() == [5.0, 1.0, 0.0, 7.0, 5.0]


@pytest.mark.parametrize("padding", ["right", "left"])
def test_qdt_returns_add_up_within_a_window(padding: str) -> None:
    """The relabelled return counts at a window's last step, wherever that is drawn; those before it are rewards and
    that.
    """
    dataset = scale_rewards(data(), 0.5, 0.0)
    algorithm = make("qdt", dataset, padding=padding, target_return=10.0, return_scale=5.0)
    batch = windows(
        SequenceSampler(4, left_padded=padding == "left").prepare(dataset),
        torch.tensor([3, 1, 10] * 200),
        4,
        padding == "left",
    )
    g = torch.Generator().manual_seed(0)
    batch["returns_to_go"] = torch.where(batch["valid"], 10.0 * torch.rand(600, 4, generator=g), 0.0)  # relabelled
    key = rng.make_key(3)
    short, lengths = algorithm.shortened(batch, rng.split(key)[0]), []
    for b, row in enumerate((3, 1, 10) * 200):
        steps = torch.nonzero(batch["valid"][b]).flatten().tolist()
        kept = torch.nonzero(short["valid"][b]).flatten().tolist()
        assert kept == steps[: len(kept)]
        left = float(batch["returns_to_go"][b, kept[-1]])
        for i in range(len(kept) - 1, -1, -1):
            if i < len(kept) - 1:
                left += row + i  # what the data say: rewards are numbers of rows, as recorded
            assert float(short["returns_to_go"][b, kept[i]]) == pytest.approx(left, rel=1e-5)
        assert short["returns_to_go"][b].count_nonzero() <= len(kept)
        lengths.append((len(steps), len(kept)))
    for n in (1, 2, 4):
        share = [lengths.count((n, k)) / 200 for k in range(1, n + 1)]
        np.testing.assert_allclose(share, 1 / n, atol=0.12)
    p = scramble(algorithm.networks["actor"])
    params = {k: torch.tensor(v, dtype=torch.float32) for k, v in p.items()}
    some = {k: v[:12] for k, v in batch.items()}
    brief = algorithm.shortened(some, rng.split(key)[0])
    loss, _ = algorithm.actor_loss(params, algorithm.init(0), some, key)
    error = ((dt_actions(p, brief, 5.0) - some["actions"].numpy()) ** 2).mean(-1)
    assert float(loss) == pytest.approx(error[brief["valid"].numpy()].mean(), rel=1e-4)


@pytest.mark.parametrize(
    ("name", "steps", "given", "expected"),
    [
        ("vadt", 100, None, 1_000),
        ("qdt", 100, None, 500),
        ("gadt", 100, None, 100),
        ("vadt", 100_000, None, 1_000_000),
        ("qdt", 100_000, None, 500_000),
        ("vadt", 200_000, None, 1_000_000),
        ("vadt", 3_000_000, None, 3_000_000),
        ("qdt", 100, 7, 7),
    ],
)
def test_values_that_come_first_have_their_published_share(
    name: str, steps: int, given: int | None, expected: int
) -> None:
    kind = registry.get("algo", name)
    required = kind.requires(TrainConfig(algo=kind.Config(values_steps=given), steps=steps), data())
    assert list(required) == ["values"] and required["values"].steps == expected


def test_a_policy_holds_the_values_it_is_asked_with(tmp_path: Path) -> None:
    """V-ADT's V is in the policy's file: without the run it came from, or with another in its place, it acts the
    same.
    """
    dataset = data()
    kind = registry.get("algo", "vadt")
    small = {"width": 8, "layers": 1, "heads": 1, "context": 2, "value_hidden": [4], "values_steps": 3}
    run = TrainConfig(
        algo=kind.Config(**small), seeds=[0], runs_dir=str(tmp_path / "runs"), quiet=True, compile="eager", device="cpu"
    )
    fitted, pretrained = stages.ready(run, dataset)
    config = fitted.algo
    algorithm = kind(config, dataset.spec, pretrained)
    assert copy.copy(algorithm).pretrained and not pickle.loads(pickle.dumps(algorithm)).pretrained, (
        "other processes are not sent the run"
    )
    policy = TrainedPolicy(algorithm, algorithm.init(0), 0)
    assert not policy.uses_rewards, "no token holds a reward"
    policy.save(tmp_path / "policy.safetensors")
    observations = np.random.default_rng(0).normal(size=(5, 3)).astype(np.float32)
    expected = policy.act(observations)
    value = algorithm.teacher.value(algorithm.extra({})["value"], torch.from_numpy(observations)).mean
    np.testing.assert_allclose(policy._carry.window["prompts"][:, -1], value)
    source = algorithm.sampler().prepare(dataset)
    batch = windows(source, torch.tensor([4]), 2)
    part = pretrained["values"]
    q = part.algorithm.q_value(part.state, dataset.columns["observations"][4:6], dataset.columns["actions"][4:6])
    v = part.algorithm.value(part.state.params["value"], dataset.columns["observations"][4:6]).mean
    np.testing.assert_allclose(batch["prompts"][0], q.numpy(), rtol=1e-5)
    weight = algorithm.weight(batch)[0]
    np.testing.assert_allclose(weight, np.minimum(np.exp(3.0 * (q - v).double().numpy()), 100.0), rtol=1e-4)
    run = dataclasses.replace(run, algo=dataclasses.replace(run.algo, temperature=10.0))
    assert stages.ready(run, dataset)[0].algo.values == config.values, (
        "how greedy the policy is does not change the values"
    )
    with pytest.raises(UserError, match=r"trained on rewards times 1 plus 0, and those .* are times 2 plus 1"):
        stages.ready(dataclasses.replace(run, algo=config), scale_rewards(dataset, 2.0, 1.0))
    shutil.rmtree(tmp_path / "runs")
    assert np.array_equal(TrainedPolicy.load(tmp_path / "policy.safetensors").act(observations), expected)
    with pytest.raises(UserError, match="there is no run"):
        stages.ready(dataclasses.replace(run, algo=config), dataset)
