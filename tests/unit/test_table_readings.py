"""Readings of tables that were wrong without a word: names that look like numbers, letters, columns that nothing takes,
dialects.
"""

from __future__ import annotations

import gzip
import pickle
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pandas as pd
import pytest
import torch

import offrl
from offrl.data import DatasetConfig, load_dataset
from offrl.data.loading.read import read_raw
from offrl.data.raw.checks import find_faults
from offrl.errors import UserError


def written(path: Path, header: str, rows: list[str], encoding: str = "utf-8") -> str:
    data = ("\n".join([header, *rows]) + "\n").encode(encoding)
    path.write_bytes(gzip.compress(data, 1) if path.suffix == ".gz" else data)
    return str(path)


def episodes_of(path: Path, names: list[str]) -> int:
    rows = [f"{name},{3 * i + k},{k}.5,0.1,1" for i, name in enumerate(names) for k in range(3)]
    return load_dataset(written(path, "episode,time,obs_0,action,reward", rows)).num_episodes


@pytest.mark.parametrize(
    "names",
    [
        "1.1 1.2 1.9 1.10 1.20",
        "1_0 10 010 +10",
        "7 007",
        "1e3 1000",
        "9223372036854775808 9223372036854775809",
        "0 -0",
        "a NA nan",
        "1 2 10",
    ],
)
def test_names_of_episodes_are_texts_unless_all_are_whole_numbers(tmp_path: Path, names: str) -> None:
    assert episodes_of(tmp_path / "x.csv", names.split()) == len(names.split())


@pytest.mark.parametrize("names", [["1", "NA", "3"], ["a", "", "b"]])
def test_no_name_is_none(tmp_path: Path, names: list[str]) -> None:
    with pytest.raises(UserError, match="'episode' has no value in row 3"):
        episodes_of(tmp_path / "x.csv", names)


@pytest.mark.parametrize(
    ("words", "discrete"),
    [("007 7", True), ("1_0 10", True), ("1 2", True), ("0.5 007", False), ("99999999999999999999 1", True)],
)
def test_labels_that_are_no_whole_numbers_are_texts(tmp_path: Path, words: str, discrete: bool) -> None:
    rows = [f"0,{i}.5,{word},1" for i, word in enumerate(words.split() * 3)]
    data = load_dataset(written(tmp_path / "x.csv", "episode,obs_0,action,reward", rows))
    assert data.spec.discrete is discrete and len(data.columns["actions"].unique()) == 2


def test_underscores_are_in_no_number(tmp_path: Path) -> None:
    path = written(tmp_path / "x.csv", "episode,obs_0,action,reward", ["0,1.5,0.1,1", "0,1_000,0.1,1"])
    with pytest.raises(UserError, match="'obs_0' holds '1_000' in row 1, which is no number"):
        load_dataset(path)


@pytest.mark.parametrize("name", ["x.csv", "x.csv.gz"])
@pytest.mark.parametrize("encoding", ["cp1252", "utf-8"])
@pytest.mark.parametrize("before", [6000, 70_000])  # rows: the letters come after the sample, and after the first block
def test_windows_letters_far_down(tmp_path: Path, name: str, encoding: str, before: int) -> None:
    rows = [f"run,{t}.5,0.1,1" for t in range(before)] + [f"Ofen_{c},{t}.5,0.1,1" for c in "äöü" for t in range(4)]
    path = written(tmp_path / name, "episode,obs_0,action,reward", rows, encoding)
    assert load_dataset(path).num_episodes == 4


def test_columns_that_not_all_files_have_are_named(tmp_path: Path) -> None:
    for k, count in enumerate((3, 2)):
        header = ",".join([*(f"temp_{i}" for i in range(count)), "action", "reward"])
        written(tmp_path / f"day_{k}.csv", header, [",".join(["1.5"] * count + ["0.1", "1"])] * 2)
    data = load_dataset(DatasetConfig(name=str(tmp_path / "day_*.csv"), fields={"observations": "temp_*"}))
    assert data.spec.observation_shape == (2,)
    assert any("temp_2 (in 1 of 2, not in day_1.csv)" in note for note in data.notes)


