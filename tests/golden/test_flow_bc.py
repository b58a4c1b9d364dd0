"""Flow cloning of chunks beside NumPy: the loss, what an episode's end leaves out, the average that acts, and
integration; flows by hand are in test_fql.py. The control that clones chunks by their mean."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from offrl import registry, rng
from offrl.algorithm import TrainState
from offrl.data.dataset import DataSpec

B, OBS, A, H = 6, 3, 2, 3
G = np.random.default_rng(5)
ACTIONS, OBSERVATIONS = G.uniform(-1, 1, (B, H, A)), G.normal(size=(B, OBS))
VALID = np.arange(H) < np.array([3, 1, 2, 3, 2, 1])[:, None]
BATCH = {
    "actions": torch.tensor(ACTIONS, dtype=torch.float32),
    "observations": torch.tensor(OBSERVATIONS, dtype=torch.float32),
    "valid": torch.tensor(VALID),
}
KEY = rng.make_key(0)
SPEC = DataSpec((OBS,), A, action_low=(-1.0,) * A, action_high=(1.0,) * A)


def make(name: str, **settings: Any) -> tuple[Any, TrainState]:
    kind = registry.get("algo", name)
    algorithm = kind(kind.Config(**{"hidden": [7, 7], "length": H, **settings}), SPEC)
    state = algorithm.init(0)
    g = torch.Generator().manual_seed(1)
    params = {k: v + 0.3 * torch.randn(v.shape, generator=g) for k, v in state.params["actor"].items()}
    return algorithm, state._replace(params={"actor": params})


def field(params: dict[str, Tensor], x: np.ndarray) -> np.ndarray:
    """Two hidden layers, GELU after each, by its tanh approximation."""
    p = {k: v.double().numpy() for k, v in params.items()}
    for i in range(2):
        x = x @ p[f"net.layers.{i}.weight"].T + p[f"net.layers.{i}.bias"]
        x = 0.5 * x * (1.0 + np.tanh(np.sqrt(2.0 / np.pi) * (x + 0.044715 * x**3)))
    return x @ p["net.head.weight"].T + p["net.head.bias"]


def integrated(params: dict[str, Tensor], z: np.ndarray, steps: int) -> np.ndarray:
    x = z
    for i in range(steps):
        x = x + field(params, np.concatenate([OBSERVATIONS, x, np.full((B, 1), i / steps)], 1)) / steps
    return x.clip(-1, 1).reshape(B, H, A)


def test_loss_counts_the_steps_that_there_are() -> None:
    algorithm, state = make("flow_bc")
    noise_key, time_key = rng.split(KEY)
    z, t = rng.normal(noise_key, (B, H * A)).double().numpy(), rng.uniform(time_key, (B, 1)).double().numpy()
    chunk = ACTIONS.reshape(B, H * A)
    error = field(state.params["actor"], np.concatenate([OBSERVATIONS, (1 - t) * z + t * chunk, t], 1)) - (chunk - z)
    squares = (error**2).reshape(B, H, A)
    expected = sum(squares[b, i, j] for b in range(B) for i in range(H) for j in range(A) if VALID[b, i]) / (B * H * A)
    loss, metrics = algorithm.actor_loss(state.params["actor"], state, BATCH, KEY)
    assert float(loss) == pytest.approx(expected, rel=1e-4) == float(metrics["actor/loss"])
    assert float(loss) < 0.95 * float((error**2).mean())


def test_a_chunk_is_integrated_from_noise() -> None:
    algorithm, state = make("flow_bc", flow_steps=4)
    z = rng.normal(KEY, (B, H * A)).double().numpy()
    actor = algorithm.actor(state)
    for explore in (True, False):  # acting draws noise in either case
        chunk = actor.chunk(BATCH["observations"], KEY, explore)
        np.testing.assert_allclose(chunk.numpy(), integrated(state.params["actor"], z, 4), atol=2e-4)
    still, _ = make("flow_bc", flow_steps=4, greedy="zero")
    chunk = still.actor(state).chunk(BATCH["observations"], KEY, False)
    np.testing.assert_allclose(chunk.numpy(), integrated(state.params["actor"], np.zeros((B, H * A)), 4), atol=2e-4)
    assert not torch.equal(still.actor(state).chunk(BATCH["observations"], KEY, True), chunk)


def test_the_average_follows_and_acts() -> None:
    algorithm, state = make("flow_bc", average=0.2, greedy="zero")
    zeros = {k: torch.zeros_like(v) for k, v in state.params["actor"].items()}
    # at first it is the network, then follows at 9 / (10 + updates), at last at 0.2
    for done, rate in ((0, 1.0), (1, 9 / 11), (90, 0.2)):
        new, _ = algorithm.update(
            state._replace(step=torch.tensor(done), extra={"average": zeros}), BATCH, KEY, phase=0
        )
        for name, value in new.params["actor"].items():
            torch.testing.assert_close(new.extra["average"][name], rate * value, rtol=1e-5, atol=1e-7)
    chunk = algorithm.actor(new).chunk(BATCH["observations"], KEY, False)
    np.testing.assert_allclose(chunk.numpy(), integrated(new.extra["average"], np.zeros((B, H * A)), 10), atol=2e-4)
    without, state = make("flow_bc")
    assert without.extra(state.params) == {}


def test_a_chunk_of_one_is_an_action() -> None:
    algorithm, state = make("flow_bc", length=1)
    actor = algorithm.actor(state)
    assert actor.start(B) is None
    action, carry = actor.act(None, BATCH["observations"], KEY, explore=False)
    assert action.shape == (B, A) and carry is None
    source = algorithm.sampler()
    assert source.length == 1


def test_diffusion_of_chunks_leaves_out_what_is_after_the_end() -> None:
    algorithm, state = make("diffusion_bc", embedding=8, denoising_steps=5)
    state = state._replace(extra={"average": state.params["actor"]})
    loss = algorithm.actor_loss(state.params["actor"], state, BATCH, KEY)[0]
    choose, draw = rng.split(KEY)
    step, noise = rng.randint(choose, (B,), 5), rng.normal(draw, (B, H * A))
    abar = torch.tensor([remaining_signal(int(t), 5) for t in step], dtype=torch.float32).unsqueeze(1)
    noisy = abar.sqrt() * BATCH["actions"].flatten(1) + (1.0 - abar).sqrt() * noise
    error = (
        (algorithm.apply("actor", state.params["actor"], noisy, step, BATCH["observations"]) - noise)
        .square()
        .unflatten(1, (H, A))
    )
    expected = float((error * BATCH["valid"].unsqueeze(-1)).sum()) / (B * H * A)
    assert float(loss) == pytest.approx(expected, rel=1e-4)
    chunk = algorithm.actor(state).chunk(BATCH["observations"], KEY, True)
    assert chunk.shape == (B, H, A)
    torch.testing.assert_close(chunk.flatten(1), algorithm.denoise(state.params["actor"], BATCH["observations"], KEY))


def remaining_signal(t: int, steps: int) -> float:
    """abar of the cosine schedule (arXiv 2102.09672, equation 17), betas at most 0.999."""
    level = np.cos((np.arange(steps + 1) / steps + 0.008) / 1.008 * np.pi / 2) ** 2
    return float(np.cumprod(1 - np.minimum(1 - level[1:] / level[:-1], 0.999))[t])


# ---- chunk_bc


def test_chunks_by_their_mean() -> None:
    algorithm, state = make("chunk_bc")
    mean = algorithm.apply("actor", state.params["actor"], BATCH["observations"])[0].double().numpy().reshape(B, H, A)
    squares = (mean - ACTIONS) ** 2 * VALID[..., None]
    loss = algorithm.actor_loss(state.params["actor"], state, BATCH, KEY)[0]
    assert float(loss) == pytest.approx(squares.mean(), rel=1e-5)
    chunk = algorithm.actor(state).chunk(BATCH["observations"], KEY, False)
    np.testing.assert_allclose(chunk.numpy(), mean, atol=1e-6)


def test_chunks_by_a_gaussian() -> None:
    """Steps after the end are no part of the likelihood."""
    algorithm, state = make("chunk_bc", policy="gaussian")
    mean, log_std = (
        x.double().numpy().reshape(B, H, A)
        for x in algorithm.apply("actor", state.params["actor"], BATCH["observations"])
    )
    terms = 0.5 * ((ACTIONS - mean) / np.exp(log_std)) ** 2 + log_std + 0.5 * np.log(2 * np.pi)
    loss = algorithm.actor_loss(state.params["actor"], state, BATCH, KEY)[0]
    assert float(loss) == pytest.approx((terms * VALID[..., None]).sum() / B, rel=1e-5)
    greedy, drawn = (algorithm.actor(state).chunk(BATCH["observations"], KEY, explore) for explore in (False, True))
    np.testing.assert_allclose(greedy.numpy(), mean, atol=1e-6)
    assert not torch.equal(greedy, drawn)


@pytest.mark.parametrize("policy", ["deterministic", "gaussian"])
def test_chunks_of_one_are_cloned_as_bc_does(policy: str) -> None:
    chunks, state = make("chunk_bc", length=1, policy=policy)
    kind = registry.get("algo", "bc")
    bc = kind(kind.Config(hidden=[7, 7], policy=policy), SPEC)
    assert all(torch.equal(v, bc.init(0).params["actor"][k]) for k, v in chunks.init(0).params["actor"].items())
    batch = {
        "observations": BATCH["observations"],
        "actions": BATCH["actions"][:, :1],
        "valid": torch.ones(B, 1, dtype=torch.bool),
    }
    loss = chunks.actor_loss(state.params["actor"], state, batch, KEY)[0]
    torch.testing.assert_close(
        loss, bc.actor_loss(state.params["actor"], state, {**batch, "actions": batch["actions"][:, 0]}, KEY)[0]
    )


@pytest.mark.nightly
def test_two_chunks_in_one_state() -> None:
    """Behaviour that goes one way or the other for three steps: what a flow draws keeps to one way, and the mean lies
    between.
    """
    sides = torch.where(torch.arange(256) % 2 == 0, -0.6, 0.6)
    batch = {
        "observations": torch.zeros(256, OBS),
        "actions": sides.reshape(-1, 1, 1).expand(256, H, A).contiguous(),
        "valid": torch.ones(256, H, dtype=torch.bool),
    }
    drawn = {}
    for name in ("flow_bc", "chunk_bc"):
        algorithm, _ = make(name, hidden=[64, 64], learning_rate=3e-3)
        state = algorithm.init(0)
        for t in range(400):
            state, _ = algorithm.update(state, batch, rng.fold_in(KEY, t), phase=0)
        drawn[name] = algorithm.actor(state).chunk(torch.zeros(400, OBS), KEY, False)
    one_way = (drawn["flow_bc"].abs() > 0.3).flatten(1).all(1) & (
        drawn["flow_bc"].sign().flatten(1).sum(1).abs() == H * A
    )
    assert float(one_way.float().mean()) > 0.85 and 0.3 < float((drawn["flow_bc"][:, 0, 0] > 0).float().mean()) < 0.7
    assert float(drawn["chunk_bc"].abs().max()) < 0.3
