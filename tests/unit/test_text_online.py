"""Playing while training: episodes as turns, the ring that remembers them, and runs that continue bit for bit."""

from __future__ import annotations

import dataclasses
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import gymnasium as gym
import pytest
import torch
from torch.utils import _pytree as pytree

from offrl import registry, rng
from offrl.algorithm import stack
from offrl.errors import UserError
from offrl.settings.train import TrainConfig
from offrl.system import files as checkpoint
from offrl.tasks.task import Task
from offrl.training.step import Step
from offrl.training.updates import metric_means

if not (find_spec("transformers") and find_spec("peft")):
    pytest.skip("needs the extra 'text'", allow_module_level=True)

from offrl.data.text.dataset import from_episodes
from offrl.envs.text import AnyText
from offrl.lm import replay as rings
from offrl.lm.utterances import turns

SMALL: dict[str, Any] = {
    "width": 8,
    "layers": 1,
    "heads": 2,
    "history": 3,
    "length": 24,
    "batch_size": 6,
    "tokenizer": "words",
    "start": "language_model",
    "iteration_episodes": 5,
    "parallel": 3,
    "critic_steps": 2,
    "actor_steps": 1,
    "warmup_iterations": 1,
    "capacity": 9,
    "max_turns": 4,
    "critic_learning_rate": 0.1,
}


