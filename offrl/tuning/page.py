"""tune/index.html: what a tune chose, what that is worth, what speaks against it, and every setting that it judged."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from offrl.errors import some
from offrl.figures.style import own_settings
from offrl.figures.tuning import number, slices
from offrl.report.context import MANY, count, folded
from offrl.report.page import Cell, Page, escape
from offrl.report.rows import unbroken
from offrl.tuning.choice import ERROR95, pareto_front
from offrl.tuning.judging import COST, FINAL
from offrl.tuning.verdict import (
    NONE,
    Judgement,
    TuneResult,
    estimate,
    lost_return,
    real,
    setting_text,
    show_choice,
)

FILE = "index.html"
JUDGES = {
    "fqe": "fitted Q evaluation: the discounted return that it expects",
    "model": "the discounted return in a learned model",
    "wis": "weighted importance sampling of the discounted return",
    "dr": "the doubly robust estimate of the discounted return",
    "td": "the TD error of the policy's own Q, negative, so that larger is better",
    "q": "what the policy's own Q expects",
    "lstd": "the LSTD tournament of the policies' own Qs",
    "bvft": "the BVFT tournament of the policies' own Qs",
}
FILES = {
    "trials.csv": "every setting at every judgement, in full",
    "results.json": "the winner's scores, episode by episode, to exchange (offrl report reads it)",
    "result.json": "all that this page says, as one document",
    "winner": "the run of the chosen setting, trained anew: offrl evaluate, export and report work on it",
    "default": "the run of the default settings, trained anew",
    "runs": "the runs of the rungs",
    "journal.log": "Optuna's store, for optuna-dashboard",
    "episodes.jsonl": "the real episodes that chose",
}


@own_settings()
def write_page(folder: Path, result: Mapping[str, Any]) -> Path:
    """Write the page of a finished tune, and return its path.

    result: the content of result.json. The same result and files give the same bytes. Raises UserError where the page
    cannot be written."""
    tune = TuneResult(result)
    by = f"judged by {', '.join(result['judge'])}"
    subtitle = f"{count(len(tune.settings), 'setting')} \u00b7 {by} \u00b7 {_cost(result)}"
    page = Page(f"Tune: {', '.join(result['algos'])} on {result['data']['name']}", subtitle)
    show_choice(page, tune)
    page.contents()
    _played(page, tune)
    _searched(page, tune)
    if tune.judgements:
        _rungs(page, tune)
        _slices(page, tune)
    _front(page, tune)
    _truth(page, tune)
    _all_settings(page, tune)
    page.heading("Files")
    ends = {n: "/" if (folder / n).is_dir() else "" for n in FILES if (folder / n).exists()}
    links = [f'<li><a href="{n}{end}">{n}</a>: {escape(FILES[n])}</li>' for n, end in ends.items()]
    page.markup(f"<ul>{''.join(links)}</ul>")
    return page.save(folder / FILE)


def _played(page: Page, tune: TuneResult) -> None:
    """The real episodes that chose, where there were any."""
    if not (episodes := tune.result["chosen"].get("episodes")):
        return
    page.heading("Real episodes")
    chosen_by = f"{count(episodes, 'real episode')} chose among the finalists"
    page.text(f"{chosen_by}; what chose promises too much here as well.", "small")
    names, counts, *means = filter(
        None, (tune.result["chosen"].get(k) for k in ("finalists", "counts", "means", "costs"))
    )
    headers = ["finalist, in the data's order", "real episodes", "mean return", "mean cost"][: 2 + len(means)]
    body = [[n, c, *(estimate(real(x)) for x in row)] for n, c, *row in zip(names, counts, *means, strict=True)]
    if len(means) > 1:
        points = np.array([[real(value), -real(cost)] for value, cost in zip(*means, strict=True)])
        front = pareto_front(points)
        headers.append("on the Pareto front")
        body = [[*row, "yes" if i in front else "no"] for i, row in enumerate(body)]
    page.table(headers, body)


def _cost(result: Mapping[str, Any]) -> str:
    done, full = result["updates"]["made"], result["updates"]["full"]
    return f"{done:,} updates" + (f" ({done / full:.0%} of training all in full)" if full else "")


def _value(value: Any) -> Cell | None:
    """A setting's value; an empty cell where the algorithm has no such setting."""
    plain = real(value)
    return None if value is None else Cell(setting_text(value), value=plain if math.isfinite(plain) else None)


