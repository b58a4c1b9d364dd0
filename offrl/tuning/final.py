"""The end of a tune: the choice among the settings that were trained in full, by the data or by real episodes, and what
it is worth.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from offrl.data.containers.guard import from_json
from offrl.errors import UserError, first_line, warn
from offrl.evaluation.pool.host import evaluate_parallel
from offrl.runs.run import SavedRun
from offrl.settings.evaluation import EvalConfig
from offrl.system import trust
from offrl.system.files import open_to_append
from offrl.tasks.environments import resolve_task
from offrl.tasks.task import Task
from offrl.tuning import best_arm, choice
from offrl.tuning.judging import (
    FINAL,
    Policies,
    Summary,
    clone_distance,
    judged_rows,
    policies_of,
    summarise,
    write_trials,
)
from offrl.tuning.plan import PLAYED, RETRAINED, TRUTH
from offrl.tuning.result import write_result
from offrl.tuning.search.training import RungRun, train_rung

if TYPE_CHECKING:
    from offrl.tuning.engine import TuningSearch

EPISODES = "episodes.jsonl"


def finish(search: TuningSearch) -> dict[str, Any]:
    """Choose, play, retrain, and write what came out; returns it."""
    config = search.config
    task = task_of(search)
    summary = None
    if config.data_judges:
        summary = summarise(search.judge_finalists(), search.finalists, search.work.seeds)
    by_data = search.stage("chosen", lambda: choose(search, summary), search.finalists)
    policies = functools.cache(lambda: policies_of(search.finalist_runs))  # read once, where a stage needs them
    names = search.finalists
    final = (
        by_data
        if not config.episodes
        else search.stage("played", lambda: _play(search, task, policies(), by_data), names)
    )
    fates = dict.fromkeys(search.finalists, "finalist")
    fates |= dict.fromkeys(by_data["vetoed"], "too far from the data") | dict.fromkeys(
        by_data["members"], "not told from the best"
    )
    fates[final["setting"]] = "chosen"
    if summary is not None:
        _, steps = config.configs_and_steps()
        search.rows += judged_rows(search.trials, summary, config.data_judges[0], FINAL, steps, fates, None)
    write_trials(search.work.folder, search.rows)
    if config.truth:
        search.stage("truth", lambda: _truth(search, task, policies()))
    retrained = _retrain(search, final["setting"]) if config.retrain else {}
    return write_result(search, by_data, final, retrained)


# ---------------------------------------------------------------------------------------------------------- by the data


def choose(search: TuningSearch, summary: Summary | None) -> dict[str, Any]:
    """The choice by the data: {setting, why, order, members, vetoed}; without a judge of the data the settings in their
    order.
    """
    names = search.finalists
    if summary is None:
        empty: dict[str, Any] = {"members": [], "vetoed": {}, "overruled": {}, "reference": None}
        return {"setting": names[0], "why": "no judge of the data", "order": list(names), **empty}
    config = search.config
    reference = clone_distance(search.work.judged_on)
    vetoed = {n: reason for n, reason in zip(names, summary.exploded, strict=True) if reason}
    for n, action_distance in zip(names, summary.distance.tolist(), strict=True):
        if config.veto and n not in vetoed and action_distance > config.veto * reference:
            vetoed[n] = (
                f"its actions lie {action_distance:.2g} from the data's, more than {config.veto:g} times a linear "
                f"clone's {reference:.2g}"
            )
    overruled: dict[str, str] = {}
    open_ = [k for k, n in enumerate(names) if n not in vetoed and summary.alive[k]]
    if not open_:
        warn(
            "every finalist is too far from the data, or its values left what the rewards allow: the choice is among "
            "all of them"
        )
        open_, overruled, vetoed = [k for k in range(len(names)) if summary.alive[k]], vetoed, {}
    if not open_:
        raise UserError(
            "every setting diverged before the end: lower learning rates, or look at the data with offrl data inspect"
        )
    values, draws = summary.values, summary.draws
    ranked = [open_[i] for i in choice.ranking(values[open_])]
    order = [names[k] for k in ranked] + [n for n in names if n in vetoed]
    best, members, chosen, reason = ranked[0], [names[ranked[0]]], ranked[0], "the largest estimate"
    complete = ~np.isnan(values[open_]).any(1)
    if config.rule == "one-se" and complete.any() and (values.shape[1] > 1 or draws is not None):
        careful = cautions(search, [names[k] for k in open_], summary.distance[open_])
        fits = None if draws is None else draws[open_]
        tie = choice.one_se(values[open_], careful, summary.distance[open_], fits)
        members = [names[open_[k]] for k in tie.members]
        chosen = open_[tie.chosen]
        if chosen != best:
            reason = (
                f"the most conservative of {len(members)} that are within a standard error of the best, {names[best]}"
            )
        elif len(members) > 1:
            reason = f"the largest estimate, and the most conservative of {len(members)} within a standard error of it"
    order.remove(names[chosen])
    return {
        "setting": names[chosen],
        "why": reason,
        "order": [names[chosen], *order],
        "members": members,
        "vetoed": vetoed,
        "overruled": overruled,
        "reference": reference,
    }


def cautions(search: TuningSearch, names: Sequence[str], distance: np.ndarray) -> np.ndarray:
    """How near settings stay to the data, larger is nearer: by the settings that hold them there, or, of several
    algorithms, by the distance of their actions."""
    algos = {search.trials[n][0] for n in names}
    if len(algos) > 1:
        return -np.where(np.isnan(distance), np.inf, distance)
    keys = [search.work.spaces[search.trials[n][0]].caution(search.trials[n][1]) for n in names]
    levels = {key: float(i) for i, key in enumerate(sorted(set(keys)))}
    return np.array([levels[key] for key in keys])


# ----------------------------------------------------------------------------------------------------- by real episodes


def task_of(search: TuningSearch) -> Task | None:
    """The environment of played and reported episodes. Raises UserError where one is needed and there is none."""
    config = search.config
    task = resolve_task(search.work.judged_on.spec.task, EvalConfig(env=config.env))
    if task is None and (config.episodes or config.truth):
        raise UserError(
            f"{'episodes' if config.episodes else 'truth'}= plays in an environment, and these data name none: env=ID"
        )
    return task


def _play(search: TuningSearch, task: Task | None, policies: Policies, by_data: Mapping[str, Any]) -> dict[str, Any]:
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
        playing = best_arm.SequentialHalving(count, config.episodes)
    path = work.folder / EPISODES
    for setting, episode, value in _lines(path, names):
        playing.add(names.index(setting), episode, value)
    seeds = {n: [s for t, s in policies if t == n] for n in names}
    search.show.tell(f"playing {config.episodes} episodes of {', '.join(names)} in {task.env_id or task.name}")
    while pulls := playing.pulls():
        for arm, episode in pulls:
            name = names[arm]
            seed = seeds[name][episode % len(seeds[name])]
            config_ = EvalConfig(episodes=1, seed=PLAYED + episode, workers=0)
            value = float(evaluate_parallel([policies[name, seed]], [0], task, config_, workers=0).returns[0, 0])
            with open_to_append(path) as file:
                file.write(
                    (json.dumps({"setting": name, "seed": seed, "episode": episode, "return": value}) + "\n").encode()
                )
            playing.add(arm, episode, value)
            if not isinstance(playing, best_arm.SequentialHalving):
                break
    best = playing.best()
    means, counts = playing.means(), playing.counts()
    return {
        "setting": names[best],
        "why": f"the best of {count} finalists in {playing.played} real episodes",
        "episodes": playing.played,
        "finalists": names,
        "counts": counts.tolist(),
        "means": [None if m != m else float(m) for m in means.tolist()],
    }


def _lines(path: Path, names: Sequence[str]) -> list[tuple[str, int, float]]:
    """(setting, one of `names`; episode; return) of those that were played; a last line that was cut by a kill does not
    count, and is cut off. Raises UserError for lines that hold anything else."""
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
            sound = setting in names and type(episode) is int and type(value) in (int, float)
        except (ValueError, LookupError, TypeError, RecursionError):
            sound = False
        if not sound:
            raise UserError(
                f"{path}: line {number} is no episode of a finalist; remove the file, and its episodes are played again"
            )
        result.append((setting, episode, float(value)))
    return result


def _truth(search: TuningSearch, task: Task | None, policies: Policies) -> dict[str, Any]:
    """Returns of every finalist's policies in episodes that nothing chose by."""
    assert task is not None
    config = search.config
    search.show.tell(f"truth: {config.truth} episodes of {len(policies)} policies in {task.env_id or task.name}")
    keys = list(policies)
    result = evaluate_parallel(
        list(policies.values()), [s for _, s in keys], task, EvalConfig(episodes=config.truth, seed=TRUTH)
    )
    scores = result.scores if result.scores is not None else result.returns
    rows = [
        {"setting": t, "seed": s, "returns": result.returns[i].tolist(), "score": float(scores[i].mean())}
        for i, (t, s) in enumerate(keys)
    ]
    return {
        "environment": result.label,
        "episodes": config.truth,
        "normalised": result.scores is not None,
        "policies": rows,
    }


