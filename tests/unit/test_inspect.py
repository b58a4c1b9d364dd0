"""`offrl data inspect`: each fault is found, with the right episode and row, and the numbers are those of the file."""

from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np
import pytest

from offrl.cli.main import main
from offrl.data.tools.inspect import Report, _ranges, inspect_dataset
from offrl.errors import UserError
from offrl.settings.dataset import DatasetConfig

ROWS = 40  # four episodes of ten rows; 0 and 2 terminate, 1 and 3 time out


def columns() -> dict[str, np.ndarray]:
    """Clean D4RL columns: a state that counts up within its episode, and a successor for each row."""
    rng = np.random.default_rng(0)
    t = np.tile(np.arange(10), 4)
    observations = np.stack(
        [t + 0.25 * np.repeat(np.arange(4), 10), rng.normal(size=ROWS), np.full(ROWS, 3.0)], axis=1
    ).astype(np.float32)
    successors = np.roll(observations, -1, axis=0)
    successors[9::10] = 77.0
    terminals, timeouts = np.zeros(ROWS, bool), np.zeros(ROWS, bool)
    terminals[[9, 29]] = True
    timeouts[[19, 39]] = True
    return {
        "observations": observations,
        "actions": rng.uniform(-0.9, 0.9, (ROWS, 2)).astype(np.float32),
        "rewards": np.repeat([1.0, 2.0, 3.0, 4.0], 10).astype(np.float32),
        "next_observations": successors,
        "terminals": terminals,
        "timeouts": timeouts,
    }


def inspected(folder: Path, data: dict[str, np.ndarray], **settings: object) -> Report:
    path = folder / "made.hdf5"
    with h5py.File(path, "w") as file:
        for key, value in data.items():
            file[key] = value
    return inspect_dataset(DatasetConfig(name=str(path), **settings))  # type: ignore[arg-type]


def found(report: Report) -> list[tuple[str, str, int | None, int | None]]:
    return [(f.kind, f.severity, f.episode, f.row) for f in report.faults]


def test_clean_file(tmp_path: Path) -> None:
    report = inspected(tmp_path, columns())
    assert report.faults == [] and report.corrupting == []
    assert report.rows == ROWS and report.terminations == 2
    assert report.returns is not None and report.returns.tolist() == [10.0, 20.0, 30.0, 40.0]
    assert report.lengths is not None and report.lengths.tolist() == [10] * 4
    by_name = {c.name: c for c in report.columns}
    observations = columns()["observations"]
    assert by_name["observations"].constant == (2,) and by_name["actions"].constant == ()
    assert by_name["observations"].mean == pytest.approx(observations.mean(), abs=1e-5)
    assert by_name["observations"].std == pytest.approx(observations.std(), abs=1e-5)
    assert (by_name["rewards"].low, by_name["rewards"].high) == (1.0, 4.0)
    text = str(report)
    for words in ("40 rows, 4 episodes (2 terminated, 2 timed out or cut)", "constant: 1 of 3 dimensions of "
                                                                            "observations never change (2)",
                  "episode returns: mean 25, ", "no faults found", "made.hdf5"):  # fmt: skip
        assert words in text, words
    assert text.count("####") >= 4  # the histogram's bars


def test_each_sensor_has_a_row_by_its_name(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    numbers = {
        "TI_101": rng.normal(60, 2, 50),
        "dP": rng.normal(0, 1e-3, 50),
        "FC_SP": np.full(50, 7.0),
        "valve": rng.uniform(0, 1, 50),
    }
    table = np.stack([*numbers.values(), rng.normal(size=50)], 1)
    np.savetxt(tmp_path / "x.csv", table, "%.17g", ",", header=",".join([*numbers, "reward"]), comments="")
    fields = {"observations": ["TI_101", "dP", "FC_SP"], "actions": "valve"}
    text = str(inspect_dataset(DatasetConfig(name=str(tmp_path / "x.csv"), fields=fields)))
    rows = [line.split() for line in text.splitlines()]
    for name, column in numbers.items():
        (row,) = [r[1:] for r in rows if r[:1] == [name]]
        assert [float(v) for v in row] == pytest.approx(
            [column.min(), column.max(), column.mean(), column.std()], rel=6e-4, abs=1e-12
        )
    assert "1 of 3 dimensions of observations never change (FC_SP)" in text


@pytest.mark.parametrize("width", [30, 400])
def test_rows_of_dimensions_are_bounded(tmp_path: Path, width: int) -> None:
    data = columns()
    data["observations"] = np.random.default_rng(0).normal(size=(ROWS, width)).astype(np.float32)
    data["next_observations"] = data["observations"].copy()
    data["observations"][3, 5] = np.nan
    text = str(inspected(tmp_path, data))
    rows = [
        line.split()
        for line in text.splitlines()
        if line.startswith("    ") and " to " not in line and len(line.split()) == 5
    ]
    fifth = [float(v) for v in next(r for r in rows if r[0] == "5")[1:]]
    finite = np.delete(data["observations"][:, 5].astype(np.float64), 3)
    assert fifth == pytest.approx([finite.min(), finite.max(), finite.mean(), finite.std()], rel=6e-4)
    assert len(rows) == 30 + 2 and (f"{width - 30} more" in text) == (width > 30)


def test_settings_of_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = "".join(f"{i},{i // 10},{i * i % 7},{i % 3},{i % 5 * 25}.5,1\n" for i in range(30))
    Path("x.csv").write_text(f"t,house,x1,x2,u_pct,profit\n{rows}")
    Path("plant.yaml").write_text(
        "algo: {name: iql, temperature: 5}\nsteps: 9\ndataset:\n  name: x.csv\n  fields: {observations: [x1, x2], "
        "rewards: profit,\n    actions: [{column: u_pct, scale: 0.01}], episode_ids: house}\n"
    )
    printed = []
    for words in ("config=plant.yaml", "x.csv config=plant.yaml", "x.csv config=plant.yaml dataset.fields.rewards=x1"):
        assert main(["data", "inspect", *words.split()]) == 0
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1] and "30 rows, 3 episodes" in printed[0] and "u_pct" in printed[0]
    assert "episode returns: mean 10," in printed[1] and "episode returns: mean 10," not in printed[2]
    assert main(["data", "convert", "x.csv", "out.hdf5", "config=plant.yaml"]) == 0
    report = inspect_dataset("out.hdf5")
    assert isinstance(report, Report) and report.rows == 30
    Path("other.yaml").write_text("steps: 9\n")
    assert (
        main(["data", "doctor", "config=other.yaml"]) == 2
        and "config=other.yaml names no dataset" in capsys.readouterr().err
    )


