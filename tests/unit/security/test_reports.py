"""Reports and pictures of strangers' runs, and commands that start in a stranger's folder ("not tried" in the table of
attacks).
"""

from __future__ import annotations

import json
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from offrl.figures import curves, world_model
from offrl.figures.style import new_figure
from offrl.report import ReportConfig
from offrl.report.build import report
from offrl.report.context import ReportContext
from offrl.report.page import Page, slug
from offrl.runs.run import SavedRun
from offrl.runs.score import Results

ROOT = Path(__file__).resolve().parents[3]
SAVED = ROOT / "tests" / "data" / "run"
NAME = "=cmd|' /C calc'!A0 $\\frac{$ \x1b[2J\x07\n\r\ud800 </svg><script>x()</script> <a href=\"javascript:x()\">"


def run_of(folder: Path, name: str) -> Path:
    """An honest run with names of a stranger's."""
    shutil.copytree(SAVED, folder)
    record = json.loads((folder / "run.json").read_text())
    record["label"] = record["data"]["name"] = name
    (folder / "run.json").write_text(json.dumps(record))
    last = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])["step"]
    (folder / "metrics.jsonl").write_text(
        json.dumps({"step": last, name: [0.5] * len(record["identity"]["seeds"])}) + "\n"
    )
    return folder


def test_a_report_of_hostile_names(tmp_path: Path) -> None:
    """Row 19, and names in pictures and pages: they are texts, and everything is written into the report's own
    folder.
    """
    run_of(tmp_path / "runs" / "a", NAME)
    before = set(tmp_path.rglob("*"))
    page = report([tmp_path / "runs"], ReportConfig(out=str(tmp_path / "out"), bootstrap=20)).read_text(
        encoding="utf-8"
    )
    assert {p for p in tmp_path.rglob("*") if tmp_path / "out" not in p.parents} - before == {tmp_path / "out"}
    assert page.count("<script>") == 1 and '<a href="javascript' not in page and "$\\frac{$" in page
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]", page)
    for file in ("scores.csv", "table.csv"):
        text = (tmp_path / "out" / file).read_text(encoding="utf-8")
        assert "'=cmd" in text and ",=cmd" not in text and "\x1b" not in text


def test_files_of_a_report_are_named_by_plain_words(tmp_path: Path) -> None:
    """Names in file names: of letters, digits and dashes, not too long for a disk, and one for each data set."""
    made = ReportContext(Page("x"), tmp_path / "out", Results([]), [], [], [], {})
    for name in ("a b", "a-b", "../../a", "/etc/a", 300 * "x", 299 * "x" + "y"):
        made.add(new_figure("", fitted=False)[0], f"curve-{slug(name)}", "")
    names = [
        "curve-a-b.png",
        "curve-a-b-2.png",
        "curve-a.png",
        "curve-etc-a.png",
        f"curve-{94 * 'x'}.png",
        f"curve-{94 * 'x'}-2.png",
    ]
    assert sorted(p.name for p in tmp_path.rglob("*.png")) == sorted(names)
    assert {p.parent for p in tmp_path.rglob("*.png")} == {tmp_path / "out"}


@pytest.mark.rendered
@pytest.mark.parametrize("what", ["curve", "model"])
def test_a_matplotlibrc_has_no_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    """matplotlib reads `matplotlibrc` of the working folder, which may ask for LaTeX (it reads files) and for enormous
    pictures.
    """
    import matplotlib
    from matplotlib.texmanager import TexManager

    def latex(*_: object, **__: object) -> None:
        raise AssertionError("LaTeX was started")

    for name in ("make_dvi", "make_png", "get_text_width_height_descent"):
        monkeypatch.setattr(TexManager, name, latex)
    out = tmp_path / "a.png"
    settings = {
        "text.usetex": True,
        "text.latex.preamble": r"\input{/etc/passwd}",
        "savefig.dpi": 2000.0,
        "font.family": ["serif"],
    }
    with matplotlib.rc_context(settings):
        if what == "curve":
            assert curves.plot_run(SavedRun(run_of(tmp_path / "run", NAME)))
            out = tmp_path / "run" / "learning_curve.png"
        else:
            one_step = {
                "r2": [0.5, 0.5],
                "r2_change": [0.5, 0.5],
                "coverage_calibrated": [[0.5]] * 2,
                "coverage_recalibrated": [[0.5]] * 2,
            }
            model = {"one_step": one_step, "many_steps": {}, "rows": 3}
            about = {
                "dataset": NAME,
                "measured_on": "$\\frac{$",
                "dimensions": ["obs[$\\frac{$]", "reward"],
                "levels": [0.9],
            }
            world_model.draw({**about, "models": [model], "own_deviations": False}, out)
        assert matplotlib.rcParams["text.usetex"]  # a notebook's own settings stay
    assert out.read_bytes().startswith(b"\x89PNG") and int.from_bytes(out.read_bytes()[16:20], "big") < 2000


def hostile_folder(folder: Path) -> Path:
    """A folder that runs code where Python looks for modules in it: a plugin of Hydra, one of offrl, a module of
    another's name.
    """
    (folder / "hydra_plugins").mkdir(parents=True)
    (folder / "evil.egg-info").mkdir()
    (folder / "evil.egg-info" / "entry_points.txt").write_text("[offrl.plugins]\nevil = evil\n")
    (folder / "evil.egg-info" / "PKG-INFO").write_text("Metadata-Version: 2.1\nName: evil\nVersion: 1\n")
    for name in ("evil", "hydra_plugins/evil", "yaml"):
        (folder / f"{name}.py").write_text(f"open({str(folder / 'PWNED')!r}, 'w')\n")
    return folder


def test_the_module_path_lacks_the_working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """hydra_plugins in the working folder: `python -m offrl.cli` imports no more from there than the command
    `offrl`.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["offrl", "--version"])
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])  # as `python -m` does
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    with pytest.raises(SystemExit) as end:
        runpy.run_module("offrl.cli", run_name="__main__")
    assert end.value.code == 0 and str(tmp_path) not in sys.path
    monkeypatch.chdir(ROOT)  # a checkout that is not installed
    monkeypatch.setattr(sys, "path", [str(ROOT), *sys.path])
    with pytest.raises(SystemExit):
        runpy.run_module("offrl.cli", run_name="__main__")
    assert sys.path[0] == str(ROOT)


@pytest.mark.slow
def test_commands_in_a_strangers_folder(tmp_path: Path) -> None:
    folder = hostile_folder(tmp_path / "unpacked")
    done = subprocess.run(
        [sys.executable, "-m", "offrl.cli", "list", "algo=iql"], cwd=folder, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0 and "algo.expectile" in done.stdout, done.stderr
    assert not (folder / "PWNED").exists()
