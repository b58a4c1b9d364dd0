"""`offrl adapt`: let trained policies learn new tasks in context."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from offrl.errors import UserError, say
from offrl.settings.field import describe, setting


@dataclass
class AdaptConfig:
    """Settings of `offrl adapt`."""

    tasks: Any = setting(100, "how many tasks, none of them in the data, or their numbers: tasks=7,8,9")
    episodes: int | None = setting(
        None, "episodes of each task; null: 20, or 1 where there is one observation only (bandits)", low=1
    )
    max_steps: int | None = setting(None, "cut episodes after so many steps; null: the environment's own limit", low=1)
    explore: bool = setting(True, "sample actions, which for DPT is how it explores; false: the most probable ones")
    target_return: float | None = setting(
        None,
        "what policies that are asked for a return are asked for, in the units of the recorded rewards; null: what "
        "their runs say",
    )
    seed: int = setting(0, "decides start states and noise")
    env: str | None = setting(None, "a Gymnasium id; null: the environment of the run's data")
    out: str | None = setting(None, "folder of in_context.csv and in_context.png; null: the first RUN")


USAGE = """\
usage: offrl adapt RUN [RUN ...] [name=value ...]

Plays several episodes of tasks that are in no data with one memory (algo=dpt, meta_dt; others forget between episodes), beside
the classical methods that the environment knows (Thompson sampling, UCB for bandits), and draws how they learn.

{0}"""  # noqa: E501


def usage(arguments: list[str]) -> str:
    return USAGE.format("\n".join(describe(AdaptConfig())))


def run(arguments: list[str]) -> int:
    where = [a for a in arguments if "=" not in a]
    if not where:
        raise UserError(
            "usage: offrl adapt RUN [RUN ...] [tasks=100] [episodes=20] [name=value ...]; offrl adapt --help says more"
        )
    from offrl.runs.paths import check_run
    from offrl.settings.compose import fill, parse

    config = fill(AdaptConfig(), parse([a for a in arguments if "=" in a]), "adapt")

    for path in where:
        check_run(path)
    from offrl.runs.run import SavedRun

    adapt([SavedRun(path) for path in where], config)
    return 0


def adapt(runs: list[Any], config: AdaptConfig) -> dict[str, Any]:
    """Play, write in_context.csv and in_context.png, print the table; returns {learner: [Played of each policy]}."""
    from pathlib import Path

    import numpy as np

    from offrl.data.fit import check_fit
    from offrl.evaluation.in_context import Arena, Played, Trained, table, unseen
    from offrl.figures.evaluations import draw_in_context
    from offrl.runs.tables import interval_text, print_table
    from offrl.settings.evaluation import EvalConfig
    from offrl.statistics.intervals import mean_interval
    from offrl.system import files as checkpoint
    from offrl.system import trust
    from offrl.system.progress import Progress
    from offrl.tasks.environments import make_env, resolve_task

    specs = [run.spec for run in runs]
    trust.typed(config.env)
    task = resolve_task(specs[0].task, EvalConfig(env=config.env or "auto"))
    if task is None:
        raise UserError(
            f"{runs[0].dir}: there is no environment to play in; name one: offrl adapt {runs[0].dir} env=ID"
        )
    for spec in specs:
        check_fit(spec, task)
    env = make_env(task)
    numbers = chosen(config.tasks, lambda count: unseen(env, count, task.env_id or task.name))
    space = env.observation_space
    learners: dict[str, Any] = getattr(env.unwrapped, "learners", dict)()
    bounds = getattr(space, "low", None), getattr(space, "high", None)
    episodes = config.episodes or (1 if bounds[0] is not None and bool((bounds[0] == bounds[1]).all()) else 20)
    env.close()
    cast = {name: [learner] for name, learner in learners.items()}
    for run in runs:
        name = run.algorithm if run.algorithm not in cast else str(run.dir)
        policies = [run.load_policy(replica) for replica in run.replicas if replica not in run.diverged]
        if config.target_return is not None:
            policies = [
                p.with_target_return(config.target_return) if hasattr(p.algorithm.config, "target_return") else p
                for p in policies
            ]
        cast[name] = [Trained(policy, config.explore) for policy in policies]
    results: dict[str, list[Played]] = {}
    with Arena(task, numbers, config.seed, config.max_steps) as arena:
        for name, each in cast.items():
            with Progress(name, len(each) * episodes * arena.limit, "steps", False) as bar:
                results[name] = [
                    arena.play(learner, episodes, lambda done, most, i=i: bar.update(i * most + done))  # type: ignore[misc]
                    for i, learner in enumerate(each)
                ]
    out = Path(config.out or runs[0].dir)
    checkpoint.write_text(out / "in_context.csv", table(results))
    draw_in_context(results, out / "in_context.png", f"{', '.join(run.algorithm for run in runs)} in {task.name}")
    rows, quantity = [], ""
    for name, each in results.items():
        x, _, quantity = each[0].curve()
        values = np.mean([one.curve()[1] for one in each], axis=0)
        points = sorted({0, *(min(len(x) - 1, int(len(x) * share)) for share in (0.05, 0.25, 0.5)), len(x) - 1})
        rows.append([name, str(len(each)), *(interval_text(mean_interval(values[:, p])) for p in points)])
    unit = "episode" if episodes > 1 else "step"
    print_table(
        ["learner", "policies", *(f"{unit} {x[p]}" for p in points)],
        rows,
        f"{quantity}: mean over {len(numbers)} tasks, 95% interval over them",
    )
    say(f"{out / 'in_context.csv'}", f"{out / 'in_context.png'}")
    return results


def chosen(tasks: Any, some: Any) -> list[int]:
    """The numbers of the tasks. Raises UserError for what is neither a number nor a list of different numbers."""
    if isinstance(tasks, int) and not isinstance(tasks, bool) and tasks >= 1:
        return some(tasks)
    valid = (
        isinstance(tasks, list)
        and tasks
        and all(isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in tasks)
    )
    if not valid or len(set(tasks)) != len(tasks):
        raise UserError(f"tasks={tasks} must be how many tasks, at least 1, or a list of their numbers: tasks=7,8,9")
    return list(tasks)