@pytest.mark.parametrize(("value", "word"), [(np.nan, "NaN"), (np.inf, "infinite")])
@pytest.mark.parametrize(
    ("key", "row", "episode"),
    [("rewards", 23, 2), ("observations", 0, 0), ("actions", 39, 3), ("next_observations", 10, 1)],
)
def test_not_finite(tmp_path: Path, value: float, word: str, key: str, row: int, episode: int) -> None:
    data = columns()
    data[key][row] = value
    report = inspected(tmp_path, data)
    assert ("nan", "corrupting", episode, row) in found(report)
    assert f"'{key}' has {word}" in str(report) and f"first at episode {episode}, row {row}" in str(report)
    assert "refuses this dataset" in str(report)


def test_actions_outside_the_range(tmp_path: Path) -> None:
    data = columns()
    data["actions"][31, 1] = 1.5
    settings: dict[str, object] = {"action_low": [-1.0], "action_high": [1.0]}
    report = inspected(tmp_path, data, **settings)
    assert found(report) == [("actions", "corrupting", 3, 31)]
    assert "1.5" in str(report) and "clip_actions" in str(report)
    assert found(inspected(tmp_path, data, clip_actions=True, **settings)) == []


def test_lengths_that_disagree(tmp_path: Path) -> None:
    data = columns()
    data["rewards"] = data["rewards"][:37]
    report = inspected(tmp_path, data)
    assert ("length", "corrupting", None, 37) in found(report)
    assert "'rewards' has 37 rows" in str(report) and report.returns is None


def test_jump_inside_an_episode(tmp_path: Path) -> None:
    data = columns()
    data["next_observations"][14] += 5.0
    assert found(inspected(tmp_path, data)) == [("jump", "warning", 1, 14)]


def test_overlapping_flags(tmp_path: Path) -> None:
    data = columns()
    data["timeouts"][29] = True
    assert found(inspected(tmp_path, data)) == [("overlap", "warning", 2, 29)]


def test_missing_ends(tmp_path: Path) -> None:
    data = columns()
    data["timeouts"][39] = False
    assert found(inspected(tmp_path, data)) == [("ends", "warning", 3, 39)]
    data["terminals"][:] = False
    data["timeouts"][:] = False
    kinds = found(inspected(tmp_path, data))
    assert ("ends", "warning", 0, 0) in kinds and ("jump", "warning", 0, 9) in kinds


def test_several_faults_come_together_with_the_corrupting_first(tmp_path: Path) -> None:
    data = columns()
    data["rewards"][5] = np.nan
    data["timeouts"][29] = True
    data["next_observations"][14] += 5.0
    report = inspected(tmp_path, data)
    assert report.faults[0].kind == "nan" and {k for k, *_ in found(report)} == {"nan", "overlap", "jump"}
    assert len(report.corrupting) == 1


def test_duplicate_rows(tmp_path: Path) -> None:
    data = columns()
    for key in ("observations", "actions", "rewards"):
        data[key][25] = data[key][3]
        data[key][33] = data[key][3]
        data[key][30] = data[key][12]
    report = inspected(tmp_path, data)
    assert report.duplicates == 3 and report.first_duplicate == (25, 3)
    assert "duplicates: 3 rows" in str(report)
    data["rewards"][25] += 1
    assert inspected(tmp_path, data).duplicates == 2  # the same state and action with another reward is news


def test_unreadable(tmp_path: Path) -> None:
    with pytest.raises(UserError):
        inspect_dataset(str(tmp_path / "nothing.hdf5"))
    (tmp_path / "bad.hdf5").write_bytes(b"\x89HDF\r\n\x1a\n" + b"0" * 100)
    with pytest.raises(UserError, match=r"bad\.hdf5"):
        inspect_dataset(str(tmp_path / "bad.hdf5"))


def test_real_file() -> None:
    path = Path(__file__).parents[2] / "../shared/data/d4rl/hopper_medium_replay.hdf5"
    if not path.exists():
        pytest.skip("the shared datasets are not here")
    report = inspect_dataset(str(path))
    assert report.rows == 200_000 and report.corrupting == []
    assert report.returns is not None and report.lengths is not None
    whole = np.cumsum(report.lengths) % 50_000 != 0  # the last episode of each of four parts is cut by the row limit
    assert whole.sum() == 2281 and len(whole) == 2285
    assert report.returns[whole].mean() == pytest.approx(210.6, abs=0.05) and report.returns.max() == pytest.approx(
        2966.2, abs=0.05
    )
    assert report.scores is not None and "Hopper-v4" in report.environment


def test_ranges() -> None:
    assert _ranges((0, 1, 2, 7)) == "0-2, 7" and _ranges((4,)) == "4"
