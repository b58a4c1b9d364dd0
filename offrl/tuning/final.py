"""The end of a tune: the choice among the settings that were trained in full, by the data or by real episodes, and what
it is worth.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from offrl.data.dataset import Dataset
from offrl.errors import UserError, warn
from offrl.evaluation.pool.host import evaluate_parallel
from offrl.runs.run import SavedRun
from offrl.settings.evaluation import EvalConfig
from offrl.tasks.task import Task
from offrl.tuning import choice
from offrl.tuning.judging import (
    FINAL,
    Policies,
    Summary,
    judged_rows,
    policies_of,
    summarise,
    write_trials,
)
from offrl.tuning.plan import RETRAINED, TRUTH
from offrl.tuning.real_episodes import play, task_of
from offrl.tuning.result import write_result
from offrl.tuning.search.training import RungRun, train_rung

if TYPE_CHECKING:
    from offrl.tuning.engine import TuningSearch


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
        else search.stage("played", lambda: play(search, task, policies(), by_data), names)
    )
    fates = dict.fromkeys(search.finalists, "finalist")
    fates |= dict.fromkeys(by_data["unsafe"], "may break the limit")
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
    """The choice by the data: {setting, why, order, members, vetoed, unsafe, cost}; without a judge of the data the
    settings in their order.
    """
    names = search.finalists
    if summary is None:
        empty: dict[str, Any] = {
            "members": [], "vetoed": {}, "overruled": {}, "unsafe": {}, "cost": None, "reference": None
        }  # fmt: skip
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
    unsafe = broken_limits(summary, open_, config.cost_limit)
    candidates, limit = len(open_), config.cost_limit
    safe = [k for k in open_ if names[k] not in unsafe]
    open_ = safe or [names.index(next(iter(unsafe)))]
    values, draws = summary.values, summary.draws
    ranked = [open_[i] for i in choice.ranking(values[open_])]
    order = list(dict.fromkeys([*(names[k] for k in ranked), *unsafe, *(n for n in names if n in vetoed)]))
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
    if limit is not None:
        within = f"{reason} of what keeps the limit of {limit:g} ({len(safe)} of {candidates} finalists)"
        reason = within if safe else f"no finalist keeps the limit of {limit:g}, and it comes nearest"
    order.remove(names[chosen])
    return {
        "setting": names[chosen],
        "why": reason,
        "order": [names[chosen], *order],
        "members": members,
        "vetoed": vetoed,
        "overruled": overruled,
        "unsafe": unsafe,
        "cost": summary.cost_interval(chosen) if np.isfinite(summary.cost[chosen]) else None,
        "reference": reference,
    }


def clone_distance(data: Dataset) -> float:
    """How far the actions of the best linear function of the observations lie from the data's: root mean square in [-1,
    1], or the share of actions that are not the most frequent one. What a policy that clones the data has, at least in
    size."""
    actions = data.columns["actions"]
    if data.spec.discrete:
        return 1.0 - float(np.bincount(actions.numpy()).max() / len(actions))
    x = data.columns["observations"].reshape(len(data), -1).double().numpy()
    x = np.hstack([(x - x.mean(0)) / (x.std(0) + 1e-6), np.ones((len(x), 1))])
    y = actions.reshape(len(data), -1).double().numpy()
    weights = np.linalg.solve(x.T @ x + 1e-3 * len(x) * np.eye(x.shape[1]), x.T @ y)
    return float(np.sqrt(np.mean((x @ weights - y) ** 2)))


def broken_limits(summary: Summary, among: Sequence[int], limit: float | None) -> dict[str, str]:
    """{setting: why} of those whose cost is not below the limit with its whole interval, the nearest first."""
    if limit is None:
        return {}
    most = np.nan_to_num(summary.most_cost, nan=np.inf)
    texts = {k: "{:.4g} [{:.4g}, {:.4g}]".format(*summary.cost_interval(k)) for k in among}
    order = sorted((k for k in among if most[k] > limit), key=lambda k: most[k])
    return {summary.names[k]: f"its episodes cost {texts[k]}, and the limit is {limit:g}" for k in order}


def cautions(search: TuningSearch, names: Sequence[str], distance: np.ndarray) -> np.ndarray:
    """How near settings stay to the data, larger is nearer: by the settings that hold them there, or, of several
    algorithms, by the distance of their actions."""
    algos = {search.trials[n][0] for n in names}
    if len(algos) > 1:
        return -np.where(np.isnan(distance), np.inf, distance)
    keys = [search.work.spaces[search.trials[n][0]].caution(search.trials[n][1]) for n in names]
    levels = {key: float(i) for i, key in enumerate(sorted(set(keys)))}
    return np.array([levels[key] for key in keys])


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
        **({} if config.cost_limit is None else {"eval.cost_limit": config.cost_limit}),
    }
