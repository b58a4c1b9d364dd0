"""Who steps the environments of play."""

from __future__ import annotations

from offrl.finetuning.play.backends import Backend, Sequential
from offrl.finetuning.play.threads import Threads
from offrl.finetuning.play.warp import Warp
from offrl.finetuning.play.workers import Workers
from offrl.tasks.task import Task


def chosen(backend: str, task: Task, count: int, device: str) -> Backend:
    """The back end of the setting, with `count` environments. device: the setting. Raises UserError where they cannot
    be made, or not with it.
    """
    if backend == "processes":
        return Workers(task, count)
    if backend == "warp":
        return Warp(task, count, device)
    return (Threads if backend == "threads" else Sequential)(task, range(count))
