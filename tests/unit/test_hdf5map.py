"""Reading Minari's HDF5 by the file's own structures gives what HDF5 gives, and what is stored otherwise is left to HDF5."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch

from offrl.data import Dataset, DatasetConfig, load_dataset
from offrl.data.formats import minari
from offrl.data.formats.hdf5map import Hdf5Map
from offrl.errors import UserError

LENGTHS = (3, 700, 1, 12)  # 700 rows: h5py cuts the observations into blocks in both dimensions
Store = Callable[[Any, str, np.ndarray], None]


def box(*shape: int, dtype: str = "float64") -> dict:
    return {"type": "Box", "shape": list(shape), "dtype": dtype, "low": [-1.0] * shape[-1], "high": [1.0] * shape[-1]}


def write(root: Path, store: Store, observations: dict | None = None, groups: Callable[[Any], None] | None = None, **file: Any) -> Path:
    """A data set in Minari's layout whose datasets `store` makes; `groups` adds to each episode's group before the datasets."""
    observations = observations or box(11)
    rng = np.random.default_rng(0)
    (root / "data").mkdir(parents=True)
    meta = {"action_space": json.dumps(box(3)), "observation_space": json.dumps(observations), "dataset_id": "test/x-v0"}
    (root / "data" / "metadata.json").write_text(json.dumps(meta | {"total_steps": sum(LENGTHS), "data_format": "hdf5"}))

    def sample(space: dict, rows: int) -> np.ndarray:
        if space["dtype"] == "uint8":
            return rng.integers(0, 256, (rows, *space["shape"]), np.uint8)
        return rng.normal(size=(rows, *space["shape"])).astype(space["dtype"])

    with h5py.File(root / "data" / "main_data.hdf5", "w", **file) as out:
        for number, steps in enumerate(LENGTHS):
            group = out.create_group(f"episode_{number}")
            if groups is not None:
                groups(group)
            if observations["type"] == "Dict":
                for key, space in observations["subspaces"].items():
                    store(group, f"observations/{key}", sample(space, steps + 1))
            else:
                store(group, "observations", sample(observations, steps + 1))
            store(group, "actions", rng.uniform(-1, 1, (steps, 3)).astype(np.float32))
            store(group, "rewards", rng.normal(size=steps))
            last = np.arange(steps) == steps - 1
            store(group, "terminations", last & (number % 2 == 0))
            store(group, "truncations", last & (number % 2 == 1))
    return root


def chunked(group: Any, name: str, values: np.ndarray) -> None:  # as Minari writes
    group.create_dataset(name, data=values, chunks=True, maxshape=(None, *values.shape[1:]))


def contiguous(group: Any, name: str, values: np.ndarray) -> None:
    group.create_dataset(name, data=values)


def compressed(group: Any, name: str, values: np.ndarray) -> None:
    group.create_dataset(name, data=values, chunks=True, compression="gzip")


def big_endian(group: Any, name: str, values: np.ndarray) -> None:
    group.create_dataset(name, data=values, dtype=values.dtype.newbyteorder(">") if values.dtype != bool else None, chunks=True)


def half(group: Any, name: str, values: np.ndarray) -> None:
    chunked(group, name, values.astype(np.float16) if values.dtype.kind == "f" else values)


def whole_numbers(group: Any, name: str, values: np.ndarray) -> None:
    if name == "observations":
        values = (values * 100).astype(np.int16)
    chunked(group, name, values.astype(np.int8) if values.dtype == bool else values)


def small_blocks(group: Any, name: str, values: np.ndarray) -> None:
    group.create_dataset(name, data=values, chunks=tuple(min(n, 5) for n in values.shape))


def scattered(group: Any, name: str, values: np.ndarray) -> None:
    """Blocks that are not in their order in the file."""
    item = group.create_dataset(name, values.shape, values.dtype, chunks=tuple(min(n, 100) for n in values.shape))
    for start in reversed(range(0, len(values), 100)):
        item[start : start + 100] = values[start : start + 100]
        group.file.flush()


def never_written(group: Any, name: str, values: np.ndarray) -> None:
    if name == "rewards":
        group.create_dataset(name, values.shape, "f8", chunks=True, fillvalue=2.5)  # no block exists: all rows are the fill value
    else:
        chunked(group, name, values)


def mixed(group: Any, name: str, values: np.ndarray) -> None:
    [chunked, compressed, big_endian, contiguous][int(group.name[-1])](group, name, values)


def attributes(group: Any) -> None:
    group.attrs.update({f"a{k}": np.arange(20) for k in range(4)} | {"id": 3, "seed": 7})


def extra_members(group: Any) -> None:
    for k in range(6):
        group[f"infos_{k}"] = np.arange(3)


DICT = {"type": "Dict", "subspaces": {"observation": box(4), "achieved_goal": box(2), "desired_goal": box(2), "map": box(3, 5)}}
# name -> what to write, and how many of the four episodes have rewards and observations that are found without HDF5
CASES: dict[str, tuple[dict, int, int]] = {
    "Minari's own": ({"store": chunked}, 4, 4),
    "attributes of groups": ({"store": chunked, "groups": attributes}, 4, 4),
    "tracked order": ({"store": chunked, "track_order": True}, 4, 4),
    "contiguous": ({"store": contiguous}, 4, 4),
    "contiguous float32": ({"store": contiguous, "observations": box(11, dtype="float32")}, 4, 4),
    "big-endian": ({"store": big_endian}, 4, 4),
    "float16": ({"store": half}, 4, 4),
    "whole numbers": ({"store": whole_numbers}, 4, 4),
    "Dict": ({"store": chunked, "observations": DICT}, 4, 0),
    "images": ({"store": chunked, "observations": box(16, 12, 3, dtype="uint8")}, 4, 4),
    "scattered": ({"store": scattered}, 4, 4),
    "compressed": ({"store": compressed}, 0, 0),
    "newest file format": ({"store": chunked, "libver": "latest"}, 0, 0),
    "user block": ({"store": chunked, "userblock_size": 512}, 0, 0),
    "many members": ({"store": chunked, "groups": extra_members}, 0, 0),
    "a tree of blocks with levels": ({"store": small_blocks}, 3, 3),  # the long episode has too many blocks for one leaf
    "no blocks": ({"store": never_written}, 0, 4),
    "mixed": ({"store": mixed}, 1, 1),  # only those like the first
}


def same(a: Dataset, b: Dataset) -> bool:
    columns = list(a.columns) == list(b.columns) and all(
        a.columns[k].dtype == b.columns[k].dtype and torch.equal(a.columns[k], b.columns[k]) for k in a.columns
    )
    episodes = all(torch.equal(getattr(a, k), getattr(b, k)) for k in ("episode_start", "episode_end", "raw_returns", "complete"))
    return columns and episodes and (a.fingerprint, a.spec, a.notes, a.mapped) == (b.fingerprint, b.spec, b.notes, b.mapped)


@pytest.mark.parametrize("case", CASES)
def test_storage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    form, rewards, observations = CASES[case]
    path = write(tmp_path / "x", **form)
    names = [f"episode_{k}" for k in range(len(LENGTHS))]
    with h5py.File(path / "data" / "main_data.hdf5") as file, Hdf5Map(file, names) as found:
        for column, expected in (("rewards", rewards), ("observations", observations)):
            located = found.locate((column,))
            assert sum(r >= 0 for r in located.rows) == expected if located else expected == 0, column
            if located is not None:  # and what was found is what HDF5 reads, in its own type
                for k in range(len(LENGTHS)):
                    if located.rows[k] >= 0:
                        np.testing.assert_array_equal(located.read(k), file[f"episode_{k}/{column}"][()], strict=True)
    fast = load_dataset(str(path))
    assert fast.episode_lengths().tolist() == list(LENGTHS)
    monkeypatch.setattr(Hdf5Map, "locate", lambda self, path: None)
    assert same(fast, load_dataset(str(path)))


def test_dict_leaves_are_found(tmp_path: Path) -> None:
    path = write(tmp_path / "x", chunked, DICT)
    with h5py.File(path / "data" / "main_data.hdf5") as file, Hdf5Map(file, ["episode_1", "episode_0"]) as found:
        located = found.locate(("observations", "map"))
        assert located is not None and located.rows == [701, 4]
        np.testing.assert_array_equal(located.read(0), file["episode_1/observations/map"][()])


def test_links_that_lead_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A soft link is left to HDF5; a second name for the same dataset is the same data."""
    path = write(tmp_path / "x", chunked)
    with h5py.File(path / "data" / "main_data.hdf5", "a") as file:
        file["elsewhere"] = file["episode_1/rewards"][()] + 1.0
        del file["episode_1/rewards"], file["episode_3/actions"]
        file["episode_1/rewards"] = h5py.SoftLink("/elsewhere")
        file["episode_3/actions"] = np.zeros((12, 3))  # another type than the other episodes'
        file["episode_2b"] = file["episode_2"]
    fast = load_dataset(str(path))
    monkeypatch.setattr(Hdf5Map, "locate", lambda self, path: None)
    assert same(fast, load_dataset(str(path)))
    assert not fast.columns["actions"][-12:].any()


