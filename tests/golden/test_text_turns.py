"""Algorithms of whole turns in float64 NumPy: ArCHer, A-LoL and DigiRL's filter, from the states that their language
models give.
"""

from __future__ import annotations

import dataclasses
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
import torch

from offrl import registry, rng

if not (find_spec("transformers") and find_spec("peft")):
    pytest.skip("needs the extra 'text'", allow_module_level=True)

from offrl.algorithms.archer import RATES
from offrl.data.text.dataset import from_episodes
from offrl.lm.utterances import first_of, trim, with_actions, with_rates

DISCOUNT = 0.9
SMALL: dict[str, Any] = {
    "width": 8,
    "layers": 1,
    "heads": 2,
    "history": 3,
    "length": 30,
    "batch_size": 12,
    "tokenizer": "words",
}


def texts() -> Any:
    def turn(obs: str, action: str, reward: float) -> dict[str, Any]:
        return {"obs": obs, "action": action, "reward": reward}

    first = [turn("a b\n", "yes\n", 0.5), turn("b\n", "no no yes\n", -1.0), turn("a a a\n", "no\n", 2.0)]
    second = [turn("b b\n", "yes no\n", -0.3), turn("a\n", "yes yes yes yes\n", 0.7)]
    return from_episodes(
        [
            {"turns": first, "final_obs": "b a b\n", "terminated": True, "truncated": False},
            {"turns": second, "final_obs": None, "terminated": False, "truncated": True},
        ],
        name="toy",
    )


def make(
    name: str, pretrained: dict[str, Any] | None = None, **settings: Any
) -> tuple[Any, Any, Any, dict[str, torch.Tensor]]:
    """(algorithm, its state moved away from where it begins, what the sampler prepared, a batch of all turns)."""
    kind, data = registry.get("algo", name), texts()
    known = {f.name for f in dataclasses.fields(kind.Config)}
    config = kind.fit_config(
        kind.Config(**{k: v for k, v in {**SMALL, "discount": DISCOUNT, **settings}.items() if k in known}), data
    )
    algorithm = kind(config, data.spec, pretrained)
    state = algorithm.init(0)
    g = torch.Generator().manual_seed(1)

    def moved(tree: Any) -> Any:
        return {n: {k: v + 0.2 * torch.randn(v.shape, generator=g) for k, v in p.items()} for n, p in tree.items()}

    sampler = algorithm.sampler()
    source = sampler.prepare(data)
    batch = trim(sampler(source, rng.make_key(3), 12))
    return algorithm, state._replace(params=moved(state.params), target=moved(state.target)), source, batch


def rows(batch: dict[str, torch.Tensor]) -> list[dict[str, np.ndarray]]:
    """Each turn by itself, without padding: tokens of the state, of the action and of the state after it, with the
    start token.
    """
    found = []
    for n in range(len(batch["ids"])):
        ids, valid, action = (batch[k][n].numpy() for k in ("ids", "valid", "action"))
        later = batch["next_ids"][n].numpy()[batch["next_valid"][n].numpy()]
        whole = ids[valid]
        at = np.flatnonzero(action)
        assert (np.diff(at) == 1).all() and at[-1] == len(whole) - 1
        found.append(
            {"whole": whole, "state": whole[: at[0]], "action": np.append(ids[:1], whole[at]), "later": later, "at": at}
        )
    return found


def encoded(algorithm: Any, critic: Any, ids: np.ndarray) -> np.ndarray:
    with torch.no_grad():
        x = algorithm.apply("critic", critic, "encode", torch.tensor(ids).unsqueeze(0), torch.tensor([len(ids)]))
    return x[0].double().numpy()


def head(params: Any, name: str, x: np.ndarray) -> np.ndarray:
    """Three layers by hand."""
    w = {
        k.removeprefix(f"heads.{name}."): v.double().numpy()
        for k, v in params.items()
        if k.startswith(f"heads.{name}.")
    }
    for layer in ("layers.0", "layers.1"):
        x = np.maximum(w[f"{layer}.weight"] @ x + w[f"{layer}.bias"], 0.0)
    return w["head.weight"] @ x + w["head.bias"]


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def token_log_probs(read: Any, row: dict[str, np.ndarray]) -> np.ndarray:
    with torch.no_grad():
        logits = read(torch.tensor(row["whole"]).unsqueeze(0))[0].double().numpy()
    return np.log(softmax(logits))[row["at"] - 1, row["whole"][row["at"]]]


