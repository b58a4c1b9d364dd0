"""Rungs: which settings went on, and what thinning out may have cost."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from offrl.figures import tuning as figures
from offrl.figures.tuning import FATES, number
from offrl.report.page import Cell
from offrl.tuning.page.material import NONE, Judgement, TunePage, cell, plural
from offrl.tuning.table import FINAL

WILD = "wild card"
MOST_BRACKETS = 8  # that are drawn
ABOUT = (
    "Ranks are by the judge's estimate among the settings of the same rung, and in the last column among all "
    "finalists. A wild card goes "
    "on although its estimate was not large enough; what becomes of it is the only sign of what thinning out has cost."
)


def show(made: TunePage) -> None:
    """The picture of each bracket, their table, and the wild cards."""
    if not made.judgements:
        return
    page = made.page
    page.heading("Rungs")
    brackets = sorted({j.bracket for j in made.judgements if j.bracket is not None})
    if not brackets:
        page.text(f"One rung: all {plural(len(made.finals), 'setting')} were trained in full and judged together.")
        return
    page.text(ABOUT, "small")
    page.legend(
        [
            (kind, colour)
            for kind, colour in FATES.items()
            if kind in {f for b in brackets for _, f, _ in paths(made, b)[1]}
        ]
    )
    with page.gallery():
        for bracket in brackets[:MOST_BRACKETS]:
            columns, lines = paths(made, bracket)
            figure = figures.rungs(columns, lines, f"bracket {bracket}" if len(brackets) > 1 else "")
            page.figure(figure, "", alt=f"Rank of each setting of bracket {bracket} in each rung")
    if len(brackets) > MOST_BRACKETS:
        page.text(f"The first {MOST_BRACKETS} of {len(brackets)} brackets are drawn; the table has all.", "small")
    _table(made, brackets)
    _wild_cards(made)


def ranks(judged: Sequence[Judgement]) -> dict[str, int]:
    """{setting: rank}, 1 for the largest estimate; those without one last."""
    order = sorted(judged, key=lambda j: (math.isnan(j.value), -j.value if not math.isnan(j.value) else 0.0))
    return {j.setting: i + 1 for i, j in enumerate(order)}


def paths(made: TunePage, bracket: int) -> tuple[list[str], list[tuple[str, str, list[tuple[int, int]]]]]:
    """(names of the columns, (setting, fate, [(column, rank)]) for each setting of a bracket)."""
    own = [j for j in made.judgements if j.bracket == bracket]
    names = list(dict.fromkeys(j.rung for j in own))
    last = {j.setting: made.finals for j in made.finals}
    places: dict[str, list[tuple[int, int]]] = {}
    for column, rung in enumerate(names):
        for name, rank in ranks([j for j in own if j.rung == rung]).items():
            places.setdefault(name, []).append((column, rank))
    final = ranks(made.finals)
    for name, where in places.items():
        if name in last and last:
            where.append((len(names), final[name]))
    updates = {j.rung: j.updates for j in [*own, *made.finals]}
    columns = [f"{updates[r]:,} updates" for r in names] + ([f"final, {updates[FINAL]:,}"] if FINAL in updates else [])
    return columns, [(name, _fate(made, name, own), where) for name, where in places.items()]


def _fate(made: TunePage, name: str, own: Sequence[Judgement]) -> str:
    fates = [j.fate for j in own if j.setting == name]
    if name == made.chosen:
        return "chosen"
    if WILD in fates:
        return WILD
    if made.final(name) is None or not fates:
        return "dropped"
    return "kept" if all(f in ("kept", "finalist") for f in fates) else "kept for another reason"


def _table(made: TunePage, brackets: Sequence[int]) -> None:
    rows: list[list[Any]] = []
    groups = [(b, [j for j in made.judgements if j.bracket == b]) for b in brackets]
    for bracket, own in [*groups, (None, made.finals)]:
        for rung in dict.fromkeys(j.rung for j in own):
            judged = [j for j in own if j.rung == rung]
            count = {f: sum(j.fate == f for j in judged) for f in ("kept", WILD, "dropped")}
            others = (
                0 if rung == FINAL else len(judged) - sum(count.values()) - sum(j.fate == "finalist" for j in judged)
            )
            best = min(judged, key=lambda j: (math.isnan(j.value), -j.value if not math.isnan(j.value) else 0.0))
            numbers = [None] * 4 if rung == FINAL else [count["kept"], count[WILD], others, count["dropped"]]
            rows.append(
                [
                    Cell("all" if bracket is None else str(bracket), value=float(bracket or 0)),
                    rung,
                    judged[0].updates,
                    len(judged),
                    *numbers,
                    best.setting,
                    cell(best.value, best.error),
                ]
            )
    fates = ["kept", "wild card", "kept otherwise", "dropped"]
    made.page.table(["bracket", "rung", "updates", "settings", *fates, "best", f"{made.judge}, 95%"], rows)


def _wild_cards(made: TunePage) -> None:
    page = made.page
    cards = [j for j in made.judgements if j.fate == WILD]
    if not cards:
        page.text("There was no wild card, so nothing says what thinning out has cost.")
        return
    chosen = made.final(made.chosen)
    rows: list[list[Any]] = []
    ended = won = 0
    for card in cards:
        end = made.final(card.setting)
        place = ranks([j for j in made.judgements if (j.bracket, j.rung) == (card.bracket, card.rung)])[card.setting]
        above = NONE
        if end is not None and chosen is not None and not math.isnan(end.value - chosen.value):
            ended += 1
            won += end.value > chosen.value
            above = "is the choice" if end.setting == chosen.setting else number(end.value - chosen.value)
        rows.append([
            card.setting, card.bracket, card.rung, Cell(str(place), value=float(place)),
            cell(end.value, end.error) if end else Cell("dropped later"), above,
        ])  # fmt: skip
    taken = " One is the choice itself." if any(c.setting == made.chosen for c in cards) else ""
    larger = f"{won} of {plural(ended, 'wild card')} trained in full"
    page.text(f"Would a wild card have won? {larger} ended with a larger estimate than the chosen setting's.{taken}")
    page.table(
        ["wild card", "bracket", "rung", "rank there", f"final {made.judge}, 95%", "less the chosen one's"], rows
    )