def test_columns_that_nothing_takes_are_named(tmp_path: Path) -> None:
    rows = [f"{t},{20 + t},{1 + t / 100},{t // 10},0.{t},{t},ok" for t in range(9)]
    path = written(tmp_path / "x.csv", "time,temp_C,pressure_bar,state,action,reward,comment", rows)
    [note] = [n for n in load_dataset(path).notes if "nothing takes" in n]
    assert "temp_C, pressure_bar, comment (state alone is observations, by its name)" in note
    chosen = DatasetConfig(name=path, fields={"observations": ["state", "temp_C"]})
    assert any("nothing takes the columns pressure_bar, comment:" in n for n in load_dataset(chosen).notes)
    frame = pd.read_csv(path).drop(columns=["temp_C", "pressure_bar", "time", "comment"])
    assert not any("nothing takes" in n for n in offrl.from_dataframe(frame).notes)


@pytest.mark.parametrize(
    "ids",
    [
        pd.array(["a", "a", None, "b"], dtype="string"),
        pd.Series(["a", "a", pd.NaT, "b"], dtype=object),
        pd.Series(["a", "a", None, "b"], dtype="category"),
        pd.array([1, 1, None, 2], dtype="Int64"),
    ],
)
def test_pandas_missing_ids_are_named_by_their_row(ids: Any) -> None:
    frame = pd.DataFrame({"batch": ids, "obs_0": [1.0, 2, 3, 4], "action": 0.1, "reward": 1.0})
    with pytest.raises(UserError, match="'batch' has no value in row 2"):
        offrl.from_dataframe(frame, episode_ids="batch")


def test_times_are_no_ids_of_episodes(tmp_path: Path) -> None:
    frame = pd.DataFrame({"obs_0": [1.0, 2, 3, 4], "action": 0.1, "reward": 1.0})
    frame["episode_ids"] = pd.date_range("2024-01-01", periods=4, freq="s")
    frame.to_parquet(tmp_path / "x.parquet")
    with pytest.raises(UserError, match="'episode_ids' holds times, where ids of episodes are due"):
        load_dataset(str(tmp_path / "x.parquet"))
    days = frame["episode_ids"].dt.strftime("%Y-%m-%d")
    assert offrl.from_dataframe(frame.assign(episode_ids=days)).num_episodes == 1


NAMES, ROWS = "obs_0;action;reward;episode", ["1.5;0.1;1;0", "2.5;0.2;1;0"]


@pytest.mark.parametrize(
    "lines",
    [
        ["sep=;", NAMES, *ROWS],
        ['"sep=;"', NAMES, *ROWS],
        ["# logger 3", "# a; b", NAMES, ROWS[0], "# pause", ROWS[1]],
        [f"# {NAMES}", *ROWS],  # numpy.savetxt
        [NAMES, "degC;%;-;1", *ROWS],
        [NAMES, *(f"{row};" for row in ROWS)],
        [f"{NAMES};", *ROWS],
    ],
)
def test_what_loggers_write_around_the_rows(tmp_path: Path, lines: list[str]) -> None:
    data = load_dataset(written(tmp_path / "x.csv", lines[0], lines[1:]))
    assert data.columns["observations"].flatten().tolist() == [1.5, 2.5] and data.num_episodes == 1
    assert any("(degC, %, 1) is taken for units" in note for note in data.notes) == ("degC;%;-;1" in lines)


def test_a_first_row_of_texts_is_not_always_units(tmp_path: Path) -> None:
    rows = ["run1,1.5,off,1", "run1,2.5,on,1"]
    assert len(load_dataset(written(tmp_path / "x.csv", "episode,obs_0,action,reward", rows))) == 2
    with pytest.raises(UserError, match=r"x.csv: line 3 has 2 values"):
        load_dataset(written(tmp_path / "x.csv", "episode,obs_0,action,reward", ["0,1.5,0.1,1", "0,1"]))


def test_nothing_is_lost_of_a_table_read_twice(tmp_path: Path) -> None:
    """Names of which only the last block says that they are texts."""
    rows = [f"{e},{e}.5,0.1,1" for e in range(66_000)] + ["1.10,0.5,0.1,1", "1.1,0.5,0.1,1"]
    data = load_dataset(written(tmp_path / "x.csv", "episode,obs_0,action,reward", rows))
    assert data.num_episodes == 66_002 and np.isfinite(data.columns["observations"].numpy()).all()


WALK = 5_400_000 + np.cumsum(np.random.default_rng(0).normal(0, 0.01, 400))  # a northing in metres
KINDS = ["arrays", "dict", "frame", "csv", "parquet", "wide", "npz", "fortran", "hdf5", "d4rl"]


