"""What every registered algorithm of texts must satisfy. A new one is picked up by itself."""

from __future__ import annotations

import dataclasses
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from torch.utils import _pytree as pytree

from offrl import registry, rng
from offrl.algorithm import select, stack
from offrl.errors import UserError
from offrl.evaluation.policy import TrainedPolicy
from offrl.settings.train import TrainConfig
from offrl.tasks.task import Task
from offrl.training.setup import check_kind
from offrl.training.stages import ready
from offrl.training.step import Step
from offrl.training.updates import metric_means
from tests.support.cases import copy, data, identical, scratch

if not (find_spec("transformers") and find_spec("peft")):
    pytest.skip("needs the extra 'text'", allow_module_level=True)

from offrl.data.text.dataset import from_episodes

NAMES = [name for name, kind in registry.names("algo").items() if kind.traits.text]
SMALL: dict[str, Any] = {
    "width": 8,
    "layers": 1,
    "heads": 2,
    "batch_size": 6,
    "length": 60,
    "policy_steps": 2,
    "learning_rate": 1e-2,
    "history": 1,
    "observation_weight": 0.5,
    # what plays: without data in its memory no reward is earned in so few updates, and nothing moves
    "critic_steps": 2,
    "actor_steps": 1,
    "iteration_episodes": 4,
    "warmup_iterations": 0,
    "max_turns": 3,
    "capacity": 32,
    "from_data": True,
    "values_episodes": 8,
    "values_steps": 20,
}
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("lm_bc", {"history": None}),
    ("ilql", {"history": None, "value_head": "hl_gauss", "value_bins": 11}),
    ("ilql", {"trunk": "shared", "value_layers": 1}),
    ("lm_mc", {"tokenizer": "words", "history": 2}),
]
CASES = [(name, {}) for name in NAMES] + [v for v in VARIANTS if v[0] in NAMES]
REPRESENTATIVES = ("lm_bc", "ilql", "alol", "digirl")  # cloning, values of tokens, advantages learnt first, what plays
each = pytest.mark.parametrize(
    ("name", "settings"),
    [
        pytest.param(
            n, s, id=f"{n} {s or ''}".strip(), marks=() if n in REPRESENTATIVES and not s else pytest.mark.nightly
        )
        for n, s in CASES
    ],
)


def episodes() -> Any:
    """Echo, or be punished; some episodes stop at a time-out."""
    g = np.random.default_rng(0)
    for number in range(20):
        turns = []
        for _ in range(int(g.integers(1, 4))):
            said, answer = (str(g.choice(["red", "blue", "a b"])) for _ in range(2))
            turns.append({"obs": f"say {said}\n", "action": f"{answer}\n", "reward": float(said == answer)})
        yield {"turns": turns, "final_obs": "bye\n", "terminated": number % 3 > 0, "truncated": number % 3 == 0}


class Echo(gym.Env):
    """Say what is said."""

    observation_space = action_space = gym.spaces.Text(50, charset=" abcdefghijklmnopqrstuvwxyz\n")

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        self.asked, self.turn = str(self.np_random.choice(["red", "blue", "a b"])), 0
        return f"say {self.asked}\n", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self.turn += 1
        return f"say {self.asked}\n", float(action.strip() == self.asked), self.turn == 3, False, {}


def texts() -> Any:
    return from_episodes(episodes(), name="echo", task=Task("echo", env_factory=Echo))


def make(name: str, **settings: Any) -> Any:
    kind = registry.get("algo", name)
    known = {f.name for f in dataclasses.fields(kind.Config)}
    config = kind.Config(**{**{k: v for k, v in SMALL.items() if k in known}, **settings})
    run = TrainConfig(algo=config, seeds=[0], steps=2, runs_dir=str(scratch()), quiet=True, device="cpu")
    dataset = texts()
    run, pretrained = ready(run, dataset)
    return kind(run.algo, dataset.spec, pretrained), dataset


def started(algorithm: Any, dataset: Any, seeds: tuple[int, ...] = (0,), **options: Any) -> tuple[Any, Any]:
    source = algorithm.sampler().prepare(dataset)
    size = algorithm.config.batch_size
    return stack([algorithm.init(s) for s in seeds]), Step(algorithm, source, batch_size=size, replicas=1, **options)


