"""The first screen: what was chosen and why, the score that chose nothing, the command; then what was searched."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from offrl.figures.tuning import number
from offrl.report.context import folded
from offrl.report.opening.answer import Answer, Row
from offrl.report.opening.whiskers import picture
from offrl.report.page import Cell, escape
from offrl.report.rows import digits, span, whole
from offrl.statistics.intervals import mean_interval
from offrl.tuning.config import FEW_EPISODES
from offrl.tuning.page.material import ERROR95, NONE, Judgement, TunePage, cell, plural, real, some, text
from offrl.tuning.page.truth import lost
from offrl.tuning.table import FINAL

ROLES = {"winner": "#009e73", "default": "#d55e00"}
MANY = 12
SCORE = (
    "Mean over seeds with its 95% interval (Student's t; the seed is the unit). These seeds were trained anew, on all "
    "episodes of the "
    "data, and played episodes that nothing chose by: this is the number to report."
)
OPTIMISM = (
    "Grey: the estimate that chose. {} The largest of several that each err promises too much: of {} equal settings "
    "with this error it "
    "would exceed the truth by {} on average (its optimism). Its unit is the judge's, {}, and not that of the score."
)
RULES = {
    "one-se": "By the one-standard-error rule (rule=one-se), which takes the most conservative of the settings that "
    "the judge cannot tell "
    "from the largest estimate",
    "best": "By the largest estimate (rule=best)",
}
COPY = """(()=>{const b=document.getElementById('copy'),c=document.getElementById('command');b.hidden=false;
b.addEventListener('click',()=>{const done=()=>{b.textContent='copied'},old=()=>{getSelection().selectAllChildren(c);
document.execCommand('copy')&&done()};
navigator.clipboard?navigator.clipboard.writeText(c.textContent).then(done,old):old()})})()"""


def show(made: TunePage) -> None:
    """Everything a hurried reader wants."""
    page, result, name = made.page, made.result, made.chosen
    setting = made.settings.get(name, {"algo": "", "values": {}})
    values = ", ".join(f"{k} {text(v)}" for k, v in setting["values"].items())
    with_values = f" with {values}" if values else ""
    verdict = escape(f"Chosen: {setting['algo']}{with_values} ({name})")
    page.markup(f'<section class="answer"><p class="verdict first">{verdict}</p>')
    page.text(f"Why: {result['chosen']['why']}.{_rule(made)}")
    if words := untold(made):
        page.text(words)
    if result["truth"] is not None:
        page.text(f"Afterwards: {lost(made, result['truth'])}")
    words, kind = comparison(result["retrained"], name in made.defaults)
    page.markup(f'<p class="sure {kind}">{escape(words)}</p>')
    entries = {role: e for role in ROLES if (e := result["retrained"].get(role)) is not None}
    if any(e["score"] is not None and math.isfinite(real(e["score"][0])) for e in entries.values()):
        page.markup(_whiskers(entries))
    page.markup("</section>")
    _scores(made, entries)
    _command(made)
    if notes := warnings(made):
        page.box("To know before using it", notes, "warning")
    _members(made)


def _rule(made: TunePage) -> str:
    """Which rule chose; "" where episodes did, or there was one finalist only."""
    rule, by_data = RULES.get(str(made.result["rule"])), made.result["by_data"]
    if rule is None or not made.judge or len(made.finals) < 2 or made.result["chosen"].get("episodes"):
        return ""
    return (
        f" {rule}."
        if len(by_data.get("members") or ()) > 1 or made.result["rule"] != "one-se"
        else f" {rule}: here that one alone."
    )


def _place(made: TunePage) -> str:
    """Where the estimate of the choice stands among those of the last judgement."""
    known = sorted((j.value for j in made.finals if not math.isnan(j.value)), reverse=True)
    judged = made.final(made.chosen)
    if judged is None or math.isnan(judged.value):
        return ""
    place = known.index(judged.value) + 1
    return "It is the largest." if place == 1 else f"It is number {place} of {len(known)}, counted from the largest."


def untold(made: TunePage) -> str:
    """What to say where the judge cannot tell the choice from the default settings of its algorithm; "" where it can.

    They are compared in the last rung that judged both.
    """
    default = f"{made.settings.get(made.chosen, {}).get('algo', '')}-00"
    if made.chosen in made.defaults or default not in made.settings:
        return ""
    rungs: dict[Any, dict[str, Judgement]] = {}
    for judgement in made.judgements:
        if not math.isnan(judgement.value):
            rungs.setdefault((judgement.bracket, judgement.rung), {})[judgement.setting] = judgement
    shared = [rung for rung in rungs.values() if made.chosen in rung and default in rung]
    verdict = "The judge does not tell the choice from the default settings of its algorithm"
    scored = [role for role in ROLES if (made.result["retrained"].get(role) or {}).get("score") is not None]
    better = f"; where nothing else speaks for the choice, the default settings ({default}) are the better advice"
    advice = "" if len(scored) == len(ROLES) else better
    if not shared:
        diverged = any(j.setting == default and math.isnan(j.value) for j in made.judgements)
        return f"{verdict}: no rung judged both{advice}." if made.judge and not diverged else ""
    choice, other = shared[-1][made.chosen], shared[-1][default]
    error = math.hypot(choice.error, other.error)
    alike = {made.chosen, default} <= set(made.result["by_data"].get("members") or ())
    below = choice.value <= other.value
    if not (below or alike or math.isnan(error) or choice.value - other.value < ERROR95 * error):
        return ""
    sure = "" if math.isnan(error) else f", difference \u00b1 {number(ERROR95 * error)}, 95%"
    where = "" if choice.rung == FINAL else f", in rung {choice.rung}"
    return f"{verdict} ({made.judge}: {number(choice.value)} against {number(other.value)}{sure}{where}){advice}."


def comparison(retrained: Mapping[str, Mapping[str, Any]], is_default: bool) -> tuple[str, str]:
    """(a sentence on the winner against the default settings, one of page.KINDS): by the differences of seeds that both
    have.
    """
    if not retrained:
        return (
            "Nothing was trained anew (retrain=false), so there is no score to report: estimates that chose promise "
            "too much.",
            "warning",
        )
    winner, default = retrained.get("winner"), retrained.get("default")
    if winner is None or not winner["seeds"]:
        return (
            "The choice was trained anew, but not scored: these data name no environment, or env=none was given.",
            "note",
        )
    if is_default or default is None:
        return "The choice is what would be trained without a search: the default settings of its algorithm.", "note"
    pairs = _pairs(winner, default)
    mean, low, high = mean_interval([a - b for a, b in pairs])
    if not pairs or math.isnan(mean):
        return "The choice cannot be compared with the default settings: a seed of one of them has no score.", "warning"
    score = bool(winner["normalised"])
    word, difference = "score" if score else "return", f"{mean:+.1f}" if score or abs(mean) < 1000 else f"{mean:+,.0f}"
    if math.isnan(low):
        return (
            f"{difference} {word} against the default settings, by one seed of each: nothing says how much of this is "
            "chance.",
            "warning",
        )
    interval = f"{difference} {word}, 95% interval {span((mean, low, high), score)}, {len(pairs)} new seeds of each"
    if low > 0.0:
        return f"Better than the default settings of its algorithm: {interval}.", "good"
    if high < 0.0:
        return f"Worse than the default settings of its algorithm: {interval}. Take the default.", "bad"
    return f"Not told from the default settings of its algorithm: {interval}. More final_seeds= would tell.", "warning"


def _pairs(winner: Mapping[str, Any], default: Mapping[str, Any]) -> list[tuple[float, float]]:
    """Scores of the seeds that both have."""
    if bool(winner["normalised"]) != bool(default["normalised"]):
        return []
    scores = [
        {r.get("seed", i): real(s) for i, (r, s) in enumerate(zip(e["rows"], e["seeds"], strict=False))}
        for e in (winner, default)
    ]
    return [(scores[0][seed], scores[1][seed]) for seed in scores[0] if seed in scores[1]]


def _interval(entry: Mapping[str, Any]) -> tuple[float, float, float] | None:
    score = entry["score"]
    return None if score is None or math.isnan(real(score[0])) else (real(score[0]), real(score[1]), real(score[2]))


def _whiskers(entries: Mapping[str, Mapping[str, Any]]) -> str:
    score = all(e["normalised"] for e in entries.values())
    names = {role: f"{role}: {e['setting']}" for role, e in entries.items()}
    rows = tuple(Row(names[role], _interval(e), "" if e["seeds"] else "no score") for role, e in entries.items())
    unit = "normalised score" if score else "return"
    answer = Answer("", "", "note", unit, SCORE, tuple(sorted(rows, key=lambda r: r.estimate is None)), score)
    return picture(answer, {names[role]: ROLES[role] for role in names}, "setting")


def _scores(made: TunePage, entries: Mapping[str, Mapping[str, Any]]) -> None:
    """The reported scores in numbers, and in grey what chose."""
    rows: list[list[Any]] = []
    names = {role: str(e["setting"]) for role, e in entries.items()}
    for role, name in names.items():
        entry = entries[role]
        score, interval = bool(entry["normalised"]), _interval(entry)
        rows.append(
            [
                Cell(role, small=(name,)),
                Cell(digits(interval[0], score), strong=True, value=interval[0]) if interval else Cell(NONE),
                Cell(whole(span(interval, score)) or "one seed") if interval else Cell(NONE),
                Cell("", small=(", ".join(digits(real(s), score) for s in entry["seeds"]),)),
                Cell("", small=(whole(_estimate(made, name)),)),
            ]
        )
    if not rows and made.judge:
        made.page.text(f"Estimate that chose: {_estimate(made, made.chosen)} ({made.judge}, 95%).", "small")
    elif rows:
        made.page.table(
            ["", "score, new seeds", "95% interval", "each seed", f"estimate that chose ({made.judge or 'none'})"], rows
        )
    optimism, count = real(made.result["optimism"]), len(made.finals)
    if math.isfinite(optimism) and made.judge:
        made.page.text(OPTIMISM.format(_place(made), count, number(optimism), made.estimate_of()), "small")
    played = made.result["chosen"]
    if played.get("episodes"):
        words = (
            f"{plural(played['episodes'], 'real episode')} chose among the finalists; what chose promises too "
            "much here as well."
        )
        made.page.text(words, "small")
        if played.get("finalists"):
            lines = [
                [n, c, cell(real(m))]
                for n, c, m in zip(played["finalists"], played["counts"], played["means"], strict=True)
            ]
            made.page.table(["finalist, in the data's order", "real episodes", "mean return"], lines)


def _estimate(made: TunePage, name: str) -> str:
    """What the last judgement said of a setting."""
    judged = made.final(name)
    if judged is None or math.isnan(judged.value):
        return NONE
    return number(judged.value) + (f" \u00b1 {number(ERROR95 * judged.error)}" if math.isfinite(judged.error) else "")


def _command(made: TunePage) -> None:
    made.page.text("To train it yourself, on all data and without the search:")
    made.page.markup(
        f'<pre id="command" style="white-space:pre-wrap;overflow-wrap:anywhere;user-select:all;-webkit-user-select:all">'  # noqa: E501
        f'{escape(made.result["command"])}</pre><p><button type="button" id="copy" '
        f"hidden>copy</button></p><script>{COPY}</script>"
    )


def warnings(made: TunePage) -> list[str]:
    """What speaks against the choice."""
    result, lines = made.result, []
    vetoed: Mapping[str, str] = result["by_data"].get("vetoed") or {}
    judged = made.final(made.chosen)
    if made.chosen in vetoed:
        lines.append(
            f"the choice itself is vetoed: {vetoed[made.chosen]}; every other finalist was too, or was worse in what "
            "was played"
        )
    elif judged is not None and judged.exploded:
        lines.append(f"the choice itself is doubtful, as every finalist was vetoed: {judged.exploded}")
    if others := [f"{n}: {why}" for n, why in vetoed.items() if n != made.chosen]:
        lines.append(f"{plural(len(others), 'finalist')} vetoed, and not chosen from: {some(others, 3)}")
    if result.get("short"):
        lines.append(f"the judge is too short: {result['short']}")
    if made.judge and result["data"]["episodes"] < FEW_EPISODES:
        lines.append(
            f"only {plural(result['data']['episodes'], 'episode')} judged: which of them these are decides much"
        )
    lost = [j.setting for j in made.comparable if math.isnan(j.value)]
    if lost:
        lines.append(f"{plural(len(lost), 'setting')} diverged with all seeds: {some(lost)}")
    return lines


def _members(made: TunePage) -> None:
    """The settings that the data cannot tell apart."""
    members = list(made.result["by_data"].get("members") or [])
    if len(members) < 2:
        return
    page = made.page
    page.text(f"The data cannot tell these apart: {some(members, 8)}.")
    with folded(page, True, f"The {len(members)} settings within a standard error of the largest estimate"):
        rows: list[list[Any]] = []
        for name in members:
            j = made.final(name)
            value, error, distance = (j.value, j.error, j.distance) if j else (math.nan,) * 3
            rows.append([Cell(made.label(name), strong=name == made.chosen), cell(value, error), cell(distance)])
        page.table(["setting", f"{made.judge}, 95%", "distance of actions from the data's"], rows, sortable=True)
        if reference := real(made.result["by_data"].get("reference")):
            page.text(f"A linear clone of the data has a distance of {number(reference)}.", "small")


def searched(made: TunePage) -> None:
    """Data, spaces, rungs and costs."""
    page, result = made.page, made.result
    page.heading("What was searched")
    configs, steps = result["budget"]
    data, seeds = result["data"], result["seeds"]
    reported = f", seeds {', '.join(map(str, seeds['final']))} reported" if seeds["final"] else ""
    page.items(
        [
            f"data: {data['name']}, of which {plural(data['episodes'], 'episode')} judged (checksum "
            f"{str(data['fingerprint'])[:12]})",
            f"{plural(configs, 'setting')} of each algorithm, {steps:,} updates in full; proposer "
            f"{result['proposer']}, "
            f"rule {result['rule']}",
            f"seeds {', '.join(map(str, seeds['search']))} searched{reported}",
            *(
                [f"judged by {made.estimate_of()}" + (f"; beside it {', '.join(made.others)}" if made.others else "")]
                if made.judge
                else []
            ),
        ]
    )
    rows: list[list[Any]] = []
    for algo, space in made.spaces.items():
        for d in space.dimensions:
            ends = (
                some([text(v) for v in d.values], 12)
                if d.values
                else f"{number(d.low)} to {number(d.high)}{', log' if d.log else ''}"
            )
            rows.append([algo, d.name, ends, text(space.default[d.name]) if d.name in space.default else NONE])
    page.table(["algorithm", "setting", "searched", "default"], rows)
    made_, full = result["updates"]["made"], result["updates"]["full"]
    share = f", {made_ / full:.0%} of the {full:,} that training every setting in full takes" if full else ""
    page.text(f"Cost: {made_:,} updates of single policies{share}; judging and retraining are not in it.")