def _searched(page: Page, tune: TuneResult) -> None:
    """Data, spaces and costs."""
    result, (configs, steps) = tune.result, tune.result["budget"]
    data, seeds = result["data"], result["seeds"]
    page.heading("What was searched")
    judged = f"{tune.judge} ({JUDGES.get(tune.judge, '')})" + "".join(f"; beside it {o}" for o in tune.other_judges)
    page.items(
        [
            f"data: {data['name']}, of which {count(data['episodes'], 'episode')} judged (checksum "
            f"{data['fingerprint'][:12]})",
            f"{count(configs, 'setting')} of each algorithm, {steps:,} updates in full; proposer {result['proposer']}, "
            f"rule {result['rule']}",
            f"seeds {', '.join(map(str, seeds['search']))} searched"
            + (f", seeds {', '.join(map(str, seeds['final']))} reported" if seeds["final"] else ""),
            *([f"judged by {judged}"] if tune.judge else []),
            f"cost: {_cost(result)}; judging and retraining are not in it",
        ]
    )
    rows: list[list[Any]] = []
    for algo, entries in result["spaces"].items():
        default = tune.settings.get(f"{algo}-00", {}).get("values", {})
        for e in entries:
            listed = some([setting_text(v) for v in e["values"]], 12)
            ends = listed or f"{number(e['low'])} to {number(e['high'])}{', log' if e['log'] else ''}"
            rows.append([algo, e["name"], ends, setting_text(default[e["name"]]) if e["name"] in default else NONE])
    page.table(["algorithm", "setting", "searched", "default"], rows)


def _rungs(page: Page, tune: TuneResult) -> None:
    """How many settings went on, and the only sign of what thinning out has cost: the wild cards."""
    page.heading("Rungs")
    rungs: dict[tuple[int | None, str], list[Judgement]] = {}
    for j in tune.judgements:
        rungs.setdefault((j.bracket, j.rung), []).append(j)
    rows: list[list[Any]] = []
    for (bracket, rung), judged in rungs.items():
        best = max(judged, key=lambda j: -math.inf if math.isnan(j.value) else j.value)
        going = None if rung == FINAL else sum(j.row["fate"] != "dropped" for j in judged)
        bracket_name = "all" if bracket is None else str(bracket)
        judged_best = (best.setting, estimate(best.value, best.error))
        rows.append([bracket_name, rung, judged[0].row["updates"], len(judged), going, *judged_best])
    page.table(["bracket", "rung", "updates", "settings", "went on", "best", f"{tune.judge}, 95%"], rows)
    wild_cards = {j.setting for j in tune.judgements if j.row["fate"] == "wild card"}
    ends = [j for name, j in tune.finals.items() if name in wild_cards]
    if tune.chosen in tune.finals and ends:
        won = sum(j.value > tune.finals[tune.chosen].value for j in ends)
        larger = f"{won} of {count(len(ends), 'wild card')} trained in full ended with a larger estimate"
        page.text(
            f"A wild card goes on although its estimate was not large enough. Would one have won? {larger} than the "
            f"chosen setting's.{' One is the choice itself.' if tune.chosen in wild_cards else ''}"
        )


def _slices(page: Page, tune: TuneResult) -> None:
    """Each setting against the estimates of the first rung."""
    page.heading("Settings and estimates")
    updates = tune.first_rung[0].row["updates"]
    page.text(
        f"Estimates of the first rung, after {updates:,} updates, which all settings reached, with 95% intervals "
        "(seeds and bootstrapped fits) over each setting by itself; green, the chosen one; orange, the default.",
        "small",
    )
    for algo, entries in tune.result["spaces"].items():
        judged = [j for j in tune.first_rung if not math.isnan(j.value) and tune.settings[j.setting]["algo"] == algo]
        if not judged:
            continue
        with page.gallery():
            for e in entries:
                listed = [setting_text(v) for v in e["values"]]
                points: list[tuple[Any, float, float, str]] = []
                for j in judged:
                    value = tune.settings[j.setting]["values"].get(e["name"])
                    x = setting_text(value) if listed else real(value)
                    kind = "chosen" if j.setting == tune.chosen else "default" if j.setting == f"{algo}-00" else ""
                    points.append((x, j.value, ERROR95 * j.error, kind))
                listed += dict.fromkeys(p[0] for p in points if listed and p[0] not in listed)
                figure = slices(e["name"], points, tune.judge, listed, e.get("log", False))
                page.figure(figure, "", alt=f"Estimates over {e['name']} of {algo}")


