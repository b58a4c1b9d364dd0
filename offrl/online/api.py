"""Fine-tuning from Python; the command line is a thin layer over `finetune_from`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from offrl.data.dataset import Dataset
from offrl.online.begin import begin
from offrl.online.outcome import write
from offrl.online.place import directory
from offrl.online.run import finetune as play_and_learn
from offrl.runs import Run


def finetune(
    run: Run | str | Path | None = None,
    *,
    env: str | Callable[[], Any] | None = None,
    steps: int | None = None,
    dataset: str | Path | Dataset | None = None,
    settings: Mapping[str, Any] | None = None,
    **more: Any,
) -> Run:
    """Let the replicas of `run` go on learning in an environment, and return the new run.

    run: a run, or its directory; None: fresh parameters of algo="...". env: a Gymnasium id, or a function that makes an environment; by
    default the one that the run was scored in. steps: environment steps of each replica. dataset: where the run's data are, if they moved
    or came from Python; for fresh parameters the data to mix in. settings: any other setting by its name on the command line, such as
    {"algo.temperature": 5.0, "eval.episodes": 20}; settings without a dot can be given as keywords (mixing=0.5, quiet=True). The same
    call continues what was interrupted. Raises UserError for what a command would refuse.
    """
    values: dict[str, Any] = {**more, **(settings or {})}
    if steps is not None:
        values["steps"] = steps
    if isinstance(env, str):
        values["env"] = env
    given = dataset if isinstance(dataset, Dataset) else None
    if dataset is not None and given is None:
        values["dataset"] = str(dataset)
    path = run.dir if isinstance(run, Run) else run
    return finetune_from(path, values, given, env if callable(env) else None)


def finetune_from(
    run: str | Path | None, values: Mapping[str, Any], dataset: Dataset | None = None, env: Callable[[], Any] | None = None
) -> Run:
    """Fine-tune with the settings `values`; see `finetune`."""
    start = begin(run, values, dataset, env)
    run_dir = directory(start)
    play_and_learn(start, run_dir)
    done = Run(run_dir)
    write(done, start.config.steps)
    return done