def stored(folder: Path, kind: str, values: np.ndarray, column: str = "observations") -> offrl.Dataset:
    """`values` [R] as the second dimension of the observations, or as rewards."""
    plain = np.random.default_rng(1).normal(size=len(values))
    observed = plain if column == "rewards" else values
    rewards = values if column == "rewards" else np.ones(len(values))
    ends = np.arange(len(values)) % 100 == 99
    arrays: dict[str, Any] = {
        "observations": np.stack([plain, observed], 1),
        "actions": plain[:, None].clip(-1, 1),
        "rewards": rewards,
    }
    if kind in ("arrays", "dict"):
        arrays |= {"observations": {"a": plain, "b": observed}} if kind == "dict" else {}
        return offrl.from_arrays(**arrays, truncations=ends)
    if kind in ("frame", "csv", "parquet", "wide"):
        names = (
            ("observations_0", "observations_1", "actions_0", "rewards")
            if kind == "parquet"
            else ("obs_0", "obs_1", "action", "reward")
        )
        table = dict(zip(names, (plain, observed, arrays["actions"][:, 0], rewards), strict=True))
        frame = pd.DataFrame({**table, "truncations": ends})
        path = folder / ("x.csv" if kind == "csv" else "x.parquet")
        if kind == "frame":
            return offrl.from_dataframe(frame)
        frame.to_csv(path, index=False) if kind == "csv" else frame.to_parquet(path)
        return load_dataset(str(path))
    if kind in ("npz", "fortran"):
        arrays["observations"] = np.asarray(arrays["observations"], order="F" if kind == "fortran" else "C")
        np.savez(folder / "x.npz", truncations=ends, **arrays)
        return load_dataset(str(folder / "x.npz"))
    with h5py.File(folder / "x.hdf5", "w") as file:
        for name, array in arrays.items():
            file[name] = array
        file["terminals" if kind == "d4rl" else "terminations"] = np.zeros(len(values), bool)
        file["timeouts" if kind == "d4rl" else "truncations"] = ends
    return load_dataset(str(folder / "x.hdf5"))


@pytest.mark.parametrize("kind", KINDS)
def test_what_float32_cannot_tell_apart_is_said_with_its_column(tmp_path: Path, kind: str) -> None:
    notes = [n for n in stored(tmp_path, kind, WALK).notes if "float32" in n]
    assert len(notes) == 1
    if kind not in ("frame", "csv", "parquet", "wide"):  # an array of several dimensions
        assert "subtract an offset, such as 5.4e+06" in notes[0] and "of 400 different numbers" in notes[0]
    assert notes[0].startswith(("obs_1", "observations_1", "observations, dimension 1", "observations, entry b"))


@pytest.mark.parametrize("kind", ["arrays", "csv", "npz", "hdf5"])
def test_rewards_that_float32_cannot_tell_apart(tmp_path: Path, kind: str) -> None:
    assert [n.startswith("reward") for n in stored(tmp_path, kind, WALK, "rewards").notes if "float32" in n] == [True]


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (1_700_000_000 + np.arange(400), True),  # seconds since 1970
        (20_000_000 + np.arange(400), True),
        (1.0 + 1e-9 * np.arange(400), True),
        (np.where(np.arange(400) % 2, 3e7, 3e7 + 1), True),
        (np.full(400, 5_400_000.3), False),
        (np.arange(400), False),
        (WALK - 5_400_000, False),
        (1e6 * np.random.default_rng(0).normal(size=400), False),
        (0.1 + np.random.default_rng(0).normal(size=400) * 1e-17, False),  # rounding errors of float64
        (1e-9 * np.arange(400), False),
        (np.float32(5_400_000) + np.arange(400, dtype=np.float32) % 3, False),
    ],
)
def test_only_what_is_lost_is_said(tmp_path: Path, values: np.ndarray, said: bool) -> None:
    for kind in ("arrays", "npz", "csv"):
        assert any("float32" in n for n in stored(tmp_path, kind, values).notes) is said, kind


DATES = ["2024-01-01", "2024-01-02", "2024-03-01", "2024-02-01"]


@pytest.mark.parametrize(
    "index",
    [
        pd.to_datetime(DATES),
        pd.to_datetime(DATES).tz_localize("Europe/Berlin"),
        pd.DatetimeIndex(DATES, name="Date"),
        pd.PeriodIndex(DATES, freq="D"),
        pd.to_timedelta([0, 1, 3, 2], "h"),
        pd.MultiIndex.from_arrays([["a"] * 4, pd.to_datetime(DATES)], names=["zone", None]),
    ],
    ids=lambda index: f"{type(index).__name__}-{index.dtype}",
)
def test_an_index_of_times_is_the_time(index: Any) -> None:
    frame = pd.DataFrame({"obs_0": np.arange(4.0), "action": 0.1, "reward": 1.0}, index=index)
    with pytest.raises(UserError, match="goes back from"):
        offrl.from_dataframe(frame)
    assert offrl.from_dataframe(frame.iloc[[0, 1, 3, 2]]).num_episodes == 1
    ids = offrl.from_dataframe(frame.assign(episode=[0, 1, 0, 1]))
    assert ids.episode_lengths().tolist() == [2, 2] and any("sorted by episode and" in note for note in ids.notes)


