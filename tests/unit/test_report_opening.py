"""The first screen of a report: who is ahead, by how much, how sure; the picture beside it; films and goal maps; the
printed page.
"""

from __future__ import annotations

import base64
import os
import re
from pathlib import Path

import numpy as np
import pytest

from offrl.benchmark.run import _results
from offrl.figures.curves import Curves
from offrl.report import figures, films
from offrl.report.page import Page
from offrl.report.whiskers import MOST_ROWS, Answer, Row, picture
from offrl.runs.comparable import difference_lines
from offrl.runs.results import collect, write
from offrl.statistics.aggregate import aggregates, difference

from .test_html import Reader
from .test_report import Values, level, made, make

HOPPER, WALKER = "hopper-medium-v2", "walker2d-medium-v2"
MP4 = b"\x00\x00\x00\x20ftypisom" + bytes(range(64))


def spread(mean: float, width: float) -> Values:
    return lambda seed, step: (mean + width * (seed - 1)) * step / 300


def rising(first: float, apart: float) -> Values:
    return lambda seed, step: (first + apart * seed) * step / 300


def test_the_difference_of_two_interquartile_means() -> None:
    rng = np.random.default_rng(0)
    x, y = rng.normal(0.7, 0.05, (5, 4)), rng.normal(0.5, 0.05, (5, 4))
    gap = difference(x, y, reps=2000)
    assert gap.value == pytest.approx(aggregates(x)["iqm"].value - aggregates(y)["iqm"].value)
    assert 0 < gap.low < gap.value < gap.high
    back = difference(y, x, reps=2000)
    assert back.value == pytest.approx(-gap.value) and back.low == pytest.approx(-gap.high, abs=0.02)
    same = difference(x, x, reps=2000)
    assert same.value == 0 and same.low < 0 < same.high
    assert np.isnan(difference(x[:1], y[:1]).low)
    with pytest.raises(ValueError, match="same tasks"):
        difference(x, y[:, :3])


