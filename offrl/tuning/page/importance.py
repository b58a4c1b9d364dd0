"""Which settings the estimate depends on: fANOVA (Hutter, Hoos and Leyton-Brown, 2014), by Optuna."""

from __future__ import annotations

import importlib.util
import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from offrl.errors import first_line
from offrl.figures import tuning as figures
from offrl.report.page import Cell
from offrl.tuning.page.material import TunePage, plural
from offrl.tuning.search.propose import as_trial, load_optuna
from offrl.tuning.search.space import Space

LEAST = 20  # settings of one rung, below which a forest says nothing
EVALUATOR = (
    "Share of the variance of the estimate that each setting explains by itself or with others: fANOVA over a random "
    "forest "
    "(optuna.importance.FanovaImportanceEvaluator, seed 0), on the first rung, which judged all settings after as many "
    "updates. It is "
    "about this search's ranges, and about what the judge says rather than the truth."
)


def show(made: TunePage) -> None:
    """A picture and a table for each algorithm, or a sentence that says why there is none."""
    if not made.judgements:
        return
    page = made.page
    page.heading("Importance of the settings")
    first = True
    for algo, space in made.spaces.items():
        judged = [(j.setting, j.value) for j in made.comparable if j.algo == algo and not math.isnan(j.value)]
        known = [(made.settings[name]["values"], value) for name, value in judged if name in made.settings]
        shares = shares_of(space, known)
        if isinstance(shares, str):
            page.text(f"{algo}: {shares}")
            continue
        if first:
            page.text(EVALUATOR, "small")
            first = False
        page.figure(
            figures.importance(shares),
            f"{algo}, {plural(len(known), 'setting')}",
            alt=f"Importance of the settings of {algo}",
        )
        page.table(
            ["setting", "share of the variance"], [[name, Cell(f"{s:.1%}", value=s)] for name, s in shares.items()]
        )


def shares_of(space: Space, judged: Sequence[tuple[Mapping[str, Any], float]]) -> dict[str, float] | str:
    """{setting: share}, the largest first, of settings' values and estimates; or a sentence that says why there are
    none.
    """
    if len(space.dimensions) < 2:
        return "one setting was searched, so there is nothing to compare it with."
    if len(judged) < LEAST:
        return f"{plural(len(judged), 'setting')} judged on one rung; fANOVA needs {LEAST} to say anything."
    if importlib.util.find_spec("optuna") is None or importlib.util.find_spec("sklearn") is None:
        return "fANOVA needs Optuna and scikit-learn: pip install 'offrl[tune]', and the same command again."
    if len({value for _, value in judged}) < 2:
        return "all estimates are equal, so no setting matters."
    optuna = load_optuna()
    study = optuna.create_study(direction="maximize", sampler=optuna.samplers.RandomSampler(seed=0))
    for values, value in judged:
        if (
            all(d.name in values for d in space.dimensions)
            and (trial := as_trial(optuna, space, values, (value,))) is not None
        ):
            study.add_trial(trial)
    if (count := len(study.get_trials(deepcopy=False))) < LEAST:
        return (
            f"{plural(count, 'setting')} inside the search space judged on one rung; fANOVA needs {LEAST} to "
            "say anything."
        )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            evaluator = optuna.importance.FanovaImportanceEvaluator(seed=0)
            shares = optuna.importance.get_param_importances(study, evaluator=evaluator)
    except (RuntimeError, ValueError) as error:  # of values without any spread
        return f"fANOVA found nothing ({first_line(error)})."
    return dict(sorted(((str(n), float(s)) for n, s in shares.items()), key=lambda e: (-e[1], e[0])))
