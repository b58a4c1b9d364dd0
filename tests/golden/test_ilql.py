"""ILQL, MC returns and cloning of texts: losses in NumPy, token by token, from the outputs of the heads on each
sequence by itself.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
import torch

from offrl import registry

if not (find_spec("transformers") and find_spec("peft")):
    pytest.skip("needs the extra 'text'", allow_module_level=True)

from offrl.data.text.dataset import from_episodes
from offrl.lm import value_guided
from offrl.lm.sampler import take, trim_padding

TOLD: list[dict[str, Any]] = [
    {
        "turns": [{"obs": "ab", "action": "xy\n", "reward": -1.0}, {"obs": "c", "action": "y\n", "reward": 2.0}],
        "final_obs": "dd",
        "terminated": True,
        "truncated": False,
    },
    {
        "turns": [{"obs": "ba", "action": "x\n", "reward": 0.5}],
        "final_obs": "cab",
        "terminated": False,
        "truncated": True,
    },
    {
        "turns": [{"obs": "d", "action": "yx\n", "reward": -3.0}],
        "final_obs": None,
        "terminated": False,
        "truncated": True,
    },
]
GAMMA, TAU, CQL = 0.8, 0.7, 0.3


def made(name: str, **settings: Any) -> tuple[Any, Any, Any]:
    data = from_episodes(TOLD, name="toy")
    kind = registry.get("algo", name)
    given: dict[str, Any] = {"width": 8, "layers": 1, "heads": 2, "batch_size": 3, "length": 40, **settings}
    if name != "lm_bc":
        given |= {"trunk": "shared", "clone_weight": 0.25, "discount": GAMMA, "conservative_weight": CQL}
    config = kind.fit_config(kind.Config(**given), data)
    algorithm = kind(config, data.spec)
    state = algorithm.init(0)
    g = torch.Generator().manual_seed(1)
    moved = {n: {k: v + 0.3 * torch.randn(v.shape, generator=g) for k, v in p.items()} for n, p in state.params.items()}
    target = {n: {k: v + 0.2 * torch.randn(v.shape, generator=g) for k, v in moved[n].items()} for n in state.target}
    state = state._replace(params=moved, target=target)
    source = algorithm.sampler().prepare(data)
    return algorithm, state, trim_padding(take(source, torch.arange(len(source.begin))))


def outputs(algorithm: Any, params: Any, text: str, *heads: str) -> list[np.ndarray]:
    """What the heads (and the language model's, "policy") say after the start token and after each character of `text`,
    float64.
    """
    tok = algorithm.tokenizer
    ids = torch.tensor([[tok.start, *tok.encode([text])[0].tolist()]])
    name = next(iter(params))
    with torch.no_grad():
        hidden = algorithm.apply(name, params[name], "hidden", ids)
        found = [
            algorithm.apply(name, params[name], "logits", hidden)
            if h == "policy"
            else algorithm.apply(name, params[name], "outputs", hidden, h)[0]
            for h in heads
        ]
    return [f[0].numpy().astype(np.float64) for f in found]


def softmax_loss(logits: np.ndarray, token: int) -> float:
    return float(np.log(np.exp(logits - logits.max()).sum()) + logits.max() - logits[token])


def tokens_of(history: int | None) -> Any:
    """(text before, character, reward, done, text at whose end the next state is (None: unknown), where) of each action
    token.
    """
    for episode in TOLD:
        turns = episode["turns"]
        for t, turn in enumerate(turns):
            texts = [x for other in turns[: t + 1] for x in (other["obs"], other["action"])][:-1]
            seen = "".join(texts[-history:] if history else texts)
            after = turns[t + 1]["obs"] if t + 1 < len(turns) else episode["final_obs"]
            later = [*texts, turn["action"], after or ""]
            for i, letter in enumerate(turn["action"]):
                last = i == len(turn["action"]) - 1
                inside = seen + turn["action"][: i + 1]
                state = "".join(later[-history:] if history else later) if last else inside
                done = last and t == len(turns) - 1 and episode["terminated"]
                if last and not done and after is None:
                    state = None
                yield seen + turn["action"][:i], letter, turn["reward"] if last else 0.0, done, state, (episode, t, i)


def return_from(place: Any) -> float:
    episode, t, i = place
    total, passed = 0.0, -1
    for k, turn in enumerate(episode["turns"][t:]):
        passed += len(turn["action"]) - (i if k == 0 else 0)
        total += GAMMA**passed * turn["reward"]
    return total


@pytest.mark.parametrize("history", [None, 1, 2])
def test_ilql(history: int | None) -> None:
    algorithm, state, batch = made("ilql", history=history, expectile=TAU)
    loss, metrics = algorithm.value_loss(state.params["value"], state, batch)
    fit, expectile, cql, clone = [], [], [], []
    for before, letter, reward, done, after, _ in tokens_of(history):
        token = int(algorithm.tokenizer.encode([letter])[0][0])
        q1, q2, v, policy = (x[-1] for x in outputs(algorithm, state.params, before, "q1", "q2", "v", "policy"))
        old = [x[-1][token] for x in outputs(algorithm, state.target, before, "q1", "q2")]
        bar, value = min(old), float(v[0])
        expectile.append(0.5 * abs(TAU - float(bar < value)) * (value - bar) ** 2)
        cql.append(softmax_loss(q1, token) + softmax_loss(q2, token))
        clone.append(softmax_loss(policy, token))
        if after is not None:
            next_v = 0.0 if done else float(outputs(algorithm, state.params, after, "v")[0][-1][0])
            y = reward + GAMMA * next_v
            fit.append(0.5 * (q1[token] - y) ** 2 + 0.5 * (q2[token] - y) ** 2)
    count = len(cql)
    parts = {
        "value/q_loss": sum(fit) / count,
        "value/v_loss": np.mean(expectile),
        "value/conservative": np.mean(cql),
        "policy/loss": np.mean(clone),
    }
    for name, expected in parts.items():
        assert float(metrics[name]) == pytest.approx(expected, rel=1e-4), name
    whole = (
        parts["value/q_loss"] + parts["value/v_loss"] + CQL * parts["value/conservative"] + 0.25 * parts["policy/loss"]
    )
    assert float(loss) == pytest.approx(whole, rel=1e-4)


def test_monte_carlo_returns() -> None:
    algorithm, state, batch = made("lm_mc", history=1)
    loss, _ = algorithm.value_loss(state.params["value"], state, batch)
    total = []
    for before, letter, _, _, _, place in tokens_of(1):
        token = int(algorithm.tokenizer.encode([letter])[0][0])
        q, policy = (x[-1] for x in outputs(algorithm, state.params, before, "q1", "policy"))
        total.append(
            0.5 * (q[token] - return_from(place)) ** 2
            + CQL * softmax_loss(q, token)
            + 0.25 * softmax_loss(policy, token)
        )
    assert float(loss) == pytest.approx(np.mean(total), rel=1e-4)


@pytest.mark.parametrize("large", [False, True])
def test_hl_gauss_heads_mean_what_scalars_do(large: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The expectile's weight, CQL's logits and targets come from the mean of the bins; of a large vocabulary only V has
    bins.
    """
    monkeypatch.setattr(value_guided, "MOST_OUTPUTS", 10 if large else 10_000)
    algorithm, state, batch = made(
        "ilql", history=1, expectile=TAU, value_head="hl_gauss", value_bins=7, value_min=-4.0, value_max=3.0
    )
    _, metrics = algorithm.value_loss(state.params["value"], state, batch)
    centres, edges = np.arange(7) - 3.5, np.arange(8) - 4.0

    def mean(logits: np.ndarray) -> np.ndarray:
        p = np.exp(logits - logits.max(-1, keepdims=True))
        return (p / p.sum(-1, keepdims=True)) @ centres

    def mean_q(logits: np.ndarray) -> np.ndarray:
        return logits if large else mean(logits.reshape(-1, 7))

    def q_error(logits: np.ndarray, token: int, target: float) -> float:
        return (logits[token] - target) ** 2 if large else cross_entropy(logits.reshape(-1, 7)[token], target)

    def cross_entropy(logits: np.ndarray, target: float) -> float:
        from math import erf, sqrt

        below = np.array([erf((e - np.clip(target, -4.0, 3.0)) / (0.75 * sqrt(2.0))) for e in edges])
        share = np.diff(below) / (below[-1] - below[0])
        return float(-(share * (logits - np.log(np.exp(logits - logits.max()).sum()) - logits.max())).sum())

    fit, expectile, cql, count = 0.0, 0.0, 0.0, 0
    for before, letter, reward, done, after, _ in tokens_of(1):
        token, count = int(algorithm.tokenizer.encode([letter])[0][0]), count + 1
        q1, q2, v = (x[-1] for x in outputs(algorithm, state.params, before, "q1", "q2", "v"))
        bar = min(mean_q(x[-1])[token] for x in outputs(algorithm, state.target, before, "q1", "q2"))
        expectile += 0.5 * abs(TAU - float(bar < mean(v))) * cross_entropy(v, bar)
        cql += softmax_loss(mean_q(q1), token) + softmax_loss(mean_q(q2), token)
        if after is not None:
            y = reward + GAMMA * (0.0 if done else float(mean(outputs(algorithm, state.params, after, "v")[0][-1])))
            fit += 0.5 * q_error(q1, token, y) + 0.5 * q_error(q2, token, y)
    for name, expected in (("value/q_loss", fit), ("value/v_loss", expectile), ("value/conservative", cql)):
        assert float(metrics[name]) == pytest.approx(expected / count, rel=2e-4), name


def test_cloning_counts_actions_and_weighs_observations() -> None:
    algorithm, state, batch = made("lm_bc", history=1, observation_weight=0.4)
    loss, metrics = algorithm.policy_loss(state.params["policy"], state, batch)
    actions, observed = [], []
    for episode in TOLD:
        for t, turn in enumerate(episode["turns"]):
            after = episode["turns"][t + 1]["obs"] if t + 1 < len(episode["turns"]) else episode["final_obs"] or ""
            whole = turn["obs"] + turn["action"] + after
            (logits,) = outputs(algorithm, state.params, whole, "policy")
            ids = algorithm.tokenizer.encode([whole])[0]
            begin, end = len(turn["obs"]), len(turn["obs"] + turn["action"])
            actions += [softmax_loss(logits[i], ids[i]) for i in range(begin, end)]
            observed += [softmax_loss(logits[i], ids[i]) for i in range(end, len(ids))]
    assert float(metrics["policy/loss"]) == pytest.approx(np.mean(actions), rel=1e-4)
    assert float(loss) == pytest.approx((sum(actions) + 0.4 * sum(observed)) / len(actions), rel=1e-4)


def test_decoding_is_guided_by_the_smaller_value() -> None:
    algorithm, state, _ = made("ilql", history=1, beta=2.5)
    text = "abx"
    q1, q2, policy = (x[-1] for x in outputs(algorithm, state.params, text, "q1", "q2", "policy"))
    expected = policy - np.log(np.exp(policy - policy.max()).sum()) - policy.max() + 2.5 * np.minimum(q1, q2)
    ids = torch.tensor([[algorithm.tokenizer.start, *algorithm.tokenizer.encode([text])[0].tolist()]])
    with torch.no_grad():
        found = algorithm.actor(state).reader()(ids, torch.ones_like(ids, dtype=torch.bool))[0].numpy()
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)
