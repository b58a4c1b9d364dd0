"""The first screen of a tune's page, and its sentences: the choice, its score, the default beside it, the doubts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from offrl.errors import some
from offrl.figures.tuning import number
from offrl.report.context import count
from offrl.report.page import Cell, Page, escape
from offrl.report.rows import digits, span, unbroken
from offrl.report.whiskers import Answer, Row, picture
from offrl.settings.field import shown_value
from offrl.statistics.intervals import mean_interval
from offrl.tuning.choice import ERROR95
from offrl.tuning.config import FEW_EPISODES, PLAY
from offrl.tuning.judging import FINAL

NONE = "\u2013"  # in place of a number that is not known
ROLES = {"winner": "#009e73", "default": "#d55e00"}
SCORE = (
    "Mean over seeds with its 95% interval (Student's t; the seed is the unit). These seeds were trained anew, on all "
    "episodes of the data, and played episodes that nothing chose by: this is the number to report."
)
RULES = {
    "one-se": "By the one-standard-error rule (rule=one-se), which takes the most conservative of the settings that "
    "the judge cannot tell from the largest estimate",
    "best": "By the largest estimate (rule=best)",
}


@dataclass(frozen=True)
class Judgement:
    """One setting as one rung judged it; NaN where it could not."""

    row: Mapping[str, Any]  # of trials.csv
    setting: str
    rung: str
    bracket: int | None
    value: float  # of the judge that decides
    error: float  # its standard error

    def number(self, column: str) -> float:
        return real(self.row.get(column))

    @property
    def text(self) -> str:
        """The estimate with its 95% interval."""
        if math.isnan(self.value):
            return NONE
        return number(self.value) + (f" \u00b1 {number(ERROR95 * self.error)}" if math.isfinite(self.error) else "")


class TuneResult:
    """What is in result.json, as the screen and the page need it."""

    def __init__(self, result: Mapping[str, Any]) -> None:
        self.result = result
        self.settings: Mapping[str, Mapping[str, Any]] = result["settings"]
        self.chosen = str(result["chosen"]["setting"])
        self.default = f"{self.settings.get(self.chosen, {}).get('algo', '')}-00"  # of the chosen algorithm
        self.judge, *self.other_judges = [j for j in result["judge"] if j != PLAY] or [""]
        self.judgements = [
            Judgement(r, str(r["setting"]), str(r["rung"]), r["bracket"], real(r.get(self.judge)), real(r.get("error")))
            for r in result["rows"]
        ]
        self.finals = {j.setting: j for j in self.judgements if j.rung == FINAL}  # the judgement that chose
        self.members: Sequence[str] = result["by_data"].get("members") or ()  # not told from the largest estimate
        self.vetoed: Mapping[str, str] = result["by_data"].get("vetoed") or {}
        self.limit: float | None = result.get("cost_limit")  # of an episode's cost
        self.unsafe: Mapping[str, str] = result["by_data"].get("unsafe") or {}  # may break it

    @property
    def first_rung(self) -> list[Judgement]:
        """The judgements after as many updates of every setting."""
        return [j for j in self.judgements if j.rung == self.judgements[0].rung]

    def label(self, name: str) -> str:
        """A setting's name with its values: `iql-04 (temperature 3)`."""
        values = ", ".join(f"{k} {setting_text(v)}" for k, v in self.settings.get(name, {}).get("values", {}).items())
        return f"{name} ({values})" if values else name


def real(x: Any) -> float:
    """A finite number; NaN for anything else."""
    return float(x) if isinstance(x, (int, float)) and not isinstance(x, bool) and math.isfinite(x) else math.nan


def setting_text(value: Any) -> str:
    """A setting's value in few letters."""
    return number(value) if isinstance(value, float) else shown_value(value)


def estimate(x: float, error: float = math.nan) -> Cell:
    """A number of a table, with its 95% interval below it where a standard error is known."""
    if not math.isfinite(x):
        return Cell(NONE)
    interval = (unbroken(f"\u00b1 {number(ERROR95 * error)}"),) if math.isfinite(error) else ()
    return Cell(number(x), small=interval, value=x)


def limit_kept(tune: TuneResult) -> str:
    """A sentence on what an episode of the choice costs, by what chose it; "" without a limit."""
    interval = tune.result["chosen"].get("cost")
    if tune.limit is None or not interval:
        return ""
    (cost, low, high), played = map(real, interval), tune.result["chosen"].get("episodes")
    ends = "" if math.isnan(high) else f" [{number(max(0.0, low))}, {number(high)}]"
    judge = "in the real episodes that it played" if played else "by fitted Q evaluation of the costs"
    reaches = math.isnan(high) or high > tune.limit >= cost
    doubt = f"; the interval {'is not known' if math.isnan(high) else 'reaches beyond it'}" if reaches else ""
    return f"An episode of the choice costs {number(cost)}{ends} {judge} (95%); the limit is {tune.limit:g}{doubt}."