def test_an_index_of_times_beside_a_column_of_times_is_left() -> None:
    frame = pd.DataFrame(
        {"time": range(4), "obs_0": np.arange(4.0), "action": 0.1, "reward": 1.0}, index=pd.to_datetime(DATES)
    )
    assert offrl.from_dataframe(frame).num_episodes == 1
    plain = frame.reset_index(drop=True)
    assert offrl.from_dataframe(plain).fingerprint == offrl.from_dataframe(frame).fingerprint


WHOLE = {
    "speed": (np.random.default_rng(0).integers(1500, 3001, 500), True),
    "price": (np.random.default_rng(0).integers(0, 1001, 500), True),
    "set point": (np.arange(500) % 3 * 50, True),
    "duty": (np.arange(512) % 256, True),
    "percent": (100 + np.arange(500) % 101, True),
    "choices": (np.arange(500) % 18, False),
    "rare choices": (np.where(np.arange(500) == 7, 5, 0), False),
    "from 1": (1 + np.arange(500) % 20, False),
}


@pytest.mark.parametrize("kind", ["arrays", "csv", "npz"])
@pytest.mark.parametrize("name", WHOLE)
def test_whole_numbers_that_look_like_amounts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, kind: str
) -> None:
    numbers, said = WHOLE[name]
    rows, words = len(numbers), "state their range if they are amounts"
    arrays = {
        "observations": np.random.default_rng(1).normal(size=(rows, 1)),
        "actions": numbers,
        "rewards": np.ones(rows),
    }
    ends, low, high = np.arange(rows) % 50 == 49, float(numbers.min()), float(numbers.max())
    if kind == "arrays":
        plain, stated = ({"truncations": ends}, {"truncations": ends, "action_low": low, "action_high": high})
        data = offrl.from_arrays(**arrays, **plain)
        assert (words in capsys.readouterr().err) is said and data.spec.discrete
        amounts = offrl.from_arrays(**arrays, **stated)
        assert offrl.from_arrays(**arrays, **plain, num_actions=4000).spec.discrete
    else:
        path = tmp_path / f"x.{kind}"
        if kind == "npz":
            np.savez(path, truncations=ends, **arrays)
        else:
            pd.DataFrame(
                {"obs_0": arrays["observations"][:, 0], "action": numbers, "reward": 1.0, "truncated": ends}
            ).to_csv(path)
        data = load_dataset(str(path))
        assert (words in capsys.readouterr().err) is said and data.spec.discrete
        amounts = load_dataset(DatasetConfig(name=str(path), action_low=[low], action_high=[high]))
        if kind == "csv":
            assert load_dataset(DatasetConfig(name=str(path), action_kind="discrete")).spec.discrete
    assert words not in capsys.readouterr().err
    assert not amounts.spec.discrete and amounts.columns["actions"].shape == (rows, 1)
    assert amounts.columns["actions"].min() == -1.0 and amounts.columns["actions"].max() == 1.0


def said_of(times: np.ndarray, episode: np.ndarray | None = None, **settings: Any) -> list[str]:
    rows = len(times)
    frame = pd.DataFrame({"time": times, "obs_0": np.arange(rows) % 7 / 2, "action": 0.1, "reward": 1.0})
    frame = frame if episode is None else frame.assign(episode=episode)
    return [n for n in offrl.from_dataframe(frame, **settings).notes if "step" in n]


SECOND, MINUTE = np.arange(300.0), 60.0 * np.arange(300)


def test_a_rate_that_changes_and_a_gap_are_both_said() -> None:
    month = 86400 * 30
    changed, gap = said_of(np.concatenate([SECOND, 300 + MINUTE, 300 + 18000 + month + MINUTE[:100]]))
    assert "changes 1 time, first from 1 to 60 at row 300" in changed
    assert (
        "1 gap longer than 90, the longest of 2.59206e+06, the first after row 599" in gap
        and "dataset.max_gap=90" in gap
    )
    [changed] = said_of(np.concatenate([SECOND, 300 + MINUTE, 300 + 18000 + month + MINUTE[:100]]), max_gap=3600.0)
    assert "changes 1 time" in changed


