"""`offrl evaluate`: score the policies of a run again."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from offrl.errors import UserError, say, warn
from offrl.runs.paths import check_run
from offrl.settings.evaluation import ACTING_HELP
from offrl.settings.field import describe, setting

if TYPE_CHECKING:
    from collections.abc import Sequence

    from offrl.api import Run
    from offrl.evaluation.result import Evaluation
    from offrl.evaluation.shield_kinds import ShieldSettings


@dataclass
class EvaluateConfig:
    """Settings of `offrl evaluate`."""

    episodes: int = setting(10, "episodes of each policy", low=1)
    seed: int = setting(0, "decides the start states, together with the policy's seed and the episode")
    env: str | None = setting(None, "a Gymnasium id, or file.py:Name; null: the environment that the run was scored in")
    max_steps: int | None = setting(None, "cut episodes after so many steps; null: the environment's own limit", low=1)
    cost_limit: float | None = setting(
        None, "limit of an episode's cost, for cost_normalized and safe; null: the algorithm's own", low=0.0
    )
    parallel: int = setting(64, "environments alive at once in one process; never changes a score", low=1)
    device: str = setting(
        "auto", "auto, cpu or cuda:N: where policies act whose actions take long (planners, language models)"
    )
    target_returns: list[Any] = setting(
        [],
        "target returns of return-conditioned policies, all at once: 1000,2000,3000, or auto, spread over the data's; "
        "of cdt also with limits of the cost, [[1000,20],[1000,40]]; writes RUN/target_returns.csv and .png",
    )
    frequency: list[int] = setting(
        [],
        "steps of the environment between two decisions, one evaluation each: 1,2,4,8 holds actions, or plays them "
        "from the queue of a policy that draws several at a time; writes RUN/frequency.csv and .png",
    )
    robust: str | None = setting(
        None,
        "perturbations of a MuJoCo environment: rrls, contact (of two parameters; rrls:3 of three), or a YAML file of "
        "ranges; writes RUN/robust.html, .csv, .json and .png",
    )
    points: str = setting("grid", "points of robust=: grid, grid:5, latin:100, or axis, each parameter alone")
    rewards: list[str] = setting(
        [],
        "other rewards for zero-shot policies (fb, breeze), without training: file.py:function, or several, "
        "a.py:f,a.py:g, as dataset.reward_labels; inferred from the run's data; writes RUN/rewards.csv",
    )
    acting: dict[str, Any] = setting({}, ACTING_HELP)
    shield: str | None = setting(
        None,
        "what corrects actions before they are played: file.py:FUNCTION, a rule(observations, actions) in torch that "
        "returns their lowest and highest values, or other actions; critic, of algo.cost_limit=; or model; also with "
        "robust= and video=",
    )
    constraint: str | None = setting(
        None, "shield=model: file.py:FUNCTION, of next observations in torch, at most 0 where all is well"
    )
    world_model: str | None = setting(None, "shield=model: a run of algo=dynamics")
    safe_action: list[float] = setting([], "played where a shield has no solution; []: the middle of the range")
    video: bool = setting(False, "true: film the first episodes, all policies in one picture, to RUN/videos/*.mp4")
    video_episodes: int = setting(1, "how many episodes are filmed, one file each", low=1)
    fps: int = setting(30, "pictures a second at most, at real speed", low=1)
    size: int | None = setting(
        None, "pixels of a policy's square; null: 480 for one, 320 for up to four, 256 for more", low=16, high=2048
    )


WIDEST = 10  # tasks whose successes a table shows


def usage(arguments: list[str]) -> str:
    return "\n".join(["usage: offrl evaluate RUN [name=value ...]", "", *describe(EvaluateConfig())])


def run(arguments: list[str]) -> int:
    if not arguments or "=" in arguments[0]:
        raise UserError(
            "usage: offrl evaluate RUN [episodes=10] [seed=0] [env=ID] [video=true]; offrl evaluate --help says more"
        )
    check_run(arguments[0])
    from offrl.api import Run
    from offrl.evaluation.shield_kinds import shield_of
    from offrl.runs.tables import interval_text, print_columns
    from offrl.settings.compose import fill, parse
    from offrl.settings.groups import flat_name
    from offrl.settings.replicas import by_cell, number
    from offrl.statistics.intervals import mean_interval
    from offrl.system.devices import pick_device

    values = {flat_name(k.removeprefix("eval.")): v for k, v in parse(arguments[1:]).items()}
    if values.get("target_returns") == "auto":
        values["target_returns"] = ["auto"]
    if isinstance(values.get("rewards"), str):
        values["rewards"] = [values["rewards"]]
    config = fill(EvaluateConfig(), values, "evaluate")
    trained = Run(arguments[0])
    kinds = [name for name in ("target_returns", "rewards", "frequency", "robust") if getattr(config, name)]
    if len(kinds) > 1:
        raise UserError(f"{' and '.join(kinds)} are different evaluations; give one of them")
    if config.shield and (config.target_returns or config.rewards or config.frequency):
        raise UserError(f"shield= and {kinds[0]}= are different evaluations; give one of them")
    shield = shield_of(config.shield, config.safe_action, config.constraint, config.world_model)
    scoring = {k: v for k, v in asdict(config).items() if k in ("episodes", "seed", "env", "parallel", "max_steps")}
    if config.target_returns:
        return _evaluate_target_returns(trained, config, scoring)
    if config.rewards:
        return _evaluate_on_rewards(trained, config, scoring)
    if config.frequency:
        return _evaluate_frequency(trained, config, scoring)
    if config.robust:
        return _evaluate_robust(trained, config, {**scoring, "shield": shield})
    video = config.video and _can_film()
    drawing = os.environ.get("MUJOCO_GL")
    scoring |= {"acting": config.acting, "device": str(pick_device(config.device)), "cost_limit": config.cost_limit}
    result = trained.evaluate(**scoring, shield=shield)
    replicas, rows = trained.replicas, result.rows()
    prefix = "trained with " * any(name in config.acting for name in trained.grid)  # than they act with
    columns = {prefix + name: [number(dict(replica.values)[name]) for replica in replicas] for name in trained.grid}
    columns["seed"] = [str(replica.seed) for replica in replicas]
    returns = {"return_mean": "return", "return_std": "std over episodes"}
    costs = {"cost": "cost", "cost_normalized": "cost / limit", "safe": "safe"}
    for key, header in {"score": "score", **returns, "length_mean": "length", "success": "success", **costs}.items():
        columns[header] = ["" if row.get(key) is None else f"{row[key]:.2f}" for row in rows]
    if shield:
        columns |= _without_shield(rows, trained.evaluate(**scoring).rows())
    if result.tasks <= WIDEST:  # no line holds more; scores.csv of a run does
        columns["success by task"] = [row["success_by_task"] or "" for row in rows]
        columns["score by task"] = [row.get("score_by_task", "") for row in rows]
    print_columns(columns, f"{trained.algorithm}: {result.label}")
    means, unit = result.per_seed(), "score" if result.scores is not None else "return"
    for where in by_cell(trained.replicas).values():
        cell = trained.replicas[where[0]].cell
        say(f"{unit} over seeds{cell and f', {prefix}{cell}'}: {interval_text(mean_interval(means[where]))}")
    # where MuJoCo's back end failed to load it was said, and set to "disable" (see
    # offrl.tasks.environments.import_mujoco)
    if video and os.environ.get("MUJOCO_GL") == drawing:
        _film(trained, config, result, shield)
    return 0


def _without_shield(rows: Sequence[dict[str, Any]], plain: Sequence[dict[str, Any]]) -> dict[str, list[str]]:
    """Columns of a table: what the shield did, and the scores of the same episodes without it (`plain`)."""
    from offrl.evaluation.shield import OFTEN

    steps = {"shielded": "steps changed", "unsolved": "no solution"}
    columns = {header: [f"{row[name]:.1%}" for row in rows] for name, header in steps.items()}
    columns["mean change"] = [f"{row['shield_change']:.3f}" for row in rows]
    for name, header in {"score": "score without", "return_mean": "return without", "cost": "cost without"}.items():
        if plain[0].get(name) is not None:
            columns[header] = [f"{row[name]:.2f}" for row in plain]
    if any(row["shielded"] > OFTEN for row in rows):
        warn(f"the shield changes more than {OFTEN:.0%} of the steps: the policy rarely acts as it was trained")
    return columns


def _evaluate_target_returns(trained: Run, config: EvaluateConfig, scoring: dict[str, Any]) -> int:
    """Score the policies with each target return: a table, a CSV file and a picture."""
    from offrl.figures.evaluations import draw_prompts, draw_target_returns
    from offrl.runs.tables import interval_text, print_table

    targets = None if config.target_returns == ["auto"] else config.target_returns
    achieved = trained.evaluate_target_returns(targets, **scoring, acting=config.acting)
    for where in achieved.cells.values():
        columns = {"target return": [f"{target:g}" for target in achieved.targets]}
        if achieved.limits:
            columns["limit"] = [f"{limit:g}" for limit in achieved.limits]
        achieved_values = {
            "return": achieved.returns(where),
            "score": achieved.scores(where),
            "cost": achieved.costs(where),
            "safe seeds": achieved.safe(where),
        }
        for name, intervals in achieved_values.items():
            if intervals is not None:
                columns[f"{name} [95% interval]"] = [
                    interval_text(i, 2 if name == "safe seeds" else 1) for i in intervals
                ]
        cell, rows = achieved.replicas[where[0]].cell, list(zip(*columns.values(), strict=True))
        print_table(list(columns), rows, f"{trained.algorithm}{cell and f', {cell}'}: {achieved.evaluations[0].label}")
    table, picture = trained.dir / "target_returns.csv", trained.dir / "target_returns.png"
    achieved.write(table)
    title = f"{trained.algorithm} on {trained.dataset}"
    if achieved.limits and achieved.evaluations[0].costs is not None:
        draw_prompts(achieved, picture, title)
    else:
        draw_target_returns(achieved, picture, title, trained.record["data"].get("return_max"))
    say(str(table), str(picture))
    return 0


def _evaluate_frequency(trained: Run, config: EvaluateConfig, scoring: dict[str, Any]) -> int:
    """Score the policies with each number of steps between decisions: a table, a CSV file and a picture."""
    from offrl.figures.evaluations import draw_frequencies
    from offrl.runs.tables import interval_text, print_table
    from offrl.statistics.intervals import mean_interval

    if config.video:
        raise UserError("video=true films policies that decide at every step: leave frequency= out, or video=")
    scores = trained.evaluate_frequency(config.frequency, **scoring, acting=config.acting)
    for where in scores.cells.values():
        cell, returns, means = scores.replicas[where[0]].cell, scores.returns(where), scores.scores(where)
        rows = [
            [
                str(d),
                f"{scores.decisions[i, where].mean():.1f}",
                interval_text(returns[i]),
                *([] if means is None else [interval_text(means[i])]),
            ]
            for i, d in enumerate(scores.steps)
        ]
        headers = [
            "steps per decision",
            "decisions per episode",
            "return [95% interval]",
            *([] if means is None else ["score [95% interval]"]),
        ]
        print_table(headers, rows, f"{trained.algorithm}{cell and f', {cell}'}: {scores.evaluations[0].label}")
        if scores.frequency_score is not None:
            text = interval_text(mean_interval(scores.frequency_score[where]))
            span = f"{scores.steps[0]} to {scores.steps[-1]} steps per decision{cell and f', {cell}'}"
            say(f"frequency score, the mean {scores.unit} from {span}: {text}")
    table, picture = trained.dir / "frequency.csv", trained.dir / "frequency.png"
    scores.write(table)
    draw_frequencies(
        {"" if len(scores.cells) > 1 else trained.algorithm: scores},
        picture,
        f"{trained.algorithm} on {trained.dataset}, deciding rarely",
    )
    say(str(table), str(picture))
    return 0


def _evaluate_robust(trained: Run, config: EvaluateConfig, scoring: dict[str, Any]) -> int:
    """Score the policies at the points of a study: a table, a page, a CSV and a JSON file, and a picture."""
    from offrl.report.robust import HEADERS, rows, unchanged_lines, write_robust
    from offrl.runs.tables import print_table

    if config.video:
        raise UserError("video=true films the environment as it is: leave robust= out, or video=")
    assert config.robust is not None
    more: dict[str, Any] = {"acting": config.acting, "cost_limit": config.cost_limit, "quiet": False}
    scores = trained.evaluate_robust(config.robust, config.points, **scoring, **more)
    title = f"{trained.algorithm}, robust={config.robust}, {len(scores.points):,} points"
    print_table(["", *HEADERS, "where"], rows(scores), f"{title}: {scores.evaluations[0].label}")
    say(*unchanged_lines(scores), str(write_robust(scores, trained.dir, f"{trained.algorithm} on {trained.dataset}")))
    return 0


def _evaluate_on_rewards(trained: Run, config: EvaluateConfig, scoring: dict[str, Any]) -> int:
    """Infer the task of each reward and score the policies by it: a table and a CSV file."""
    from offrl.evaluation.reward_inference import write
    from offrl.runs.tables import interval_text, print_table
    from offrl.settings.replicas import by_cell
    from offrl.statistics.intervals import mean_interval

    evaluations = [trained.evaluate_on_reward(rewards, **scoring) for rewards in config.rewards]
    for where in by_cell(trained.replicas).values():
        cell = trained.replicas[where[0]].cell
        rows = [
            [
                one.name,
                interval_text(mean_interval(one.returns.mean(axis=1)[where])),
                f"{one.data:.2f}",
                interval_text(mean_interval(one.evaluation.returns.mean(axis=1)[where])),
            ]
            for one in evaluations
        ]
        headers = ["reward", "its return [95% interval]", "the data's", "the environment's return"]
        print_table(headers, rows, f"{trained.algorithm}{cell and f', {cell}'}: {evaluations[0].evaluation.label}")
    say(str(write(evaluations, trained.dir)))
    return 0


def _can_film() -> bool:
    """Prepare for drawing; False, after a warning, where no video can be written."""
    from offrl.video import NoVideo, prepare

    try:
        prepare()
    except NoVideo as error:
        warn(f"no video: {error}")
        return False
    return True


def _film(trained: Run, config: EvaluateConfig, result: Evaluation, shield: ShieldSettings | None) -> None:
    """Write the videos; a warning where that is impossible."""
    from offrl.settings.evaluation import EvalConfig
    from offrl.video import NoVideo, film

    scored = EvalConfig(episodes=config.episodes, seed=config.seed, max_steps=config.max_steps)
    try:
        paths = film(
            trained,
            scored,
            env=config.env,
            fps=config.fps,
            size=config.size,
            videos=config.video_episodes,
            scored=result,
            shield=shield,
        )
    except NoVideo as error:
        warn(f"no video: {error}")
        return
    for path in paths:
        say(f"{path} ({path.stat().st_size / 1e3:,.0f} kB)")