def default_doubt(tune: TuneResult) -> str:
    """A sentence where the judge cannot tell the choice from the default settings of its algorithm; "" where it can,
    and where the default settings may break the limit of the costs.

    They are compared in the last rung that judged both.
    """
    if tune.default in (tune.chosen, *tune.unsafe) or tune.default not in tune.settings or not tune.judge:
        return ""
    verdict = "The judge does not tell the choice from the default settings of its algorithm"
    scored = [r for r in ROLES if (tune.result["retrained"].get(r) or {}).get("score") is not None]
    better = f"; where nothing else speaks for the choice, the default settings ({tune.default}) are the better advice"
    advice = "" if len(scored) == len(ROLES) else better
    rungs: dict[Any, dict[str, Judgement]] = {}
    for j in tune.judgements:
        if not math.isnan(j.value):
            rungs.setdefault((j.bracket, j.rung), {})[j.setting] = j
    shared = [rung for rung in rungs.values() if tune.chosen in rung and tune.default in rung]
    if not shared:
        diverged = any(j.setting == tune.default and math.isnan(j.value) for j in tune.judgements)
        return "" if diverged else f"{verdict}: no rung judged both{advice}."
    choice, default = shared[-1][tune.chosen], shared[-1][tune.default]
    error = ERROR95 * math.hypot(choice.error, default.error)
    gap = choice.value - default.value
    if gap > 0.0 and gap >= error and not {tune.chosen, tune.default} <= set(tune.members):
        return ""
    interval = "" if math.isnan(error) else f", difference \u00b1 {number(error)}, 95%"
    where = "" if choice.rung == FINAL else f", in rung {choice.rung}"
    return f"{verdict} ({tune.judge}: {number(choice.value)} against {number(default.value)}{interval}{where}){advice}."


def comparison(
    retrained: Mapping[str, Mapping[str, Any]], is_default: bool, limit: float | None = None
) -> tuple[str, str]:
    """(a sentence on the winner against the default settings, one of page.KINDS), by the seeds that both have; by their
    costs where one of them breaks the limit.
    """
    if not retrained:
        anew = "Nothing was trained anew (retrain=false), so there is no score to report"
        return f"{anew}: estimates that chose promise too much.", "warning"
    winner, default = retrained.get("winner"), retrained.get("default")
    if winner is None or not winner["seeds"]:
        unscored = "The choice was trained anew, but not scored"
        return f"{unscored}: these data name no environment, or env=none was given.", "note"
    costs = [real((e["cost"] or [None])[0]) for e in (winner, default) if e is not None and limit is not None]
    if limit is not None and costs and costs[0] > limit:
        return f"Trained anew, the choice breaks the limit of {limit:g}: its episodes cost {number(costs[0])}.", "bad"
    if limit is not None and len(costs) > 1 and costs[1] > limit:
        both = f"their episodes cost {number(costs[1])}, the choice's {number(costs[0])}"
        return f"The default settings break the limit of {limit:g}: {both}.", "good"
    if is_default or default is None:
        return "The choice is what would be trained without a search: the default settings of its algorithm.", "note"
    scores, of_default = (
        {r.get("seed", i): real(s) for i, (r, s) in enumerate(zip(e["rows"], e["seeds"], strict=True))}
        for e in (winner, default)
    )
    differences = [scores[seed] - of_default[seed] for seed in scores if seed in of_default]
    mean, low, high = mean_interval(differences)
    score = bool(winner["normalised"])
    if score != bool(default["normalised"]) or math.isnan(mean):
        return "The choice cannot be compared with the default settings: a seed of one of them has no score.", "warning"
    difference = f"{mean:+.1f}" if score or abs(mean) < 1000 else f"{mean:+,.0f}"
    difference += " score" if score else " return"
    if math.isnan(low):
        one = "by one seed of each: nothing says how much of this is chance."
        return f"{difference} against the default settings, {one}", "warning"
    interval = f"{difference}, 95% interval {span((mean, low, high), score)}, {len(differences)} new seeds of each"
    if low > 0.0:
        return f"Better than the default settings of its algorithm: {interval}.", "good"
    if high < 0.0:
        return f"Worse than the default settings of its algorithm: {interval}. Take the default.", "bad"
    return f"Not told from the default settings of its algorithm: {interval}. More final_seeds= would tell.", "warning"


def lost_return(tune: TuneResult) -> str:
    """What the choice cost against the best finalist in truth, in a sentence; "" where truth= was not asked."""
    truth = tune.result["truth"]
    if truth is None:
        return ""
    if math.isnan(loss := real(truth["lost"])):
        return f"The true return of the choice, {tune.chosen}, is not known."
    regret, by_data = truth["regret"], str(tune.result["by_data"]["setting"])
    text = (
        f"The choice loses {number(loss)} of return against the best finalist, {tune.label(truth['best'])}, a regret "
        f"of {number(real(regret['chosen']))} (0: the best, 1: what one at random loses)."
    )
    if by_data != tune.chosen and math.isfinite(real(regret["by_data"])):
        text += f" By the data alone the choice was {by_data}, with a regret of {number(real(regret['by_data']))}."
    return text


