"""Skills and IQL over them: the auto-encoder's loss, spans of steps, targets and the high level's loss in float64
NumPy.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from offrl import registry, rng
from offrl.algorithm import TrainState
from offrl.algorithms.skill_iql import SegmentSampler, segments
from offrl.data.arrays import from_arrays
from offrl.data.dataset import Dataset, DataSpec
from offrl.nn.representations.latent import draw, gaussian_kl
from tests.support.reference import mlp as ref

B, OBS, A, H, Z, W = 6, 3, 2, 3, 4, 5
G = np.random.default_rng(1)
KEY = rng.make_key(0)
SPEC = DataSpec((OBS,), A, action_low=(-1.0,) * A, action_high=(1.0,) * A)


def tensor(x: np.ndarray) -> torch.Tensor:
    return torch.tensor(x, dtype=torch.float32)


def double(x: torch.Tensor) -> np.ndarray:
    return x.numpy().astype(np.float64)


def make(name: str, **settings: Any) -> tuple[Any, TrainState]:
    kind = registry.get("algo", name)
    algorithm = kind(kind.Config(**settings), SPEC)
    state = algorithm.init(3)
    g = torch.Generator().manual_seed(5)
    for params in state.params.values():
        params.update({k: 0.5 * torch.randn(v.shape, generator=g) for k, v in params.items()})
    return algorithm, state


def gru(p: dict[str, torch.Tensor], x: np.ndarray, steps: int) -> np.ndarray:
    """The state after `steps` of x [T, in]."""
    w_in, b_in, w, b = (double(p[f"gru.{n}"]) for n in ("weight_in", "bias_in", "weight", "bias"))
    h, sigmoid = np.zeros(W), lambda v: 1 / (1 + np.exp(-v))
    for t in range(steps):
        i, j = np.split(w_in @ x[t] + b_in, 3), np.split(w @ h + b, 3)
        reset, update = sigmoid(i[0] + j[0]), sigmoid(i[1] + j[1])
        h = (1 - update) * np.tanh(i[2] + reset * j[2]) + update * h
    return h


def test_the_loss_of_skills() -> None:
    algorithm, state = make("skills", skill_length=H, skill_dim=Z, hidden=[7], recurrent_width=W, kl_weight=0.3)
    p, length = state.params["skills"], np.array([3, 1, 2, 3, 3, 2])
    valid = np.arange(H) < length[:, None]
    s, a = G.normal(size=(B, H, OBS)), G.uniform(-1, 1, (B, H, A))
    batch = {"observations": tensor(s), "actions": tensor(a * valid[..., None]), "valid": torch.tensor(valid)}
    hidden = np.stack([gru(p, a[i], length[i]) for i in range(B)])  # what comes after the end changes nothing
    mean, log_std = np.split(hidden @ double(p["out.weight"]).T + double(p["out.bias"]), 2, 1)
    noise = double(draw((torch.zeros(B, Z), torch.zeros(B, Z)), KEY))
    z = mean + np.exp(log_std) * noise
    errors = []
    for i in range(B):
        for t in range(length[i]):
            inputs = np.concatenate([s[i, t], z[i], np.eye(H)[t]])[None]
            out = ref.forward(ref.net(p, "decoder.net."), inputs)[0][0]
            errors.append(0.5 * ((out - a[i, t]) ** 2).mean())
    kl = (0.5 * (np.exp(2 * log_std) + mean**2 - 1) - log_std).mean()
    m, l = np.split(ref.forward(ref.net(p, "prior.net."), s[:, 0])[0], 2, 1)  # noqa: E741
    log_p = (-0.5 * ((z - m) / np.exp(l)) ** 2 - l - 0.5 * np.log(2 * np.pi)).sum(1).mean()
    loss, metrics = algorithm.skills_loss(p, state, batch, KEY)
    assert float(metrics["skills/error"]) == pytest.approx(np.mean(errors), rel=1e-4)
    assert float(metrics["skills/kl"]) == pytest.approx(kl, rel=1e-4)
    assert float(loss) == pytest.approx(np.mean(errors) + 0.3 * kl - log_p, rel=1e-4)


def episodes() -> Dataset:
    """One of 5 steps that terminates, one of 4 that is cut, and one of 2 that terminates."""
    n = 11
    terminations = np.isin(np.arange(n), (4, 10))
    ends = np.isin(np.arange(n), (4, 8, 10))
    observations = np.repeat(np.arange(n, dtype=np.float32)[:, None], OBS, 1)
    # else an end's successor is taken for the next episode's start, which tells nothing
    after = observations + 1 + 0.5 * ends[:, None]
    options: dict[str, Any] = {"action_low": -1.0, "action_high": 1.0, "next_observations": after}
    return from_arrays(observations, G.uniform(-1, 1, (n, A)), 2.0 ** np.arange(n), terminations, ends, **options)


def test_segments() -> None:
    """What is cut before the span is over is left out: rows 7 and 8; row 6 is the first of three that are all there."""
    starts, last, rewards, masks = segments(episodes(), H)
    assert starts.tolist() == [0, 1, 2, 3, 4, 5, 6, 9, 10]
    assert last.tolist() == [2, 3, 4, 4, 4, 7, 8, 10, 10]
    assert rewards[:5].tolist() == [[1, 2, 4], [2, 4, 8], [4, 8, 16], [8, 16, 0], [16, 0, 0]]
    assert masks.tolist() == [1, 1, 0, 0, 0, 1, 1, 0, 0]
    sampler = SegmentSampler(H)
    batch = sampler(sampler.prepare(episodes()), KEY, 64)
    first = batch["observations"][:, 0]
    assert set(first.tolist()) == {0, 1, 2, 3, 4, 5, 6, 9, 10}
    where = {int(s): i for i, s in enumerate(starts)}
    for i in range(64):
        k = where[int(first[i])]
        assert float(batch["next_observations"][i, 0]) == float(last[k]) + 1 + 0.5 * (int(last[k]) in (4, 8, 10))
        assert torch.equal(batch["rewards"][i], rewards[k]) and batch["masks"][i] == masks[k]


@pytest.mark.parametrize("within", [False, True])
def test_targets_and_the_high_level(within: bool) -> None:
    own = {"skill_length": H, "skill_dim": Z, "hidden": [6], "skill_hidden": [7], "recurrent_width": W, "init": "torch"}
    algorithm, state = make("skill_iql", discount=0.9, temperature=2.0, prior_weight=0.7, discount_within=within, **own)
    g = torch.Generator().manual_seed(6)
    state.extra["skills"].update({k: 0.5 * torch.randn(v.shape, generator=g) for k, v in state.extra["skills"].items()})
    s, after, gains = G.normal(size=(B, OBS)), G.normal(size=(B, OBS)), G.normal(size=(B, H))
    mean, log_std, masks = G.normal(size=(B, Z)), 0.3 * G.normal(size=(B, Z)), np.array([1, 0, 1, 1, 0, 1])
    batch = {
        "observations": s,
        "next_observations": after,
        "rewards": gains,
        "masks": masks,
        "skill_mean": mean,
        "skill_log_std": log_std,
    }
    made = algorithm.one_step({k: tensor(v) for k, v in batch.items()}, KEY)
    z = mean + np.exp(log_std) * double(draw((torch.zeros(B, Z), torch.zeros(B, Z)), KEY))
    np.testing.assert_allclose(made["actions"], z, atol=1e-5)

    reward = (gains * 0.9 ** np.arange(H)).sum(1) if within else gains.sum(1)
    value = ref.net(state.params["value"])
    y = reward + 0.9**H * masks * ref.forward(value, after)[0][:, 0]
    both = np.concatenate([s, z], 1)
    q = np.stack([ref.forward(ref.net(state.params["critic"], member=e), both)[0][:, 0] for e in range(2)])
    loss, _ = algorithm.critic_loss(state.params["critic"], state, made, KEY)
    assert float(loss) == pytest.approx(((q - y) ** 2).mean(1).sum(), rel=1e-4)

    best = q.min(0)
    weight = np.minimum(np.exp(2.0 * (best - ref.forward(value, s)[0][:, 0])), 100.0)
    pair = [
        np.split(ref.forward(n, s)[0], 2, 1)
        for n in (ref.net(state.params["actor"], "net."), ref.net(state.extra["skills"], "prior.net."))
    ]
    (m, l), (m0, l0) = pair  # noqa: E741
    log_p = (-0.5 * ((z - m) / np.exp(l)) ** 2 - l - 0.5 * np.log(2 * np.pi)).sum(1)
    kl = (l0 - l + (np.exp(2 * l) + (m - m0) ** 2) / (2 * np.exp(2 * l0)) - 0.5).sum(1)
    np.testing.assert_allclose(gaussian_kl((tensor(m), tensor(l)), (tensor(m0), tensor(l0))), kl, rtol=1e-4)
    loss, _ = algorithm.actor_loss(state.params["actor"], state, made, tensor(best), KEY)
    assert float(loss) == pytest.approx(-(weight * log_p).mean() + 0.7 * kl.mean(), rel=1e-4)


def test_a_skill_is_held_and_its_decoder_knows_the_step() -> None:
    algorithm, state = make(
        "skill_iql", skill_length=H, skill_dim=Z, hidden=[6], skill_hidden=[7], recurrent_width=W, init="torch"
    )
    s = G.normal(size=(2 * H, B, OBS))
    actor = algorithm.actor(state)
    carry = actor.start(B)
    for t in range(2 * H):
        if t % H == 0:
            z = np.split(ref.forward(ref.net(state.params["actor"], "net."), s[t])[0], 2, 1)[0]
        actions, carry = actor.act(carry, tensor(s[t]), KEY, explore=False)
        np.testing.assert_allclose(carry.skill, z, atol=1e-5)
        inputs = np.concatenate([s[t], z, np.tile(np.eye(H)[t % H], (B, 1))], 1)
        expected = ref.forward(ref.net(state.extra["skills"], "decoder.net."), inputs)[0].clip(-1, 1)
        np.testing.assert_allclose(actions, expected, atol=1e-5)
