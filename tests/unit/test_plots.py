"""The learning-curve picture: drawn from scores.csv, the right size, and robust to thin data."""

from __future__ import annotations

import csv
import itertools
import math
import struct
from pathlib import Path
from typing import Any

import pytest

from offrl.errors import UserError
from offrl.figures import curves as plots
from offrl.figures import style
from offrl.runs.log import SCORE_COLUMNS
from offrl.runs.tables import Result
from offrl.settings.replicas import expand
from tests.support.tiers import nightly_but

pytestmark = pytest.mark.rendered


def write(path: Path, rows: list[dict[str, object]]) -> Path:
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(
            file, dict.fromkeys([*SCORE_COLUMNS, *(key for row in rows for key in row)]), restval=""
        )
        writer.writeheader()
        writer.writerows(rows)
    return path


def rows(seeds: int, steps: int, score: bool = True) -> list[dict[str, object]]:
    return [
        {"step": 1000 * t, "seed": s, "return_mean": 100.0 * t + s, **({"score": 3.0 * t + s} if score else {})}
        for t in range(1, steps + 1)
        for s in range(seeds)
    ]


def size(png: Path) -> tuple[int, int]:
    data = png.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    return struct.unpack(">II", data[16:24])  # type: ignore[return-value]


@pytest.mark.parametrize(("seeds", "steps", "score"), [(4, 6, True), (1, 6, False), (3, 1, True), (1, 1, False)])
def test_draws(tmp_path: Path, seeds: int, steps: int, score: bool) -> None:
    source = write(tmp_path / "scores.csv", rows(seeds, steps, score))
    out = tmp_path / "new" / "curve.png"
    assert plots.learning_curve({"iql": source}, out, behaviour=5.0, title="hopper")
    assert size(out) == (900, 550)
    assert [p.name for p in out.parent.iterdir()] == ["curve.png"]


def test_score_only_where_every_run_has_one(tmp_path: Path) -> None:
    with_score = write(tmp_path / "a.csv", rows(2, 3))
    without = write(tmp_path / "b.csv", rows(2, 3, score=False))
    assert plots.learning_curve({"a": with_score, "b": without}, tmp_path / "curve.png")
    assert plots.read_curves(with_score, "score") == {
        (): {s: {1000 * t: 3.0 * t + s for t in (1, 2, 3)} for s in (0, 1)}
    }
    assert plots.read_curves(without, "score") == {}
    costs = write(tmp_path / "costs.csv", [row | {"cost": 2.0, "safe": ""} for row in rows(1, 1)])
    assert plots.read_curves(costs, "score") == {(): {0: {1000: 3.0}}}


def test_a_frozen_seed_leaves_the_others(tmp_path: Path, pictures: dict[str, Any]) -> None:
    data = rows(3, 5)
    for row in data:
        if row["seed"] == 1 and int(str(row["step"])) > 2000:
            row["score"] = ""
    assert plots.learning_curve({"iql": write(tmp_path / "scores.csv", data)}, tmp_path / "curve.png")
    *seeds, mean = [
        dict(zip(line.get_xdata().tolist(), line.get_ydata().tolist(), strict=True))
        for line in pictures["curve.png"].axes[0].lines
    ]
    steps = [1000, 2000, 3000, 4000, 5000]
    assert seeds == [{s: 0.003 * s + seed for s in (steps[:2] if seed == 1 else steps)} for seed in range(3)]
    assert mean == {s: 0.003 * s + 1.0 for s in steps}  # of two seeds, 0 and 2, from 3000 on


