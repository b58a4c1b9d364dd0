"""COMBO: each form of its penalty in float64 NumPy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from offrl import registry, rng
from offrl.errors import UserError
from offrl.families import conservative
from tests.support.reference import world_model as small
from tests.support.reference.world_model import A, q_values

KEY, BATCH, REAL, N, WEIGHT = rng.make_key(0), small.batch(), 4, 3, 2.0
X = {k: small.wide(v) for k, v in BATCH.items()}


def make(path: Path, **settings: Any) -> tuple[Any, Any, Any]:
    return small.make(path, "combo", **{"actions": N, "conservative_weight": WEIGHT, "real_share": 0.5, **settings})


def tried(state: Any, rows: slice, key: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Uniform actions, the policy's at s and at s', and their log densities, [3, N, B, ...]."""
    uniform, here, there = rng.split(key, 3)
    observations, following = X["observations"][rows], X["next_observations"][rows]
    many = len(observations)
    found = [(small.wide(rng.uniform(uniform, (N, many, A), -1.0, 1.0)), np.full((N, many), A * np.log(0.5)))]
    for states, noise in ((observations, here), (following, there)):
        found.append(small.sample(state.params["actor"], states, small.normal(noise, N, many, A)))
    return np.stack([a for a, _ in found]), np.stack([log_p for _, log_p in found])


def logsumexp(x: np.ndarray, axis: Any) -> np.ndarray:
    top = x.max()
    return np.log(np.exp(x - top).sum(axis)) + top


@pytest.mark.parametrize("pushed", ["mix", "model"])
@pytest.mark.parametrize(
    "settings", [{}, {"kit_compat": True}, {"cql_temperature": 2.0}, {"importance": False}], ids=str
)
def test_penalty(settings: dict[str, Any], pushed: str, tmp_path: Path) -> None:
    algorithm, state, _ = make(tmp_path, penalised_states=pushed, **settings)
    assert algorithm.rollouts.real_rows == REAL
    rows = slice(REAL, None) if pushed == "model" else slice(None)
    actions, log_p = tried(state, rows, KEY)
    q = q_values(state.params["critic"], X["observations"][rows], actions)  # [2, 3, N, B]
    own = q_values(state.params["critic"], X["observations"], X["actions"])  # [2, B]
    t = settings.get("cql_temperature", 1.0)
    if settings.get("kit_compat"):
        level = t * logsumexp((q - log_p) / t, 1).mean(1)  # of 3, then over N
    elif settings.get("importance", True):
        level = t * logsumexp((q - log_p) / t, (1, 2))  # of all 3 N
    else:
        level = logsumexp(np.concatenate([q.reshape(2, 3 * N, -1), own[:, None, rows]], 1), 1)
    each = level.mean(1) - own[:, :REAL].mean(1)  # up at the data's rows alone
    loss, metrics = algorithm.penalty(state.params["critic"], state, BATCH, KEY)
    assert float(loss) == pytest.approx(WEIGHT * each.sum(), rel=1e-3)
    assert float(metrics["cql/difference"]) == pytest.approx(each.mean(), rel=1e-3)
    assert float(metrics["cql/q_data"]) == pytest.approx(own[:, :REAL].mean(), rel=1e-3)


def test_the_reference_s_logsumexp_is_smaller_by_log_of_the_actions(tmp_path: Path) -> None:
    """Where all values and densities are alike; so its penalty is as well."""
    algorithm, _, _ = make(tmp_path, kit_compat=True)
    scores = torch.full((2, 3 * N, 5), 1.5)
    plain, kit = (float(joint(scores)[0, 0]) for joint in (conservative.logsumexp_over_actions, algorithm.kit_joint))
    assert plain - kit == pytest.approx(np.log(N), rel=1e-5) and kit == pytest.approx(1.5 + np.log(3), rel=1e-5)


def test_values_rise_at_the_data_s_pairs_and_fall_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The penalty's gradient with respect to Q at the batch's own pairs: up at the data's, nothing at imagined ones."""
    algorithm, state, _ = make(tmp_path)
    size = len(BATCH["rewards"])
    soft_maximum = conservative.soft_maximum

    def penalty(shift: torch.Tensor) -> torch.Tensor:
        def shifted(*x: Any, **options: Any) -> conservative.SoftMaximum:
            soft = soft_maximum(*x, **options)
            return soft._replace(q_data=soft.q_data + shift)

        monkeypatch.setattr(conservative, "soft_maximum", shifted)
        return algorithm.penalty(state.params["critic"], state, BATCH, KEY)[0]

    slope = torch.func.grad(penalty)(torch.zeros(2, size))
    torch.testing.assert_close(slope[:, :REAL], torch.full((2, REAL), -WEIGHT / REAL))
    assert float(slope[:, REAL:].abs().max()) == 0.0


def test_critic_loss_has_deterministic_targets_on_the_whole_batch(tmp_path: Path) -> None:
    algorithm, state, _ = make(tmp_path)
    action, _ = small.sample(state.params["actor"], X["next_observations"], small.normal(KEY, 8, A))
    y = X["rewards"] + 0.9 * X["masks"] * q_values(state.target["critic"], X["next_observations"], action).min(0)
    td = ((q_values(state.params["critic"], X["observations"], X["actions"]) - y) ** 2).mean(1).sum()
    penalty, _ = algorithm.penalty(state.params["critic"], state, BATCH, rng.fold_in(KEY, 102))
    loss, _ = algorithm.critic_loss(state.params["critic"], state, BATCH, KEY)
    assert float(loss) == pytest.approx(td + float(penalty), rel=1e-4)


def test_a_few_followed_actions_have_the_same_value(tmp_path: Path) -> None:
    losses = []
    for followed in (0, 2):
        algorithm, state, _ = make(tmp_path, gradient_samples=followed)
        losses.append(float(algorithm.penalty(state.params["critic"], state, BATCH, KEY)[0]))
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_what_it_refuses(tmp_path: Path) -> None:
    for settings in ({"importance": False}, {"gradient_samples": 2}):
        with pytest.raises(UserError, match=r"algo\.kit_compat=true"):
            make(tmp_path, kit_compat=True, **settings)
    for share in (0.0, 0.1, 1.0):  # of 8 rows
        with pytest.raises(UserError, match=f"algo.real_share={share:g}"):
            make(tmp_path, real_share=share)


def test_published_defaults() -> None:
    c = registry.get("algo", "combo").Config()
    assert (c.hidden, c.real_share, c.horizon, c.conservative_weight, c.actions) == ([256, 256, 256], 0.5, 5, 0.5, 10)
    assert (c.actor_learning_rate, c.learning_rate, c.init, c.actor_schedule, c.decay_steps) == (
        1e-4,
        3e-4,
        "torch",
        "cosine",
        1_000_000,
    )
    assert not c.entropy_in_target and not c.kit_compat and c.penalised_states == "mix" and c.penalty == 0.0