def warnings(tune: TuneResult) -> list[str]:
    """What speaks against the choice."""
    result, final = tune.result, tune.finals.get(tune.chosen)
    lines: list[str] = []
    if tune.chosen in tune.vetoed:
        remark = "every other finalist was too, or was worse in what was played"
        lines.append(f"the choice itself is vetoed: {tune.vetoed[tune.chosen]}; {remark}")
    elif final is not None and final.row["exploded"]:
        lines.append(f"the choice itself is doubtful, as every finalist was vetoed: {final.row['exploded']}")
    if vetoes := [f"{n}: {reason}" for n, reason in tune.vetoed.items() if n != tune.chosen]:
        lines.append(f"{count(len(vetoes), 'finalist')} vetoed, and not chosen from: {some(vetoes, 3)}")
    if result.get("short"):
        lines.append(f"the judge is too short: {result['short']}")
    if tune.judge and result["data"]["episodes"] < FEW_EPISODES:
        episodes = count(result["data"]["episodes"], "episode")
        lines.append(f"only {episodes} judged: which of them these are decides much")
    if unsafe := [f"{n}: {reason}" for n, reason in tune.unsafe.items() if n != tune.chosen]:
        number_of = count(len(unsafe), "finalist")
        lines.append(f"{number_of} may break the limit, with an interval that reaches beyond it: {some(unsafe, 3)}")
    if diverged := [j.setting for j in tune.first_rung if math.isnan(j.value)]:
        lines.append(f"{count(len(diverged), 'setting')} diverged with all seeds: {some(diverged)}")
    return lines


def show_choice(page: Page, tune: TuneResult) -> None:
    """The first screen: what was chosen and why, the score that chose nothing, the command, the doubts."""
    result, chosen, setting = tune.result, tune.result["chosen"], tune.settings.get(tune.chosen, {})
    values = ", ".join(f"{k} {setting_text(v)}" for k, v in setting.get("values", {}).items())
    verdict = f"Chosen: {setting.get('algo', '')}{f' with {values}' if values else ''} ({tune.chosen})"
    page.markup(f'<section class="answer"><p class="verdict first">{escape(verdict)}</p>')
    rule = RULES.get(str(result["rule"]), "")
    if rule and tune.judge and len(tune.finals) > 1 and not chosen.get("episodes"):
        alone = ": here that one alone" if len(tune.members) < 2 and result["rule"] == "one-se" else ""
        page.text(f"Why: {chosen['why']}. {rule}{alone}.")
    else:
        page.text(f"Why: {chosen['why']}.")
    for line in (limit_kept(tune), default_doubt(tune), lost_return(tune)):
        if line:
            page.text(line)
    sentence, kind = comparison(result["retrained"], tune.chosen == tune.default, tune.limit)
    page.markup(f'<p class="sure {kind}">{escape(sentence)}</p>')
    _scores(page, tune)
    page.markup("</section>")
    page.text("To train it yourself, on all data and without the search:")
    page.preformatted(result["command"])
    if lines := warnings(tune):
        page.box("To know before using it", lines, "warning")
    if len(tune.members) > 1:
        page.text(f"The data cannot tell these apart: {some([tune.label(n) for n in tune.members], 8)}.")


def _scores(page: Page, tune: TuneResult) -> None:
    """The reported scores, and the estimates that chose."""
    entries = {role: e for role in ROLES if (e := tune.result["retrained"].get(role)) is not None}
    rows, lines, colours = [], [], {}
    for role, e in entries.items():
        label, score = f"{role}: {e['setting']}", e["score"] or [math.nan] * 3
        mean, low, high = map(real, score)
        rows.append(Row(label, (mean, low, high)) if math.isfinite(mean) else Row(label, None, "no score"))
        colours[label] = ROLES[role]
        if e["seeds"]:
            lines.append(f"{label}, each seed: {', '.join(digits(real(s), e['normalised']) for s in e['seeds'])}")
        if tune.limit is not None and e["cost"]:
            cost, low, high = map(real, e["cost"])
            each = ", ".join(number(real(r.get("cost"))) for r in e["rows"])
            ends = "" if math.isnan(low) else f" [{number(low)}, {number(high)}], 95%"
            lines.append(f"{label}, cost of an episode: {number(cost)}{ends}; each seed: {each}; limit {tune.limit:g}")
    if any(row.estimate is not None for row in rows):
        normalised = all(e["normalised"] for e in entries.values())
        unit = "normalised score" if normalised else "return"
        page.markup(picture(Answer("", "", "note", unit, SCORE, tuple(rows), normalised), colours, "setting"))
    page.items(lines)
    final, optimism = tune.finals.get(tune.chosen), real(tune.result["optimism"])
    if final is not None and not math.isnan(final.value):
        larger = sum(j.value > final.value for j in tune.finals.values())
        rank = f"It is number {larger + 1} of {len(tune.finals)}, counted from the largest."
        text = f"The estimate that chose ({tune.judge}, 95%): {final.text}. {rank if larger else 'It is the largest.'}"
        if math.isfinite(optimism):
            text += (
                f" The largest of several that each err promises too much: of {len(tune.finals)} equal settings with "
                f"this error it would exceed the truth by {number(optimism)} on average (its optimism)."
            )
        page.text(text, "small")
