"""What float32 does not tell apart is said of every layout that a reader converts on the way in; and d3rlpy's tuple
observations.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pandas as pd
import pytest

from offrl.algorithms.bc import BC, BCConfig
from offrl.data import load_dataset
from offrl.data.containers import npz
from offrl.data.dataset import ColumnSpec, DataSpec
from offrl.data.tables.frame import from_dataframe
from offrl.errors import UserError
from offrl.evaluation.policy import TrainedPolicy
from offrl.settings.dataset import DatasetConfig
from tests.support.data_files import minari, minari_arrow

RNG = np.random.default_rng(0)
NORTHING = 5_400_000 + np.cumsum(RNG.normal(0, 0.01, 400))  # in metres: float32 knows half metres there
PLAIN = RNG.normal(size=400)
ENDS = np.arange(400) % 100 == 99
FOLLOWING = np.where(ENDS, NORTHING + 0.25, np.roll(NORTHING, -1))
SAID = "5.4e+06, 1 stay different in float32"


def d3rlpy_v2(path: Path, observations: np.ndarray, rewards: np.ndarray, tuples: bool = False) -> Path:
    """As `ReplayBuffer.dump` of d3rlpy 2.8 writes episodes."""
    with h5py.File(path, "w") as file:
        file["columns"], file["num_episodes"], file["version"] = (
            ["observations", "actions", "rewards", "terminated"],
            4,
            "2.1",
        )
        for i in range(4):
            rows = slice(100 * i, 100 * i + 100)
            parts = {f"observations_{i}_{j}": observations[rows, j : j + 1] for j in range(2)} if tuples else {}
            for name, values in (parts or {f"observations_{i}": observations[rows]}).items():
                file[name] = values
            file[f"actions_{i}"], file[f"rewards_{i}"], file[f"terminated_{i}"] = (
                PLAIN[rows, None],
                rewards[rows, None],
                False,
            )
    return path


def stacked(column: np.ndarray) -> np.ndarray:
    return np.stack([column, PLAIN], 1)


def of_d3rlpy(folder: Path, column: np.ndarray) -> DatasetConfig:
    return DatasetConfig(name=str(d3rlpy_v2(folder / "x.h5", stacked(column), PLAIN)))


def of_npz(folder: Path, column: np.ndarray) -> DatasetConfig:
    flags = {"terminations": np.zeros(400, bool), "truncations": ENDS}
    np.savez(folder / "x.npz", observations=stacked(column), actions=PLAIN[:, None], rewards=PLAIN, **flags)
    return DatasetConfig(name=str(folder / "x.npz"))


def of_npz_by_columns(folder: Path, column: np.ndarray) -> DatasetConfig:
    config = of_npz(folder, column)
    with np.load(config.name) as arrays:
        np.savez(config.name, **{k: np.asfortranarray(v) for k, v in arrays.items()})
    return config


def of_ogbench(folder: Path, column: np.ndarray) -> DatasetConfig:
    np.savez(
        folder / "mine-v0.npz", observations=stacked(column), actions=np.clip(PLAIN[:, None], -1, 1), terminals=ENDS
    )
    return DatasetConfig(name=str(folder / "mine-v0.npz"), format="ogbench")


def of_minari(folder: Path, column: np.ndarray) -> DatasetConfig:
    place = minari(folder, (2,))
    with h5py.File(place / "data" / "main_data.hdf5", "r+") as file:
        for number in range(3):
            del file[f"episode_{number}/observations"]
            file[f"episode_{number}/observations"] = stacked(column)[11 * number : 11 * number + 11]
    return DatasetConfig(name=str(place))


def of_arrow(folder: Path, column: np.ndarray) -> DatasetConfig:
    """A Dict of one entry, of two steps only."""
    values = [{"x": [float(a), float(b)]} for a, b in zip(column[[0, 150, 399]], PLAIN, strict=False)]
    return DatasetConfig(name=str(minari_arrow(folder / "set" / "data", values, [0.0, 1.0, 0.0]).parent))


MAKERS = (of_d3rlpy, of_npz, of_npz_by_columns, of_ogbench, of_minari, of_arrow)


@pytest.mark.parametrize("make", MAKERS, ids=lambda f: f.__name__)
def test_a_column_that_float32_merges_is_named(
    tmp_path: Path, make: Callable[..., DatasetConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(npz, "_BLOCK", 1000)  # so that an array is read in many parts
    northing = NORTHING if make is not of_arrow else 5_400_000 + np.linspace(0, 0.1, 400)
    notes = [note for note in load_dataset(make(tmp_path, northing)).notes if "float32" in note]
    assert len(notes) == 1 and "observations" in notes[0] and SAID in notes[0] and "subtract an offset" in notes[0]


@pytest.mark.parametrize("make", MAKERS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("change", ["less an offset", "float32 in the file"])
def test_what_float32_holds_is_not_named(tmp_path: Path, make: Callable[..., DatasetConfig], change: str) -> None:
    column = NORTHING - 5_400_000 if change == "less an offset" else NORTHING.astype(np.float32).astype(np.float64)
    assert not [note for note in load_dataset(make(tmp_path, column)).notes if "float32" in note]


def test_whole_numbers_and_rewards_of_d3rlpy(tmp_path: Path) -> None:
    whole = (1000 * stacked(NORTHING)).astype(np.int64)
    (note,) = [n for n in load_dataset(str(d3rlpy_v2(tmp_path / "a.h5", whole, PLAIN))).notes if "float32" in n]
    assert "observations, dimension 0" in note
    (note,) = [
        n for n in load_dataset(str(d3rlpy_v2(tmp_path / "b.h5", stacked(PLAIN), NORTHING))).notes if "float32" in n
    ]
    assert note.startswith("rewards: ")


@pytest.mark.parametrize("form", ["auto", "d3rlpy"])
def test_d3rlpys_tuple_observations_are_refused_by_name(tmp_path: Path, form: str) -> None:
    path = d3rlpy_v2(tmp_path / "x.h5", stacked(PLAIN), PLAIN, tuples=True)
    with pytest.raises(
        UserError, match=r"x\.h5 holds d3rlpy's tuple observations, .* not supported: join them into one \(numpy\.conc"
    ):
        load_dataset(DatasetConfig(name=str(path), format=form))


@pytest.mark.parametrize("container", ["frame", "csv", "parquet"])
def test_an_observed_column_that_float32_merges_gets_an_offset(tmp_path: Path, container: str) -> None:
    table = pd.DataFrame(
        {"obs_n": NORTHING, "obs_t": PLAIN, "action": np.clip(PLAIN, -1, 1), "reward": PLAIN, "truncated": 1 * ENDS}
    )
    table = table.assign(next_obs_n=FOLLOWING, next_obs_t=np.append(PLAIN[1:], 0.0))
    fields = {"next_observations": ["next_obs_n", "next_obs_t"]}
    if container == "frame":
        dataset = from_dataframe(table, fields=fields)
    else:
        file = tmp_path / f"x.{container}"
        table.to_csv(file, index=False) if container == "csv" else table.to_parquet(file)
        dataset = load_dataset(DatasetConfig(name=str(file), fields=fields))
    assert dataset.spec.observation_columns[0] == ColumnSpec("obs_n", offset=-5_400_000.0, auto_offset=True)
    assert [n for n in dataset.notes if n.startswith("obs_n: float32") and "minus 5400000" in n]
    for name, values in (("observations", NORTHING), ("next_observations", FOLLOWING)):
        np.testing.assert_array_equal(dataset.columns[name][:, 0], (values - 5_400_000).astype(np.float32))
    assert DataSpec.from_json(json.loads(json.dumps(dataset.spec.to_json()))) == dataset.spec

    algorithm = BC(BCConfig(hidden=(4,)), dataset.spec)
    policy = TrainedPolicy(algorithm, algorithm.init(0), 0)
    assert policy.normalised(np.array([[0.25, 0.0]]))[0, 0] == 0.25
    with pytest.raises(UserError, match=r"obs_n records.*add -5400000 to it"):
        policy.normalised(np.array([[5_400_000.25, 0.0]]))


def test_an_offset_that_is_given_stays(tmp_path: Path) -> None:
    table = pd.DataFrame({"obs": NORTHING, "action": np.clip(PLAIN, -1, 1), "reward": PLAIN, "truncated": 1 * ENDS})
    dataset = from_dataframe(table, observations=[{"column": "obs", "offset": -5_399_000}])
    assert dataset.spec.observation_columns == (ColumnSpec("obs", offset=-5_399_000.0),)