def policy_log_probs(algorithm: Any, params: Any, row: dict[str, np.ndarray]) -> np.ndarray:
    def read(ids: torch.Tensor) -> torch.Tensor:
        return algorithm.apply("policy", params, "logits", algorithm.apply("policy", params, "hidden", ids))

    return token_log_probs(read, row)


def values(algorithm: Any, critic: Any, row: dict[str, np.ndarray], names: str) -> np.ndarray:
    """q1 and q2 of state and action, or v1 and v2 of the state: [2]."""
    x = encoded(algorithm, critic, row["state"])
    if names == "q":
        x = np.append(x, encoded(algorithm, critic, row["action"]))
    return np.array([head(critic, f"{names}{i}", x)[0] for i in (1, 2)])


def column(batch: dict[str, torch.Tensor], name: str) -> np.ndarray:
    return batch[name].double().numpy()


def target_of(algorithm: Any, state: Any, batch: Any, n: int, row: Any) -> np.ndarray:
    bar = state.target["critic"]
    after = np.array([head(bar, f"v{i}", encoded(algorithm, bar, row["later"]))[0] for i in (1, 2)])
    return column(batch, "reward")[n] + DISCOUNT * (1.0 - column(batch, "done")[n]) * after


def close(found: torch.Tensor, expected: float) -> None:
    np.testing.assert_allclose(float(found), expected, rtol=2e-4, atol=2e-5)


def test_turns_are_transitions() -> None:
    algorithm, _, _, batch = make("archer")
    assert {round(r, 4) for r in batch["reward"].tolist()} == {0.5, -1.0, 2.0, -0.3, 0.7}
    returns = {0.5: 0.5 + 0.9 * (-1.0 + 0.9 * 2.0), -1.0: -1.0 + 0.9 * 2.0, 2.0: 2.0, -0.3: -0.3 + 0.9 * 0.7, 0.7: 0.7}
    for n, row in enumerate(rows(batch)):
        reward = round(float(batch["reward"][n]), 4)
        close(batch["return"][n], returns[reward])
        assert (bool(batch["done"][n]), bool(batch["known"][n])) == (reward == 2.0, reward != 0.7)
        said = {0.5: "yes\n", -1.0: "no no yes\n", 2.0: "no\n", -0.3: "yes no\n", 0.7: "yes yes yes yes\n"}
        assert algorithm.tokenizer.decode(row["action"][1:].tolist()) == said[reward]


def test_archer_learns_at_the_rates_of_its_authors() -> None:
    """submit_OfflineArcher_TwentyQuestions.sh of OfflineArcher: actor_lr=1e-4, critic_lr=1e-5, for gpt2 and
    roberta-base.
    """
    rates = with_rates(registry.get("algo", "archer").Config(lm="gpt2"), RATES)
    assert (rates.actor_learning_rate, rates.critic_learning_rate) == (1e-4, 1e-5)


@pytest.mark.parametrize("clip", [100.0, 0.9])
def test_archer(clip: float) -> None:
    algorithm, state, _, batch = make("archer", temperature=2.0, expectile=0.8, max_weight=clip)
    critic, policy = state.params["critic"], state.params["policy"]
    q_loss = v_loss = actor = 0.0
    for n, row in enumerate(rows(batch)):
        q, v, bar = (
            values(algorithm, p, row, k) for p, k in ((critic, "q"), (critic, "v"), (state.target["critic"], "q"))
        )
        q_loss += float(batch["known"][n]) * ((q - target_of(algorithm, state, batch, n, row)) ** 2).sum() / 12
        v_loss += (np.where(bar < v, 0.2, 0.8) * (bar - v) ** 2).sum() / 12
        weight = min(np.exp(2.0 * (q.min() - v.min())), clip)
        actor -= weight * policy_log_probs(algorithm, policy, row).sum() / 12
    loss, metrics = algorithm.critic_loss(critic, state, batch)
    close(metrics["critic/q_loss"], q_loss)
    close(metrics["critic/v_loss"], v_loss)
    close(loss, q_loss + v_loss)
    close(algorithm.actor_loss(policy, state, batch)[0], actor)


