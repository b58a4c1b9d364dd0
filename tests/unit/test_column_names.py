"""Which column is what, alike in all containers; and what the names, units, scales and labels of columns are kept
for.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pandas as pd
import pytest

import offrl
from offrl.cli.main import main
from offrl.data import DatasetConfig, load_dataset
from offrl.data.dataset import ColumnSpec, Dataset, DataSpec
from offrl.data.fit import check_columns
from offrl.errors import UserError

KINDS = ("npz", "hdf5", "csv", "parquet", "frame", "arrays")
ROW = np.arange(12)
CORE = {"observations": ROW * 1.0, "actions": ROW / 16, "rewards": ROW * 0.5}


def read(folder: Path, kind: str, columns: dict[str, Any], **settings: Any) -> Dataset:
    path = folder / f"x.{kind}"
    if kind == "arrays":
        return offrl.from_arrays(**columns)
    if kind == "frame":
        return offrl.from_dataframe(pd.DataFrame(columns), **settings)
    if kind == "npz":
        np.savez(path, **columns)
    elif kind == "hdf5":
        with h5py.File(path, "w") as file:
            for name, values in columns.items():
                file[name] = values.astype("S") if values.dtype.kind == "U" else values
    elif kind == "csv":
        pd.DataFrame(columns).to_csv(path, index=False)
    else:
        pd.DataFrame(columns).to_parquet(path)
    return load_dataset(DatasetConfig(name=str(path), cache="never", **settings))


def refused(folder: Path, kind: str, columns: dict[str, Any]) -> str:
    with pytest.raises(UserError) as caught:
        read(folder, kind, columns)
    return str(caught.value)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "names", ["terminals truncated", "terminated timeouts", "terminations timeout", "done truncations"]
)
def test_flags_by_any_usual_name(tmp_path: Path, kind: str, names: str) -> None:
    flags = dict(zip(names.split(), (np.isin(ROW, (3, 11)), ROW == 7), strict=True))
    data = read(tmp_path, kind, CORE | flags)
    assert data.episode_lengths().tolist() == [4, 4, 4]
    assert data.columns["terminations"].nonzero().flatten().tolist() == [3, 11]
    assert data.columns["truncations"].nonzero().flatten().tolist() == [7]


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_sorted_by_ids_and_times(tmp_path: Path, kind: str) -> None:
    order = np.argsort(ROW % 4, kind="stable")  # the three episodes step by step
    ids = np.array(["b", "a", "10"])[ROW // 4]
    columns = {**CORE, "trajectory": ids, "timestamp": ROW % 4 * 1.5, "dones": np.isin(ROW, (3, 7, 11))}
    data = read(tmp_path, kind, {name: values[order] for name, values in columns.items()})
    assert data.columns["observations"].flatten().tolist() == ROW.tolist() and data.episode_lengths().tolist() == [
        4,
        4,
        4,
    ]
    assert data.columns["terminations"].sum() == 3 and any(
        "rows are sorted by trajectory and timestamp" in n for n in data.notes
    )


@pytest.mark.parametrize("kind", KINDS)
def test_a_column_whose_meaning_is_not_taken_is_refused(tmp_path: Path, kind: str) -> None:
    ends = {"episode_ends": ROW % 4 == 3}
    for word, meaning, more in (
        ("cost_0", "costs", {}),
        ("terminated", "terminations", {"terminals": ROW == 3}),
        ("episode", "episodes", {"episode_ids": ROW // 4}),
        ("date", "times", {"time": ROW}),
    ):
        if kind == "arrays" and word == "cost_0":
            continue  # a keyword is asked for: it is a further column
        text = refused(tmp_path, kind, {**CORE, **ends, word: ROW // 4 * 0, **more})
        assert f"the column '{word}', which holds {meaning} by its name" in text and "dataset.fields." in text


@pytest.mark.parametrize("kind", KINDS)
def test_costs_are_recognised_and_no_reward(tmp_path: Path, kind: str) -> None:
    ends = {"episode_ends": ROW % 4 == 3}
    data = read(tmp_path, kind, {**CORE, **ends, "cost": ROW})
    assert data.columns["costs"].tolist() == ROW.tolist() and data.spec.costs
    assert data.episode_costs().tolist() == [6.0, 22.0, 38.0]
    rewardless = {name: values for name, values in CORE.items() if name != "rewards"}
    text = refused(tmp_path, kind, {**rewardless, **ends, "fuel_cost": ROW})
    assert "'fuel_cost' is taken for costs" in text and "scale" in text
    assert "'costs' holds -1, which is below 0 (1 rows) (first at episode 0, row 0)" in refused(
        tmp_path, kind, {**CORE, **ends, "cost": ROW - 1.0}
    )


def test_starts_of_episodes_are_no_ends(tmp_path: Path) -> None:
    starts = {"is_first": ROW % 4 == 0}
    assert "holds starts of episodes by its name: write numpy.append(is_first[1:], True)" in refused(
        tmp_path, "npz", CORE | starts
    )
    assert read(tmp_path, "npz", {**CORE, **starts, "episode": ROW // 4}).num_episodes == 3


@pytest.mark.parametrize("kind", KINDS[:5])
def test_columns_that_nothing_takes_are_named(tmp_path: Path, kind: str) -> None:
    data = read(tmp_path, kind, {**CORE, "dones": ROW == 11, "pressure": ROW, "remark": np.array(["x"] * 12)})
    assert any("nothing takes the columns pressure, remark:" in note for note in data.notes)


@pytest.mark.parametrize("kind", ["npz", "hdf5", "parquet"])
def test_done_beside_other_flags(tmp_path: Path, kind: str) -> None:
    both = read(tmp_path, kind, {**CORE, "done": np.isin(ROW, (3, 7, 11)), "terminated": ROW == 7})
    assert (
        both.columns["truncations"].nonzero().flatten().tolist() == [3, 11] and both.columns["terminations"].sum() == 1
    )
    columns = {**CORE, "done": np.isin(ROW, (3, 7, 11)), "terminated": ROW == 7, "truncated": ROW == 11}
    assert "'done' marks row 3, which neither 'terminated' nor 'truncated' marks" in refused(tmp_path, kind, columns)
    columns = {**CORE, "done": ROW == 11, "terminated": ROW == 7}
    assert "row 7 is an end by 'terminated', and 'done' does not mark it" in refused(tmp_path, kind, columns)


def test_marks_of_another_length(tmp_path: Path) -> None:
    assert "'episode_ids' has shape [5]; one value for each of 12 rows is due" in refused(
        tmp_path, "npz", {**CORE, "episode_ids": ROW[:5]}
    )
    numbered = {
        "obs_0": ROW * 1.0,
        "obs_1": ROW[:4] * 1.0,
        "actions": CORE["actions"],
        "rewards": CORE["rewards"],
        "dones": ROW == 11,
    }
    assert "column 'obs_1' has 4 rows, and 'obs_0' has 12" in refused(tmp_path, "npz", numbered)


# ---------------------------------------------------------------------------------------------------- labels and
# columns


def choices(folder: Path, name: str, words: list[Any], columns: str = "obs_temp", scale: float = 1.0) -> str:
    rows = [f"{e},{t * scale},{words[(e + t) % len(words)]},1" for e in range(3) for t in range(6)]
    (folder / name).write_text(f"episode,{columns},action,reward\n" + "\n".join(rows) + "\n")
    return str(folder / name)


def test_choices_are_numbered_alike_where_files_are_joined(tmp_path: Path) -> None:
    a, b = choices(tmp_path, "a.csv", ["auto", "cool", "heat"]), choices(tmp_path, "b.csv", ["auto", "heat"])
    due = load_dataset(f"[{a},{b}]").columns["actions"].tolist()
    joined = load_dataset(DatasetConfig(name=a, concatenate=[b]))
    assert joined.columns["actions"].tolist() == due and joined.spec.action_labels == ("auto", "cool", "heat")
    assert main(["data", "merge", b, a, str(tmp_path / "m.hdf5")]) == 0
    merged = load_dataset(str(tmp_path / "m.hdf5"))
    assert merged.columns["actions"].tolist() == due[18:] + due[:18] and merged.spec.action_labels == (
        "auto",
        "cool",
        "heat",
    )
    numbers = choices(tmp_path, "n.csv", [0, 1])
    with pytest.raises(
        UserError, match="are called 0 auto, 1 cool, 2 heat, and those in n are numbers: which is which is not known"
    ):
        load_dataset(DatasetConfig(name=a, concatenate=[numbers]))


def test_files_whose_columns_stand_in_another_order_are_not_joined(tmp_path: Path) -> None:
    for name, header in (("a.csv", "obs_flow,obs_temp"), ("b.csv", "obs_temp,obs_flow")):
        lines = [f"{e},{t},{2 * t},0.{t},1" for e in range(2) for t in range(5)]
        (tmp_path / name).write_text(f"episode,{header},action,reward\n" + "\n".join(lines) + "\n")
    a, b = str(tmp_path / "a.csv"), str(tmp_path / "b.csv")
    with pytest.raises(UserError, match="its columns are obs_temp, obs_flow instead of obs_flow, obs_temp"):
        load_dataset(DatasetConfig(name=a, concatenate=[b]))
    fields = {"observations": ["obs_flow", "obs_temp"]}
    assert (
        load_dataset(DatasetConfig(name=b, fields=fields)).spec.observation_columns
        == load_dataset(a).spec.observation_columns
    )


def test_a_policy_is_held_against_the_columns_of_other_data() -> None:
    labelled = DataSpec((1,), 1, True, 2, action_labels=("off", "on"), name="a")
    with pytest.raises(UserError, match="its choices of actions are 0 off, 1 on, and those of b are 0 on, 1 standby"):
        check_columns(labelled, DataSpec((1,), 1, True, 2, action_labels=("on", "standby"), name="b"), "candidate x")
    kelvin, celsius = (
        DataSpec((1,), 1, observation_columns=(ColumnSpec("temp", unit),), name=unit) for unit in ("K", "°C")
    )
    with pytest.raises(UserError, match="was trained on the columns temp in K, and °C has temp in °C"):
        check_columns(kelvin, celsius, "candidate x")
    check_columns(kelvin, DataSpec((1,), 1, observation_columns=(ColumnSpec("temp"),)), "candidate x")


def test_specifications_keep_columns_and_labels_in_json() -> None:
    columns = (ColumnSpec("valve", "%", 0.01, -1.0), ColumnSpec("temp"))
    spec = DataSpec((2,), 1, True, 2, observation_columns=columns, action_labels=("off", "on"))
    assert DataSpec.from_json(json.loads(json.dumps(spec.to_json()))) == spec
    with pytest.raises(UserError, match="observation_columns has 2 entries, where 3 are due"):
        DataSpec.from_json({**spec.to_json(), "observation_shape": [3]})
    with pytest.raises(UserError, match=r"observation_columns\[0\]"):
        DataSpec.from_json({**spec.to_json(), "observation_columns": [7, 8]})


@pytest.mark.parametrize("kind", ["parquet", "frame", "npz"])
def test_times_are_no_actions_and_infinity_no_id(tmp_path: Path, kind: str) -> None:
    times = np.datetime64("2024-01-01") + ROW.astype("timedelta64[h]")
    assert "column 'actions' holds times, where numbers are due" in refused(
        tmp_path, kind, CORE | {"actions": times, "dones": ROW == 11}
    )
    ids = np.where(ROW < 6, 1.0, np.inf)
    assert "column 'episode_ids' has no value in row 6" in refused(tmp_path, kind, CORE | {"episode_ids": ids})
