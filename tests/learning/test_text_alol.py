"""Does A-LoL raise a known reward above what cloning the same data earns?"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

import offrl

if not (find_spec("transformers") and find_spec("peft")):
    pytest.skip("needs the extra 'text'", allow_module_level=True)

from offrl.data.text.dataset import from_episodes
from offrl.envs.text import AnyText
from offrl.tasks.task import Task

pytestmark = pytest.mark.nightly
PROMPTS = ("the sea is\n", "the wood is\n")
WORDS, LENGTH = ("blue", "green", "old"), 5
SMALL: dict[str, Any] = {
    "algo.width": 16,
    "algo.layers": 1,
    "algo.heads": 2,
    "algo.tokenizer": "words",
    "algo.batch_size": 32,
    "algo.learning_rate": 3e-3,
    "eval.every": 0,
    "eval.episodes": 300,
    "compare": [],
    "quiet": True,
}


def worth(prompt: str, text: str) -> float:
    """How often the sentence has the right word."""
    return float(text.split().count(WORDS[PROMPTS.index(prompt)]))


class Sentences(gym.Env):
    """A sentence about something, whose reward is known."""

    def __init__(self) -> None:
        self.observation_space = self.action_space = AnyText(200)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        self.prompt = str(self.np_random.choice(PROMPTS))
        return self.prompt, {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        return "\n", worth(self.prompt, action), True, False, {}


def sentences(count: int = 1_000) -> Any:
    g = np.random.default_rng(0)
    episodes = []
    for _ in range(count):
        prompt, text = str(g.choice(PROMPTS)), " ".join(g.choice(WORDS, LENGTH)) + "\n"
        turn = {"obs": prompt, "action": text, "reward": worth(prompt, text)}
        episodes.append({"turns": [turn], "final_obs": None, "terminated": True, "truncated": False})
    return from_episodes(episodes, name="sentences", task=Task(name="sentences", env_factory=Sentences))


def test_alol_earns_more_than_cloning(tmp_path: Any) -> None:
    data, settings = sentences(), {**SMALL, "runs_dir": str(tmp_path)}
    clone = offrl.train("lm_bc", data, seeds=1, steps=250, settings=settings)
    cloned = clone.final_scores[0]["return_mean"]
    assert abs(cloned - LENGTH / 3) < 0.25  # as the data
    earned = {}
    for variant, more in (("a_lol", {}), ("ref_free", {"algo.values_from": "data"})):
        own = {"algo.policy": str(clone.dir), "algo.variant": variant, "algo.actor_learning_rate": 2e-3, **more}
        run = offrl.train("alol", data, seeds=1, steps=250, settings={**settings, **own})
        earned[variant] = run.final_scores[0]["return_mean"]
    print(f"lm_bc {cloned:.2f}, alol {earned}")
    assert all(found > cloned + 0.6 for found in earned.values())
