"""The same table as CSV, Parquet, HDF5, npz, DataFrame and arrays is the same dataset: that which pandas alone makes of
it.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pandas as pd
import pytest

import offrl
from offrl.data import DatasetConfig, load_dataset
from offrl.data.dataset import Dataset

pytest.importorskip("hypothesis", reason="the extra `dev` is not installed")

import hypothesis
from hypothesis import strategies as st

NAMES = {
    "rewards": ("reward", "rewards", "rew"),
    "terminations": ("terminations", "terminals", "terminated", "terminal"),
    "truncations": ("truncations", "timeouts", "truncated", "timeout"),
    "dones": ("done", "dones"),
    "episode_ends": ("episode_ends", "episode_end"),
    "episode_ids": ("episode_ids", "episode", "trajectory", "traj_id"),
    "time": ("time", "timestamp"),
}
OBSERVATIONS = ("obs_{}", "observation_{}", "state_{}", "s{}", "observations_{}")
ACTIONS = ("action_{}", "act_{}", "a_{}", "actions_{}")
MARKS = (
    "episode_ids",
    "episode_ids time",
    "terminations truncations",
    "terminations episode_ends",
    "episode_ids dones",
    "terminations truncations dones",
    "terminations dones episode_ids",
    "truncations dones",
    "time episode_ends",
    "terminations truncations episode_ids time dones",
    "terminations episode_ids time",
)
CONTAINERS = ("csv", "parquet", "hdf5", "npz", "frame", "arrays")
QUICK, THOROUGH = 15, 2000  # tables


@st.composite
def tables(draw: Any) -> tuple[pd.DataFrame, dict[str, str]]:
    """(a table in the order in which it was logged, the name of its column by what it means)."""
    number = draw(st.integers(0, 2**32 - 1))
    rng = np.random.default_rng(number)
    lengths = np.append(rng.integers(1, 6, rng.integers(0, 5)), 3)  # of two rows, 0 and 1 may be flags or row numbers
    rows = int(lengths.sum())
    episode = np.repeat(np.arange(len(lengths)), lengths)
    step = np.concatenate([np.arange(n) for n in lengths])
    last = np.append(episode[1:] != episode[:-1], True)
    kinds = last * rng.integers(0, 3, rows)  # of ends: none that a flag marks, a termination, a time-out
    marks = draw(st.sampled_from(MARKS)).split()
    named = {mark: draw(st.sampled_from(NAMES[mark])) for mark in ("rewards", *marks)}
    values: dict[str, Any] = {
        "rewards": rng.integers(-9, 9, rows) / 4,
        "terminations": kinds == 1,
        "truncations": kinds == 2,
        "dones": kinds > 0,
        "episode_ends": last,
        "episode_ids": rng.permutation(50)[episode],
        "time": step + rng.random() if "episode_ids" in marks else np.arange(rows) * 2.5,
    }
    if draw(st.booleans()):
        texts = draw(st.sampled_from(["run {}", "{}.10", "007{}", "{}_0", "ä{}"]))
        values["episode_ids"] = np.array([texts.format(i) for i in values["episode_ids"]], object)
    if draw(st.booleans()):
        values |= {k: values[k].astype(int) for k in ("terminations", "truncations", "dones", "episode_ends")}
    width, style = draw(st.integers(1, 3)), draw(st.sampled_from(OBSERVATIONS))
    columns = {style.format(i): rng.integers(-999, 999, rows) / 8 for i in range(width)}
    kind, style = draw(st.sampled_from(["amounts", "numbers", "texts"])), draw(st.sampled_from(ACTIONS))
    if kind == "amounts":
        columns |= {style.format(i): rng.integers(-7, 8, rows) / 8 + 1 / 64 for i in range(draw(st.integers(1, 2)))}
    else:
        choice = rng.integers(0, 3, rows)
        columns[style.format(0)] = choice if kind == "numbers" else np.array(["auto", "cool", "heat"], object)[choice]
    columns |= {named[mark]: values[mark] for mark in named}
    names = list(columns)
    rng.shuffle(names)
    frame = pd.DataFrame({name: columns[name] for name in names})
    if {"episode_ids", "time"} <= set(marks):
        frame = frame.iloc[rng.permutation(rows)].reset_index(drop=True)
    return frame, named


def by_pandas(frame: pd.DataFrame, named: dict[str, str]) -> dict[str, np.ndarray]:
    """What the table means: columns [R] or [R, width] in the order of time, and the last rows of episodes."""
    ids, time = named.get("episode_ids"), named.get("time")
    if ids and time:
        first = frame[ids].map({value: i for i, value in enumerate(frame[ids].unique())})
        frame = (
            frame.assign(first=first)
            .sort_values(["first", time], kind="stable")
            .drop(columns="first")
            .reset_index(drop=True)
        )
    frame = frame.assign(none=False)
    flag = {
        mark: frame[named.get(mark, "none")].astype(bool)
        for mark in ("terminations", "truncations", "dones", "episode_ends")
    }
    frame = frame.drop(columns="none")
    terminated = flag["terminations"] if "terminations" in named else flag["dones"] & ~flag["truncations"]
    ends = terminated | flag["truncations"] | flag["dones"] | flag["episode_ends"]
    if ids:
        ends |= frame[ids] != frame[ids].shift(-1)
    ends.iloc[-1] = True
    observations, actions = (
        sorted(n for n in frame if n not in named.values() and n[0] in letters) for letters in ("os", "a")
    )
    chosen = frame[actions[0]] if len(actions) == 1 else frame[actions]
    if frame[actions[0]].dtype == object:
        chosen = chosen.astype("category").cat.codes
    return {
        "observations": frame[observations].to_numpy(np.float32),
        "actions": chosen.to_numpy(),
        "rewards": frame[named["rewards"]].to_numpy(np.float32),
        "terminations": terminated.to_numpy(bool),
        "ends": ends.to_numpy(bool),
    }


def read(frame: pd.DataFrame, container: str, folder: Path) -> Dataset:
    """The dataset of the table in a container."""
    arrays = {name: frame[name].to_numpy() for name in frame}
    path = folder / f"x.{container}"
    texts = h5py.string_dtype()
    if container == "frame":
        return offrl.from_dataframe(frame)
    if container == "arrays":
        return offrl.from_arrays(**{**arrays, **{k: v.astype(str) for k, v in arrays.items() if v.dtype == object}})
    if container == "csv":
        frame.to_csv(path, index=False)
    elif container == "parquet":
        frame.to_parquet(path)
    elif container == "npz":
        np.savez(path, **{k: v.astype(str) if v.dtype == object else v for k, v in arrays.items()})
    else:
        with h5py.File(path, "w") as file:
            for name, values in arrays.items():
                file.create_dataset(name, data=values, dtype=texts if values.dtype == object else values.dtype)
    return load_dataset(DatasetConfig(name=str(path), cache="never"))


def check(table: tuple[pd.DataFrame, dict[str, str]]) -> None:
    """Every container gives what pandas makes of the table."""
    frame, named = table
    due = by_pandas(frame, named)
    ends = np.flatnonzero(due["ends"])
    with tempfile.TemporaryDirectory() as folder:
        for container in CONTAINERS:
            data = read(frame, container, Path(folder))
            columns = {name: column.numpy() for name, column in data.columns.items()}
            low, high = np.array(data.spec.action_low), np.array(data.spec.action_high)
            actions = columns["actions"] if data.spec.discrete else (columns["actions"] + 1) / 2 * (high - low) + low
            assert (data.episode_end.numpy() - 1).tolist() == ends.tolist(), container
            for name in ("observations", "rewards", "terminations"):
                np.testing.assert_array_equal(columns[name], due[name], container)
            np.testing.assert_allclose(
                actions.reshape(due["actions"].shape), due["actions"], atol=1e-6, err_msg=container
            )
            inside = ~due["ends"]
            np.testing.assert_array_equal(
                columns["next_observations"][inside], np.roll(due["observations"], -1, 0)[inside], container
            )
            assert (columns["truncations"] == due["ends"] & ~due["terminations"]).all() and not columns[
                "successor_known"
            ][ends].any()


@pytest.mark.parametrize("examples", [QUICK, pytest.param(THOROUGH, marks=pytest.mark.nightly)])
def test_every_container_gives_the_same_dataset(examples: int) -> None:
    settings = hypothesis.settings(
        max_examples=examples,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    settings(hypothesis.given(tables())(check))()