@each
def test_resumes_bit_for_bit_and_learns_from_every_part(name: str, settings: dict[str, Any]) -> None:
    algorithm, dataset = make(name, **settings)
    state, step = started(algorithm, dataset)
    before = copy(state)
    period = max(1, algorithm.every, algorithm.traits.period)
    whole, sums = step.run(state, {}, 0, 4 * period)
    identical(state._replace(buffers={}), before._replace(buffers={}))  # an update changes nothing in place
    half, part = started(algorithm, dataset)[1].run(copy(before), {}, 0, 2 * period)
    again, again_sums = started(algorithm, dataset)[1].run(copy(half), part, 2 * period, 2 * period)
    identical(whole, again)
    assert all(torch.equal(v, again_sums[k]) for k, v in sums.items())
    assert all(v.isfinite().all() for v in metric_means(sums, 4 * period).values())
    for module, params in whole.params.items():
        still = [k for k, v in params.items() if torch.equal(v, before.params[module][k])]
        assert not [k for k in still if "wpe" not in k and "wte" not in k], (module, still)
    other, _ = started(algorithm, dataset, seeds=(1,))
    if name == "alol":  # every seed begins as the cloned policy
        return
    assert any(
        not torch.equal(a, b)
        for a, b in zip(pytree.tree_leaves(other.params), pytree.tree_leaves(before.params), strict=True)
    )


@each
def test_a_policy_file_holds_all_that_acting_needs(name: str, settings: dict[str, Any], tmp_path: Path) -> None:
    from offrl.lm.models import configured

    algorithm, dataset = make(name, **settings)
    state, step = started(algorithm, dataset)
    state, _ = step.run(state, {}, 0, max(2, 2 * algorithm.every))
    policy = TrainedPolicy(algorithm, select(state, 0), 3)
    asked = ["say red\n", "say a b\n", "say blue\n"]
    said = [policy.act(asked), policy.act(["bye\n"] * 3)]
    policy.save(tmp_path / "policy.safetensors")
    configured._tokenizers.clear()
    algorithm_of = TrainedPolicy.load(tmp_path / "policy.safetensors")
    assert [algorithm_of.act(asked), algorithm_of.act(["bye\n"] * 3)] == said
    # who else is asked changes nothing
    alone = TrainedPolicy.load(tmp_path / "policy.safetensors")
    assert alone.act(asked[:1])[0] == said[0][0]


@each
def test_parts_of_a_batch_make_up_the_whole(name: str, settings: dict[str, Any]) -> None:
    whole, dataset = make(name, **settings)
    parts, _ = make(name, **settings, accumulate=3, checkpointing=True)
    a, sums = (lambda s: s[1].run(s[0], {}, 0, max(1, whole.every)))(started(whole, dataset))
    b, more = (lambda s: s[1].run(s[0], {}, 0, max(1, whole.every)))(started(parts, dataset))
    for module in a.opt:
        for key, moment in a.opt[module]["mu"].items():
            torch.testing.assert_close(
                moment, b.opt[module]["mu"][key], rtol=1e-3, atol=1e-6, msg=lambda m, k=key: f"{k}: {m}"
            )
    for key, value in sums.items():
        torch.testing.assert_close(value, more[key], rtol=1e-3, atol=1e-5, msg=lambda m, k=key: f"{k}: {m}")


@each
def test_padding_and_the_cache_change_nothing(name: str, settings: dict[str, Any]) -> None:
    """Each next token's logits: alone without padding, among longer prompts with padding, and read in pieces from a
    cache.
    """
    algorithm, dataset = make(name, **settings)
    state, step = started(algorithm, dataset)
    state = select(step.run(state, {}, 0, max(2, 2 * algorithm.every))[0], 0)
    from offrl.lm.models.decoding import left_padded

    prompts = [algorithm.prompt(texts) for texts in (["say red\n"], ["say a b\n", "blue\n", "say blue\n"], ["x"])]
    with torch.no_grad():
        ids, valid = left_padded(prompts, 0, torch.device("cpu"))
        among = algorithm.actor(state).reader()(ids, valid)
        for row, prompt in enumerate(prompts):
            one = torch.from_numpy(prompt.astype(np.int64)).unsqueeze(0)
            full = algorithm.actor(state).scores(one)[:, -1]
            read, pieces = algorithm.actor(state).reader(), None
            for t in range(len(prompt)):
                pieces = read(one[:, t : t + 1], torch.ones(1, t + 1, dtype=torch.bool))
            torch.testing.assert_close(among[row : row + 1], full, rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(pieces, full, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in REPRESENTATIVES else pytest.mark.nightly) for n in NAMES]
)
def test_refuses_numbers_and_trains_in_bfloat16(name: str) -> None:
    with pytest.raises(UserError, match="learns from texts"):
        check_kind(registry.get("algo", name), name, data(False))
    algorithm, dataset = make(name)
    state, step = started(algorithm, dataset, precision="bf16")
    state, sums = step.run(state, {}, 0, max(2, 2 * algorithm.every))
    assert all(
        v.dtype == torch.float32 and v.isfinite().all() for v in [*pytree.tree_leaves(state.params), *sums.values()]
    )


