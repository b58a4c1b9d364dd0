"""MOBILE: the model-Bellman inconsistency and the penalised target in float64 NumPy."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from offrl import registry, rng
from offrl.errors import UserError
from tests.support.reference import world_model as small
from tests.support.reference.world_model import OBS, A, q_values

KEY, BATCH, REAL = rng.make_key(0), small.batch(), 2
X = {k: small.wide(v) for k, v in BATCH.items()}
SAMPLES = 4


def make(path: Path, **settings: Any) -> tuple[Any, Any, Any]:
    return small.make(path, "mobile", **{"backup_samples": SAMPLES, "inconsistency_weight": 0.7, **settings})


def inconsistency(
    state: Any, source: Any, observations: np.ndarray, actions: np.ndarray, key: torch.Tensor, margin: float = 1.0
) -> np.ndarray:
    mean, std = (x[source.tree["elites"], :, :OBS] for x in small.predict(source.tree, observations, actions))
    draw, act = rng.split(key)
    low, high = small.wide(source.tree["low"]), small.wide(source.tree["high"])
    following = mean + std * small.normal(draw, SAMPLES, *mean.shape)
    following = np.clip(following, low - margin * (high - low), high + margin * (high - low)).reshape(-1, OBS)
    action, _ = small.sample(state.params["actor"], following, small.normal(act, len(following), A))
    q = q_values(state.target["critic"], following, action).min(0).reshape(SAMPLES, *mean.shape[:2])
    return q.mean(0).std(0, ddof=1)  # over samples the mean, over elites the standard deviation


@pytest.mark.parametrize("margin", [1.0, 0.0])
def test_inconsistency(margin: float, tmp_path: Path) -> None:
    algorithm, state, source = make(tmp_path, range_margin=margin)
    assert source.tree["elites"].tolist() == small.ELITES and source.model.members == 4
    expected = inconsistency(state, source, X["observations"], X["actions"], KEY, margin)
    found = algorithm.inconsistency(state, BATCH["observations"], BATCH["actions"], KEY)
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-4)
    assert expected.min() > 0.01


def test_elites_that_agree_are_not_penalised(tmp_path: Path) -> None:
    algorithm, state, source = make(tmp_path, backup_samples=3)
    net = {k: v.clone() for k, v in source.tree["params"].items()}
    for name in (k for k in net if k.startswith("net.")):
        net[name] = net[name][:1].expand_as(net[name]).clone()
    net["min_log_var"] = net["max_log_var"] = torch.full((OBS + 1,), -60.0)  # and are sure
    source.tree["params"] = net
    state.params["actor"].update({k: torch.zeros_like(v) for k, v in state.params["actor"].items()})
    state.params["actor"]["net.head.bias"] = torch.tensor([0.3, -0.2, -5.0, -5.0])  # and so is the policy, nearly
    assert float(algorithm.inconsistency(state, BATCH["observations"], BATCH["actions"], KEY).max()) < 0.1


@pytest.mark.parametrize(
    "settings",
    [{}, {"min_target": 0.0}, {"entropy_in_target": True}, {"max_entropy_weight": None, "entropy_in_target": True}],
)
def test_critic_loss(settings: dict[str, Any], tmp_path: Path) -> None:
    algorithm, state, source = make(tmp_path, **settings)
    assert algorithm.rollouts.real_rows == REAL
    action, log_p = small.sample(state.params["actor"], X["next_observations"], small.normal(KEY, 8, A))
    value = q_values(state.target["critic"], X["next_observations"], action).min(0)
    if settings.get("entropy_in_target"):
        weight = math.exp(0.4)
        value = value - (weight if "max_entropy_weight" in settings else 1.0) * log_p  # learnt to be above 1
    doubt = inconsistency(state, source, X["observations"][REAL:], X["actions"][REAL:], rng.fold_in(KEY, 302))
    y = X["rewards"] - 0.7 * np.concatenate([np.zeros(REAL), doubt]) + 0.9 * X["masks"] * value
    if "min_target" in settings:
        assert (y < 0).any() and (y > 0).any()
        y = np.maximum(y, 0.0)
    q = q_values(state.params["critic"], X["observations"], X["actions"])
    loss, metrics = algorithm.critic_loss(state.params["critic"], state, BATCH, KEY)
    assert float(loss) == pytest.approx(((q - y) ** 2).mean(1).sum(), rel=1e-3)
    assert float(metrics["mobile/inconsistency"]) == pytest.approx(doubt.mean(), rel=1e-3)
    assert ("mobile/clipped" in metrics) == ("min_target" in settings)


@pytest.mark.parametrize(
    "settings", [{}, {"entropy_in_target": True}, {"value_head": "c51", "value_range": [-20.0, 20.0]}]
)
def test_the_best_of_several_actions_is_each_critics_own(settings: dict[str, Any], tmp_path: Path) -> None:
    """min over critics of max over actions, as in the authors' code; not max over actions of min over critics."""
    algorithm, state, _ = make(tmp_path, max_target_actions=5, critics=3, **settings)
    critic = state.target["critic"]
    action, log_p = small.sample(state.params["actor"], X["next_observations"], small.normal(KEY, 5, 8, A))
    if "value_head" in settings:
        raw = algorithm.critic.logits(critic, BATCH["next_observations"], torch.tensor(action, dtype=torch.float32))
        q = small.wide(algorithm.critic.head.mean(raw))
    else:
        q = q_values(critic, X["next_observations"], action)  # [E, M, B]
        # or one is the smallest everywhere
        critic["head.bias"] -= torch.tensor(q.mean((1, 2)), dtype=torch.float32).view(-1, 1, 1)
        q = q_values(critic, X["next_observations"], action)
    assert (q.max(1).min(0) > q.min(0).max(0) + 1e-3).any()
    chosen = q.argmax(1)
    # the weight counts as 1
    value = q.max(1) - (np.take_along_axis(log_p, chosen, 0) if settings.get("entropy_in_target") else 0.0)
    expected = X["rewards"] + 0.9 * X["masks"] * value.min(0)
    found = algorithm.target(state, state.params["actor"], BATCH, KEY)
    np.testing.assert_allclose(found.value, expected, rtol=1e-3, atol=1e-3)
    if "value_head" in settings:
        least = q.max(1).argmin(0)
        logits = raw[torch.tensor(least), torch.tensor(chosen)[torch.tensor(least), torch.arange(8)], torch.arange(8)]
        torch.testing.assert_close(found.bootstrap.logits, logits)


