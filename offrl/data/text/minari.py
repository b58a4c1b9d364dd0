"""Minari datasets whose observations and actions are texts (`gymnasium.spaces.Text`), read straight from their storage."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from offrl.data.formats import minari
from offrl.data.formats.files import open_hdf5
from offrl.data.formats.minari_episodes import numbered
from offrl.data.text.dataset import TextBuilder, refuse_settings
from offrl.data.text.files import TextFile, named_task, without_timeouts
from offrl.errors import UserError, warn
from offrl.settings.dataset import DatasetConfig

RECORD = "text"  # in what offrl records in the metadata of datasets that it writes: see `offrl.data.text.write`


def is_text(path: Path) -> bool:
    """True where the Minari dataset at `path` has texts for observations and for actions."""
    folder = minari.data_folder(path)
    try:
        meta = json.loads((folder / "metadata.json").read_text()) if folder else {}
        return all(json.loads(meta[f"{what}_space"])["type"] == "Text" for what in ("observation", "action"))
    except (OSError, ValueError, KeyError, TypeError):  # `minari.read` says what is wrong
        return False


def load(path: Path, config: DatasetConfig, faults: bool = False) -> TextFile:
    """The dataset in the folder `path`, for which `is_text` holds; see `offrl.data.text.files.load`.

    A step that both terminated and was cut off counts as terminated, as in all of Minari's datasets here.
    """
    folder = minari.data_folder(path)
    assert folder is not None
    meta = json.loads((folder / "metadata.json").read_text())
    name = str(meta.get("dataset_id") or folder.parent.name)
    refuse_settings(config, name)
    record = meta.get(minari.RECORD, {}).get(RECORD, {}) if isinstance(meta.get(minari.RECORD), dict) else {}
    if record and [record.get("episodes"), record.get("turns")] != [meta.get("total_episodes"), meta.get("total_steps")]:
        warn(f"{folder}: the episodes are not those that offrl wrote; the dataset is read by its layout alone")
        record = {}
    builder = TextBuilder(name, None, str(folder), "minari")
    builder.version = str(meta.get("minari_version", ""))
    builder.task = named_task(record["task"], str(folder)) if "task" in record else minari.recorded_task(meta, name, ())
    unknown, metas = set(record.get("unknown", ())), record.get("metas", [])
    problems: list[str] = []
    read = _hdf5 if meta.get("data_format", "hdf5") == "hdf5" else _arrow
    for number, (place, columns) in enumerate(read(folder)):
        try:
            if isinstance(columns, UserError):
                raise columns
            episode = _episode(columns, number in unknown, f"{folder}: {place}")
            builder.add(episode | ({"meta": metas[number]} if number < len(metas) else {}), place)
        except UserError as error:
            if not faults:
                raise
            problems.append(str(error).removeprefix(f"{folder}: "))
    if problems and not len(builder):
        raise UserError(f"{folder}: {problems[0]}")
    left_out = (*minari.NOT_ABOUT, "observation_space", "env_spec")
    return TextFile(without_timeouts(builder.finish(), config), {k: v for k, v in meta.items() if k not in left_out}, problems)


def _episode(columns: dict[str, list[Any]], unknown: bool, where: str) -> dict[str, Any]:
    """One of Minari's episodes in the canonical form. `unknown`: its last observation stands for one that is not known."""
    steps = len(columns["rewards"])
    for key in ("actions", "terminations", "truncations", "observations"):
        expected = steps + (key == "observations")
        if len(columns[key]) != expected:
            raise UserError(f"{where}: '{key}' has {len(columns[key])} entries, where {steps} rewards need {expected}")
    observations, actions = columns["observations"], columns["actions"]
    for step in range(steps - 1):
        if columns["terminations"][step] or columns["truncations"][step]:
            raise UserError(f"{where} is marked as ended at step {step}, and {steps - 1 - step} more follow")
    ended = bool(steps and columns["terminations"][-1])
    return {
        "turns": [{"obs": o, "action": a, "reward": r} for o, a, r in zip(observations[:steps], actions, columns["rewards"], strict=True)],
        "final_obs": None if unknown else observations[-1],
        "terminated": ended,
        "truncated": bool(steps and columns["truncations"][-1]) and not ended,
    }


_KEYS = ("observations", "actions", "rewards", "terminations", "truncations")


def _hdf5(folder: Path) -> Iterator[tuple[str, Any]]:
    """Through h5py's low-level interface, which takes a third of the time where episodes are short."""
    from h5py import h5d, h5g, h5s

    with open_hdf5(folder / "main_data.hdf5") as file:
        for name in numbered(iter(file), "episode_"):
            columns: Any = {}
            try:
                group = h5g.open(file.id, name.encode())
                for key in _KEYS:
                    item = h5d.open(group, key.encode())
                    values = np.empty(item.shape, item.dtype)
                    if values.size:
                        item.read(h5s.ALL, h5s.ALL, values)
                    columns[key] = [v.decode() if isinstance(v, bytes) else v for v in values.reshape(-1).tolist()]
            except UnicodeDecodeError:
                columns = UserError(f"{folder}: {name} has a text that is not UTF-8")
            except KeyError:
                columns = UserError(f"{folder}: {name} has no '{key}'")
            yield name, columns


def _arrow(folder: Path) -> Iterator[tuple[str, Any]]:
    """Arrow or Parquet: every column has T + 1 rows, of which only the observations use the last."""
    try:
        import pyarrow as pa
        import pyarrow.dataset as ds
    except ImportError:
        raise UserError("this dataset is stored as Arrow: pip install pyarrow") from None
    for name in numbered((p.name for p in folder.iterdir() if p.is_dir()), ""):
        files = sorted(str(p) for p in (folder / name).iterdir() if p.suffix in (".arrow", ".parquet"))
        if not files:
            yield f"episode {name}", UserError(f"{folder}: episode {name} has no .arrow or .parquet file; the dataset is incomplete")
            continue
        try:
            table = ds.dataset(files, format=Path(files[0]).suffix[1:]).to_table()
        except (pa.ArrowInvalid, OSError) as error:
            text = " ".join(str(error).split())
            yield f"episode {name}", UserError(f"{folder}: episode {name} cannot be read ({text}); the file is damaged or incomplete")
            continue
        if missing := [k for k in _KEYS if k not in table.column_names]:
            yield f"episode {name}", UserError(f"{folder}: episode {name} has no '{missing[0]}'")
            continue
        values = {k: table.column(k).to_pylist() for k in _KEYS}
        yield f"episode {name}", {k: v if k == "observations" else v[:-1] for k, v in values.items()}
