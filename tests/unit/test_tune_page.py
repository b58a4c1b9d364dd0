"""The page of a tune: its numbers are those of the result, nothing of a name is markup, and every gap has a
sentence.
"""

from __future__ import annotations

import copy
import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from offrl.figures.tuning import number, slices
from offrl.tuning.page import write_page
from offrl.tuning.verdict import TuneResult, comparison, default_doubt, warnings
from tests.unit.test_html import NASTY, Reader

WIDTHS = [[64, 64], [256, 256]]
SPACES: dict[str, list[dict[str, Any]]] = {
    "iql": [
        {"name": "temperature", "values": [], "low": 0.25, "high": 20.0, "log": True},
        {"name": "expectile", "values": [], "low": 0.5, "high": 0.95, "log": False},
        {"name": "hidden", "values": WIDTHS},
    ],
    "td3_bc": [{"name": "alpha", "values": [1.0, 2.5, 4.0]}],
}
DEFAULTS: dict[str, dict[str, Any]] = {
    "iql": {"temperature": 3.0, "expectile": 0.7, "hidden": WIDTHS[1]},
    "td3_bc": {"alpha": 2.5},
}


def tuned(
    folder: Path, count: int = 8, algos: tuple[str, ...] = ("iql", "td3_bc"), *, known: bool = True, rungs: int = 2
) -> dict[str, Any]:
    """The result of a tune that never was, and the files of its state that the page reads: `count` settings of each
    algorithm in one bracket, of which a quarter and a wild card go on; estimates are noisy true values."""
    generator = np.random.default_rng(0)
    settings: dict[str, Any] = {}
    worth: dict[str, float] = {}
    for algo in algos:
        for i in range(count):
            values: dict[str, Any] = dict(DEFAULTS[algo])
            if i and algo == "iql":
                values = {
                    "temperature": float(np.exp(generator.uniform(-1.3, 2.9))),
                    "expectile": float(generator.uniform(0.5, 0.95)),
                    "hidden": WIDTHS[int(generator.integers(2))],
                }
            elif i:
                values = {"alpha": [1.0, 2.5, 4.0][int(generator.integers(3))]}
            settings[f"{algo}-{i:02d}"] = {"algo": algo, "values": values}
            worth[f"{algo}-{i:02d}"] = -abs(math.log(values.get("temperature", values.get("alpha", 1.0)) / 2.0)) + 3.0
    names = list(settings)
    rows = []

    def row(name: str, rung: str, fate: str, updates: int, noise: float) -> dict[str, Any]:
        value = 20.0 * (worth[name] + noise * float(generator.normal()))
        algo = settings[name]["algo"]
        return {
            "bracket": None if rung == "final" else 1,
            "rung": rung,
            "setting": name,
            "algo": algo,
            **{f"algo.{k}": v for k, v in settings[name]["values"].items()},
            "updates": updates,
            "seeds": 2,
            "fqe": value,
            "error": 8.0 * (1.0 + noise),
            "worst": value - 3.0,
            "td": -value / 7.0,
            "distance": 0.4 + 0.1 * float(generator.random()),
            "exploded": "",
            "fate": fate,
        }

    keep = names
    if rungs == 2:
        first = [row(n, "1", "dropped", 10_000, 0.8) for n in names]
        ordered = sorted(first, key=lambda r: -r["fqe"])
        kept = max(1, len(names) // 4)
        for r in ordered[:kept]:
            r["fate"] = "kept"
        if len(ordered) > kept:
            ordered[kept]["fate"] = "wild card"
        rows += first
        keep = [r["setting"] for r in first if r["fate"] != "dropped"]
    finals = [row(n, "final", "finalist", 40_000, 0.3) for n in keep]
    order = [r["setting"] for r in sorted(finals, key=lambda r: -r["fqe"])]
    next(r for r in finals if r["setting"] == order[0])["fate"] = "chosen"
    rows += finals
    by_data = {
        "setting": order[0],
        "why": "the largest estimate, and the most conservative of 3 within a standard error of it",
        "order": order,
        "members": order[:3],
        "vetoed": {},
        "reference": 0.4,
    }
    winner, default = order[0], f"{settings[order[0]]['algo']}-00"
    real = {n: [[20.0 * worth[n] + 4.0 * float(generator.normal()) for _ in range(6)] for _ in range(2)] for n in keep}
    seeds = {n: [float(np.mean(r)) for r in real[n]] for n in keep}
    means = {n: float(np.mean(seeds[n])) for n in keep}
    best = max(means, key=lambda n: means[n])
    retrained = {"winner": _retrained(winner, "winner", 71.0)}
    if default != winner:
        retrained["default"] = _retrained(default, "default", 60.0)
    (folder / "state").mkdir(parents=True, exist_ok=True)
    if known:
        policies = [{"setting": n, "seed": s, "returns": real[n][s], "score": 1.0} for n in keep for s in range(2)]
        (folder / "state" / "truth.json").write_text(
            json.dumps({"environment": "Hopper-v5", "episodes": 6, "policies": policies})
        )
        judged = [
            {"setting": n, "seed": s, "own_q": 3.0 * worth[n], "td_error": 1.0 - 0.1 * worth[n], "distance": 0.4}
            for n in keep
            for s in range(2)
        ]
        (folder / "state" / "judged.json").write_text(json.dumps({"methods": ["fqe", "td"], "policies": judged}))
    (folder / "trials.csv").write_text("setting\n")
    return {
        "data": {"name": "hopper-medium", "episodes": 200, "fingerprint": "ab" * 32},
        "algos": list(algos),
        "spaces": {a: SPACES[a] for a in algos},
        "budget": [count, 40_000],
        "seeds": {"search": [0, 1], "final": [2, 3, 4]},
        "judge": ["fqe", "td"],
        "criteria": ["return"],
        "proposer": "tpe",
        "rule": "one-se",
        "brackets": [[[len(names), 10_000], [max(1, len(names) // 4), 40_000]]],
        "updates": {"made": 280_000, "full": 640_000},
        "rows": rows,
        "settings": settings,
        "by_data": by_data,
        "chosen": dict(by_data),
        "command": f"offrl train algo={settings[winner]['algo']} dataset=hopper-medium 'algo.hidden=[64,64]' "
        "steps=40000 'seeds=[2,3,4]'",
        "truth": None
        if not known
        else {
            "environment": "Hopper-v5",
            "episodes": 6,
            "seeds": seeds,
            "means": means,
            "best": best,
            "regret": {"by_data": 0.1, "chosen": 0.1},
            "lost": means[best] - means[winner],
        },
        "retrained": retrained,
        "optimism": 11.0 if len(finals) > 1 else None,
    }


def _retrained(name: str, role: str, middle: float) -> dict[str, Any]:
    scores = [middle - 1.5, middle, middle + 2.0]
    rows = [{"seed": 2 + i, "score": s, "return_mean": 30.0 * s} for i, s in enumerate(scores)]
    half = 4.302653 * float(np.std(scores, ddof=1)) / math.sqrt(3)
    mean = float(np.mean(scores))
    return {
        "setting": name,
        "run": role,
        "score": [mean, mean - half, mean + half],
        "seeds": scores,
        "normalised": True,
        "rows": rows,
    }


def written(folder: Path, result: dict[str, Any]) -> str:
    """The page, after a look at its nesting and at what it would load."""
    page = write_page(folder, json.loads(json.dumps(result))).read_text(encoding="utf-8")
    reader = Reader(page)
    assert not reader.wrong and not reader.open
    links = [a["href"] for tag, a in reader.elements if tag == "a" and not str(a["href"]).startswith("#")]
    assert all((folder / str(link)).exists() for link in links)
    assert not [
        tag
        for tag, a in reader.elements
        if tag in ("link", "iframe", "object", "embed") or str(a.get("src", "data:")).split(":")[0] != "data"
    ]
    assert not re.findall(r"https?:|url\((?!#)", page)
    assert "nan" not in " ".join(reader.texts).lower().split()
    return page


def texts(page: str) -> str:
    return " ".join(" ".join(Reader(page).texts).split())


# ------------------------------------------------------------------------------------------------------------- contents


def test_the_page_has_everything_and_is_the_same_twice(tmp_path: Path) -> None:
    result = tuned(tmp_path, 20)
    page = written(tmp_path, result)
    assert page == written(tmp_path, result)
    shown = texts(page)
    for heading in ("What was searched", "Rungs", "Settings and estimates", "Against the truth", "All settings"):
        assert f">{heading}</h2>" in page
    assert "Several criteria" not in shown
    assert "Better than the default settings" not in shown.partition("Rungs")[2]
    assert result["command"] in shown
    mean, low, high = result["retrained"]["winner"]["score"]
    assert f"{mean:.1f} [{low:.1f}, {high:.1f}]" in shown
    assert "each seed: 69.5, 71.0, 73.0" in shown


def test_numbers_of_the_table_are_those_of_the_result(tmp_path: Path) -> None:
    result = tuned(tmp_path)
    page = written(tmp_path, result)
    table = page[page.index(">All settings</h2>") :]
    body = [line for line in table.splitlines() if line.startswith("<tr><th scope=")]
    assert len(body) == len(result["rows"])
    for line, row in zip(body, result["rows"], strict=True):
        numbers = [float(x) for x in re.findall(r'data-v="([^"]+)"', line)]
        for key in ("fqe", "error", "td", "worst", "distance", "updates"):
            assert row[key] in numbers, key
        assert f">{row['fate']}<" in line.replace("\u00a0", " ")


def test_names_are_text(tmp_path: Path) -> None:
    result = tuned(tmp_path, 4, known=False)
    nasty = json.dumps(NASTY)
    swapped = json.loads(
        json.dumps(result).replace('"hopper-medium"', nasty).replace('"temperature"', nasty).replace('"iql-00"', nasty)
    )
    swapped["rows"][0] = {**swapped["rows"][0], "exploded": NASTY, "fate": NASTY}
    swapped["by_data"] = {**swapped["by_data"], "vetoed": {NASTY: NASTY}}
    swapped["command"], swapped["chosen"]["why"] = NASTY, NASTY
    page = written(tmp_path, swapped)
    assert '<script>alert("x")' not in page
    assert page.count("<script") == 1 and page.count("</style>") <= 1 + page.count("<style")


def test_the_choice_against_the_default() -> None:
    winner, default = _retrained("a", "winner", 70.0), _retrained("b", "default", 60.0)
    words, kind = comparison({"winner": winner, "default": default}, False)
    assert kind == "good" and words.startswith("Better") and "+10.0 score" in words
    assert comparison({"winner": default, "default": winner}, False)[1] == "bad"
    other = copy.deepcopy(default)
    other["seeds"] = [20.0, 100.0, 70.0]
    assert comparison({"winner": winner, "default": other}, False)[0].startswith("Not told from")
    assert "retrain=false" in comparison({}, False)[0]
    assert "without a search" in comparison({"winner": winner}, True)[0]
    single = {
        role: {**e, "seeds": e["seeds"][:1], "rows": e["rows"][:1]}
        for role, e in (("winner", winner), ("default", default))
    }
    assert "one seed" in comparison(single, False)[0]
    lost = {**default, "seeds": [60.0, None, math.nan]}
    assert comparison({"winner": winner, "default": lost}, False)[1] == "warning"
    apart = {**default, "rows": [{"seed": 90 + i} for i in range(3)]}  # no seed in common
    assert "cannot be compared" in comparison({"winner": winner, "default": apart}, False)[0]


def test_rungs_and_wild_cards(tmp_path: Path) -> None:
    result = tuned(tmp_path, known=False)
    card = next(r["setting"] for r in result["rows"] if r["fate"] == "wild card")
    assert "0 of 1 wild card trained in full ended with a larger estimate" in texts(written(tmp_path, result))
    for row in result["rows"]:
        if row["setting"] == card and row["rung"] == "final":
            row["fqe"] = 1e3
    assert "1 of 1 wild card trained in full ended with a larger estimate" in texts(written(tmp_path, result))


# ----------------------------------------------------------------------------------------------------------------- gaps


def test_one_setting(tmp_path: Path) -> None:
    result = tuned(tmp_path, 1, ("iql",), rungs=1)
    shown = texts(written(tmp_path, result))
    assert "without a search" in shown


def test_nothing_trained_anew_and_all_vetoed(tmp_path: Path) -> None:
    result = tuned(tmp_path, known=False)
    result["retrained"] = {}
    for row in result["rows"]:
        row["exploded"] = "its own Q left what the rewards allow"
    result["by_data"]["vetoed"] = dict.fromkeys(result["by_data"]["order"], "its actions lie 9 from the data's")
    shown = texts(written(tmp_path, result))
    assert "retrain=false" in shown and "the choice itself is vetoed" in shown and "Against the truth" not in shown


@pytest.mark.slow
def test_estimates_that_are_missing(tmp_path: Path) -> None:
    result = tuned(tmp_path)
    for i, row in enumerate(result["rows"]):
        if i % 2:
            row |= {"fqe": None, "error": None, "worst": math.nan, "td": math.inf, "distance": None}
    shown = texts(written(tmp_path, result))
    assert "diverged with all seeds" in shown
    for row in result["rows"]:
        row |= {"fqe": None, "error": None, "worst": None, "td": None}
    result["optimism"] = None
    result["retrained"]["winner"]["score"] = [70.0, math.nan, math.nan]
    written(tmp_path, result)
    result["retrained"]["winner"] |= {"score": None, "seeds": [], "rows": []}
    assert "not scored" in texts(written(tmp_path, result))


def test_chosen_by_episodes_alone(tmp_path: Path) -> None:
    result = tuned(tmp_path, rungs=1)
    result["judge"], result["rows"], result["optimism"] = ["episodes"], [], None
    names = list(result["settings"])[:3]
    result["by_data"] = {
        "setting": names[0],
        "why": "no judge of the data",
        "order": list(result["settings"]),
        "members": [],
        "vetoed": {},
        "reference": None,
    }
    result["chosen"] = {
        "setting": names[1],
        "why": "the best of 3 finalists in 7 real episodes",
        "episodes": 7,
        "finalists": names,
        "counts": [2, 5, 0],
        "means": [31.25, 47.5, None],
    }
    shown = texts(written(tmp_path, result))
    assert (
        "7 real episodes chose among the finalists" in shown
        and "47.5" in shown
        and "the data's order, then halving" not in shown
    )


@pytest.mark.nightly
def test_many_settings_stay_small(tmp_path: Path) -> None:
    result = tuned(tmp_path, 250)
    assert len(written(tmp_path, result)) < 5e6


def test_several_criteria(tmp_path: Path) -> None:
    result = tuned(tmp_path, known=False)
    result["criteria"] = ["return", "worst", "distance"]
    shown = texts(written(tmp_path, result))
    finals = [(r["fqe"], r["worst"], -r["distance"]) for r in result["rows"] if r["rung"] == "final"]
    count = sum(not any(all(b >= a for a, b in zip(x, y, strict=True)) and x != y for y in finals) for x in finals)
    assert f"The Pareto front: {count} finalist" in shown


# ---------------------------------------------------------------------------------------------------------------- parts


def test_pictures_of_settings_and_numbers() -> None:
    figure = slices("t", [(0.1, 1.0, 0.1, ""), (10.0, 2.0, math.nan, "chosen")], "fqe", log=True)
    (axes,) = figure.axes
    assert axes.get_xscale() == "log" and [len(c[0].get_xdata()) for c in axes.containers] == [1, 0, 1]
    figure.canvas.draw()
    labels = [t.get_text() for t in axes.get_xticklabels() if 0.1 <= t.get_position()[0] <= 10.0]
    assert labels == ["0.1", "0.2", "0.5", "1", "2", "5", "10"]
    widths = ["[64,64]", "[256,256]"]
    listed = slices("h", [(widths[0], 1.0, 0.1, ""), (widths[1], 2.0, 0.1, "default")], "fqe", widths)
    assert [t.get_text() for t in listed.axes[0].get_xticklabels()] == widths
    assert [number(x) for x in (0.00025, 0.6771, -12.345678, 31234.0, 2.5e6, 0.0)] == [
        "2.5e-4",
        "0.6771",
        "-12.35",
        "31,234",
        "2.5e6",
        "0",
    ]


def test_a_choice_that_the_judge_does_not_tell_from_the_default_says_so(tmp_path: Path) -> None:
    """The rule is named, and the place of the estimate is its own: one-se may take a small one."""
    result = tuned(tmp_path, algos=("iql",))
    chosen = result["chosen"]["setting"] = result["by_data"]["setting"] = "iql-03"
    last = {**next(r for r in result["rows"] if r["rung"] == "final"), "error": 5.0}
    estimates = {"iql-00": -564.7, chosen: -572.9, "iql-04": -517.8}
    result["rows"] = [{**last, "setting": n, "algo": "iql", "fqe": v} for n, v in estimates.items()]
    result["by_data"]["members"] = list(estimates)
    result["retrained"] = {}
    page = written(tmp_path, result)
    assert "one-standard-error rule (rule=one-se)" in page and "It is number 3 of 3, counted from the largest." in page
    assert re.search(
        r"does not tell the choice from the default settings of its algorithm \(fqe: .572.9 against .564.7, difference",
        page,
    )
    assert "the default settings (iql-00) are the better advice" in page
    estimates[chosen] = -400.0
    result["rows"] = [{**last, "setting": n, "algo": "iql", "fqe": v} for n, v in estimates.items()]
    result["by_data"]["members"] = [chosen]
    page = written(tmp_path, result)
    assert "does not tell the choice" not in page and "It is the largest." in page
    result["retrained"] = {"winner": {**_retrained(chosen, "winner", 1.0), "score": None}}
    first = {**last, "bracket": 1, "rung": "1", "algo": "iql", "error": 5.0}
    rows = [
        {**first, "setting": "iql-00", "fqe": -570.0},
        {**first, "setting": chosen, "fqe": -569.0},
        result["rows"][1],
    ]
    words = default_doubt(TuneResult({**result, "rows": rows}))
    assert re.search(
        r"fqe: .569 against .570, difference .*, in rung 1\); .* \(iql-00\) are the better advice", words
    ), "thinned out there"
    assert "no rung judged both" in default_doubt(TuneResult({**result, "rows": [rows[0], rows[2]]}))
    assert "the judge is too short: updates=9" in warnings(TuneResult({**result, "short": "updates=9 is too few"}))[-1]
