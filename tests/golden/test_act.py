"""ACT beside NumPy in float64: the network, its loss, and temporal ensembling against all chunks kept."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from offrl import registry, rng
from offrl.algorithm import TrainState
from offrl.data.dataset import DataSpec
from offrl.errors import UserError
from offrl.families.generative.ensembling import EnsemblingActor

B, OBS, A, K, L, W, HEADS = 5, 3, 2, 4, 3, 8, 2
G = np.random.default_rng(3)
ACTIONS, OBSERVATIONS = G.uniform(-1, 1, (B, K, A)), G.normal(size=(B, OBS))
VALID = np.arange(K) < np.array([4, 1, 3, 4, 2])[:, None]
KEY = rng.make_key(0)
Params = dict[str, np.ndarray]
SMALL = {
    "length": K,
    "latent": L,
    "width": W,
    "heads": HEADS,
    "feed_forward": 12,
    "layers": 2,
    "decoder_layers": 2,
    "dropout": 0.0,
}


def make(**settings: Any) -> tuple[Any, TrainState]:
    kind = registry.get("algo", "act")
    algorithm = kind(
        kind.Config(**{**SMALL, **settings}), DataSpec((OBS,), A, action_low=(-1.0,) * A, action_high=(1.0,) * A)
    )
    state = algorithm.init(0)
    g = torch.Generator().manual_seed(1)  # no bias at 0, no scale at 1
    return algorithm, state._replace(
        params={"actor": {k: v + 0.2 * torch.randn(v.shape, generator=g) for k, v in state.params["actor"].items()}}
    )


BATCH = {
    "actions": torch.tensor(ACTIONS, dtype=torch.float32),
    "observations": torch.tensor(OBSERVATIONS, dtype=torch.float32),
    "valid": torch.tensor(VALID),
}

# ---- the network


def linear(p: Params, name: str, x: np.ndarray) -> np.ndarray:
    return x @ p[f"{name}.weight"].T + p[f"{name}.bias"]


def norm(p: Params, name: str, x: np.ndarray) -> np.ndarray:
    x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)
    return x * p[f"{name}.weight"] + p[f"{name}.bias"]


def attention(
    p: Params, name: str, x: np.ndarray, keys: np.ndarray, values: np.ndarray, seen: np.ndarray | None = None
) -> np.ndarray:
    """One head after another; seen [B, S]."""
    q, k, v, size = linear(p, f"{name}.q", x), keys @ p[f"{name}.k"].T, linear(p, f"{name}.v", values), W // HEADS
    parts = []
    for h in range(HEADS):
        own = slice(h * size, (h + 1) * size)
        scores = np.einsum("bti,bsi->bts", q[..., own], k[..., own]) / np.sqrt(size)
        weights = np.exp(scores) * (1.0 if seen is None else seen[:, None, :])
        parts.append(np.einsum("bts,bsi->bti", weights / weights.sum(-1, keepdims=True), v[..., own]))
    return linear(p, f"{name}.out", np.concatenate(parts, -1))


def layer(
    p: Params, name: str, x: np.ndarray, at: np.ndarray, seen: Any = None, other: Any = None, other_at: Any = None
) -> np.ndarray:
    if f"{name}.own.k" in p:
        x = norm(p, f"{name}.own_norm", x + attention(p, f"{name}.own", x + at, x + at, x, seen))
    if other is not None:
        x = norm(p, f"{name}.other_norm", x + attention(p, f"{name}.other", x + at, other + other_at, other))
    return norm(p, f"{name}.norm", x + linear(p, f"{name}.down", np.maximum(linear(p, f"{name}.up", x), 0.0)))


def decoded(p: Params, observations: np.ndarray, z: np.ndarray) -> np.ndarray:
    memory = np.stack([linear(p, "code", z), linear(p, "observation", observations)], 1)
    for i in range(2):
        memory = layer(p, f"encoder.{i}", memory, p["input_places"])
    x = np.broadcast_to(p["begin"], (len(observations), K, W))
    for i in range(2):
        x = layer(p, f"decoder.{i}", x, p["places"], None, memory, p["input_places"])
    return linear(p, "head", norm(p, "norm", x))


def encoded(p: Params) -> tuple[np.ndarray, np.ndarray]:
    """The posterior's mean and log variance."""
    read = linear(p, "read_observation", OBSERVATIONS)[:, None]
    x = np.concatenate([np.broadcast_to(p["first"], read.shape), read, linear(p, "read_action", ACTIONS)], 1)
    at = np.array(
        [[(np.sin, np.cos)[j % 2](i / 10_000.0 ** (2 * (j // 2) / W)) for j in range(W)] for i in range(K + 2)]
    )
    seen = np.concatenate([np.ones((B, 2)), VALID], 1)
    for i in range(2):
        x = layer(p, f"posterior.{i}", x, at, seen)
    spread = linear(p, "spread", x[:, 0])
    return spread[:, :L], spread[:, L:]


def numbers(state: TrainState) -> Params:
    return {k: v.double().numpy() for k, v in state.params["actor"].items()}


def test_loss() -> None:
    """L1 over the steps that there are, and 10 times the divergence, a sum over the latent and a mean over the
    batch.
    """
    algorithm, state = make()
    p, noise = numbers(state), rng.normal(rng.split(KEY, 4)[1], (B, L)).double().numpy()
    mean, log_variance = encoded(p)
    chunk = decoded(p, OBSERVATIONS, mean + np.exp(0.5 * log_variance) * noise)
    error = sum(np.abs(ACTIONS[b, i] - chunk[b, i]).sum() for b in range(B) for i in range(K) if VALID[b, i]) / (
        VALID.sum() * A
    )
    # KL of N(mean, s^2) from N(0, 1): log(1 / s) + (s^2 + mean^2) / 2 - 1 / 2
    divergence = (-0.5 * log_variance + 0.5 * (np.exp(log_variance) + mean**2) - 0.5).sum(1).mean()
    loss, metrics = algorithm.actor_loss(state.params["actor"], state, BATCH, KEY)
    assert float(metrics["actor/error"]) == pytest.approx(error, rel=1e-4)
    assert float(metrics["actor/divergence"]) == pytest.approx(divergence, rel=1e-4)
    assert float(loss) == pytest.approx(error + 10.0 * divergence, rel=1e-4)


def test_padding_changes_nothing() -> None:
    algorithm, state = make()
    other = {**BATCH, "actions": torch.where(BATCH["valid"].unsqueeze(-1), BATCH["actions"], 0.7)}
    losses = [algorithm.actor_loss(state.params["actor"], state, batch, KEY)[0] for batch in (BATCH, other)]
    torch.testing.assert_close(*losses, rtol=1e-6, atol=0.0)


def test_it_acts_at_latent_0_and_explores_with_one_of_the_prior() -> None:
    algorithm, state = make()
    actor, p = algorithm.actor(state), numbers(state)
    greedy = actor.chunk(BATCH["observations"], KEY, False)
    np.testing.assert_allclose(greedy.numpy(), decoded(p, OBSERVATIONS, np.zeros((B, L))).clip(-1, 1), atol=2e-4)
    drawn = actor.chunk(BATCH["observations"], KEY, True)
    z = rng.normal(KEY, (B, L)).double().numpy()
    np.testing.assert_allclose(drawn.numpy(), decoded(p, OBSERVATIONS, z).clip(-1, 1), atol=2e-4)


def test_dropout_comes_from_the_key() -> None:
    algorithm, state = make(dropout=0.5)
    still = algorithm.actor_loss(state.params["actor"], state, BATCH, KEY)[0]
    assert torch.equal(still, algorithm.actor_loss(state.params["actor"], state, BATCH, KEY)[0])
    without, _ = make(dropout=0.0)
    assert not torch.equal(still, without.actor_loss(state.params["actor"], state, BATCH, KEY)[0])
    # none in acting
    assert torch.equal(*(a.actor(state).chunk(BATCH["observations"], KEY, False) for a in (algorithm, without)))


def test_heads_must_divide_the_width() -> None:
    with pytest.raises(UserError, match=r"algo\.width=10 is no multiple of algo\.heads=4: take algo\.width=8"):
        make(width=10, heads=4)


# ---- temporal ensembling


class Script(EnsemblingActor):
    """Says the chunks that it is given, one after another."""

    def __init__(self, chunks: Tensor, ensemble: float | None, action_steps: int = 0) -> None:
        algorithm, state = make(length=chunks.shape[2], ensemble=ensemble, action_steps=action_steps)
        super().__init__(algorithm, state)
        self.chunks, self.asked = chunks, 0  # [T, E, h, A]

    def chunk(self, observations: Tensor, key: Tensor, explore: bool) -> Tensor:
        self.asked += 1
        return self.chunks[self.asked - 1]


def play(actor: Script, steps: int, anew: dict[int, list[bool]] | None = None) -> list[Tensor]:
    carry, actions = actor.start(actor.chunks.shape[1]), []
    for t in range(steps):
        if anew and t in anew:
            carry = actor.begin_anew(carry, torch.tensor(anew[t]))
        action, carry = actor.act(carry, torch.zeros(actor.chunks.shape[1], OBS), KEY, explore=False)
        actions.append(action)
    return actions


def test_three_votes_by_hand() -> None:
    """Of step 2 the chunks say 1, 2 and 4, the oldest first: (1 + 2 exp(-0.01) + 4 exp(-0.02)) / (1 + exp(-0.01) +
    exp(-0.02)).
    """
    chunks = torch.zeros(3, 1, 3, A)
    chunks[0, 0, 2], chunks[1, 0, 1], chunks[2, 0, 0] = 1.0, 2.0, 4.0
    actions = play(Script(chunks, 0.01), 3)
    torch.testing.assert_close(actions[2], torch.full((1, A), 2.323339055), rtol=1e-6, atol=0.0)
    assert float(play(Script(chunks, 50.0), 3)[2][0, 0]) == pytest.approx(1.0)  # the oldest
    assert float(play(Script(chunks, -50.0), 3)[2][0, 0]) == pytest.approx(4.0)  # the newest
    assert float(play(Script(chunks, 0.0), 3)[2][0, 0]) == pytest.approx(7.0 / 3.0)


@pytest.mark.parametrize("m", [0.01, 0.7, -0.3])
def test_running_means_are_those_of_all_chunks_kept(m: float) -> None:
    """Over 20 steps, of which one episode begins anew at the eighth."""
    h, steps = 5, 20
    chunks = torch.randn(steps, 2, h, A, generator=torch.Generator().manual_seed(0))
    actor = Script(chunks, m)
    actions = play(actor, steps, {8: [False, True]})
    assert actor.asked == steps and actor.action_steps == 1 and actor.actions_per_decision(4) == 1
    for t in range(steps):
        for episode, began in ((0, 0), (1, 8 if t >= 8 else 0)):
            # the oldest first
            votes = [chunks[s, episode, t - s].double().numpy() for s in range(max(began, t - h + 1), t + 1)]
            weights = np.exp(-m * np.arange(len(votes)))
            np.testing.assert_allclose(
                actions[t][episode].numpy(), np.average(votes, axis=0, weights=weights), rtol=1e-4, atol=1e-5
            )


def test_without_ensembling_a_chunk_is_played_as_it_is() -> None:
    chunks = torch.randn(4, 1, 5, A, generator=torch.Generator().manual_seed(0))
    actor = Script(chunks, None, action_steps=3)
    actions = play(actor, 7)
    assert actor.asked == 3
    for t, (drawn, step) in enumerate([(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2), (2, 0)]):
        assert torch.equal(actions[t][0], chunks[drawn, 0, step])


def test_ensembling_is_a_setting_of_acting() -> None:
    from offrl.algorithm import with_settings

    algorithm, state = make()
    changed = with_settings(algorithm, {"ensemble": 0.01})
    assert algorithm.actor(state).action_steps == K and changed.actor(state).action_steps == 1


@pytest.mark.nightly
def test_the_latent_takes_up_what_differs() -> None:
    """Two styles in one state: with the latent both are rebuilt, and at 0 one is played; without it (kl_weight so large
    that it carries nothing) the median of both is, whatever the chunk."""
    sides = torch.where(torch.arange(128) % 2 == 0, -0.6, 0.6)
    batch = {
        "observations": torch.zeros(128, OBS),
        "actions": sides.reshape(-1, 1, 1).expand(128, K, A).contiguous(),
        "valid": torch.ones(128, K, dtype=torch.bool),
    }
    errors = {}
    for weight in (0.01, 100.0):
        algorithm, _ = make(
            width=32, heads=2, feed_forward=64, layers=1, decoder_layers=1, learning_rate=3e-3, kl_weight=weight
        )
        state = algorithm.init(0)
        for t in range(200):
            state, metrics = algorithm.update(state, batch, rng.fold_in(KEY, t), phase=0)
        errors[weight] = float(metrics["actor/error"])
    assert errors[0.01] < 0.15 and errors[100.0] > 0.45
