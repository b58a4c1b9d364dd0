"""The best of N drawn actions: which one is played, whose noise is whose, and the reverse process of IDQL, by hand and
in NumPy.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from offrl import rng
from offrl.families.generative.best_of_n import BestOfActor, Noise, drawn_of, noise_of
from offrl.nn import diffusion, flow

KEY = rng.make_key(3)


class Near(BestOfActor):
    """Plays noise; the nearest to half of the observation is best."""

    def draw(self, observations: Tensor, key: Tensor, noise: Noise) -> Tensor:
        return noise(key).clamp(-1.0, 1.0)

    def scores(self, observations: Tensor, candidates: Tensor) -> Tensor:
        return -(candidates - 0.5 * observations).square().sum(-1)


def near(candidates: int, greedy: str = "sample", length: int = 1) -> Near:
    config = SimpleNamespace(candidates=candidates, greedy=greedy, length=length)
    algorithm: Any = SimpleNamespace(config=config, spec=SimpleNamespace(action_dim=1))
    return Near(algorithm, SimpleNamespace(step=torch.zeros(())))  # type: ignore[arg-type]


def test_the_best_is_played() -> None:
    observations = torch.tensor([[1.0], [-1.0], [0.2]])
    actions, _ = near(5).act(None, observations, KEY, explore=False)
    drawn = rng.normal(rng.split(KEY)[0], (3, 5, 1)).clamp(-1.0, 1.0)
    for row in range(3):  # each of its own five
        distance = (drawn[row, :, 0] - 0.5 * observations[row]).abs()
        assert float(actions[row]) == float(drawn[row, distance.argmin(), 0])
    # more candidates of the same rows come nearer
    many, _ = near(500).act(None, observations, KEY, explore=False)
    assert float((many - 0.5 * observations).abs().max()) < 0.05


def test_one_candidate_is_a_draw_and_noise_of_zero_one_action() -> None:
    observations = torch.zeros(4, 1)
    one, _ = near(1).act(None, observations, KEY, explore=False)
    torch.testing.assert_close(
        one, rng.normal(rng.split(KEY)[0], (4, 1, 1)).squeeze(-1).clamp(-1.0, 1.0), rtol=0.0, atol=0.0
    )
    assert not near(7, "zero").act(None, observations, KEY, explore=False)[0].any()
    assert near(7, "zero").act(None, observations, KEY, explore=True)[0].any()


def test_the_first_row_has_its_noise_whichever_rows_stand_beside_it() -> None:
    alone, among = noise_of(KEY, 3, 1, 2), noise_of(KEY, 3, 5, 2).unflatten(0, (3, 5))
    assert torch.equal(alone, among[:, 0])
    assert len(among.unique()) == 30
    rows = flow.repeated(torch.arange(5.0).unsqueeze(-1), 3).unflatten(0, (3, 5))  # the same order
    assert rows[:, :, 0].tolist() == [[0.0, 1.0, 2.0, 3.0, 4.0]] * 3


def test_chunks_are_chosen_as_a_whole() -> None:
    class First(Near):
        def scores(self, observations: Tensor, candidates: Tensor) -> Tensor:
            return candidates[..., 0]

    actor = First(near(6, length=2).algorithm, near(6).state)
    drawn = rng.normal(rng.split(KEY)[0], (2, 6, 2)).clamp(-1.0, 1.0)
    chunk = actor.chunk(torch.zeros(2, 1), KEY, False)
    assert chunk.shape == (2, 2, 1)
    for row in range(2):
        assert torch.equal(chunk[row, :, 0], drawn[row, drawn[row, :, 0].argmax()])


def test_drawn_with_weights() -> None:
    weights = torch.tensor([[0.3, 1.0], [0.1, 0.0], [0.6, 1.0]])  # [N, E]
    candidates = torch.arange(3.0).reshape(3, 1, 1).expand(3, 2, 1)
    draws = torch.stack([drawn_of(weights.log(), candidates, rng.make_key(i))[:, 0] for i in range(3000)])
    for row, expected in enumerate(([0.3, 0.1, 0.6], [0.5, 0.0, 0.5])):
        shares = [(draws[:, row] == i).float().mean().item() for i in range(3)]
        assert shares == pytest.approx(expected, abs=0.04)


# ---- the reverse process of IDQL: x after each step is cut off, and the noise is that of the step forward


def plain_ddpm(eps: Any, x: np.ndarray, noise: np.ndarray, betas: np.ndarray) -> np.ndarray:
    """(x - beta / sqrt(1 - abar) eps) / sqrt(alpha) + sqrt(beta) z, cut off at the range after each step (arXiv
    2304.10573's code).
    """
    abar = np.cumprod(1.0 - betas)
    for t in reversed(range(len(betas))):
        x = (x - betas[t] / np.sqrt(1.0 - abar[t]) * eps(x, t)) / np.sqrt(1.0 - betas[t])
        x = (x + (t > 0) * np.sqrt(betas[t]) * noise[t]).clip(-1.0, 1.0)
    return x


def test_reverse_process_with_clipped_states() -> None:
    steps = 5
    t = np.arange(1, steps + 1)
    betas = 1.0 - np.exp(-0.1 / steps - 0.5 * 9.9 * (2 * t - 1) / steps**2)
    np.testing.assert_allclose(betas, [0.195875, 0.458818, 0.635781, 0.754878, 0.835031], atol=1e-6)
    np.testing.assert_allclose(np.cumprod(1 - betas), [0.804125, 0.435178, 0.1585, 0.038852, 0.006409], atol=1e-6)
    g = np.random.default_rng(0)
    x, noise = g.normal(size=(6, 2)), g.normal(size=(steps, 6, 2))
    expected = plain_ddpm(lambda x, t: np.sin(2.0 * x + t), x, noise, betas)
    assert (np.abs(expected) < 1.0).any()

    def predicted(x: Tensor, step: Tensor) -> Tensor:
        return torch.sin(2.0 * x + step.unsqueeze(-1))

    def drawn(t: int) -> Tensor:
        return torch.tensor(noise[t])

    actions = diffusion.reverse_process(predicted, torch.tensor(x), drawn, steps, "vp", clip="state", variance="beta")
    np.testing.assert_allclose(actions, expected, atol=1e-12)
    for other in ({"clip": "clean"}, {"variance": "posterior"}):  # each of the two matters
        given = {"clip": "state", "variance": "beta", **other}
        assert (
            np.abs(
                diffusion.reverse_process(predicted, torch.tensor(x), drawn, steps, "vp", **given).numpy() - expected
            ).max()
            > 0.1
        )