def test_rates_of_episodes_are_compared() -> None:
    episodes = np.repeat([0, 1, 2], [300, 300, 4])
    [changed] = said_of(np.concatenate([SECOND, MINUTE, SECOND[:4]]), episodes)
    assert "changes 2 times, first from 1 to 60 at row 300" in changed and "between 1 and 60" in changed
    short = np.repeat(np.arange(40), 5)
    assert "changes 39 times" in said_of(np.concatenate([np.arange(5.0) * (1, 60)[k % 2] for k in range(40)]), short)[0]


def test_regular_and_irregular_steps_alone_say_nothing() -> None:
    rng = np.random.default_rng(0)
    for steps in (
        np.ones(500),
        rng.uniform(0.96, 1.04, 500),
        rng.exponential(1.0, 500),
        np.tile([1.0, 2.0], 250),
        np.ones(2),
    ):
        assert said_of(np.cumsum(steps)) == []


def test_outages_of_irregular_steps_are_said() -> None:
    rng = np.random.default_rng(0)
    steps = rng.exponential(1.0, 500)
    steps[250] = 86400.0
    [gap] = said_of(np.cumsum(steps))
    assert "the longest of 86400, the first after row 249" in gap
    steps[250:] = 60 * rng.exponential(1.0, 250)
    [changed] = said_of(np.cumsum(steps))
    assert "the step of time changes" in changed


def test_gaps_of_few_rows_are_said() -> None:
    [gap] = said_of(np.array([0.0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 50, 51, 52]))
    assert "1 gap longer than 1.5, the longest of 41, the first after row 9; the usual step is 1" in gap


EPISODES = [
    {"observations": np.ones((3, 2)), "actions": np.zeros((3, 1)), "rewards": np.ones(3), "terminals": np.zeros(3)}
] * 2


