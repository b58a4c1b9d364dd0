"""WSRL and RLPD: critics that learn on parts of a batch, one after the other, and what is left out without a penalty.
Cal-QL's losses are in test_cql.py, those of SAC-N in test_sac_n.py.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from offrl import registry, rng
from offrl.algorithm import TrainState
from offrl.errors import UserError
from offrl.families import conservative
from offrl.finetuning.config import FinetuneConfig, choose
from offrl.settings.presets import finetune_settings
from tests.support.golden import KEY, B, redraw, single, spec, transitions

LR, ACTOR_LR, POLYAK = 0.01, 0.003, 0.1
G = np.random.default_rng(4)
BATCH = transitions(G) | single({"returns_to_go": 2 * G.normal(size=B)})


def make(name: str = "wsrl", **settings: Any) -> tuple[Any, TrainState]:
    kind = registry.get("algo", name)
    small = {"hidden": [6, 5], "critics": 3, "learning_rate": LR, "actor_learning_rate": ACTOR_LR, "polyak": POLYAK}
    tried = {"actions": 2, "max_target_actions": 1} if name == "wsrl" else {}
    algorithm = kind(kind.Config(**{**small, **tried, **settings}), spec())
    state = algorithm.init(3)
    g = torch.Generator().manual_seed(5)  # larger than initial weights
    for params in (state.params["critic"], state.target["critic"], state.params["actor"]):
        redraw(params, g)
    return algorithm, state


def adam(params: dict[str, Any], gradients: list[dict[str, Any]], rate: float) -> dict[str, Any]:
    """Parameters after the last of some steps of Adam, from those before it and all gradients."""
    after = {}
    for name, value in params.items():
        mean = square = torch.zeros_like(value)
        for gradient in gradients:
            mean = 0.9 * mean + 0.1 * gradient[name]
            square = 0.999 * square + 0.001 * gradient[name] ** 2
        steps = len(gradients)
        corrected = (square / (1 - 0.999**steps)).sqrt() + 1e-8
        after[name] = value - rate * mean / (1 - 0.9**steps) / corrected
    return after


def same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("name", ["wsrl", "sac_n"])
def test_critics_learn_on_every_other_row_then_on_the_rest_and_the_policy_from_what_they_say(name: str) -> None:
    """The policy of WSRL from all rows, with the entropy of s'; that of RLPD from the second part."""
    algorithm, state = make(name, utd_split=2, **({"conservative_weight": 0.0} if name == "wsrl" else {}))
    critic_key, actor_key, *more = rng.split(KEY, 3 if name == "wsrl" else 2)
    now, gradients, losses = state, [], []
    for i in range(2):
        part = {k: v[i::2] for k, v in BATCH.items()}
        key = rng.fold_in(critic_key, i)
        loss = lambda p, now=now, part=part, key=key: algorithm.critic_loss(p, now, part, key)[0]  # noqa: E731
        losses.append(float(loss(now.params["critic"])))
        gradients.append(torch.func.grad(loss)(now.params["critic"]))
        critic = adam(now.params["critic"], gradients, LR)
        target = {k: (1 - POLYAK) * v + POLYAK * critic[k] for k, v in now.target["critic"].items()}
        now = now._replace(params={**now.params, "critic": critic}, target={**now.target, "critic": target})
    rows, of, key = (BATCH, "next_observations", more[0]) if more else (part, "observations", actor_key)
    actor = torch.func.grad(lambda p: algorithm.actor_loss(p, now, rows, actor_key)[0])(now.params["actor"])
    _, log_p = algorithm.sample(state.params["actor"], rows[of], key)
    slope = {"log": -(log_p - 1.0 * spec().action_dim).mean()}

    after, metrics = algorithm.update(state, BATCH, KEY, phase=0)
    same(after.params["critic"], now.params["critic"])
    same(after.target["critic"], now.target["critic"])
    same(after.params["actor"], adam(state.params["actor"], [actor], ACTOR_LR))
    same(after.params["entropy"], adam(state.params["entropy"], [slope], ACTOR_LR))
    assert float(metrics["critic/loss"]) == pytest.approx(np.mean(losses), rel=1e-5)
    assert not any(metric.startswith("cql/") for metric in metrics)


@pytest.mark.parametrize("name", ["wsrl", "cql", "cal_ql"])
def test_without_weight_no_action_is_tried(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the gradient is the penalised one's at weight 0; a multiplier stays as it is."""
    kind = registry.get("algo", name)
    algorithm = kind(kind.Config(hidden=[6, 5], actions=2, action_gap=0.5, conservative_weight=0.0), spec())
    state = algorithm.init(3)

    def gradient(_: Any) -> dict[str, Any]:
        loss = lambda p: algorithm.critic_loss(p, state, BATCH, KEY)[0]  # noqa: E731
        return torch.func.grad(loss)(state.params["critic"])

    with monkeypatch.context() as patch:
        patch.setattr(algorithm.config, "conservative_weight", torch.zeros(()))  # a grid's
        expected = gradient(algorithm)
    monkeypatch.setattr(conservative, "sampled_actions", None)
    same(gradient(algorithm), expected)
    after, _ = algorithm.update(state, BATCH, KEY, phase=0)
    same(after.params["lagrange"], state.params["lagrange"])


def test_a_batch_that_cannot_be_split_is_refused() -> None:
    algorithm, state = make(utd_split=3)
    with pytest.raises(UserError, match=rf"batch_size={B} must be a multiple of algo.utd_split=3"):
        algorithm.update(state, BATCH, KEY, phase=0)


def test_returns_are_read_for_the_penalty_alone() -> None:
    assert make()[0].sampler().extra == ("returns_to_go",)
    assert make(conservative_weight=0.0)[0].sampler().extra == ()


def test_what_changes_in_an_environment() -> None:
    online = finetune_settings("wsrl")
    assert online is not None
    config = choose(FinetuneConfig(), online, fresh=False)
    assert (config.mixing, config.warmup, config.update_every, config.utd) == (0.0, 5000, 1, 1.0)
    assert (online["conservative_weight"], online["utd_split"], online["batch_size"]) == (0.0, 4, 1024)
    rlpd = finetune_settings("sac_n", "rlpd")
    assert rlpd == {"mixing": 0.5, "warmup": 5000, "utd_split": 20, "batch_size": 20 * 256}
    # a label is any text; that of another algorithm's file counts for nothing
    assert finetune_settings("sac_n") == finetune_settings("sac_n", "mine") == finetune_settings("sac_n", "wsrl") == {}
    assert choose(FinetuneConfig(warmup=7), online, fresh=True).warmup == 7
    assert choose(FinetuneConfig(), finetune_settings("cal_ql") or {}, fresh=False).warmup == 0
    with pytest.raises(UserError, match="warmup=5000 leaves no update in steps=5000"):
        choose(FinetuneConfig(steps=5000), online, fresh=False)