# dataset -> algorithm -> (scores, seeds); the sentences
CASES: dict[str, tuple[dict[str, dict[str, tuple[Values, int]]], list[str]]] = {
    "one run": (
        {HOPPER: {"iql": (level(50), 3)}},
        [
            "iql scores 50.0 [47.5, 52.5] on hopper-medium-v2, 10.0 above the mean of the data's own episodes, 40.0; "
            "published: 67.5 \u00b1 3.8 (CORL).",
            "The whole interval lies above the data's mean",
            "data's mean 40.0",
        ],
    ),
    "one run, worse than the data": (
        {HOPPER: {"bc": (level(20), 3)}},
        ["20.0 below the mean", "do worse than what they learnt from"],
    ),
    "one run, as good as the data": (
        {HOPPER: {"bc": (level(41), 3)}},
        ["The interval holds the data's mean: with 3 seeds"],
    ),
    "unequal numbers of seeds": (
        {HOPPER: {"iql": (rising(10, 20), 4), "bc": (rising(20, 20), 2)}},
        # 5 of 8
        [
            "40.0 [",
            "against 30.0 [",
            "probability of improvement 0.62 (8 pairs of seeds)",
            "cannot be told from chance",
        ],
    ),
    "two seeds": ({HOPPER: {"bc": (level(41), 2)}}, ["twelve times as wide as they lie apart: seeds=5 trains five."]),
    "one seed": (
        {HOPPER: {"bc": (level(50), 1), "iql": (level(60), 1)}},
        ["iql is ahead of bc by 10.0 points: 59.0 against 49.0.", "One seed has no interval"],
    ),
    "one seed on several": (
        {d: {"bc": (level(50), 1), "iql": (level(60), 1)} for d in (HOPPER, WALKER)},
        ["iql is ahead of bc by 10.0 points; probability of improvement 1.00.", "One seed has no interval"],
    ),
    "apart": (
        {HOPPER: {"bc": (level(50), 3), "iql": (level(60), 3)}},
        [
            "60.0 [57.5, 62.5] against 50.0 [47.5, 52.5]; probability of improvement 1.00 (9 pairs",
            "the intervals do not overlap",
        ],
    ),
    "not apart": (
        {HOPPER: {"bc": (spread(50, 9), 3), "iql": (spread(55, 9), 3), "cql": (spread(52, 9), 3)}},
        [
            "iql is ahead of cql by 3.0",
            "with 3 seeds this cannot be told from chance. Not told apart from iql either: bc.",
        ],
    ),
    "level": ({HOPPER: {"bc": (level(50), 3), "iql": (level(50), 3)}}, ["are level: 50.0"]),
    "worse than the data, all": (
        {HOPPER: {"bc": (level(5), 3), "iql": (level(20), 3)}},
        ["None reaches the mean of the data's own episodes, 40.0."],
    ),
    "apart on several, enough seeds": (
        {d: {"bc": (level(50), 6), "iql": (level(60), 6)} for d in (HOPPER, WALKER)},
        ["iql is ahead of bc by 10.0 [", "More than chance: the interval of the difference leaves out 0."],
    ),
    "not apart on several": (
        {d: {"bc": (spread(50, 9), 6), "iql": (spread(51, 9), 6)} for d in (HOPPER, WALKER)},
        ["With 6 seeds each this cannot be told from chance."],
    ),
    "one algorithm on several": (
        {d: {"bc": (level(50), 5)} for d in (HOPPER, WALKER)},
        ["the interquartile mean over 2 datasets", "nothing here to compare"],
    ),
    "several groups": (
        {
            d: {"bc": (level(50), 5), "iql": (level(60), 5)}
            for d in (HOPPER, WALKER, "antmaze-umaze-v2", "antmaze-large-play-v2")
        },
        ["D4RL gym: iql is ahead of bc", "D4RL antmaze: iql is ahead of bc"],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_first_screen(tmp_path: Path, name: str) -> None:
    scores, sentences = CASES[name]
    for dataset, algorithms in scores.items():
        for algorithm, (values, seeds) in algorithms.items():
            make(tmp_path / "runs", algorithm, dataset, values, seeds=seeds)
    text, _ = made(tmp_path / "runs", out=tmp_path / "out")
    opening = text.partition(" Scores ")[0]
    for sentence in sentences:
        assert sentence in opening, opening
    assert not re.search(r"\bnan\b|None\b(?! reaches)", opening)


@pytest.mark.parametrize("datasets", [(HOPPER,), (HOPPER, WALKER)])
def test_what_differs_besides_the_algorithms_is_in_the_headline(tmp_path: Path, datasets: tuple[str, ...]) -> None:
    for dataset in datasets:
        make(tmp_path / "runs", "rebrac", dataset, level(20), seeds=6)
        # alpha is of td3_bc alone
        make(tmp_path / "runs", "td3_bc", dataset, level(60), seeds=6, hidden=[64, 64], alpha=9.0)
        for algorithm, normalised in (("rebrac", "false"), ("td3_bc", "true")):
            record = tmp_path / "runs" / f"{algorithm}-{dataset}" / "run.json"
            record.write_text(
                record.read_text().replace('"dataset": {}', f'"dataset": {{"normalize_observations": {normalised}}}')
            )
    scores = tmp_path / "runs" / f"rebrac-{HOPPER}" / "scores.csv"
    scores.write_text(re.sub(r"^300,(\d),10,", r"300,\1,100,", scores.read_text(), flags=re.M))
    text, _ = made(tmp_path / "runs", out=tmp_path / "out")
    opening = text.partition(" Scores ")[0]
    names = "normalised observations, hidden layers, LayerNorm, batch size and 1 more"
    assert (
        f"They differ in more than the algorithm: {names}. More than chance, by algorithm and settings together: the "
        in opening
    )
    values = (
        "normalised observations: no (rebrac), yes (td3_bc); hidden layers: [256,256,256] (rebrac), [64,64] (td3_bc); "
        "LayerNorm: yes "
    )
    assert (
        f"Besides the algorithm: {values}" in opening and "evaluation episodes: 100 (rebrac), 10 (td3_bc)." in opening
    )
    assert "alpha" not in opening


def test_cells_without_a_final_score_are_named_beside_the_others(tmp_path: Path) -> None:
    make(tmp_path / "runs", "bc", HOPPER, level(50))
    run = make(tmp_path / "runs", "iql", HOPPER, level(60))
    (run / "config.yaml").write_text("steps: 1000\n")
    text, _ = made(tmp_path / "runs", out=tmp_path / "out")
    assert "bc scores 50.0" in text and "No final score of iql." in text
    assert "iql seeds 0, 1, 2: unfinished: step 300 of 1,000" in text
    text, _ = made(run, out=tmp_path / "alone")
    assert "iql on hopper-medium-v2: no final score yet. The same command as before continues" in text
    assert (
        "unfinished: step 300 of 1,000; 60.0 at step 300, not counted" in text
        and "before reading the numbers" not in text
    )


def test_without_an_environment_it_says_what_to_do(tmp_path: Path) -> None:
    run = make(tmp_path / "my runs", "bc", "mine", None, raw=True)
    text, _ = made(run, out=tmp_path / "out")
    assert "bc on mine: trained, but not scored. No environment is known" in text
    assert f"offrl evaluate '{run}' env=ID offrl select '{run}'" in text  # a shell takes them as they stand


def test_what_is_compared_comes_before_what_stands_alone(tmp_path: Path) -> None:
    make(tmp_path / "runs", "bc", "a", level(50), raw=True)
    for algorithm, mean in (("bc", -0.003), ("iql", 60)):
        make(tmp_path / "runs", algorithm, "b", level(mean), raw=True)
    text, _ = made(tmp_path / "runs", out=tmp_path / "out")
    assert text.index("iql is ahead of bc") < text.index("bc returns 500.0") and "-0.0" not in text


def test_of_many_datasets_the_first_are_drawn(tmp_path: Path) -> None:
    for i in range(7):
        make(tmp_path / "runs", "bc", f"pump-{i}", level(50), raw=True)
    page_text, _ = made(tmp_path / "runs", out=tmp_path / "out")
    page = (tmp_path / "out" / "index.html").read_text()
    assert (
        page.count('<table class="whiskers">') == 5
        and "2 more datasets" in page_text
        and page_text.count("bc returns 500.0") == 7
    )


# -------------------------------------------------------------------------------------------------------------- the
# picture


def answer_of(rows: list[Row], **more: object) -> Answer:
    return Answer("a", "b", "good", "score", "about", tuple(rows), **more)  # type: ignore[arg-type]


def places(markup: str, tag: str) -> list[float]:
    return [float(a["cx"].rstrip("%")) for t, a in Reader(markup).elements if t == tag and a.get("cx")]  # type: ignore[union-attr]


def test_dots_lie_where_their_scores_are() -> None:
    markup = picture(
        answer_of(
            [Row("a", (3.0, 2.0, 4.0)), Row("b", (1.0, 0.5, 1.5)), Row("c", (2.0, float("nan"), float("nan")))],
            behaviour=1.0,
        ),
        {},
    )
    a, b, c = places(markup, "circle")
    assert c == pytest.approx((a + b) / 2, abs=0.02) and b < c < a
    means = {float(x["x1"].rstrip("%")) for t, x in Reader(markup).elements if t == "line" and x.get("class") == "mean"}  # type: ignore[union-attr]
    assert means == {b}
    texts = " ".join(Reader(markup).texts)
    assert "[2.0, 4.0]" in texts and "data's mean" in texts


def test_wide_intervals_do_not_hide_the_dots() -> None:
    """Two seeds: an interval twelve times as wide as they lie apart."""
    a, b = places(picture(answer_of([Row("a", (60.0, -1000.0, 1000.0)), Row("b", (50.0, 49.0, 51.0))]), {}), "circle")
    assert a - b > 30
    one = places(picture(answer_of([Row("a", (5.0, float("nan"), float("nan")))]), {}), "circle")
    assert one == [50.0]


def test_names_in_the_picture_are_text_and_many_are_counted() -> None:
    nasty = "<script>x</script>\"'"
    rows = [Row(f"{nasty}{i}", (float(i), i - 1.0, i + 1.0), note=nasty) for i in range(MOST_ROWS + 3)] + [
        Row(nasty, None, nasty)
    ]
    markup = picture(answer_of(rows), {})
    reader = Reader(markup)
    assert "script" not in {tag for tag, _ in reader.elements} and not reader.wrong and not reader.open
    assert "and 4 more, in the tables below" in markup


# ---------------------------------------------------------------------------------------------------------- films and
# maps


def filmed(root: Path, content: bytes = MP4, name: str = "Hopper-v5-seed0-episode0.mp4", algorithm: str = "bc") -> Path:
    run = make(root, algorithm, HOPPER, level(50))
    (run / "videos").mkdir()
    (run / "videos" / name).write_bytes(content)
    return run


@pytest.mark.parametrize(
    ("content", "kind"),
    [(MP4, "data:video/mp4;base64,"), (b"GIF89a" + bytes(9), "data:image/gif;base64,"), (b"<script>x()</script>", "")],
)
def test_films_stand_in_the_page(tmp_path: Path, content: bytes, kind: str) -> None:
    run = filmed(tmp_path / "runs", content, f"a<b>.{'gif' if content[:3] == b'GIF' else 'mp4'}")
    text, _ = made(run, out=tmp_path / "out")  # which looks for places outside of the page
    page = (tmp_path / "out" / "index.html").read_text()
    assert "a<b>." in text and "media-src data:;" in page
    assert (
        f'src="{kind}{base64.b64encode(content).decode()}"' in page
        if kind
        else "data:video" not in page and "1 file more" in text
    )


def test_large_films_and_files_of_others_stay_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = filmed(tmp_path / "runs")
    other = filmed(tmp_path / "others", algorithm="iql")
    os.remove(other / "videos" / "Hopper-v5-seed0-episode0.mp4")
    (tmp_path / "private.mp4").write_bytes(MP4)
    (other / "videos" / "a.mp4").symlink_to(tmp_path / "private.mp4")
    made(other, out=tmp_path / "out")
    assert "data:video" not in (tmp_path / "out" / "index.html").read_text()
    monkeypatch.setattr(films, "LARGEST", len(MP4) - 1)
    text, _ = made(run, out=tmp_path / "out")
    assert "data:video" not in (tmp_path / "out" / "index.html").read_text() and "Hopper-v5-seed0-episode0.mp4" in text


@pytest.mark.parametrize(
    "name, kind",
    [("goal_map.png", "Goal map"), ("open_loop.png", "Open-loop prediction"), ("goals.png", "Manager goal")],
)
def test_pictures_of_runs_stand_in_the_page(name: str, kind: str, tmp_path: Path) -> None:
    from offrl.figures import style

    run = make(tmp_path / "runs", "hiql", "antmaze-umaze-v2", level(50))
    style.save(style.new_figure("map", fitted=False)[0], run / name)
    text, _ = made(run, out=tmp_path / "out")
    page = (tmp_path / "out" / "index.html").read_text()
    assert f"{kind}s" in text and base64.b64encode((run / name).read_bytes()).decode() in page
    (image,) = [a for tag, a in Reader(page).elements if tag == "img"]
    assert (image["alt"] or "").startswith(f"{kind} of hiql on antmaze-umaze-v2.")


# ------------------------------------------------------------------------------------------------------- the page as a
# page


def test_every_picture_says_what_it_shows_and_tables_are_regions(tmp_path: Path) -> None:
    for algorithm, mean in (("bc", 50), ("iql", 60)):
        make(tmp_path / "runs", algorithm, HOPPER, level(mean))
    made(tmp_path / "runs", out=tmp_path / "out", draw=True)
    elements = Reader((tmp_path / "out" / "index.html").read_text()).elements
    pictures = [
        a for tag, a in elements if tag in ("svg", "img") and a.get("aria-hidden") != "true" and a.get("x") is None
    ]
    pictures = [a for a in pictures if a.get("role") == "img" or "alt" in a]
    assert pictures and all(a.get("aria-label") or a.get("alt") for a in pictures)
    assert any("Learning curves on hopper-medium-v2: bc, iql" in (a.get("aria-label") or "") for a in pictures)
    assert all(a.get("aria-label") for tag, a in elements if a.get("role") == "region")


def test_the_contents_follow_the_answer_where_a_page_says_so() -> None:
    page = Page("x")
    page.text("answer")
    page.contents()
    page.heading("A")
    page.heading("B")
    text = page.html()
    assert text.index("answer") < text.index("<nav") < text.index("<h2") and text.count("<nav") == 1
    above = Page("x")
    above.heading("A")
    above.heading("B")
    assert above.html().index("<nav") < above.html().index("<main")


def test_paper_shows_what_is_folded() -> None:
    text = Page("x").html()
    assert "beforeprint" in text and "d.open=true" in text  # and without scripts the style sheet does it
    printed = text.partition("@media print")[2]
    assert "::details-content{content-visibility:visible" in printed and re.match(
        r"\{.*nav,script,video\{display:none\}", printed
    )


def test_many_algorithms_have_colours_that_follow_the_theme() -> None:
    colours = figures.colours([f"a{i}" for i in range(10)])
    assert len(set(colours.values())) == 10
    page = Page("x")
    page.legend(list(colours.items()))
    assert page.html().split("</style>", 1)[1].count("var(--c") == 10
    lines: dict[str, Curves] = {name: {0: {1: 0.0, 2: 1.0}} for name in colours}
    figures.learning("x", lines, colours, "score", None)


def test_a_benchmark_ends_with_what_differs_besides_the_algorithms(tmp_path: Path) -> None:
    for algorithm in ("bc", "td3_bc", "awac"):
        make(tmp_path, algorithm, HOPPER, level(50), hidden=[8], batch_size=64 if algorithm == "awac" else 256)
        make(tmp_path, algorithm, WALKER, level(50), hidden=[8], batch_size=256)
    lines: list[str] = []
    _results(tmp_path, lines.append)
    assert [line for line in lines if line.startswith("differing")] == [
        f"differing besides the algorithm on {HOPPER}: batch size: 64 (awac (batch_size=64)), 256 (bc, td3_bc)"
    ]


def test_scores_without_settings_are_said_to_hide_differences(tmp_path: Path) -> None:
    for algorithm in ("bc", "td3_bc"):
        make(tmp_path / "runs", algorithm, HOPPER, level(50), hidden=[8])
    write(collect([tmp_path / "runs"]), tmp_path / "table")
    (line,) = difference_lines(collect([tmp_path / "table" / "results.csv"]))
    assert line.endswith("settings: not stored of bc, td3_bc, so that more may differ")
    assert not difference_lines(collect([tmp_path / "runs"]))