def test_archer_with_distributions() -> None:
    """HL-Gauss: V's target is the mean of Qbar's distribution, and its loss is weighed as a squared error's is."""
    algorithm, state, _, batch = make(
        "archer", value_head="hl_gauss", value_bins=7, value_min=-3.0, value_max=3.0, expectile=0.8
    )
    critic, low, width = state.params["critic"], -3.0, 6.0 / 7
    centres = low + width * (np.arange(7) + 0.5)

    def logits(params: Any, row: Any, names: str) -> np.ndarray:
        x = encoded(algorithm, params, row["state"])
        x = np.append(x, encoded(algorithm, params, row["action"])) if names == "q" else x
        return np.array([head(params, f"{names}{i}", x) for i in (1, 2)])

    v_loss = 0.0
    for row in rows(batch):
        v, bar = logits(critic, row, "v"), softmax(logits(state.target["critic"], row, "q")) @ centres
        edges = (low + width * np.arange(8) - bar[:, None]) / (np.sqrt(2.0) * 0.75 * width)
        erf = np.vectorize(__import__("math").erf)(edges)
        mass = (erf[:, 1:] - erf[:, :-1]) / (erf[:, -1:] - erf[:, :1])
        entropy = -(mass * np.log(softmax(v))).sum(-1)
        v_loss += (np.where(bar < softmax(v) @ centres, 0.2, 0.8) * entropy).sum() / 12
    close(algorithm.critic_loss(critic, state, batch)[1]["critic/v_loss"], v_loss)


@pytest.mark.parametrize("baseline", [False, True])
def test_archer_online(baseline: bool) -> None:
    algorithm, state, _, batch = make("archer_online", start="language_model", token_baseline=baseline, value_layers=3)
    critic, policy = state.params["critic"], state.params["policy"]
    words = algorithm.tokenizer.encode(["yes\n", "no yes no\n", "no no\n"])
    fresh = with_actions(batch, [words[n % 3].tolist() for n in range(12)])
    v_loss = actor = fit = 0.0
    tokens = sum(len(words[n % 3]) for n in range(12))
    bars = algorithm.critic.target_q(state.target["critic"], fresh)
    for n, (row, old) in enumerate(zip(rows(fresh), rows(batch), strict=True)):
        assert (row["action"][1:] == words[n % 3]).all() and (row["state"] == old["state"]).all()
        q, v, bar = (
            values(algorithm, p, row, k) for p, k in ((critic, "q"), (critic, "v"), (state.target["critic"], "q"))
        )
        np.testing.assert_allclose(bars[:, n].numpy(), bar, rtol=2e-4, atol=2e-5)
        v_loss += ((v - bar) ** 2).sum() / 12
        rest = np.full(len(row["at"]), q.min() - v.min())
        if baseline:
            with torch.no_grad():
                hidden = (
                    algorithm.apply("policy", policy, "hidden", torch.tensor(row["whole"]).unsqueeze(0))[0]
                    .double()
                    .numpy()
                )
            rest -= np.array([head(policy, "baseline", hidden[t - 1])[0] for t in row["at"]])
            fit += (rest**2).sum() / tokens
        actor -= (rest * policy_log_probs(algorithm, policy, row)).sum() / 12
    batch["target_q"] = bars.transpose(0, 1)
    close(algorithm.critic_loss(critic, state, batch)[1]["critic/v_loss"], v_loss)
    loss, metrics = algorithm.actor_loss(policy, state, fresh)
    close(metrics["actor/loss"], actor)
    close(loss, actor + fit)


@pytest.fixture
def clone() -> dict[str, Any]:
    """A cloned policy which nobody trained, and settings that name it."""
    kind, data = registry.get("algo", "lm_bc"), texts()
    config = kind.fit_config(kind.Config(**SMALL), data)
    params = kind(config, data.spec).init(7).params["policy"]
    return {"pretrained": {"policy": params}, "policy_settings": dataclasses.asdict(config)}


