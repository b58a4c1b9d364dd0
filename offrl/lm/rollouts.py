"""Play many text environments with one call of the policy for all of them, and keep their texts."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import gymnasium as gym
import torch
from torch import Tensor

from offrl import rng
from offrl.errors import UserError
from offrl.lm.actor import TextActor
from offrl.tasks.environments import make_env
from offrl.tasks.episodes import ENDLESS, reset_seed, success_of
from offrl.tasks.task import Task

if TYPE_CHECKING:
    from offrl.algorithm import TrainState
    from offrl.lm.algorithm import TextAlgorithm

Policy = Callable[[list[list[str]], list[list[str] | None]], Sequence[str]]


@dataclass
class _Game:
    """A running episode."""

    env: gym.Env
    number: int = -1
    seed: int = 0
    history: list[str] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    misunderstood: int = 0
    info: dict[str, Any] = field(default_factory=dict)

    def begin(self, number: int, seed: int, options: Mapping[str, Any] | None) -> None:
        self.number, self.seed = number, reset_seed(seed, 0, number)
        observation, self.info = self.env.reset(seed=self.seed, options=None if options is None else dict(options))
        self.history, self.rewards, self.misunderstood = [observation], [], 0

    def step(self, action: str) -> tuple[bool, bool]:
        """(terminated, truncated) after this action."""
        observation, reward, terminated, truncated, self.info = self.env.step(action)
        self.history += [action, observation]
        self.rewards.append(float(reward))
        self.misunderstood += not self.info.get("understood", True)
        return bool(terminated), bool(truncated)

    def legal(self) -> list[str] | None:
        actions = self.info.get("legal_actions")
        return None if actions is None else list(actions)

    def episode(self, terminated: bool) -> dict[str, Any]:
        """The episode in the canonical form. One that terminated did not time out as well."""
        meta: dict[str, Any] = {"seed": self.seed}
        if self.misunderstood:
            meta["misunderstood"] = self.misunderstood
        success = success_of(self.info)
        if success is not None:
            meta["success"] = success
        steps = zip(self.history[0::2], self.history[1::2], self.rewards, strict=False)
        return {
            "turns": [{"obs": o, "action": a, "reward": r} for o, a, r in steps],
            "final_obs": self.history[-1],
            "terminated": terminated,
            "truncated": not terminated,
            "meta": meta,
        }


def rollouts(
    env_factory: Callable[[], gym.Env],
    policy: Policy,
    episodes: int,
    seed: int = 0,
    parallel: int = 32,
    *,
    starts: Sequence[Mapping[str, Any]] = (),
    max_steps: int | None = None,
) -> list[dict[str, Any]]:
    """Play `episodes` episodes, up to `parallel` of them at once; they come back in the canonical form and in their
    order.

    env_factory: makes a text environment. policy(histories, legal_actions): for each running episode its texts so far
    (observation, action, observation, ..., the last one an observation) and info["legal_actions"] (None where the
    environment gives none) to its next action. starts: options of `reset`, which the episodes take in turn
    (`Task.starts`). max_steps: turns after which an episode is cut off.

    Episode e is reset with a seed made from (seed, e), so which others run beside it makes no difference to it, only to
    the policy. `meta` has that seed, the success where the environment reports it, and the number of actions that it
    reported as misunderstood (info["understood"]).
    Raises UserError for a policy that does not answer with a text each.
    """
    if episodes < 1 or parallel < 1 or (max_steps is not None and max_steps < 1):
        raise UserError(
            f"rollouts: episodes={episodes}, parallel={parallel}, max_steps={max_steps}: each must be 1 at least"
        )
    results: dict[int, dict[str, Any]] = {}
    games: list[_Game] = []
    pool: list[_Game] = []
    envs: list[gym.Env] = []
    count = 0
    try:
        while len(results) < episodes:
            while count < episodes and len(games) < parallel:
                if not pool:
                    envs.append(env_factory())
                    pool.append(_Game(envs[-1]))
                games.append(pool.pop())
                games[-1].begin(count, seed, starts[count % len(starts)] if starts else None)
                count += 1
            actions = policy([list(g.history) for g in games], [g.legal() for g in games])
            _check(actions, len(games))
            survivors = []
            for game, action in zip(games, actions, strict=True):
                terminated, truncated = game.step(action)
                if terminated or truncated or len(game.rewards) == max_steps:
                    results[game.number] = game.episode(terminated)
                    pool.append(game)
                else:
                    survivors.append(game)
            games = survivors
    finally:
        for env in envs:
            env.close()
    return [results[e] for e in range(episodes)]


def _check(actions: Sequence[str], count: int) -> None:
    if isinstance(actions, str) or len(actions) != count:
        answer = "one text" if isinstance(actions, str) else f"{len(actions)} actions"
        raise UserError(
            f"rollouts: the policy gave {answer} for {count} running episodes; it must give a list with one text for "
            "each"
        )
    for number, action in enumerate(actions):
        if not isinstance(action, str):
            raise UserError(f"rollouts: action {number} of the policy is of type {type(action).__name__}, not a text")


def play_episodes(
    algorithm: TextAlgorithm,
    state: TrainState,
    task: Task,
    episodes: int,
    key: Tensor,
    parallel: int = 32,
    max_steps: int | None = None,
) -> list[dict[str, Any]]:
    """Episodes of a task, as `rollouts` gives them, in which the actions are drawn from an algorithm's policy. The key
    decides them.
    """
    calls = itertools.count()
    seed_key, action_key = rng.split(key)
    actor = TextActor(algorithm, state)

    def policy(histories: list[list[str]], legal: list[list[str] | None]) -> Sequence[str]:
        with torch.no_grad():
            return actor.reply(histories, legal, range(len(histories)), rng.fold_in(action_key, next(calls)), True)

    limits = [n for n in (max_steps, task.max_episode_steps) if n is not None]
    max_turns, seed = min(limits, default=ENDLESS), int(seed_key) & 0x7FFFFFFF
    return rollouts(lambda: make_env(task), policy, episodes, seed, parallel, starts=task.starts, max_steps=max_turns)


def episode_means(episodes: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Means over episodes in the canonical form, by metric: of the return, the turns, the share of misunderstood ones,
    and success.
    """
    turns = [len(e["turns"]) for e in episodes]
    columns = {
        "return": [sum(t["reward"] for t in e["turns"]) for e in episodes],
        "turns": turns,
        "misunderstood": [e["meta"].get("misunderstood", 0) / n for e, n in zip(episodes, turns, strict=True)],
        "success": [float(e["meta"]["success"]) for e in episodes if "success" in e["meta"]],
    }
    return {f"rollout/{name}": float(sum(values)) / len(values) for name, values in columns.items() if values}
