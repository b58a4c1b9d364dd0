"""`offrl data doctor`: a page for any data that can be read, sound or not, whose words and numbers are those of the
report.
"""

from __future__ import annotations

import contextlib
import html
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from unittest import mock

import h5py
import numpy as np
import pytest

from offrl.data.arrays import raw_from_arrays
from offrl.data.raw import RawData
from offrl.data.tools.inspect import Report, report
from offrl.errors import UserError
from offrl.figures.sample import sample_of
from offrl.report import dataset as module
from offrl.report.dataset import doctor, write_page
from offrl.settings.dataset import DatasetConfig
from tests.support.tiers import nightly_but

from .test_html import Reader, outside
from .test_inspect import columns

Data = dict[str, np.ndarray]
# the others are not, to save time
DRAWN = ("all nan", "short rewards", "one episode", "discrete", "constant action", "huge numbers", "few rows")


def undrawn(name: str) -> contextlib.ExitStack:
    """Pictures are made but not drawn, unless the case is one of DRAWN."""
    patches = contextlib.ExitStack()
    if name not in DRAWN:
        patches.enter_context(mock.patch("offrl.figures.style.save"))
        patches.enter_context(mock.patch("offrl.report.page.svg", return_value="<svg></svg>"))
    return patches


def shown(folder: Path) -> str:
    """The page's text, after a check of its form."""
    page = (folder / "index.html").read_text(encoding="utf-8")
    reader = Reader(page)
    assert not reader.wrong and not reader.open and outside(page) == []
    return html.unescape(re.sub(r"\s+", " ", " ".join(reader.texts)))


def examined(tmp_path: Path, data: Data, **settings: object) -> tuple[Report, str]:
    path = tmp_path / "made.hdf5"
    with h5py.File(path, "w") as file:
        for key, value in data.items():
            file[key] = value
    findings = doctor(DatasetConfig(name=str(path), **settings), tmp_path / "out")  # type: ignore[arg-type]
    return findings, shown(tmp_path / "out")


def test_sound_data(tmp_path: Path) -> None:
    findings, text = examined(tmp_path, columns())
    assert findings.faults == [] and "No faults found" in text
    assert "4: 2 terminated, 2 timed out or cut" in text and "mean 25, from 10 to 40" in text
    assert "1 of 3 dimensions of the observations never change" in text
    pictures = {p.stem for p in (tmp_path / "out").glob("*.png")}
    assert pictures == {"returns", "lengths", "order", "rewards", "actions", "observations", "coverage"}
    assert "taken at random" not in text


FAULTY: dict[str, Callable[[Data], Data]] = {
    "nan observation": lambda d: (
        d | {"observations": np.where(np.arange(40)[:, None] == 13, np.nan, d["observations"])}
    ),
    "nan reward": lambda d: d | {"rewards": np.where(np.arange(40) == 13, np.nan, d["rewards"]).astype(np.float32)},
    "all nan": lambda d: (
        d | {"observations": np.full((40, 3), np.nan, np.float32), "rewards": np.full(40, np.inf, np.float32)}
    ),
    "actions outside": lambda d: d | {"actions": d["actions"] * 5},
    "short rewards": lambda d: d | {"rewards": d["rewards"][:30]},
    "short observations": lambda d: d | {"observations": d["observations"][:7]},
    "rewards of two columns": lambda d: d | {"rewards": np.ones((40, 2), np.float32)},
    "no ends": lambda d: {k: v for k, v in d.items() if k in ("observations", "actions", "rewards")},
    "empty": lambda d: {k: v[:0] for k, v in d.items()},
}


@pytest.mark.parametrize("name", FAULTY)
def test_faults_come_first_with_their_cures(tmp_path: Path, name: str) -> None:
    with undrawn(name):
        findings, text = examined(
            tmp_path, FAULTY[name](columns()), format="columns" if name.startswith("no ") else "auto"
        )
    assert findings.corrupting, findings.faults
    assert "offrl refuses this dataset as it is" in text
    for fault in findings.faults:
        assert fault.message in text and fault.cure in text
    page = (tmp_path / "out" / "index.html").read_text()
    assert page.index('class="box bad"') < page.index("<table")


def made(**values: np.ndarray) -> RawData:
    rows = len(next(iter(values.values())))
    rng = np.random.default_rng(1)
    arrays = {
        "observations": rng.normal(size=(rows, 4)).astype(np.float32),
        "actions": rng.uniform(-1, 1, (rows, 2)).astype(np.float32),
        "rewards": rng.normal(size=rows).astype(np.float32),
    }
    return raw_from_arrays({**arrays, **values, "episode_ends": np.arange(9, rows, 10)}, DatasetConfig(name="made"))


