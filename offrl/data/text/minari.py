"""Minari datasets whose observations and actions are texts (`gymnasium.spaces.Text`), read straight from their
storage.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from offrl.data.containers.guard import reading
from offrl.data.containers.hdf5 import open_hdf5, refuse_absent, refuse_long_texts, refuse_loops
from offrl.data.containers.parquet import read_table
from offrl.data.formats import minari
from offrl.data.formats.minari_episodes import numbered
from offrl.data.formats.minari_spaces import load_metadata
from offrl.data.text.dataset import TextBuilder, refuse_settings
from offrl.data.text.files import TextFile, named_task, without_timeouts
from offrl.errors import UserError, warn
from offrl.settings.dataset import DatasetConfig

RECORD = "text"  # in what offrl records in the metadata of datasets that it writes: see `offrl.data.text.write`


def is_text(path: Path) -> bool:
    """True where the Minari dataset at `path` has texts for observations and for actions."""
    folder = minari.data_folder(path)
    try:
        metadata = load_metadata(folder) if folder else None
    except UserError:  # `minari.read` says what is wrong
        return False
    return metadata is not None and metadata.observations["type"] == metadata.actions["type"] == "Text"


def load(path: Path, config: DatasetConfig, faults: bool = False) -> TextFile:
    """The dataset in the folder `path`, for which `is_text` holds; see `offrl.data.text.files.load`.

    A step that both terminated and was cut off counts as terminated, as in all of Minari's datasets here.
    """
    folder = minari.data_folder(path)
    assert folder is not None
    metadata = load_metadata(folder)
    meta = metadata.values
    name = str(meta.get("dataset_id") or folder.parent.name)
    refuse_settings(config, name)
    record = meta.get(minari.RECORD, {}).get(RECORD, {}) if isinstance(meta.get(minari.RECORD), dict) else {}
    if not isinstance(record, dict):
        raise UserError(f"{folder}: what offrl recorded there is damaged ({str(record)[:40]}); get the dataset again")
    if record and [record.get("episodes"), record.get("turns")] != [
        meta.get("total_episodes"),
        meta.get("total_steps"),
    ]:
        warn(f"{folder}: the episodes are not those that offrl wrote; the dataset is read by its layout alone")
        record = {}
    builder = TextBuilder(name, None, str(folder), "minari")
    builder.version = str(meta.get("minari_version", ""))
    builder.task = (
        named_task(record["task"], str(folder)) if "task" in record else minari.recorded_task(metadata, name, ())
    )
    with reading(f"{folder}: what offrl recorded there"):
        unknown, metas = set(record.get("unknown", ())), list(record.get("metas", ()))
    problems: list[str] = []
    episodes = _hdf5(folder) if metadata.format == "hdf5" else _arrow(folder, metadata.format)
    for number, (label, columns) in enumerate(episodes):
        try:
            if isinstance(columns, UserError):
                raise columns
            episode = _episode(columns, number in unknown, f"{folder}: {label}")
            builder.add(episode | ({"meta": metas[number]} if number < len(metas) else {}), label)
        except UserError as error:
            if not faults:
                raise
            problems.append(str(error).removeprefix(f"{folder}: "))
    if problems and not len(builder):
        raise UserError(f"{folder}: {problems[0]}")
    left_out = (*minari.NOT_ABOUT, "observation_space", "env_spec")
    return TextFile(
        without_timeouts(builder.finish(), config), {k: v for k, v in meta.items() if k not in left_out}, problems
    )


def _episode(columns: dict[str, list[Any]], unknown: bool, where: str) -> dict[str, Any]:
    """One of Minari's episodes in the canonical form. `unknown`: its last observation stands for one that is not
    known.
    """
    steps = len(columns["rewards"])
    for key in ("actions", "terminations", "truncations", "observations"):
        expected = steps + (key == "observations")
        if len(columns[key]) != expected:
            raise UserError(f"{where}: '{key}' has {len(columns[key])} entries, where {steps} rewards need {expected}")
    for key in ("terminations", "truncations"):
        if wrong := [v for v in columns[key] if v not in (0, 1)]:
            raise UserError(f"{where}: '{key}' holds {str(wrong[0])[:30]!r}; flags are 0 or 1")
    observations, actions = columns["observations"], columns["actions"]
    for step in range(steps - 1):
        if columns["terminations"][step] or columns["truncations"][step]:
            raise UserError(f"{where} is marked as ended at step {step}, and {steps - 1 - step} more follow")
    ended = bool(steps and columns["terminations"][-1])
    return {
        "turns": [
            {"obs": o, "action": a, "reward": r}
            for o, a, r in zip(observations[:steps], actions, columns["rewards"], strict=True)
        ],
        "final_obs": None if unknown else observations[-1],
        "terminated": ended,
        "truncated": bool(steps and columns["truncations"][-1]) and not ended,
    }


_KEYS = ("observations", "actions", "rewards", "terminations", "truncations")


def _is_column(key: str, item: Any) -> bool:
    """True for an h5py.h5d.DatasetID with texts, or for rewards and flags with numbers, [R] or [R, 1]."""
    return item.dtype.kind in ("OS" if key in _KEYS[:2] else "biuf") and (
        item.rank == 1 or (item.rank == 2 and item.shape[1] == 1)
    )


def _hdf5(folder: Path) -> Iterator[tuple[str, Any]]:
    """Through h5py's low-level interface, which takes a third of the time where episodes are short."""
    from h5py import h5d, h5g, h5s

    with open_hdf5(folder / "main_data.hdf5") as file:
        refuse_loops(path := folder / "main_data.hdf5")
        for name in numbered(file, "episode_"):
            columns: Any = {}
            key = "rewards"
            try:
                group = h5g.open(file.id, name.encode())
                for key in _KEYS:
                    item = h5d.open(group, key.encode())
                    if not _is_column(key, item):
                        due = "texts" if key in _KEYS[:2] else "numbers"
                        raise UserError(
                            f"{folder}: {name}: '{key}' holds {item.dtype} of shape {list(item.shape or ())}; a column "
                            f"of {due} is due"
                        )
                    refuse_absent(item, f"{folder}: {name}: '{key}'", file)
                    refuse_long_texts(item, path, f"{folder}: {name}: '{key}'")
                    values = np.empty(item.shape, item.dtype)
                    if values.size:
                        item.read(h5s.ALL, h5s.ALL, values)
                    columns[key] = [v.decode() if isinstance(v, bytes) else v for v in values.reshape(-1).tolist()]
            except UnicodeDecodeError:
                columns = UserError(f"{folder}: {name} has a text that is not UTF-8")
            except KeyError:
                columns = UserError(f"{folder}: {name} has no '{key}'")
            except UserError as error:
                columns = error
            yield name, columns


def _arrow(folder: Path, form: str) -> Iterator[tuple[str, Any]]:
    """Arrow or Parquet: every column has T + 1 rows, of which only the observations use the last."""
    import pyarrow as pa

    for name in numbered((p.name for p in folder.iterdir() if p.is_dir()), ""):
        columns: Any = {}
        try:
            table, file = read_table(folder / name, form)
            if missing := [k for k in _KEYS if table.column_names.count(k) != 1]:
                raise UserError(f"{folder}: episode {name} has no '{missing[0]}', or has it twice")
            with reading(file):
                for key in _KEYS[2:]:
                    kind = table.schema.field(key).type
                    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
                    if not (pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)):
                        raise UserError(f"{folder}: episode {name}: '{key}' holds {kind} values, not numbers")
                values = {k: table.column(k).to_pylist() for k in _KEYS}
            columns = {k: v if k == "observations" else v[:-1] for k, v in values.items()}
        except UserError as error:
            columns = error
        yield f"episode {name}", columns