@pytest.mark.parametrize("name", ["hopper-medium.pkl", "x.pickle", "x.pkl.gz", "x.data", "old.pkl"])
def test_pickles_are_refused_with_the_lines_that_turn_them_into_npz(tmp_path: Path, name: str) -> None:
    data = pickle.dumps(EPISODES, 0 if name.startswith("old") else 4)
    (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    with pytest.raises(
        UserError, match="is a pickle, which may run code when it is read, and is refused on purpose"
    ) as error:
        load_dataset(str(tmp_path / name))
    lines = str(error.value).partition("a list of episodes: ")[2].rpartition(" (docs/")[0]
    if name == "hopper-medium.pkl":
        code = lines.replace("open('", f"open('{tmp_path}/").replace("savez('", f"savez('{tmp_path}/")
        exec(code, {"pickle": pickle, "numpy": np})
        assert load_dataset(str(tmp_path / "hopper-medium.npz")).episode_lengths().tolist() == [3, 3]


@pytest.mark.parametrize("new", [True, False])
def test_files_of_torch_are_refused_as_pickles(tmp_path: Path, new: bool) -> None:
    torch.save({"actor": torch.zeros(3)}, tmp_path / "checkpoint_999.pt", _use_new_zipfile_serialization=new)
    with pytest.raises(UserError, match=r"a pickle.*is refused on purpose"):
        load_dataset(str(tmp_path / "checkpoint_999.pt"))
    with pytest.raises(UserError, match=r"a pickle.*is refused on purpose: policies of offrl are RUN/policies"):
        offrl.load_policy(tmp_path / "checkpoint_999.pt")


@pytest.mark.parametrize(("minutes", "named"), [(1, True), (30, True), (60, True), (1440, False)])
def test_a_step_back_by_an_hour_may_be_the_end_of_summer_time(tmp_path: Path, minutes: int, named: bool) -> None:
    hours = pd.date_range("2024-10-26 22:00", periods=8 * 60, freq="min", tz="UTC")[::minutes]
    local = (
        list(hours.tz_convert("Europe/Berlin").tz_localize(None).astype(str))
        if named
        else ["2024-10-26", "2024-10-28", "2024-10-27"]
    )
    n = len(local)
    pd.DataFrame({"time": local, "obs_0": range(n), "action": 0.5, "reward": 1.0}).to_csv(
        tmp_path / "s.csv", index=False
    )
    with pytest.raises(UserError, match=r"'time' (goes back from|is the same as).*sort the rows by time") as refused:
        load_dataset(str(tmp_path / "s.csv"))
    assert ("summer time ends" in str(refused.value)) == named


@pytest.mark.parametrize(
    ("numbers", "other", "decimal", "expected"),
    [
        ("998,5 1.000,5 1.001", "1", "auto", [998.5, 1000.5, 1001.0]),
        ("998 999 1.000", "0,5", "auto", [998.0, 999.0, 1000.0]),
        ("998 999 1.000", "0.5", "auto", [998.0, 999.0, 1.0]),
        (
            "998 999 1.000",
            "1",
            "auto",
            "1.000 in column 'obs_0' may be 1000, with points between thousands, or 1: say dataset.decimal=",
        ),
        ("998 999 1.000", "1", "point", [998.0, 999.0, 1.0]),
        ("998 999 1.000", "1", "comma", [998.0, 999.0, 1000.0]),
        ("1.234 2.345", "1", "auto", [1.234, 2.345]),
        ("1.5 2,5", "1", "auto", "holds 1.5, with a decimal point, and other numbers have decimal commas"),
        ("1,234.5 2.5", "1", "point", [1234.5, 2.5]),
        ("1,234.5 2.5", "1", "auto", "holds '1,234.5' in row 0, which is no number"),
        ("-1.000,25 1e3", "1", "auto", [-1000.25, 1000.0]),
    ],
)
def test_marks_of_decimals_and_thousands(tmp_path: Path, numbers: str, other: str, decimal: str, expected: Any) -> None:
    path = written(
        tmp_path / "x.csv", "episode;obs_0;action_x;reward", [f"0;{number};{other};1" for number in numbers.split()]
    )
    config = DatasetConfig(name=path, decimal=decimal, action_kind="continuous", action_low=[-9], action_high=[9])
    if isinstance(expected, str):
        with pytest.raises(UserError, match=expected):
            load_dataset(config)
        return
    data = load_dataset(config)
    assert data.columns["observations"][:, 0].tolist() == pytest.approx(expected)
    assert any("decimal commas" in note for note in data.notes) == ("," in numbers + other and decimal == "auto")


@pytest.mark.parametrize(
    ("words", "expected"),
    [("0.5 1.5", [0.5, 1.5]), ("2 10", [2, 10]), ("007 7", [0, 1]), ("on off", [1, 0]), ("1_0 2", [0, 1])],
)
def test_actions_that_are_numbers_as_texts(words: str, expected: list[float]) -> None:
    frame = pd.DataFrame({"obs_0": [1.0, 2.0], "action": words.split(), "reward": 1.0, "done": [False, True]})
    data = offrl.from_dataframe(frame)
    actions = data.columns["actions"].flatten()
    if "." in words:
        actions = (actions + 1) / 2 * (data.spec.action_high[0] - data.spec.action_low[0]) + data.spec.action_low[0]
    assert actions.tolist() == pytest.approx(expected) and data.spec.discrete is ("." not in words)


@pytest.mark.parametrize(("number", "named"), [(-999, True), (9999, True), (-99999, True), (-998, False), (29, False)])
def test_numbers_that_stand_for_missing_values_are_named(tmp_path: Path, number: int, named: bool) -> None:
    rows = [f"{t // 10},{number if t == 17 else 20 + t % 8},{1000 - t},0.{t % 9},1" for t in range(40)]
    data = load_dataset(written(tmp_path / "x.csv", "episode,obs_temp,obs_count,action,reward", rows))
    assert data.spec.observation_columns[0].name == "obs_temp"
    np.savez(
        tmp_path / "x.npz",
        **{k: data.columns[k].numpy() for k in ("observations", "actions", "rewards", "truncations")},
    )
    for kind, name in (("csv", "column 'obs_temp'"), ("npz", "'observations', dimension 0,")):
        texts = [str(f) for f in find_faults(read_raw(str(tmp_path / f"x.{kind}"))) if "a missing value?" in str(f)]
        assert len(texts) == named
        if named:
            assert f"{name} holds {number:g} in 1 rows, otherwise 20 to 27" in texts[0]
            assert "episode 1, row 17" in texts[0] and "dataset.missing=forward" in texts[0]


def test_a_decimal_mark_is_for_csv_alone(tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", observations=np.zeros(3), actions=np.zeros(3), rewards=np.zeros(3), dones=[0, 0, 1])
    with pytest.raises(UserError, match=r"dataset.decimal=comma is for CSV, and .*x.npz is none"):
        load_dataset(DatasetConfig(name=str(tmp_path / "x.npz"), decimal="comma"))