VARIANTS: dict[str, tuple[RawData, str]] = {
    "one episode": (
        raw_from_arrays(
            {"observations": np.eye(5), "actions": np.ones((5, 1)), "rewards": np.ones(5), "episode_ends": [4]},
            DatasetConfig(name="one"),
        ),
        "one episode only",
    ),
    "discrete": (made(actions=np.arange(30) % 3 * 2), "2 of 5 are never taken"),
    "constant action": (made(actions=np.zeros((30, 2), np.float32)), "(constant)"),
    "constant observations": (made(observations=np.ones((30, 4), np.float32)), "no plane to draw"),
    "one number observed": (made(observations=np.arange(30.0)), "no plane to draw"),
    "images": (
        made(observations=np.random.default_rng(0).integers(0, 255, (30, 16, 16, 3), dtype=np.uint8)),
        "pixels: 30 images of 16x16x3, of which 0.0% repeat the one before",
    ),
    "sparse": (made(rewards=(np.arange(300) == 7).astype(np.float32)), "Rewards are sparse: 0.33%"),
    "no reward": (made(rewards=np.zeros(30)), "Every reward is zero"),
    "equal returns": (made(rewards=np.ones(30)), "All 3 episodes have the same return, 10"),
    "unlike scales": (
        made(observations=(np.arange(30)[:, None] % 2 * [1.0, 0.0, 500.0, 2.0])),
        "dimension 2 varies 500 times as much as dimension 0; dataset.normalize_observations=true",
    ),
    "rising": (made(rewards=np.arange(300.0)), "Returns rise in the order of the file (rank correlation 1.00)"),
    "edge": (
        made(actions=np.tile([[1.0, 0.1]], (30, 1))),
        "Action dimension 0 lies on an end of its range in 100% of the rows",
    ),
    "huge numbers": (
        made(observations=np.random.default_rng(0).normal(size=(30, 4)) * [1e-8, 1, 1e8, 1e30]),
        "axis is logarithmic",
    ),
    "many actions": (made(actions=np.random.default_rng(0).uniform(-1, 1, (30, 40))), "The first 3 of 40 dimensions"),
    "few rows": (
        raw_from_arrays(
            {"observations": np.eye(2), "actions": np.ones((2, 1)), "rewards": np.ones(2), "episode_ends": [1]},
            DatasetConfig(name="two"),
        ),
        "too few finite rows",
    ),
}


@pytest.mark.parametrize("name", nightly_but(("discrete", *(VARIANTS.keys() - set(DRAWN))), VARIANTS))
def test_unusual_data(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.draw, "MOST_ACTIONS", 3)
    raw, words = VARIANTS[name]
    with undrawn(name):
        write_page(raw, report(raw, DatasetConfig()), tmp_path)
    assert words in shown(tmp_path)


def test_what_normalising_does_is_true_of_small_units(tmp_path: Path) -> None:
    """Published data keep the published floor, which small units do not get over."""
    raw = made(observations=np.random.default_rng(0).normal(size=(300, 2)) * [1.0, 2e-6])
    for source, words in (
        ("file", "normalize_observations=true makes them alike"),
        ("builtin", "leaves it a standard deviation of 0.002"),
    ):
        own = replace(raw, source=source)
        findings = report(own, DatasetConfig())
        assert any(words in text for text in module._remarks(own, findings, sample_of(own, findings))), source


def test_large_data_are_sampled_and_it_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("offrl.figures.sample.SAMPLE", 50)
    raw = made(rewards=np.arange(300.0))
    findings = report(raw, DatasetConfig())
    sample = sample_of(raw, findings)
    assert len(sample.rows) == 50 == len(set(sample.rows.tolist())) and sample.rows.tolist() == sorted(sample.rows)
    assert sample.episode is not None and sample.episode.tolist() == (sample.rows // 10).tolist()
    with undrawn(""):
        write_page(raw, findings, tmp_path)
    text = shown(tmp_path)
    assert "Drawn from 50 of 300 rows, taken at random." in text
    assert "mean 1,495, from 45 to 2,945" in text  # of all episodes: sums of 0..9 and of 290..299


def test_share_on_an_end_of_the_range() -> None:
    from offrl.figures.dataset import edge_shares

    raw = made(actions=np.array([[1.0, 0.0]] * 6 + [[0.5, -1.0]] * 4))
    findings = report(raw, DatasetConfig())
    assert edge_shares(raw, sample_of(raw, findings), 1e-3) == [(0.6, 0), (0.4, 1)]


def test_coverage_names_the_variance() -> None:
    from offrl.figures.dataset import coverage

    rng = np.random.default_rng(0)
    shared = rng.normal(size=4000)
    # three of four dimensions are one: 75% and 25%
    values = np.stack([shared, shared, shared, rng.normal(size=4000)], 1)
    figure, caption = coverage(values, None, "return")
    assert figure is not None and "100% of the variance; 90% need 2 of 4 components" in caption
    assert [axes.get_xlabel() for axes in figure.axes if axes.get_xlabel()] == ["component 1 (75% of the variance)"]


def test_unreadable(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="nowhere"):
        doctor(DatasetConfig(name=str(tmp_path / "nowhere.hdf5")), tmp_path / "out")
    (tmp_path / "file").write_text("")
    with h5py.File(tmp_path / "made.hdf5", "w") as file:
        for key, value in columns().items():
            file[key] = value
    with pytest.raises(UserError, match="cannot write"):
        doctor(DatasetConfig(name=str(tmp_path / "made.hdf5")), tmp_path / "file")
