"""`offrl data convert`, `subset`, `merge` and `doctor` on the command line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from offrl.data import load_dataset

from .conftest import Offrl


@pytest.mark.slow
def test_convert_subset_merge_and_train_on_it(offrl: Offrl) -> None:
    done = offrl("data convert builtin mine/hop-v0")
    assert (done.status, done.err) == (0, "")
    assert "wrote " in done.out and "(minari): 60,396 rows, 948 episodes" in done.out and "verified" in done.out
    assert load_dataset("mine/hop-v0").fingerprint == load_dataset("builtin").fingerprint
    assert offrl("data subset mine/hop-v0 best.hdf5 top=0.1 quiet=true") == (0, "", "")
    assert offrl("data subset builtin worst.hdf5 episodes=[3,4,5] max_return=1e9").status == 0
    done = offrl("data merge best.hdf5 worst.hdf5 both.hdf5")
    assert done.status == 0 and "28,2" in done.out
    data, best = load_dataset("both.hdf5"), load_dataset("best.hdf5")
    assert data.num_episodes == 94 + 3 and data.spec.task is not None and data.spec.task.env_id == "Hopper-v5"
    np.testing.assert_array_equal(data.columns["rewards"][: len(best)], best.columns["rewards"])
    inspected = offrl("data inspect both.hdf5")
    assert inspected.status == 0 and "no faults found" in inspected.out and "normalised (offrl)" in inspected.out
    trained = offrl("train algo=bc dataset=both.hdf5")
    assert trained.status == 0 and "Hopper-v5" in trained.out, trained.err


def test_bad_input_is_one_line(offrl: Offrl, write: Callable[..., Path]) -> None:
    good, bad = write("good.hdf5"), write("bad.hdf5", rewards=np.full(300, np.nan, np.float32))
    for command, message in (
        ("data", "say what to do: inspect, doctor, horizon, convert, merge, subset, render, label, list"),
        ("data convret a b", "Did you mean 'convert'?"),
        ("data convert good.hdf5", "usage: offrl data convert DATASET OUT"),
        ("data convert good.hdf5 a.hdf5 b.hdf5", "3 names were given, 2 are needed"),
        ("data convert good.hdf5 good.hdf5", "exists; give another name, or force=true"),
        ("data convert god.hdf5 x.hdf5", "Did you mean 'good.hdf5'?"),
        ("data convert good.hdf5 x.zip format=d4rl", "a D4RL file ends in .hdf5"),
        ("data convert good.hdf5 x format=rlds", "format=rlds is not allowed"),
        ("data convert good.hdf5 x.hdf5 forse=true", "Did you mean 'force'?"),
        ("data convert good.hdf5 x.hdf5 dataset.actoin_low=[-1]", "Did you mean 'dataset.action_low'?"),
        ("data convert format=d4rl good.hdf5 x.hdf5", "'good.hdf5' stands after the settings"),
        ("data convert bad.hdf5 x.hdf5", "'rewards' has NaN in 300 rows"),
        ("data subset good.hdf5 x.hdf5", "say what to keep"),
        ("data subset good.hdf5 x.hdf5 top=2", "top=2.0 is out of range"),
        ("data subset good.hdf5 x.hdf5 episodes=0:0", "and none of these"),
        ("data merge good.hdf5 x.hdf5", "usage: offrl data merge A B"),
        ("data doctor nothing-v2", "unknown dataset 'nothing-v2'"),
    ):
        done = offrl(command)
        assert done.status == 2 and message in done.err and done.err.count("\n") == 1, (command, done)
    assert sorted(p.name for p in good.parent.glob("*.hdf5")) == ["bad.hdf5", "good.hdf5"] and bad.exists()
    assert offrl("data convert bad.hdf5 x.hdf5 dataset.check=false").status == 0
    assert offrl("data convert good.hdf5 x.hdf5 force=true").status == 0
    assert load_dataset("x.hdf5").fingerprint == load_dataset("good.hdf5").fingerprint


@pytest.mark.slow
def test_doctor_writes_a_page_and_its_status_is_the_verdict(offrl: Offrl, write: Callable[..., Path]) -> None:
    pytest.importorskip("matplotlib")
    write("good.hdf5"), write("bad.hdf5", rewards=np.full(300, np.nan, np.float32))
    good, bad = offrl("data doctor good.hdf5"), offrl("data doctor bad.hdf5 out=page")
    assert (good.status, bad.status) == (0, 1)
    assert "no fault that would corrupt training" in good.out and "1 fault(s)" in bad.out
    assert (
        "no fault" in Path("doctor-good/index.html").read_text().lower()
        and "NaN" in Path("page/index.html").read_text()
    )


def test_help(offrl: Offrl) -> None:
    from dataclasses import fields

    from offrl.cli.data import Output
    from offrl.data.tools.subset import Choice

    text = offrl("data --help").out
    for settings in (Output(), Choice()):
        for field in fields(settings):
            assert f"  {field.name}=" in text