@pytest.mark.parametrize("variant", ["a_lol", "a_lol_seq", "ref_free", "kl", "r_lol"])
def test_alol(variant: str, clone: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    from offrl.algorithms import alol as advantages

    worth = torch.tensor([0.2, -1.5, 1.0, -0.9, 0.0])  # V_ref of the five turns
    monkeypatch.setattr(advantages, "reference_values", lambda algorithm, source, earned: worth)
    algorithm, state, source, batch = make(
        "alol", variant=variant, clip=0.2, kl_weight=0.3, credit_assignment="reward", **clone
    )
    rewards = np.array([0.5, -1.0, 2.0, -0.3, 0.7])
    weights = np.maximum(rewards if variant == "r_lol" else rewards - worth.numpy(), 0.0)
    np.testing.assert_allclose(source.columns["weight"].numpy(), weights, atol=1e-6)
    drawn = algorithm.sampler()(source, rng.make_key(5), 20_000)["row"]
    np.testing.assert_allclose(np.bincount(drawn.numpy(), minlength=5) / 20_000, weights / weights.sum(), atol=0.015)
    policy, expected = state.params["policy"], 0.0
    reference = algorithm.init(0).params["policy"]
    # the actor begins as the reference
    assert all(torch.equal(v, clone["pretrained"]["policy"][k]) for k, v in reference.items())
    for n, row in enumerate(rows(batch)):
        own, before = policy_log_probs(algorithm, policy, row), policy_log_probs(algorithm, reference, row)
        a = weights[int(batch["row"][n])]
        ratio = {"a_lol_seq": np.clip(np.exp(own - before), 0.8, 1.2), "ref_free": 1.0, "kl": 1.0}.get(
            variant, np.clip(np.exp(own.sum() - before.sum()), 0.8, 1.2)
        )
        expected += (-a * (ratio * own).sum() + (0.3 * (own - before).sum() if variant == "kl" else 0.0)) / 12
    leaves = {k: v.clone().requires_grad_() for k, v in policy.items()}
    loss, _ = algorithm.actor_loss(leaves, state, batch)
    close(loss.detach(), expected)
    if variant == "a_lol":  # the ratio has no gradient: that of the loss is the weighted gradient of log pi
        found = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
        likely = algorithm.log_probs(leaves, batch).sum(-1)
        before = algorithm.reference_log_probs(leaves, batch).sum(-1)
        weight = batch["weight"] * (likely - before).exp().clamp(0.8, 1.2).detach() / 12
        wanted = torch.autograd.grad(-(weight * likely).sum(), list(leaves.values()), allow_unused=True)
        for x, y in zip(found, wanted, strict=True):
            assert (x is None) == (y is None)
            if x is not None:
                torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-6)


def test_values_of_a_reference_are_what_it_earns_from_each_state() -> None:
    from offrl.algorithms.alol import fit

    g = np.random.default_rng(0)
    x = torch.tensor(g.normal(size=(800, 3)), dtype=torch.float32)
    truth = 4.0 + 2.0 * x[:, 0] * (x[:, 1] > 0)
    y = truth + torch.tensor(g.normal(size=800), dtype=torch.float32)
    found, error, constant = fit(x, y, x, 2, 150, 2e-2)
    assert float((found - truth).square().mean()) < 0.4 and 0.7 < error < 1.6 < 2.5 < constant
    noise, error, constant = fit(x, torch.tensor(g.normal(size=800), dtype=torch.float32), x, 2, 150, 2e-2)
    assert float(noise.std()) < 0.3 and error <= constant  # what is held out keeps it from learning noise


@pytest.mark.parametrize(("outcome", "margin"), [(1.0, 0.05), (0.0, -0.005)])
def test_digirl(outcome: float, margin: float) -> None:
    algorithm, state, _, batch = make("digirl", threshold=0.5, margin=margin, outcome_weight=outcome)
    critic, policy = state.params["critic"], state.params["policy"]
    loss = actor = 0.0
    chosen = []
    for n, row in enumerate(rows(batch)):
        good = int(column(batch, "return")[n] > 0.5)
        now, later = (
            np.array([softmax(head(critic, f"v{i}", encoded(algorithm, critic, row[k]))) for i in (1, 2)])
            for k in ("state", "later")
        )
        known = float(batch["known"][n])
        loss -= (np.log(now[:, good]).sum() + known * np.log(later[:, good]).sum()) / 12
        rise = known * (later[:, 1].min() - now[:, 1].min())
        kept = rise - margin + outcome * (column(batch, "reward")[n] + column(batch, "return")[n]) > 0.0
        chosen.append(bool(kept))
        actor -= kept * policy_log_probs(algorithm, policy, row).sum() / 12
    assert algorithm.cloned(state, batch).tolist() == chosen and 0 < sum(chosen) < 12
    close(algorithm.critic_loss(critic, state, batch)[0], loss)
    close(algorithm.actor_loss(policy, state, batch)[0], actor)


def test_states_end_where_actions_begin() -> None:
    algorithm, _, _, batch = make("archer")
    for n, end in enumerate(first_of(batch).tolist()):
        said = algorithm.tokenizer.decode(batch["ids"][n, :end].tolist())
        assert said.endswith("\n") and said.split("\n")[-2].split()[0] in ("a", "b")
