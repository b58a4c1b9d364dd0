"""Own data: CSV, wide Parquet, DataFrames, folders of files; what is recognised, and what each mistake is told."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import offrl
from offrl.data import DatasetConfig, load_dataset
from offrl.data.tables.actions import as_actions
from offrl.errors import UserError

FIELDS = {
    "observations": ["temp_in", "temp_out"],
    "actions": "heater",
    "rewards": "cost",
    "episode_ids": "house",
    "time": "timestamp",
}


def thermostat(days: int = 3, steps: int = 8) -> pd.DataFrame:
    """Rows every 15 minutes of several houses: texts as ids and choices, times as texts."""
    rng = np.random.default_rng(0)
    frames = []
    for day in range(days):
        times = pd.date_range("2024-01-01", periods=steps, freq="15min") + pd.Timedelta(days=day)
        values = {"temp_in": rng.normal(20, 1, steps).round(3), "temp_out": rng.normal(5, 1, steps).round(3)}
        choices = rng.choice(["off", "low", "high"], steps)
        choices[:3] = ["off", "low", "high"]
        frames.append(
            pd.DataFrame(
                {"timestamp": times.strftime("%Y-%m-%d %H:%M:%S"), "house": f"h{day}", **values, "heater": choices}
            )
        )
    frame = pd.concat(frames, ignore_index=True)
    frame["cost"] = -np.abs(frame["temp_in"] - 21).round(3)
    return frame


def usual(episodes: int = 3, steps: int = 5) -> pd.DataFrame:
    rows = episodes * steps
    rng = np.random.default_rng(1)
    frame = pd.DataFrame({f"obs_{i}": rng.normal(size=rows).round(4) for i in (0, 10, *range(9, 0, -1))})
    return frame.assign(
        episode=np.repeat(np.arange(episodes), steps),
        action_0=rng.uniform(-1, 1, rows).round(4),
        reward=np.arange(rows) / 4,
    )


def refused(config: Any) -> str:
    with pytest.raises(UserError) as error:
        load_dataset(config)
    return str(error.value)


def read(path: Path, **settings: Any) -> offrl.Dataset:
    return load_dataset(DatasetConfig(name=str(path), **{"fields": FIELDS, **settings}))


@pytest.mark.parametrize("dialect", ["plain", "index", "europe", "gzip", "excel", "utf-16", "parquet", "frame"])
def test_every_form_of_a_table_gives_the_same_data(tmp_path: Path, dialect: str) -> None:
    frame = thermostat()
    path = tmp_path / ("x.parquet" if dialect == "parquet" else "x.csv.gz" if dialect == "gzip" else "x.csv")
    options = {
        "index": {"index": True},
        "europe": {"sep": ";", "decimal": ","},
        "excel": {"encoding": "cp1252"},
        "utf-16": {"encoding": "utf-16", "sep": "\t"},
    }
    if dialect == "frame":
        typed = frame.assign(
            timestamp=pd.to_datetime(frame["timestamp"]).dt.tz_localize("UTC"), house=frame["house"].astype("category")
        )
        data = offrl.from_dataframe(typed, **FIELDS)
    elif dialect == "parquet":
        frame.assign(timestamp=pd.to_datetime(frame["timestamp"])).to_parquet(path)
        data = read(path)
    else:
        frame.rename(columns={"cost": "cost"}).assign(**{"°C": 1}).to_csv(
            path, **{"index": False, **options.get(dialect, {})}
        )
        data = read(path)
    assert data.episode_end.tolist() == [8, 16, 24] and data.spec.num_actions == 3
    np.testing.assert_allclose(
        data.columns["observations"].numpy(), frame[["temp_in", "temp_out"]].to_numpy(), rtol=1e-6
    )
    np.testing.assert_allclose(data.columns["rewards"].numpy(), frame["cost"].to_numpy(), rtol=1e-6)
    assert data.columns["actions"].tolist() == [["high", "low", "off"].index(w) for w in frame["heater"]]
    assert any("0 high, 1 low, 2 off" in note for note in data.notes)


def test_usual_names_are_recognised_and_series_stand_in_the_order_of_numbers(tmp_path: Path) -> None:
    frame = usual()
    frame.to_csv(tmp_path / "x.csv")
    data = load_dataset(str(tmp_path / "x.csv"))
    np.testing.assert_allclose(
        data.columns["observations"].numpy(), frame[[f"obs_{i}" for i in range(11)]].to_numpy(), rtol=1e-6
    )
    assert data.num_episodes == 3 and data.spec.action_dim == 1
    frame.drop(columns="obs_4").to_csv(tmp_path / "x.csv")  # perhaps lost: only by name
    assert "which of them are observations is not clear" in refused(str(tmp_path / "x.csv"))
    assert (
        load_dataset(DatasetConfig(name=str(tmp_path / "x.csv"), fields={"observations": "obs_*"})).spec.observation_dim
        == 10
    )


def test_patterns_scales_and_lists(tmp_path: Path) -> None:
    frame = usual()
    frame.to_csv(tmp_path / "x.csv", index=False)
    fields = {"observations": ["obs_1*", {"column": "obs_0", "scale": 10.0, "offset": 1.0}]}
    data = load_dataset(DatasetConfig(name=str(tmp_path / "x.csv"), fields=fields))
    expected = np.stack([frame["obs_1"], frame["obs_10"], 10 * frame["obs_0"] + 1], 1)
    np.testing.assert_allclose(data.columns["observations"].numpy(), expected, rtol=1e-5)


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_a_series_that_misses_a_number_must_be_named(tmp_path: Path, suffix: str) -> None:
    """A lost sensor: `obs` for obs_0, obs_1, obs_3 ... would train on the rest without a word."""
    frame = usual().drop(columns="obs_2")
    path = tmp_path / f"x.{suffix}"
    frame.to_parquet(path) if suffix == "parquet" else frame.to_csv(path, index=False)
    fields = {"observations": "obs", "actions": "action", "rewards": "reward"}
    assert (
        "some are missing" in (text := refused(DatasetConfig(name=str(path), fields=fields)))
        and "dataset.fields.observations=obs*" in text
    )
    assert read(path, fields={**fields, "observations": "obs*"}).spec.observation_dim == 10


def test_a_column_twice_is_one_line(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    table = pa.Table.from_pandas(usual(), preserve_index=False)
    pq.write_table(table.append_column("episode", table.column("episode")), tmp_path / "x.parquet")
    assert "has a column twice: episode" in refused(DatasetConfig(name=str(tmp_path / "x.parquet")))
    unnamed = table.append_column("", table.column("episode")).append_column("", table.column("episode"))
    pq.write_table(unnamed, tmp_path / "y.parquet")
    assert "has a column twice: one without a name" in refused(DatasetConfig(name=str(tmp_path / "y.parquet")))


def test_rows_are_sorted_by_episode_and_time(tmp_path: Path) -> None:
    frame = thermostat()
    frame.to_csv(tmp_path / "a.csv", index=False)
    frame.sample(frac=1.0, random_state=3).to_csv(tmp_path / "b.csv", index=False)
    straight, shuffled = read(tmp_path / "a.csv"), read(tmp_path / "b.csv")
    returns = [sorted(d.raw_returns.tolist()) for d in (straight, shuffled)]
    np.testing.assert_allclose(*returns, rtol=1e-6)
    assert any("sorted by house and timestamp" in note for note in shuffled.notes)


def test_time_that_stands_still_or_goes_back_is_refused_and_gaps_are_noted(tmp_path: Path) -> None:
    frame, fields = thermostat(days=1), {k: v for k, v in FIELDS.items() if k != "episode_ids"}
    frame.loc[5, "timestamp"] = frame.loc[4, "timestamp"]
    frame.to_csv(tmp_path / "x.csv", index=False)
    assert "is the same as 2024-01-01 01:00:00 in row 5" in refused(
        DatasetConfig(name=str(tmp_path / "x.csv"), fields=fields)
    )
    frame = thermostat(days=2, steps=20)
    frame.to_csv(tmp_path / "x.csv", index=False)
    data = read(tmp_path / "x.csv", fields=fields)
    assert data.num_episodes == 1 and any(
        "1 gap longer than 22.5 min" in note and "after row 19" in note for note in data.notes
    )
    assert read(tmp_path / "x.csv", fields=fields, max_gap=3600.0).episode_end.tolist() == [20, 40]


def test_a_counter_that_begins_again_begins_an_episode(tmp_path: Path) -> None:
    usual().drop(columns="episode").assign(time=np.tile(np.arange(5), 3)).to_csv(tmp_path / "x.csv", index=False)
    assert load_dataset(str(tmp_path / "x.csv")).episode_end.tolist() == [5, 10, 15]


def test_done_that_marks_time_outs_as_well(tmp_path: Path) -> None:
    done = np.tile([0, 0, 0, 0, 1], 3)
    cut = np.array([0] * 14 + [1])
    usual().drop(columns="episode").assign(done=done, truncated=cut).to_csv(tmp_path / "x.csv", index=False)
    data = load_dataset(str(tmp_path / "x.csv"))
    assert data.columns["terminations"].nonzero().flatten().tolist() == [4, 9]
    assert data.columns["truncations"].nonzero().flatten().tolist() == [14]


def test_missing_values_are_named_or_filled(tmp_path: Path) -> None:
    frame = thermostat()
    frame.loc[17, "temp_out"] = np.nan
    frame.to_csv(tmp_path / "x.csv", index=False)
    text = refused(DatasetConfig(name=str(tmp_path / "x.csv"), fields=FIELDS))
    assert "'temp_out'" in text and "row 17" in text and "dataset.missing=forward" in text
    data = read(tmp_path / "x.csv", missing="forward")
    assert float(data.columns["observations"][17, 1]) == pytest.approx(frame.loc[16, "temp_out"])


def test_missing_values_are_not_filled_from_another_episode(tmp_path: Path) -> None:
    frame = thermostat()
    frame.loc[16, "temp_out"] = np.nan  # an episode's first row
    frame.to_csv(tmp_path / "x.csv", index=False)
    assert "row 16" in refused(DatasetConfig(name=str(tmp_path / "x.csv"), fields=FIELDS, missing="forward"))


def test_an_unclear_file_lists_its_columns_and_a_command_that_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    thermostat().to_csv("x.csv", index=False)
    text = refused("x.csv")
    assert "its columns are timestamp, house, temp_in, temp_out, heater, cost" in text
    from shlex import split

    from offrl.settings.compose import compose, parse

    proposed = split(text.partition("offrl data inspect ")[2])
    config = compose(parse([f"dataset={proposed[0]}", *proposed[1:]])).dataset
    assert config.fields == {
        "observations": ["temp_in", "temp_out"],
        "actions": "heater",
        "rewards": "COLUMN",
        "episode_ids": "house",
    }
    assert "without the scale where it is negative already" in text
    config.fields["rewards"] = [{"column": "cost", "scale": -1}]
    assert load_dataset(config).num_episodes == 3


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("", "is empty"),
        ("1,2,3\n4,5,6\n", "first line holds numbers"),
        ("a b c\n1 2 3\n", "has no comma, semicolon, tab or bar"),
        ("obs_0,action_0,reward,obs_0\n1,2,3,4\n", "a column twice: obs_0"),
        ("obs_0,action_0,reward,episode\n" + "1" * 200_000 + ",0.5,3,0\n", "cannot be read as CSV"),
        ("obs_0,action_0,reward,episode\n1,0.5,3,0\n1,0.5\n", "line 3 has 2 values"),
        ("obs_0,action_0,reward,episode\n1,0.5,3,0\nabc,0.5,3,0\n", "'obs_0' holds 'abc' in row 1"),
        ("obs_0,action_0,reward,episode\n1,0.5,3,0\n1,0.5,3,\n", "'episode' has no value in row 1"),
    ],
)
def test_files_that_are_no_table(tmp_path: Path, content: str, reason: str) -> None:
    (tmp_path / "x.csv").write_text(content)
    assert reason in refused(str(tmp_path / "x.csv"))


def test_a_packed_file_that_grows_too_much_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from offrl.data.containers import guard

    monkeypatch.setattr(guard, "FREE", 1000)
    (tmp_path / "x.csv.gz").write_bytes(gzip.compress(b"obs_0,action_0,reward,episode\n" + b"0,0,0,0\n" * 20_000))
    assert "more than 200 times" in refused(str(tmp_path / "x.csv.gz"))
    (tmp_path / "y.csv.gz").write_bytes(gzip.compress(b"obs_0,action_0,reward,\xe9\n" + b"0,0,0,0\n" * 20_000))
    assert "more than 200 times" in refused(str(tmp_path / "y.csv.gz"))  # letters of Windows too


@pytest.mark.parametrize("how", ["folder", "glob", "list", "python"])
def test_files_of_an_episode_each_are_one_dataset(tmp_path: Path, how: str) -> None:
    for house, rows in thermostat().groupby("house"):
        rows.drop(columns="house").to_csv(tmp_path / f"{house}.csv", index=False)
    paths = sorted(tmp_path.glob("*.csv"))
    names: Any = {
        "folder": str(tmp_path),
        "glob": f"{tmp_path}/h*.csv",
        "list": f"[{','.join(map(str, paths))}]",
        "python": "",
    }
    fields = {k: v for k, v in FIELDS.items() if k != "episode_ids"}
    from offrl.data.loading.load import name_of

    data = load_dataset(DatasetConfig(name=names[how] or name_of(paths), fields=fields))
    assert data.episode_end.tolist() == [8, 16, 24]


def test_several_whole_datasets_are_refused_with_the_command_that_merges_them(tmp_path: Path) -> None:
    for name in ("a", "b"):
        np.savez(tmp_path / f"{name}.npz", observations=np.zeros((2, 1)))
    text = refused(f"{tmp_path}/*.npz")
    assert "offrl data merge" in text and "dataset.concatenate=" in text
    assert "no file fits" in refused(f"{tmp_path}/*.hdf5")


CHOICE, AMOUNT = np.array([0, 1, 2, 0]), np.array([0.5, 1.5, 0.0, 2.0])


@pytest.mark.parametrize(
    ("columns", "kind", "expected"),
    [
        ([CHOICE], "auto", [0, 1, 2, 0]),
        ([np.eye(3, dtype=int)[CHOICE][:, i] for i in range(3)], "auto", [0, 1, 2, 0]),
        ([CHOICE, CHOICE], "multi_discrete", [0, 4, 8, 0]),
        ([CHOICE, AMOUNT], "auto", "mix a choice"),
        ([CHOICE, CHOICE], "auto", "several choices at once"),
        ([CHOICE, AMOUNT], "one_hot", "row 0"),
        ([AMOUNT], "discrete", "numbers with fractions"),
        ([CHOICE, AMOUNT], "multi_discrete", "holds 0.5 in row 0"),
    ],
)
def test_kinds_of_actions(columns: list[np.ndarray], kind: str, expected: Any) -> None:
    names = [f"c{i}" for i in range(len(columns))]
    if isinstance(expected, str):
        with pytest.raises(UserError, match=expected):
            as_actions(columns, names, kind, "x")
    else:
        actions, count, *_ = as_actions(columns, names, kind, "x")
        assert actions.tolist() == expected and count in (0, 3, 9)
    assert as_actions([CHOICE, AMOUNT], ["a", "b"], "continuous", "x")[0].shape == (4, 2)


def test_repr_is_one_short_line() -> None:
    text = repr(offrl.from_dataframe(usual(), name="plant"))
    assert text.startswith("Dataset('plant': 15 rows, 3 episodes") and len(text) < 250


@pytest.mark.parametrize("value", [5, {"observations": 1}, np.zeros(3)])
def test_what_is_no_dataset_is_refused_by_its_type(value: Any) -> None:
    with pytest.raises(UserError, match=f"dataset is a {type(value).__name__}"):
        offrl.train("iql", value)


def test_a_dataframe_trains(tmp_path: Path) -> None:
    names = {f"dataset.fields.{k}": v for k, v in FIELDS.items()}
    run = offrl.train(
        "bc",
        thermostat(),
        seeds=1,
        steps=2,
        quiet=True,
        settings={"runs_dir": str(tmp_path), "algo.batch_size": 4, **names},
    )
    assert run.spec.num_actions == 3 and run.policy().act(np.zeros(2, np.float32)) in range(3)


def test_the_proposed_command_has_no_action_among_the_observations(tmp_path: Path) -> None:
    known = ("FV101", "TCV_7", "TIC1.OUT", "u", "valve")
    path, rows = tmp_path / "x.csv", "1;a;3;4;5;6\n2;a;3;5;6;7\n"
    for name in (*known, "heizung", "PV_101", "speed"):
        path.write_text(f"time;charge;T1;T2;{name};profit\n{rows}")
        observed, acted = ("[T1,T2]", name) if name in known else ("*", "COLUMN")
        assert f'"dataset.fields.observations={observed}" "dataset.fields.actions={acted}"' in refused(
            DatasetConfig(name=str(path))
        ), name
    path.write_text("time;note;T1;T2;heizung;profit;comment\n1;a;3;4;5;6;x\n2;b;3;5;6;7;y\n")
    assert "COLUMN taken out of the observations" in refused(DatasetConfig(name=str(path)))
    fields = {"actions": "heizung", "rewards": "profit"}
    for observations, said in ((["T1", "heizung"], True), (["T1", "T2"], False)):
        notes = read(path, fields={**fields, "observations": observations}).notes
        assert any("among the observations are actions (heizung)" in note for note in notes) == said