def _front(page: Page, tune: TuneResult) -> None:
    """The Pareto front of the finalists, where several criteria were named."""
    finals = [j for j in tune.finals.values() if not math.isnan(j.value)]
    if len(tune.result["criteria"]) < 2 or not finals:
        return
    columns = {
        "return": [j.value for j in finals],
        "worst": [j.number("worst") for j in finals],
        "distance": [-j.number("distance") for j in finals],
        COST: [-j.number(COST) for j in finals],
    }
    front = [finals[i] for i in pareto_front(np.array([columns[n] for n in tune.result["criteria"]]).T)]
    page.heading("Several criteria")
    page.text(
        f"The Pareto front: {count(len(front), 'finalist')} of {len(finals)} that no other one equals in every "
        "criterion and beats in one. Nothing weighs one criterion against another."
    )
    rows = [
        [
            Cell(tune.label(j.setting), strong=j.setting == tune.chosen),
            estimate(j.value, j.error),
            *_costs(tune, j),
            *(estimate(j.number(column)) for column in ("worst", "distance")),
        ]
        for j in sorted(front, key=lambda j: -j.value)
    ]
    headers = ["on the front", f"{tune.judge}, 95%", *_cost_headers(tune), "worst seed", "distance"]
    page.table(headers, rows, sortable=True)


def _cost_headers(tune: TuneResult) -> list[str]:
    return [] if tune.limit is None else ["cost, 95%", f"keeps {tune.limit:g}"]


def _costs(tune: TuneResult, j: Judgement) -> list[Any]:
    """What an episode costs, and whether its interval keeps the limit; nothing without a limit."""
    if tune.limit is None:
        return []
    cost, error = j.number(COST), j.number("cost_error")
    safe = cost + ERROR95 * error <= tune.limit
    return [estimate(cost, error), Cell("yes" if safe else "no", kind="good" if safe else "bad")]


def _truth(page: Page, tune: TuneResult) -> None:
    """True mean returns of the finalists beside their estimates, where truth= played them."""
    if (truth := tune.result["truth"]) is None:
        return
    page.heading("Against the truth")
    episodes = count(truth["episodes"], "episode")
    page.text(
        f"Each seed of every finalist was played {episodes} after the choice, which chose nothing, in "
        f"{truth['environment']}. {lost_return(tune)}"
    )
    rows: list[list[Any]] = []
    for name, mean in sorted(truth["means"].items(), key=lambda e: -real(e[1])):
        j = tune.finals.get(name)
        rows.append(
            [
                Cell(name, strong=name == tune.chosen),
                estimate(real(mean)),
                Cell("", small=(", ".join(number(real(s)) for s in truth["seeds"][name]),)),
                estimate(j.value, j.error) if j else None,
            ]
        )
    page.table(["finalist", "true mean return", "each seed", f"{tune.judge}, 95%"], rows, sortable=True)


def _all_settings(page: Page, tune: TuneResult) -> None:
    """Every setting at every judgement."""
    page.heading("All settings")
    searched = list(dict.fromkeys(e["name"] for entries in tune.result["spaces"].values() for e in entries))
    rows: list[list[Any]] = []
    for j in tune.judgements:
        values = tune.settings.get(j.setting, {}).get("values", {})
        veto = j.row["exploded"] or (tune.vetoed.get(j.setting, "") if j.rung == FINAL else "")
        rows.append(
            [
                Cell(j.setting, strong=j.setting == tune.chosen),
                j.rung,
                j.bracket,
                Cell(unbroken(j.row["fate"]), kind="good" if j.row["fate"] == "chosen" else ""),
                *(estimate(x) for x in (j.value, j.error)),
                *_costs(tune, j),
                *(_value(values.get(k)) for k in searched),
                *(estimate(j.number(k)) for k in (*tune.other_judges, "worst", "distance")),
                j.row["updates"],
                j.row["seeds"],
                Cell("", small=tuple(map(unbroken, textwrap.wrap(veto, 44))), kind="bad" if veto else ""),
            ]
        )
    headers = ["setting", "rung", "bracket", "fate", tune.judge, "standard error", *_cost_headers(tune), *searched]
    headers += tune.other_judges
    headers += ["worst seed", "distance", "updates", "seeds", "vetoed"]
    if not rows:  # nothing but episodes judged
        headers = ["setting", *searched]
        rows = [[n, *(_value(s["values"].get(k)) for k in searched)] for n, s in tune.settings.items()]
    title = f"{count(len(tune.settings), 'setting')}, {count(len(tune.judgements), 'judgement')}"
    with folded(page, len(rows) > MANY, title):
        page.table(headers, rows, sortable=True)
    if reference := tune.result["by_data"].get("reference"):
        page.text(
            "Distance: root mean square between the policy's actions and the data's (discrete actions: the share that "
            f"differ); that of a linear clone of the data is {number(float(reference))}.",
            "small",
        )
