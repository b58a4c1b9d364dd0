"""Cubes, scene and puzzles, driven by the package's oracles: plans with correlated noise, or reactions with independent
noise.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import numpy as np

from offrl.collect.config import CollectConfig
from offrl.collect.ogbench.rows import Rows, empty, keep

NOISE, SMOOTHING, MIN_NORM = 0.1, 0.5, 0.4  # OGBench's --noise, --noise_smoothing (plans) and --min_norm (reactions)
RANDOM_ACTIONS = {"cube": 0.1, "scene": 0.1, "puzzle": 0.2}  # its --p_random_action, of the kind noisy
P_STACK = {
    "single": (0.0, 0.0),
    "double": (0.0, 0.25),
    "triple": (0.05, 0.35),
    "quadruple": (0.1, 0.5),
    "octuple": (0.0, 0.35),
}
SUBTASKS = {"cube": ("cube",), "scene": ("cube", "button", "drawer", "window"), "puzzle": ("button",)}
SCENE_CUBE_STEPS = 100  # after which a reacting oracle leaves the scene's cube alone
TRIES = 100  # recordings of one episode, until the scene's cube stays where a camera sees it


def oracles(config: CollectConfig, env: Any) -> dict[str, Any]:
    """The oracle of each kind of subtask of the environment."""
    family = config.env.partition("-")[0]
    plan = config.kind == "play"
    noise = NOISE if config.oracle_noise is None else config.oracle_noise
    form = {"noise": noise, "noise_smoothing": SMOOTHING} if plan else {"min_norm": MIN_NORM}
    oracle_by_name = {}
    for name in SUBTASKS[family]:
        more: dict[str, Any] = {"gripper_always_closed": True} if family == "puzzle" else {}
        if family == "scene" and name == "cube" and not plan:
            more = {"max_step": SCENE_CUBE_STEPS}
        how = "plan" if plan else "markov"
        module = importlib.import_module(f"ogbench.manipspace.oracles.{how}.{name}_{how}")
        oracle_by_name[name] = getattr(module, f"{name.capitalize()}{how.capitalize()}Oracle")(env=env, **form, **more)
    return oracle_by_name


def player(config: CollectConfig, env: Any) -> Callable[[Any, CollectConfig, int], Rows]:
    """The function that plays an episode."""
    by_task = oracles(config, env)
    family = config.env.partition("-")[0]
    noise = NOISE if config.oracle_noise is None else config.oracle_noise
    stack = next((v for k, v in P_STACK.items() if k in config.env), (0.5, 0.5))

    def once(env: Any, seed: int | None) -> Rows:
        observation, info = env.reset(seed=seed)
        space = env.action_space
        p_stack = np.random.uniform(*stack)
        spread = np.random.uniform(0.0, noise) * np.array([1, 1, 1, 3, 10]) if config.kind == "noisy" else None
        oracle = by_task[info["privileged/target_task"]]
        oracle.reset(observation, info)
        rows = empty(env.unwrapped)
        over = False
        while not over:
            if spread is not None and np.random.uniform() < RANDOM_ACTIONS[family]:
                action = np.random.uniform(space.low, space.high)  # space.sample() has a generator that no seed reaches
            else:
                action = np.asarray(oracle.select_action(observation, info))
                action = action if spread is None else action + np.random.normal(0.0, spread)
            action = np.clip(action, -1.0, 1.0)
            next_observation, _, terminated, truncated, info = env.step(action)
            over = bool(terminated or truncated)
            if oracle.done:
                target_observation, target = env.unwrapped.set_new_target(p_stack=p_stack)
                oracle = by_task[target["privileged/target_task"]]
                oracle.reset(target_observation, target)
            keep(rows, observation, action, over, info)
            observation = next_observation
        return rows

    def play(env: Any, config: CollectConfig, seed: int) -> Rows:
        rows = once(env, seed)
        for _ in range(TRIES):
            if family != "scene" or in_sight(np.asarray(rows["qpos"])):
                break
            rows = once(env, None)  # goes on in the generators of this episode's seed
        return rows

    return play


def in_sight(qpos: np.ndarray) -> bool:
    """Whether the scene's cube, numbers 14 to 16 of the positions [T, Q], is seen in all states of an episode, or lies
    in the drawer.
    """
    y, z = qpos[:, 15], qpos[:, 16]
    beyond_left = (y <= -0.3) & ((z < 0.06) | (z > 0.08))
    return not bool((y >= 0.29).any() or beyond_left.any())
