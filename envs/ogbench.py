"""OGBench (arXiv 2410.20092): its datasets by name, with the environments that score them where the package ogbench is
installed.
"""

from __future__ import annotations

import importlib.util
import re

from offrl.registry import register
from offrl.tasks.task import Task

KINDS = ("navigate", "stitch", "explore", "play", "noisy")
NAME = re.compile(
    r"(?P<env>(?:visual-)?(?:pointmaze|antmaze|humanoidmaze|antsoccer|cube|scene|puzzle|powderworld)(?:-[a-z0-9]+)*?)"
    rf"-(?P<kind>{'|'.join(KINDS)})(?:(?P<sparse>-sparse)?(?P<single>-singletask(?:-task[1-5])?))?-v0(?P<val>-val)?"
)
GOALS = tuple({"task_id": k} for k in range(1, 6))  # of evaluation: five starts and goals in each environment


@register("task", "ogbench")
def lookup(name: str) -> Task | None:
    """The task of an OGBench dataset by its exact name; None for any other name.

    "pointmaze-medium-navigate-v0": five goals in turn, scored by the share of episodes that reach theirs.
    "pointmaze-medium-navigate-singletask-task1-v0": one goal that is not shown, with rewards;
    "scene-play-sparse-singletask-task1-v0": these are -1 until all of the task is done.
    """
    match = NAME.fullmatch(name)
    if match is None or match["val"]:
        return None
    installed = importlib.util.find_spec("ogbench") is not None
    env = f"{match['env']}{match['single'] or ''}-v0"
    return Task(
        name=name,
        env_id=f"offrl.envs.ogbench_env:offrl/{env}" if installed else None,
        env_kwargs={"sparse": True} if match["sparse"] else {},
        starts=() if match["single"] else GOALS,
        scored_by="success",
        note="" if installed else "its environment is in the package ogbench: pip install 'offrl[ogbench]'",
    )
