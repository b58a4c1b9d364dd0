"""Where true returns are known: what the choice lost, how well the judges rank, and what real episodes would have
bought.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from offrl.figures import tuning as figures
from offrl.figures.tuning import number
from offrl.report.page import Cell
from offrl.report.rows import whole
from offrl.statistics.bootstrap import Curve, Interval
from offrl.tuning.page.material import NONE, TunePage, cell, plural, real
from offrl.tuning.ranking import FEW, chance_of_best, compare_judges, quality
from offrl.tuning.regret import EPISODES, regret_curve

REPS = 500  # resamples of settings and seeds for the judges
TRIALS, RESAMPLES = 400, 200  # of the curves
MEASURES = {
    "spearman": "rank correlation",
    "kendall": "Kendall's tau",
    "regret@1": "regret of the first",
    "regret@3": "regret of the first 3",
}
BASELINES = {
    "own_q": ("own Q", "q", 1.0),
    "td_error": ("small TD error", "td", -1.0),
    "distance": ("near the data", "", -1.0),
}
"""Statistics of each policy in state/judged.json: name, the judge that is the same, and whether more is better."""
BANDS = ("the data's order, then halving", "no data, halving")  # whose intervals are drawn; the table has all
RULES = {
    "the data's order, then halving": ("halving", True, "#009e73"),
    "the data's order, all alike": ("uniform", True, "#0072b2"),
    "the data's order, UCB": ("ucb", True, "#cc79a7"),
    "no data, halving": ("halving", False, "#d55e00"),
}
JUDGED = (
    "How the judges rank the finalists, against their true mean returns. Regrets are shares of the range of true "
    "returns that taking the "
    "first, or the best of the first three, loses: 0 is perfect. 95% intervals draw settings, and seeds within them, "
    "anew."
)
THINNED = "The judge that decides chose the finalists too, which narrows what is left to tell apart."
CURVE = (
    "What n real episodes would have bought, replayed on the true returns: 0 is the best finalist, 1 what one taken at "
    "random has. With 0 "
    "the data decide alone. Bands (of two; the table has all) are pointwise 95% intervals over other settings and "
    "other episodes. The best "
    "of several noisy means stands for the truth, which overstates regret where few episodes were played."
)


def show(made: TunePage) -> None:
    """Everything that only the environment can say; nothing where it was not asked."""
    known: Mapping[str, Any] | None = made.result["truth"]
    if known is None:
        return
    page = made.page
    page.heading("Against the truth")
    page.text(
        f"Each seed of every finalist was played {plural(known['episodes'], 'episode')} after the choice, which chose "
        "nothing. The best of "
        f"them is {made.label(known['best'])}, with a mean return of {number(real(known['means'][known['best']]))}. "
        f"{lost(made, known)}"
    )
    page.text(f"Environment: {known['environment']}.", "small")
    names = complete(known["seeds"])
    left = len(known["seeds"]) - len(names)
    if left:
        page.text(f"{plural(left, 'finalist')} with a diverged seed left out below.", "small")
    if len(names) < 2:
        page.text("One finalist has nothing to be ranked against.")
        return
    _scatter(made, known, names)
    _judges(made, known["seeds"], names)
    _curves(made, names)


def complete(seeds: Mapping[str, Sequence[Any]]) -> list[str]:
    """Settings with a true return for every seed."""
    most = max(map(len, seeds.values()), default=0)
    return [
        name for name, values in seeds.items() if len(values) == most and all(math.isfinite(real(v)) for v in values)
    ]


def lost(made: TunePage, known: Mapping[str, Any]) -> str:
    """What the choice cost, in a sentence. known: the result's "truth"."""
    amount = real(known["lost"])
    if math.isnan(amount):
        return f"The true return of the choice, {made.chosen}, is not known."
    regret = known["regret"]
    cost = (
        f"The choice loses {number(amount)} of return against the best finalist, a regret of "
        f"{number(real(regret['chosen']))}"
    )
    parts = [f"{cost} (0: the best, 1: what one at random loses)."]
    if made.result["by_data"]["setting"] != made.chosen and math.isfinite(real(regret["by_data"])):
        other = made.result["by_data"]["setting"]
        parts.append(f"By the data alone the choice was {other}, with a regret of {number(real(regret['by_data']))}.")
    return " ".join(parts)


