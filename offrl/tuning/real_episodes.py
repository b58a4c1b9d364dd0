"""The choice among the finalists by real episodes, each of which is written down before the next begins."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from offrl.data.containers.guard import from_json
from offrl.errors import UserError, first_line
from offrl.evaluation.pool.host import evaluate_parallel
from offrl.settings.evaluation import EvalConfig
from offrl.statistics.intervals import mean_interval
from offrl.system import trust
from offrl.system.files import open_to_append
from offrl.tasks.environments import make_env, resolve_task
from offrl.tasks.episodes import cost_of, step
from offrl.tasks.task import Task
from offrl.tuning import best_arm
from offrl.tuning.judging import Policies
from offrl.tuning.plan import PLAYED

if TYPE_CHECKING:
    from offrl.tuning.engine import TuningSearch

EPISODES = "episodes.jsonl"


def task_of(search: TuningSearch) -> Task | None:
    """The environment of played and reported episodes. Raises UserError where one is needed and there is none."""
    config = search.config
    task = resolve_task(search.work.judged_on.spec.task, EvalConfig(env=config.env))
    if task is None and (config.episodes or config.truth):
        raise UserError(
            f"{'episodes' if config.episodes else 'truth'}= plays in an environment, and these data name none: env=ID"
        )
    if task is not None and config.episodes and config.cost_limit is not None:
        refuse_costless(task)
    return task


def refuse_costless(task: Task) -> None:
    """Raise UserError for an environment that does not say what a step costs."""
    with contextlib.closing(make_env(task)) as env:
        env.reset(seed=0)
        *_, info = step(env, env.action_space.sample())
    if np.isnan(cost_of(info)):
        raise UserError(
            f"criteria=cost: {task.env_id or task.name} does not say what a step costs (info['cost']): leave "
            "episodes= out, to choose by the data's costs alone, or name another env="
        )


def play(search: TuningSearch, task: Task | None, policies: Policies, by_data: Mapping[str, Any]) -> dict[str, Any]:
    """The choice among the best by the data with n real episodes, each written down before the next begins."""
    assert task is not None
    config, work = search.config, search.work
    playable = [n for n in by_data["order"] if n not in by_data["vetoed"] and any(t == n for t, _ in policies)]
    if len(playable) < 2:
        return {"setting": by_data["setting"], "why": "the only finalist", "episodes": 0}
    count = max(2, min(config.finalists, config.episodes // 2, len(playable)))
    names = playable[:count]
    playing: best_arm.EpisodeSearch
    if config.confidence < 1.0:
        low, high = float(work.judged_on.raw_returns.min()), float(work.judged_on.raw_returns.max())
        size = max(high - low, 1e-6)
        prior = {"prior": 0.5 * (low + high), "prior_sd": size, "noise": size / 4.0, "margin": size / 100.0}
        playing = best_arm.TopTwo(count, config.episodes, **prior, confidence=config.confidence, seed=config.seed)
    else:
        playing = best_arm.SequentialHalving(count, config.episodes, config.cost_limit)
    path = work.folder / EPISODES
    limited = config.cost_limit is not None
    for setting, episode, value, cost in _lines(path, names, limited):
        playing.add(names.index(setting), episode, value, cost)
    seeds = {n: [s for t, s in policies if t == n] for n in names}
    search.show.tell(f"playing {config.episodes} episodes of {', '.join(names)} in {task.env_id or task.name}")
    while pulls := playing.pulls():
        for arm, episode in pulls:
            name = names[arm]
            seed = seeds[name][episode % len(seeds[name])]
            config_ = EvalConfig(episodes=1, seed=PLAYED + episode, workers=0)
            played = evaluate_parallel([policies[name, seed]], [0], task, config_, workers=0)
            value, spent = float(played.returns[0, 0]), 0.0
            entry = {"setting": name, "seed": seed, "episode": episode, "return": value}
            if limited:
                assert played.costs is not None
                entry["cost"] = spent = float(played.costs[0, 0])
            with open_to_append(path) as file:
                file.write((json.dumps(entry) + "\n").encode())
            playing.add(arm, episode, value, spent)
            if not isinstance(playing, best_arm.SequentialHalving):
                break
    best = playing.best()
    means, counts = playing.means(), playing.counts()
    reason = f"the best of {count} finalists"
    costs: dict[str, Any] = {}
    if (limit := config.cost_limit) is not None:
        interval = mean_interval(list(playing.costs[best].values()))
        costs = {"costs": _plain(playing.mean_costs()), "cost": _plain(np.array(interval))}
        if interval[0] <= limit:
            reason = f"the best of those of {count} finalists that keep the limit of {limit:g}"
        else:
            reason = f"none of the last of {count} finalists keeps the limit of {limit:g}, and it comes nearest"
    return {
        "setting": names[best],
        "why": f"{reason} in {playing.played} real episodes",
        "episodes": playing.played,
        "finalists": names,
        "counts": counts.tolist(),
        "means": _plain(means),
        **costs,
    }


def _plain(values: np.ndarray) -> list[float | None]:
    return [None if x != x else float(x) for x in values.tolist()]


def _lines(path: Path, names: Sequence[str], limited: bool) -> list[tuple[str, int, float, float]]:
    """(setting, one of `names`; episode; return; cost, 0 unless `limited`) of those that were played; a last line that
    was cut by a kill does not count, and is cut off. Raises UserError for lines that hold anything else."""
    try:
        text = trust.read_text(path)
    except FileNotFoundError:
        return []
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"{path} cannot be read ({first_line(error)}); remove it, and its episodes are played again"
        ) from None
    complete, _, partial_line = text.rpartition("\n")
    if partial_line:
        with trust.open_to_write(path, "r+b") as file:
            file.truncate(len((complete + "\n").encode()) if complete else 0)
    result = []
    for number, line in enumerate(complete.splitlines(), 1):
        try:
            entry = from_json(line)
            setting, episode, value = entry["setting"], entry["episode"], entry["return"]
            cost = entry["cost"] if limited else 0.0
            sound = setting in names and type(episode) is int and {type(value), type(cost)} <= {int, float}
        except (ValueError, LookupError, TypeError, RecursionError):
            sound = False
        if not sound:
            raise UserError(
                f"{path}: line {number} is no episode of a finalist; remove the file, and its episodes are played again"
            )
        result.append((setting, episode, float(value), float(cost)))
    return result
