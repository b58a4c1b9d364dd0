"""Files that offrl itself writes: beside the layout they hold a record of it, which is damaged as well."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from tests.fuzz.drafts import Draft, Rng, random_episodes, stacked
from tests.fuzz.json_slips import json_slip


def written(rng: Rng) -> Draft:
    """Columns for `write`, with what makes a record worth having: unknown last observations, a range, extra columns."""
    columns = stacked(random_episodes(rng, discrete=rng.random() < 0.2))
    table = {name: columns[name] for name in ("observations", "actions", "rewards", "terminations")}
    ends = columns["episode_ends"].copy()
    ends[-1] = rng.random() < 0.7
    table["episode_ends"] = ends
    if rng.random() < 0.5:
        table["truncations"] = columns["truncations"] & ends
    if rng.random() < 0.4:
        table["next_observations"] = columns["next_observations"]
    if rng.random() < 0.4:
        table["speed"] = rng.normal(size=len(table["rewards"])).astype(np.float32)
    minari = bool(rng.random() < 0.5)
    return Draft("record", "case-v0" if minari else "case.hdf5", {"": table})


def write(draft: Draft, path: Path) -> None:
    """The columns as `offrl data convert` would write them."""
    from offrl.data.arrays import raw_from_arrays
    from offrl.data.writing.write import write_data
    from offrl.settings.dataset import DatasetConfig

    table = dict(draft.tables[""])
    raw = raw_from_arrays(table, DatasetConfig(name="case"))
    form = "d4rl" if path.suffix else "minari"
    write_data(raw, path, form, {"author": "nobody", "description": "made up"})


def change(path: Path, rng: Rng) -> str:
    """Another record in the file or folder at `path`, often with the checksum that belongs to it."""
    if path.is_dir():
        place = path / "data" / "metadata.json"
        meta = json.loads(place.read_text())
        what, meta["offrl"] = _changed(meta["offrl"], rng)
        place.write_text(json.dumps(meta))
        return what
    with h5py.File(path, "a") as file:
        text = file["metadata/offrl"][()]
        del file["metadata/offrl"]
        what, record = _changed(json.loads(text), rng)
        file["metadata/offrl"] = json.dumps(record)
    return what


def _changed(record: Any, rng: Rng) -> tuple[str, Any]:
    inside = [record]
    what = json_slip(inside, rng)
    record = inside[0] if inside else None
    if isinstance(record, dict) and rng.random() < 0.8:
        plain = {key: value for key, value in record.items() if key != "sha256"}
        record["sha256"] = hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()
        what += ", with its checksum"
    return f"record: {what}", record
