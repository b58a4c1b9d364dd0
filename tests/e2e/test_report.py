"""`offrl report` on runs that were really trained, and `offrl data doctor` on their data."""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from offrl.runs.exchange import read

from .conftest import Offrl


@pytest.mark.slow
def test_train_then_report(offrl: Offrl, write: Callable[..., Path], tmp_path: Path) -> None:
    data = write("hopper-mine.hdf5")
    common = f"train dataset={data} eval.env=Hopper-v4 seeds=2 steps=20 eval.every=10 quiet=true"
    assert offrl(f"{common} algo=bc name=bc").status == 0
    assert offrl(f"{common} algo=iql name=iql").status == 0
    result = offrl("report runs out=page bootstrap=100 baseline=bc")
    assert result.status == 0 and result.out.startswith("page/index.html"), result.err
    page = (tmp_path / "page" / "index.html").read_text()
    assert "bc, iql on hopper-mine" in page and "evaluation: discounted_mean" in page
    with open(tmp_path / "page" / "table.csv", newline="") as file:
        table = {row["algorithm"].partition(" ")[0]: row for row in csv.DictReader(file)}
    for name in ("bc", "iql"):
        with open(tmp_path / "runs" / name / "scores.csv", newline="") as file:
            last = [float(row["return_mean"]) for row in csv.DictReader(file) if row["step"] == "20"]
        assert len(last) == 2 and np.isclose(float(table[name]["return_mean"]), np.mean(last))
    assert offrl("report runs out=page bootstrap=100 results=all.jsonl license=CC0-1.0 quiet=true").status == 0
    assert offrl("report all.jsonl out=again bootstrap=100").status == 0
    assert (tmp_path / "again" / "table.csv").read_text() == (tmp_path / "page" / "table.csv").read_text()
    documents = read(tmp_path / "all.jsonl")
    assert [len(r["returns"]) for d in documents for r in d["runs"]] == [1] * 4 and documents[0]["license"] == "CC0-1.0"
    assert str(tmp_path) not in (tmp_path / "all.jsonl").read_text()
    assert "holds one: give one.jsonl" in offrl("report runs results=one.json").err
    doctor = offrl(f"data doctor {data} out=doctor")
    assert doctor.status == 0 and "hopper-mine" in (tmp_path / "doctor" / "index.html").read_text(), doctor.err


def test_doctor_of_faulty_data(offrl: Offrl, write: Callable[..., Path], tmp_path: Path) -> None:
    data = write("bad.hdf5", rewards=np.full(300, np.nan, np.float32))
    result = offrl(f"data doctor {data} out=doctor")
    assert result.status == 1
    assert "offrl refuses this dataset as it is" in (tmp_path / "doctor" / "index.html").read_text()