GRIDS: dict[str, dict[str, list[float]]] = {
    "one": {"temperature": [10.0, 1.0, math.inf]},
    "two": {"temperature": [1.0, 3.0], "expectile": [0.7, 0.9], "discount": [0.99]},
    "three": {"temperature": [1.0, 3.0], "expectile": [0.7, 0.9], "discount": [0.9, 0.99]},
    "many": {"temperature": [float(t) for t in range(40)], "expectile": [0.7, 0.8, 0.9]},
}


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("name", nightly_but(("one", "two"), GRIDS))
def test_grids(tmp_path: Path, name: str, steps: int) -> None:
    replicas = expand(GRIDS[name], [0, 1])
    data = [
        {"step": t, "seed": r.seed, **dict(r.values), "score": float(i * t)}
        for t in range(1, steps + 1)
        for i, r in enumerate(replicas)
    ]
    source = write(tmp_path / "scores.csv", data)
    read = plots.read_curves(source, "score")
    assert list(read) == list(dict.fromkeys(r.values for r in replicas))
    assert list(read.values())[1] == {s: {t: float((2 + s) * t) for t in range(1, steps + 1)} for s in (0, 1)}
    assert plots.learning_curve({"iql": source}, tmp_path / "curve.png", behaviour=1.0, title="hopper")
    width, height = size(tmp_path / "curve.png")
    assert (width, height) == (900, 550) if name != "many" else width == 900 and height > 550
    plain = write(tmp_path / "bc.csv", rows(2, 2))
    assert plots.learning_curve({"iql": source, "bc": plain}, tmp_path / "both.png")


def test_names_of_lines() -> None:
    values = (("temperature", 3.0), ("expectile", 0.7))
    assert [plots._line_name("iql", values, several) for several in (False, True)] == ["3, 0.7", "iql 3, 0.7"]
    assert plots._line_name("iql", (), False) == plots._line_name("iql", (), True) == "iql"


@pytest.mark.parametrize(("name", "drawn"), [("one", True), ("two", True), ("three", False), ("many", True)])
def test_grid_picture(tmp_path: Path, name: str, drawn: bool) -> None:
    cells = list(dict.fromkeys(r.values for r in expand(GRIDS[name], [0])))
    for score, seeds in ((None, 2), ((12.0, 10.0, 14.0), 2), ((12.0, math.nan, math.nan), 1)):
        results = [
            Result("iql", seeds, (1000.0 * i, 1000.0 * i - 50.0, 1000.0 * i + 50.0), score, values=v)
            for i, v in enumerate(cells)
        ]
        assert plots.grid_picture(results, tmp_path / "grid.png", title="hopper") is drawn
        assert (tmp_path / "grid.png").exists() is drawn
    if drawn:
        assert size(tmp_path / "grid.png") == (900, 550)
    assert not plots.grid_picture([Result("iql", 1, (1.0, 1.0, 1.0))], tmp_path / "none.png")


def test_the_heat_map_has_the_numbers_of_its_cells() -> None:
    _, axes = style.new_figure("")
    plots.heat_map(axes, [[1.0, 250.0], [math.nan, 3.0]], ["a", "b"], ["c", "d"], numbers=True)
    assert [(t.get_position(), t.get_text()) for t in axes.texts] == [((0, 0), "1.0"), ((1, 0), "250"), ((1, 1), "3.0")]
    assert [t.get_text() for t in axes.get_yticklabels()] == ["c", "d"]


def test_nothing_to_draw(tmp_path: Path) -> None:
    assert not plots.learning_curve({"iql": write(tmp_path / "scores.csv", [])}, tmp_path / "curve.png")
    assert not (tmp_path / "curve.png").exists()


def test_missing_or_unwritable_file(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"cannot read .*none.csv"):
        plots.learning_curve({"iql": tmp_path / "none.csv"}, tmp_path / "curve.png")
    source = write(tmp_path / "scores.csv", rows(2, 2))
    with pytest.raises(UserError, match="cannot write"):
        plots.learning_curve({"iql": source}, source / "curve.png")


def test_labels_keep_apart() -> None:
    heights: list[float] = []

    class Axes:
        def get_ylim(self) -> tuple[float, float]:
            return 0.0, 10.0

        def annotate(self, _: str, position: tuple[float, float], **__: object) -> None:
            heights.append(position[1])

    style.label_ends(Axes(), [(9.9, "a", "x"), (9.9, "b", "x"), (9.8, "c", "x"), (1.0, "d", "x")])
    assert all(b - a >= style.LABEL_GAP - 1e-9 for a, b in itertools.pairwise(heights)) and heights[-1] <= 1.0


@pytest.mark.parametrize(("x", "text"), [(0, "0"), (500, "500"), (2500, "2.5k"), (50_000, "50k"), (1e6, "1M")])
def test_thousands(x: float, text: str) -> None:
    assert style.thousands(x) == text
