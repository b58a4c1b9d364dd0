"""Steps as RLDS stores them: the last row of an episode is what its last action led to, and no transition."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from offrl.data import load_dataset
from offrl.data.dataset import Dataset
from offrl.data.tables.frame import from_dataframe
from offrl.errors import UserError
from offrl.settings.dataset import DatasetConfig

STEP = np.arange(15) % 5  # three episodes of four transitions; the second is cut by a time limit
LAST = STEP == 4
FLAGS = {"is_first": STEP == 0, "is_last": LAST, "is_terminal": LAST & (np.arange(15) // 5 != 1)}
OBSERVATIONS, ACTIONS, REWARDS = np.arange(15.0), np.where(LAST, 0.0, 0.5), np.where(LAST, 0.0, STEP + 1.0)
VECTORS = {"observations": OBSERVATIONS[:, None], "actions": ACTIONS[:, None], "rewards": REWARDS, **FLAGS}
TABLE = {"obs_0": OBSERVATIONS, "action_0": ACTIONS, "reward": REWARDS, **FLAGS}


def check(data: Dataset) -> None:
    columns = {name: column.numpy() for name, column in data.columns.items()}
    assert data.episode_end.tolist() == [4, 8, 12] and columns["successor_known"].all()
    assert columns["rewards"].tolist() == [1.0, 2.0, 3.0, 4.0] * 3
    assert columns["observations"][:, 0].tolist() == OBSERVATIONS[~LAST].tolist()
    assert columns["next_observations"][:, 0].tolist() == OBSERVATIONS[1:][~LAST[:-1]].tolist()
    assert columns["actions"][:, 0] == pytest.approx(0.5)
    assert np.flatnonzero(columns["terminations"]).tolist() == [3, 11] and np.flatnonzero(
        columns["truncations"]
    ).tolist() == [7]
    assert any("the 3 rows of is_last hold no action" in note for note in data.notes)


def npz(folder: Path, columns: dict[str, np.ndarray]) -> Path:
    np.savez(folder / "x.npz", **columns)  # type: ignore[arg-type]
    return folder / "x.npz"


def hdf5(folder: Path, columns: dict[str, np.ndarray]) -> Path:
    with h5py.File(folder / "x.hdf5", "w") as file:
        for name, values in columns.items():
            file[name] = values
    return folder / "x.hdf5"


def csv(folder: Path, columns: dict[str, np.ndarray]) -> Path:
    rows = zip(*(column.tolist() for column in columns.values()), strict=True)
    (folder / "x.csv").write_text("\n".join([",".join(columns), *(",".join(map(str, row)) for row in rows)]) + "\n")
    return folder / "x.csv"


def parquet(folder: Path, columns: dict[str, np.ndarray]) -> Path:
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pa.table({name: column.tolist() for name, column in columns.items()}), folder / "x.parquet")
    return folder / "x.parquet"


@pytest.mark.parametrize(
    "fields", [{}, {"terminations": "is_terminal"}, {"terminations": "is_terminal", "episode_ends": "is_last"}], ids=str
)
@pytest.mark.parametrize(
    ("write", "columns"),
    [(npz, VECTORS), (hdf5, VECTORS), (parquet, VECTORS), (csv, TABLE), (parquet, TABLE)],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_the_last_step_is_no_transition(
    tmp_path: Path, write: Callable[..., Path], columns: dict[str, np.ndarray], fields: dict[str, Any]
) -> None:
    check(load_dataset(DatasetConfig(name=str(write(tmp_path, columns)), fields=fields)))


def test_a_dataframe_and_memory_mapped_columns(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    check(from_dataframe(pandas.DataFrame(TABLE)))
    check(
        load_dataset(DatasetConfig(name=str(npz(tmp_path, VECTORS)), memory="mmap", cache_dir=str(tmp_path / "cache")))
    )


def test_an_end_that_is_missing_and_other_flags(tmp_path: Path) -> None:
    cut = {name: column[:13] for name, column in VECTORS.items()}  # the recording stopped in the third episode
    data = load_dataset(str(npz(tmp_path, cut)))
    assert (
        data.episode_end.tolist() == [4, 8, 11]
        and not bool(data.columns["successor_known"][-1])
        and not bool(data.complete[-1])
    )
    # two ends are unmarked: no row is lost
    ids = {**VECTORS, "episode_ids": np.arange(15) // 5, "is_last": LAST & (np.arange(15) < 5)}
    fields = {"terminations": "is_terminal", "episode_ends": "is_last"}
    assert load_dataset(DatasetConfig(name=str(npz(tmp_path, ids)), fields=fields)).episode_end.tolist() == [4, 9, 14]
    table = {**TABLE, "episode": ids["episode_ids"], "is_last": ids["is_last"]}
    assert load_dataset(DatasetConfig(name=str(csv(tmp_path, table)), fields=fields)).episode_end.tolist() == [4, 9, 14]
    kept = {"first": "is_first", "last": "is_last", "end": "is_terminal"}
    more = {**VECTORS, "terminations": FLAGS["is_terminal"], "truncations": LAST & ~FLAGS["is_terminal"]}
    # asked for as further columns
    assert len(load_dataset(DatasetConfig(name=str(npz(tmp_path, more)), fields=kept))) == 15
    own = {**VECTORS, "truncations": LAST & ~FLAGS["is_terminal"], "terminations": FLAGS["is_terminal"]}
    with pytest.raises(UserError, match="nothing takes the column 'is_terminal'"):  # a file that says its ends twice
        load_dataset(str(npz(tmp_path, own)))
