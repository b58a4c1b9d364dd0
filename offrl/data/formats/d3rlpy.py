"""HDF5 files written by d3rlpy: `MDPDataset.dump` of version 1 and `ReplayBuffer.dump` of version 2."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from offrl.data.formats.files import open_hdf5, read_hdf5
from offrl.data.memory import Memory
from offrl.data.raw import RawData, canonical
from offrl.errors import UserError
from offrl.settings.dataset import DatasetConfig


def read(path: Path, config: DatasetConfig, memory: Memory) -> RawData:
    """`terminals` are the environment's terminations, `episode_terminals` the ends of episodes for whatever reason."""
    with open_hdf5(path) as file:
        if "observations_0" in file:
            return _read_v2(path, file, memory)
        missing = [k for k in ("observations", "actions", "rewards", "terminals") if k not in file]
        if missing:
            raise UserError(f"{path} has no '{missing[0]}', which every d3rlpy file has; it has {', '.join(sorted(file))}")
        if "version" not in file:
            raise UserError(
                f"{path} was written by d3rlpy before 1.0, whose rewards belong to the row before; load and dump it with d3rlpy 1.x, "
                "or, if its rewards are in place, set dataset.format=columns"
            )
        discrete = bool(file["discrete_action"][()]) if "discrete_action" in file else None
        keys = {"observations": "observations", "actions": "actions", "rewards": "rewards", "terminations": "terminals"}
        columns = {}
        for name, key in keys.items() | config.fields.items():
            if key not in file:
                raise UserError(f"{path} has no '{key}' (dataset.fields.{name}); it has {', '.join(sorted(file))}")
            columns[name] = canonical(
                name, read_hdf5(name, file[key], memory, str(path)), str(path), discrete if name == "actions" else None
            )
        ends = canonical("terminations", file["episode_terminals"][()], str(path)) if "episode_terminals" in file else None
    return RawData(columns, episode_ends=ends, name=path.stem, source="d3rlpy", path=str(path), discrete=discrete)


def _read_v2(path: Path, file: object, memory: Memory) -> RawData:
    """One set of datasets per episode: observations_0, actions_0, rewards_0 [T, 1], terminated_0."""
    from h5py import File

    assert isinstance(file, File)
    count = sum(key.startswith("observations_") for key in file)
    lengths = [file[f"actions_{i}"].shape[0] for i in range(count)]
    stops = np.cumsum(lengths)
    columns: dict[str, np.ndarray] = {}
    for name in ("observations", "actions", "rewards"):
        first = file[f"{name}_0"]
        if first.dtype.kind not in "biuf":
            raise UserError(f"{path}: '{name}_0' holds {first.dtype} values; d3rlpy's tuple observations are not supported")
        out = memory.empty(name, (int(stops[-1]), *first.shape[1:]), np.float32 if first.dtype.kind == "f" else first.dtype)
        for i in range(count):
            file[f"{name}_{i}"].read_direct(out, dest_sel=np.s_[int(stops[i]) - lengths[i] : int(stops[i])])
        columns[name] = canonical(name, out, str(path))
    ends = np.zeros(int(stops[-1]), bool)
    ends[stops - 1] = True
    columns["terminations"] = np.zeros(int(stops[-1]), bool)
    columns["terminations"][stops - 1] = [bool(np.any(file[f"terminated_{i}"][()])) for i in range(count)]
    return RawData(columns, episode_ends=ends, name=path.stem, source="d3rlpy", path=str(path))