def _scatter(made: TunePage, known: Mapping[str, Any], names: Sequence[str]) -> None:
    judged = [j for n in names if (j := made.final(n)) is not None and not math.isnan(j.value)]
    if not made.judge or not judged:
        return
    page = made.page
    means = [real(known["means"][j.setting]) for j in judged]
    seeds = [list(map(real, known["seeds"][j.setting])) for j in judged]
    points = [(j.value, j.error, mean, made.kind(j.setting)) for j, mean in zip(judged, means, strict=True)]
    figure = figures.against_truth(points, seeds, f"estimate, {made.judge}")
    caption = (
        "Estimates with 95% intervals against true mean returns; grey, single seeds; green, the chosen one; "
        "orange, the default."
    )
    page.figure(figure, caption)
    order = sorted(range(len(judged)), key=lambda i: -means[i])
    rows: list[list[Any]] = [
        [
            Cell(judged[i].setting, strong=judged[i].setting == made.chosen),
            cell(means[i]),
            Cell("", small=(", ".join(map(number, seeds[i])),)),
            cell(judged[i].value, judged[i].error),
        ]
        for i in order
    ]
    with page.details("True returns in numbers"):
        page.table(["finalist", "true mean return", "each seed", f"{made.judge}, 95%"], rows, sortable=True)


def estimates(made: TunePage, names: Sequence[str]) -> dict[str, np.ndarray]:
    """{judge: its estimates [K], larger is better, NaN where there is none}: the judges, and statistics that cost
    nothing.
    """
    judged = [made.final(n) for n in names]
    result: dict[str, np.ndarray] = {}
    if made.judge:
        result[made.judge] = np.array([math.nan if j is None else j.value for j in judged])
    for other in made.others:
        result[other] = np.array([math.nan if j is None else j.others[other] for j in judged])
    policies = (made.stage("judged") or {}).get("policies")
    rows = [r for r in policies if isinstance(r, dict)] if isinstance(policies, list) else []
    for key, (label, same, sign) in BASELINES.items():
        own = [[real(r.get(key)) for r in rows if r.get("setting") == n] for n in names]
        column = np.array([sign * float(np.mean(v)) if v else math.nan for v in own])
        if same not in result:
            result[label] = column
    return {name: column for name, column in result.items() if np.isfinite(column).any()}


def _judges(made: TunePage, seeds: Mapping[str, Sequence[Any]], names: Sequence[str]) -> None:
    judges = estimates(made, names)
    if not judges:
        return
    page = made.page
    page.heading("How well the judges rank", level=3)
    thinned = len(names) < len(made.settings)
    page.text(f"{JUDGED} {THINNED}" if thinned else JUDGED, "small")
    if len(names) < FEW:
        page.text(f"{len(names)} settings are too few for intervals: these numbers say next to nothing.", "small")
    returns = np.array([list(map(real, seeds[n])) for n in names])
    rows: list[list[Any]] = []
    for name, estimate in judges.items():
        cells = [_interval(quality(returns, estimate, measure, reps=REPS)) for measure in MEASURES]
        chances = [chance_of_best(returns, estimate, k, reps=REPS) for k in (1, 3)]
        rows.append([Cell(name, strong=name == made.judge), *cells, *(Cell(f"{c:.0%}", value=c) for c in chances)])
    rows.append(
        [
            "at random",
            cell(0.0),
            cell(0.0),
            *(Cell(f"{v:.2f}", value=v) for v in at_random(returns.mean(1))),
            *_shares(len(names)),
        ]
    )
    page.table(["judge", *MEASURES.values(), "the best is first", "among the first 3"], rows)
    if len(judges) > 1 and len(names) >= FEW:
        pairs = compare_judges(returns, judges, reps=REPS)
        lines: list[list[Any]] = [
            [f"{p.first} less {p.second}", _interval(p.difference), _p(p.adjusted)] for p in pairs
        ]
        with page.details("Judges compared by rank correlation, on the same resamples"):
            page.table(["judges", "difference", "p (Holm)"], lines)
            page.text("Only a pair with p below 0.05 tells a better judge from a worse one.", "small")