class Echo(gym.Env):
    """Say what was said; ends after a right answer."""

    def __init__(self) -> None:
        self.observation_space = self.action_space = AnyText(40)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        self.said = str(self.np_random.choice(["red\n", "blue\n"]))
        return self.said, {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        right = action == self.said
        self.said = str(self.np_random.choice(["red\n", "blue\n"]))
        return self.said, float(right), right, False, {"success": right}


def episodes() -> list[dict[str, Any]]:
    def episode(said: str, final: str | None, terminated: bool) -> dict[str, Any]:
        words = [f"{word}\n" for word in said.split()]
        pairs = zip(words[0::2], words[1::2], strict=True)
        each = [{"obs": o, "action": a, "reward": 0.5 * n - float(o == a)} for n, (o, a) in enumerate(pairs)]
        return {"turns": each, "final_obs": final, "terminated": terminated, "truncated": not terminated}

    return [
        episode("red blue blue blue", "red\n", True),
        episode("blue red red red blue blue", "blue\n", False),
        episode("red red", "red\n", True),
    ]


def data(task: Task | None = None) -> Any:
    return from_episodes(episodes(), name="echo", task=task)


PLAYED = Task(name="echo", env_factory=Echo)


def make(**settings: Any) -> tuple[Any, Any]:
    kind, dataset = registry.get("algo", "archer_online"), data(PLAYED)
    return kind(kind.fit_config(kind.Config(**{**SMALL, **settings}), dataset), dataset.spec), dataset


def test_episodes_become_the_turns_that_the_sampler_draws() -> None:
    algorithm, dataset = make()
    source = algorithm.sampler().prepare(dataset)
    drawn = turns(source, torch.arange(6))
    made = rings.of_episodes(algorithm, episodes(), algorithm.width, torch.device("cpu"), algorithm.config.discount)
    for name in ("reward", "done", "known", "return"):
        torch.testing.assert_close(made[name], drawn[name])
    for name in ("ids", "valid", "action", "next_ids", "next_valid"):
        wide = rings.pad(drawn[name], algorithm.width)
        mask = wide if wide.dtype == torch.bool else 1
        assert torch.equal(made[name] * mask, wide), name


def test_the_ring_keeps_the_newest_turns() -> None:
    algorithm, dataset = make(capacity=4)
    source = algorithm.sampler().prepare(dataset)
    ring = rings.push(algorithm.buffers()["ring"], turns(source, torch.arange(3)))
    assert (int(ring["at"]), int(ring["count"])) == (3, 3)
    ring = rings.push(ring, turns(source, torch.arange(3, 6)))
    assert (int(ring["at"]), int(ring["count"])) == (2, 4)
    kept = rings.turns_at(ring, torch.arange(4))
    expected = turns(source, torch.tensor([4, 5, 2, 3]))
    for name in ("ids", "valid", "action", "next_ids", "next_valid", "reward", "done", "known"):
        wide = rings.pad(expected[name], algorithm.width) if expected[name].dim() == 2 else expected[name]
        assert torch.equal(kept[name], wide), name
    full = rings.fill(algorithm.buffers()["ring"], source)  # more turns than places: the last ones
    assert sorted(full["reward"].tolist()) == sorted(turns(source, torch.arange(2, 6))["reward"].tolist())
    assert torch.equal(rings.draw(full, rng.make_key(0), 50)["reward"].unique(), full["reward"].unique())


OTHER = {"from_data": True, "data_share": 0.5, "token_baseline": True, "value_head": "hl_gauss"}


@pytest.mark.parametrize(("settings", "first"), [({}, 2), (OTHER, 3)])
def test_resumes_bit_for_bit(settings: dict[str, Any], first: int, tmp_path: Path) -> None:
    algorithm, dataset = make(**settings)

    def run(state: Any, sums: Any, first: int, count: int) -> tuple[Any, Any]:
        source = algorithm.sampler().prepare(dataset)
        return Step(algorithm, source, batch_size=6, replicas=1).run(state, sums, first, count)

    begin = stack([algorithm.init(4)])
    whole, sums = run(begin, {}, 0, 7)
    assert not torch.equal(whole.buffers["ring"]["ids"], begin.buffers["ring"]["ids"])
    state, part = run(begin, {}, 0, first)
    for name, value in state.params["policy"].items():  # the first iteration warms up
        assert torch.equal(value, begin.params["policy"][name])
    checkpoint.write(tmp_path / "x", checkpoint.flatten({"state": state, "sums": part}), {})
    tensors, _ = checkpoint.read(tmp_path / "x")
    state = checkpoint.unflatten({"state": begin}, tensors, "x")["state"]
    part = {k.removeprefix("sums/"): v for k, v in tensors.items() if k.startswith("sums/")}
    again, again_sums = run(state, part, first, 7 - first)
    for x, y in zip(pytree.tree_leaves(whole), pytree.tree_leaves(again), strict=True):
        assert torch.equal(x, y)
    assert sums.keys() == again_sums.keys() and all(torch.equal(v, again_sums[k]) for k, v in sums.items())
    means = metric_means(sums, 7)
    assert 1.0 <= float(means["rollout/turns"]) <= 4.0 and {"actor/loss", "critic/q_loss"} <= means.keys()
    assert any(not torch.equal(v, begin.params["policy"][k]) for k, v in whole.params["policy"].items())


def test_says_what_is_missing() -> None:
    kind = registry.get("algo", "archer_online")
    run = TrainConfig(algo=kind.Config(**SMALL), seeds=[0], steps=2, quiet=True, device="cpu")
    with pytest.raises(UserError, match=r"echo names no environment: algo\.env=ID"):
        kind.requires(run, data())
    with pytest.raises(UserError, match="CartPole"):  # an environment that does not speak
        kind.requires(dataclasses.replace(run, algo=kind.Config(**SMALL, env="CartPole-v1")), data())
    with pytest.raises(UserError, match=r"algo\.legal=rerank: archer_online learns from what its actor writes freely"):
        kind.requires(dataclasses.replace(run, algo=kind.Config(**SMALL, legal="rerank")), data(PLAYED))
    kind = registry.get("algo", "digirl")
    config = kind.fit_config(kind.Config(width=8, heads=2, threshold=5.0), data())
    with pytest.raises(UserError, match=r"at or below algo\.threshold=5.*between"):
        kind(config, data().spec).sampler().prepare(data())
    kind = registry.get("algo", "alol")
    with pytest.raises(UserError, match=r"algo\.start=cloned"):
        kind.fit_config(kind.Config(start="language_model"), data())
