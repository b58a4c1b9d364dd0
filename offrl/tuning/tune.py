"""`offrl tune` from a command to `result.json`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from offrl.errors import warn
from offrl.system import backend, trust
from offrl.system.devices import pick_device
from offrl.system.locks import exclusive
from offrl.system.progress import StageProgress
from offrl.tuning.config import OPTUNA
from offrl.tuning.engine import TuningSearch, introduction
from offrl.tuning.final import finish
from offrl.tuning.judging import short_judge
from offrl.tuning.plan import prepare
from offrl.tuning.real_episodes import task_of
from offrl.tuning.search import store
from offrl.tuning.search.propose import load_optuna


def tune(values: Mapping[str, Any]) -> dict[str, Any]:
    """Search, choose, retrain and report with the settings of a command; returns what `result.json` says. The same call
    continues it.

    Raises UserError for what a command would refuse; Interrupted, when all is saved.
    """
    work = prepare(values)
    config = work.config
    with exclusive(work.folder), trust.settings_of_file(values.get("resume") is not None):
        if config.proposer in OPTUNA:
            load_optuna(config.proposer)
            store.check(config.storage, work.folder, config.algos, work.identity, len(config.criteria))
        device = pick_device(config.device)
        backend.configure(device, config.threads)  # also where all runs are trained already: judging must round alike
        show = StageProgress(config.quiet)
        show.tell(*introduction(work))
        if advice := short_judge(config.ope, config.data_judges, config.rungs > 1 or len(work.brackets) > 1):
            warn(advice)
        search = TuningSearch(work, show)
        task_of(search)  # so that what is missing at the end is said now
        try:
            search.run()
            return finish(search)
        finally:
            show.stop()