def at_random(means: np.ndarray) -> list[float]:
    """Expected regret@1 and regret@3 of an order drawn at random, as shares of the range of true means [K]."""
    ordered, total = np.sort(means), len(means)
    span = float(ordered[-1] - ordered[0])
    result = []
    for k in (1, 3):
        draw = min(k, total)
        best = sum(float(v) * math.comb(i, draw - 1) for i, v in enumerate(ordered)) / math.comb(total, draw)
        result.append((float(ordered[-1]) - best) / span if span > 0.0 else 0.0)
    return result


def _shares(count: int) -> list[Cell]:
    return [Cell(f"{share:.0%}", value=share) for share in (1 / count, min(1.0, 3 / count))]


def _p(x: float) -> Cell:
    return Cell(f"{x:.3f}", value=x) if math.isfinite(x) else Cell(NONE)


def _interval(x: Interval) -> Cell:
    if not math.isfinite(x.value):
        return Cell(NONE)
    small = (whole(f"{x.low:.2f} to {x.high:.2f}"),) if math.isfinite(x.low) else ()
    return Cell(f"{x.value:.2f}", small=small, value=x.value)


def returns_of(record: Mapping[str, Any] | None, names: Sequence[str]) -> tuple[list[str], np.ndarray] | None:
    """(settings in the order of `names`, returns [K, seeds x episodes], a column being one seed and one reset) of
    state/truth.json; None where the file has no such matrix of at least two settings."""
    rows: dict[str, dict[Any, list[float]]] = {}
    policies = record.get("policies") if record else None
    for row in policies if isinstance(policies, list) else []:
        if isinstance(row, dict) and isinstance(row.get("returns"), list):
            rows.setdefault(str(row.get("setting")), {})[str(row.get("seed"))] = [real(x) for x in row["returns"]]
    columns = {name: [x for seed in sorted(own) for x in own[seed]] for name, own in rows.items()}
    size = max(map(len, columns.values()), default=0)
    usable = [n for n in names if len(columns.get(n, ())) == size > 0 and all(map(math.isfinite, columns[n]))]
    return (usable, np.array([columns[n] for n in usable])) if len(usable) > 1 else None


def _curves(made: TunePage, names: Sequence[str]) -> None:
    page = made.page
    page.heading("Regret against real episodes", level=3)
    order = [n for n in made.result["by_data"]["order"] if n in names]
    matrix = returns_of(made.stage("truth"), [*order, *(n for n in names if n not in order)])
    if matrix is None:
        page.text("The returns of single episodes (state/truth.json) are missing or damaged, so there is no curve.")
        return
    usable, returns = matrix
    prior = -np.arange(len(usable), dtype=float)
    curves: dict[str, tuple[Curve, str]] = {}
    for label, (rule, by_data, colour) in RULES.items():
        if by_data and not made.judge:
            continue
        curve = regret_curve(
            returns, rule, EPISODES, prior=prior if by_data else None, paired=True, trials=TRIALS, resamples=RESAMPLES
        )
        curves[label] = (curve, colour)
    page.text(CURVE, "small")
    page.legend([(label, colour) for label, (_, colour) in curves.items()])
    page.figure(
        figures.regret(curves, [n for n in BANDS if n in curves]), "", alt="Regret against the number of real episodes"
    )
    rows: list[list[Any]] = []
    for label, (curve, _) in curves.items():
        points = zip(curve.value.tolist(), curve.low.tolist(), curve.high.tolist(), strict=True)
        rows.append([label, *(_interval(Interval(*p)) for p in points)])
    page.table(["regret with real episodes", *(f"{n}" for n in EPISODES)], rows)