def test_the_actor_sees_the_clipped_weight(tmp_path: Path) -> None:
    algorithm, state, _ = make(tmp_path)
    action, log_p = small.sample(state.params["actor"], X["observations"], small.normal(KEY, 8, A))
    q = q_values(state.params["critic"], X["observations"], action).min(0)
    assert float(algorithm.actor_loss(state.params["actor"], state, BATCH, KEY)[0]) == pytest.approx(
        (log_p - q).mean(), rel=1e-3
    )
    assert float(algorithm.weight(state)) == 1.0 and float(
        make(tmp_path, max_entropy_weight=None)[0].weight(state)
    ) == pytest.approx(math.exp(0.4))


def test_a_fixed_weight_of_the_entropy(tmp_path: Path) -> None:
    algorithm, _, _ = make(tmp_path, entropy_weight=0.2, entropy_learning_rate=0.0)
    state = algorithm.init(0)
    for i in range(3):
        state, metrics = algorithm.update(state, {k: v[:REAL] for k, v in BATCH.items()}, rng.make_key(i), phase=0)
    assert float(algorithm.weight(state)) == pytest.approx(0.2) and float(metrics["entropy/weight"]) == pytest.approx(
        0.2
    )


def test_what_it_cannot_take(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"algo=mobile .* algo.history=1 \(this one has 2\)"):
        make(tmp_path, model={"history": 2})
    with pytest.raises(UserError, match="algo=mobile compares the model's elites, and there is one"):
        make(tmp_path, model={"elites": [1]})


def test_a_batch_without_imagined_rows(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"real_share=1: MOBILE is cautious of imagined rows alone"):
        small.make(tmp_path, "mobile", real_share=1.0)


def test_published_defaults() -> None:
    c = registry.get("algo", "mobile").Config()
    assert (c.actor_learning_rate, c.learning_rate, c.real_share, c.backup_samples, c.hidden) == (
        1e-4,
        3e-4,
        0.05,
        10,
        [256, 256],
    )
    assert (c.actor_schedule, c.decay_steps, c.rollouts, c.rollout_every, c.rollout_retain) == (
        "cosine",
        3_000_000,
        50_000,
        1000,
        5,
    )
    assert not c.entropy_in_target and c.max_entropy_weight == 1.0
