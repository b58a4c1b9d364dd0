"""Does ArCHer find more than cloning does: in the compact maze from data, and by playing a small game?"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
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
COMMON: dict[str, Any] = {"eval.every": 0, "compare": [], "quiet": True}
RIGHT = {"red?\n": "yes please\n", "blue?\n": "no thanks\n"}
ANSWERS = [f"{a} {b}\n" for a in ("yes", "no") for b in ("please", "thanks")]


def earned(run: Any) -> float:
    return float(run.final_scores[0]["return_mean"])


def test_archer_crosses_the_maze_where_clones_get_lost(tmp_path: Path) -> None:
    """Cloning earns about -80; about a minute and a half."""
    settings = {
        **COMMON,
        "runs_dir": str(tmp_path),
        "eval.episodes": 50,
        "algo.history": 1,
        "algo.tokenizer": "words",
        "algo.width": 64,
        "algo.layers": 1,
        "algo.batch_size": 64,
        "algo.observation_weight": 1.0,
        "algo.learning_rate": 2e-3,
    }
    clone = offrl.train("lm_bc", "text-maze-compact", seeds=1, steps=300, settings=settings)
    own = {
        "algo.start": "cloned",
        "algo.policy": str(clone.dir),
        "algo.actor_learning_rate": 1e-3,
        "algo.temperature": 2.0,
    }
    run = offrl.train("archer", "text-maze-compact", seeds=1, steps=1_000, settings={**settings, **own})
    print(f"lm_bc {earned(clone):.1f}, archer {earned(run):.1f}")
    assert earned(run) > earned(clone) + 15.0


class Game(gym.Env):
    """One question, one answer of two words."""

    def __init__(self) -> None:
        self.observation_space = self.action_space = AnyText(40)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        self.asked = str(self.np_random.choice(list(RIGHT)))
        return self.asked, {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        right = action == RIGHT[self.asked]
        return "done\n", float(right), True, False, {"success": right, "understood": action in ANSWERS}


def test_archer_online_learns_a_game(tmp_path: Path) -> None:
    """The data answer at random, and are right in a quarter of the cases; about half a minute."""
    g = np.random.default_rng(0)
    episodes = []
    for _ in range(400):
        asked, answer = str(g.choice(list(RIGHT))), str(g.choice(ANSWERS))
        turn = {"obs": asked, "action": answer, "reward": float(answer == RIGHT[asked])}
        episodes.append({"turns": [turn], "final_obs": "done\n", "terminated": True, "truncated": False})
    data = from_episodes(episodes, name="game", task=Task(name="game", env_factory=Game))
    settings = {
        **COMMON, "runs_dir": str(tmp_path), "eval.episodes": 200, "algo.width": 16, "algo.layers": 1, "algo.heads": 2,
        "algo.tokenizer": "words", "algo.batch_size": 32, "algo.learning_rate": 3e-3,
    }  # fmt: skip
    clone = offrl.train("lm_bc", data, seeds=1, steps=100, settings=settings)
    own = {
        "algo.policy": str(clone.dir),
        "algo.iteration_episodes": 48,
        "algo.critic_steps": 15,
        "algo.actor_steps": 15,
        "algo.warmup_iterations": 4,
        "algo.capacity": 512,
        "algo.actor_learning_rate": 1.5e-3,
        "algo.critic_learning_rate": 5e-3,
    }
    run = offrl.train("archer_online", data, seeds=1, steps=720, settings={**settings, **own})
    print(f"lm_bc {earned(clone):.2f}, archer_online {earned(run):.2f}")
    assert earned(clone) < 0.35 and earned(run) > earned(clone) + 0.12