@pytest.mark.slow
def test_legal_actions_are_chosen_in_proportion_to_their_probability() -> None:
    algorithm, dataset = make("lm_bc", legal="rerank")
    state, step = started(algorithm, dataset)
    state = select(step.run(state, {}, 0, 30)[0], 0)
    from offrl.evaluation.steppers import Observed

    legal = ("red\n", "blue\n", "a b\n")
    prompt = algorithm.prompt(["say red\n"])
    likely = []
    for action in legal:  # by hand, one after another
        ids = np.append(prompt, algorithm.tokenizer.encode([action])[0]).astype(np.int64)
        with torch.no_grad():
            logits = (
                algorithm.actor(state)
                .scores(torch.from_numpy(ids).unsqueeze(0))[0, :, : algorithm.tokenizer.size]
                .double()
            )
        likely.append(sum(float(logits[t - 1].log_softmax(-1)[ids[t]]) for t in range(len(prompt), len(ids))))
    expected = np.exp(likely) / np.exp(likely).sum()
    asked = Observed("say red\n")
    asked.legal_actions = legal
    actor = algorithm.actor(state)
    with torch.no_grad():
        drawn, _ = actor.act(actor.start(600), [asked] * 600, rng.make_key(5), explore=True)
    shares = np.array([drawn.count(action) for action in legal]) / 600
    assert np.abs(shares - expected).max() < 4 * 0.5 / 600**0.5 and shares.sum() == 1.0


def test_who_has_no_legal_actions_changes_nothing_for_the_others() -> None:
    from offrl.evaluation.steppers import Observed

    algorithm, dataset = make("lm_bc", legal="rerank")
    state = select(started(algorithm, dataset)[0], 0)
    asked, plain = Observed("say red\n"), Observed("say blue\n")
    asked.legal_actions = ("red\n", "blue\n")
    actor = algorithm.actor(state)
    with torch.no_grad():
        alone, _ = actor.act(actor.start(1), [asked], rng.make_key(5), explore=True)
        both, _ = actor.act(actor.start(3), [asked, plain, plain], rng.make_key(5), explore=True)
        free, _ = (
            make("lm_bc")[0].actor(state).act(actor.start(3), [asked, plain, plain], rng.make_key(5), explore=True)
        )
    assert both[0] == alone[0] in asked.legal_actions and both[1:] == free[1:]


def test_a_trained_policy_acts_otherwise() -> None:
    algorithm, dataset = make("ilql", trunk="shared")
    state, step = started(algorithm, dataset)
    policy = TrainedPolicy(algorithm, select(step.run(state, {}, 0, 20)[0], 0), 0)
    asked = ["say red\n"] * 40
    assert len(set(policy.act(asked))) > 1
    greedy = policy.with_settings({"decoding": "greedy", "beta": 0})
    assert len(set(greedy.act(asked))) == 1 and policy.algorithm.config.decoding == "sample"
    with torch.no_grad():
        ids = torch.from_numpy(algorithm.prompt(asked[:1]).astype(np.int64)).unsqueeze(0)
        hidden = algorithm.apply("value", policy.state.params["value"], "hidden", ids)
        clone = algorithm.apply("value", policy.state.params["value"], "logits", hidden).log_softmax(-1)
        torch.testing.assert_close(greedy.algorithm.actor(policy.state).scores(ids), clone)  # beta 0: the clone itself
        assert (algorithm.actor(policy.state).scores(ids) - clone).abs().max() > 1e-3
    with pytest.raises(UserError, match="cannot act with another width"):
        policy.with_settings({"width": 3})
    with pytest.raises(UserError, match=r"acting.sampling_temperature=0.0 is out of range"):
        policy.with_settings({"sampling_temperature": 0})