def test_large_values_become_infinite_as_in_hdf5(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder) -> None:
    path = write(tmp_path / "x", chunked)
    with h5py.File(path / "data" / "main_data.hdf5", "a") as file:
        file["episode_1/rewards"][:4] = [1e300, -1e300, np.nan, 1e-320]
    fast = minari.read(path, DatasetConfig(), minari.Memory())
    assert fast.columns["rewards"][3:5].tolist() == [np.inf, -np.inf] and [str(w.message) for w in recwarn.list] == []
    monkeypatch.setattr(Hdf5Map, "locate", lambda self, path: None)
    slow = minari.read(path, DatasetConfig(), minari.Memory())
    np.testing.assert_array_equal(fast.columns["rewards"], slow.columns["rewards"])
    with pytest.raises(UserError, match="'rewards' has infinite values"):
        load_dataset(str(path))


def test_damaged_structures_are_not_believed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes changed at random: whatever HDF5 still reads is read the same, and nothing crashes."""
    path = write(tmp_path / "x", chunked)
    target = path / "data" / "main_data.hdf5"
    good = target.read_bytes()
    locate = Hdf5Map.locate
    rng = np.random.default_rng(0)
    with h5py.File(target) as file:  # where structures are, not data
        start = h5py.h5o.get_info(file["episode_0"].id).addr
    read, refused = 0, 0
    for _ in range(60):
        damaged = bytearray(good)
        for at in rng.integers(start, start + 6000, 3):
            damaged[at] = rng.integers(0, 256)
        target.write_bytes(damaged)
        results: list[Dataset | None] = []
        for way in (locate, lambda self, path: None):
            monkeypatch.setattr(Hdf5Map, "locate", way)
            try:
                results.append(load_dataset(DatasetConfig(name=str(path), check=False)))
            except UserError:
                results.append(None)
        fast, slow = results
        if slow is None:  # at times only for damage beside what is needed
            refused += 1
        else:
            assert fast is not None and fast.fingerprint == slow.fingerprint
            read += 1
    assert read > 10 and refused > 5