# ----------------------------------------------------------------------------------------------------------- retraining


def _retrain(search: TuningSearch, chosen: str) -> dict[str, str]:
    """Train the chosen setting and the default of its algorithm anew, on all episodes, with seeds and episodes that
    chose nothing.
    """
    algo, _ = search.trials[chosen]
    default = f"{algo}-00"
    roles = {}
    for role, name in (("winner", chosen), ("default", default)):
        if role == "default" and name == chosen:
            continue
        directory = search.work.folder / role
        settings = winner_settings(search, name)
        search.show.tell(
            f"{role}: {name} anew with seeds {', '.join(map(str, search.work.final_seeds))} on all episodes"
        )
        train_rung(RungRun(directory, settings, (name,)), search.work.data)
        roles[role] = name
        search.stage(f"retrained-{role}", functools.partial(_scores, directory))
    return roles


def _scores(directory: Path) -> dict[str, Any]:
    """The last evaluation of a run."""
    return {"rows": SavedRun(directory).final_scores}


def winner_settings(search: TuningSearch, name: str) -> dict[str, Any]:
    """Settings of `offrl train` for a setting on all data."""
    config, work = search.config, search.work
    algo, values = search.trials[name]
    algo_settings = {f"algo.{field}": list(v) if isinstance(v, tuple) else v for field, v in values.items()}
    return {
        **work.base[algo],
        **algo_settings,
        "steps": config.configs_and_steps()[1],
        "seeds": work.final_seeds,
        "eval.env": config.env,
        "eval.episodes": config.eval_episodes,
        "eval.seed": RETRAINED,
        "eval.every": 0,
        "eval.estimate": False,
    }
