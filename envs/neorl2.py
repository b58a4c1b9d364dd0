"""NeoRL-2 (arXiv 2503.19267): its datasets by name, which returns score 0 and 100, and its environments where the
package has them.

The numbers are data (`neorl2.json`); the neorl2 package is imported to make an environment and for nothing else.
"""

from __future__ import annotations

import importlib.util
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from offrl.errors import UserError, warn
from offrl.registry import register
from offrl.tasks.task import Task

if TYPE_CHECKING:
    from offrl.data.raw import RawData
    from offrl.settings.dataset import DatasetConfig

URL = "http://datasets.polixir.site/neorl2"  # no https is known there: the checksums are what protects a download
FIELDS = {  # as neorl2_dataset's get_data.py writes them
    "observations": "obs",
    "next_observations": "next_obs",
    "actions": "action",
    "rewards": "reward",
    "terminations": "done",
    "truncations": "truncated",
}
_DATA = json.loads((Path(__file__).parent / "neorl2.json").read_text(encoding="utf-8"))
TASKS: dict[str, tuple[int, int, int, float, float]] = {name: tuple(row) for name, row in _DATA["tasks"].items()}
MD5: dict[str, str] = _DATA["md5"]  # of the training files
TRAJECTORIES: dict[str, int] = _DATA["trajectories"]


@register("task", "neorl2")
def lookup(name: str) -> Task | None:
    """The task of a NeoRL-2 dataset by its exact name, such as "Pipeline"; None for any other name.

    It has no environment where the neorl2 package is not installed.
    """
    if name not in TASKS:
        return None
    observations, actions, steps, low, high = TASKS[name]
    installed = importlib.util.find_spec("neorl2") is not None
    return Task(
        name=name,
        env_id=f"neorl2:{name}" if installed else None,
        max_episode_steps=steps,
        ref_min=low,
        ref_max=high,
        ref_label="NeoRL-2",
        observation_dim=observations,
        action_dim=actions,
        note="" if installed else "NeoRL-2's environments need the neorl2 package, which is not installed",
    )


def locate(name: str) -> Path:
    """The training file of a dataset: in $OFFRL_NEORL2, or where the neorl2 package keeps it. Raises UserError where it
    is in neither.
    """
    directory, file = os.environ.get("OFFRL_NEORL2"), f"{name}-train.npz"
    folders = [Path(f).expanduser() for f in (directory, "~/.neorl2/datasets") if f]
    for path in (folder / sub / file for folder in folders for sub in ("", name)):
        if path.is_file():
            return path
    raise UserError(
        f"NeoRL-2's {name} is not here: there is no {file} in {' or '.join(map(str, folders))}; get it from "
        f"{URL}/{name}/{file} (MD5 {MD5[name]}) or with the neorl2 package and "
        f"{'put it there' if directory else 'set $OFFRL_NEORL2 to its folder'}"
    )


def _load(name: str, config: DatasetConfig) -> RawData:
    from offrl.data.formats.download import checksum

    path = locate(name)
    if (digest := checksum(path, "md5")) != MD5[name]:
        warn(
            f"{path} is not the file that NeoRL-2 published: its MD5 is {digest}, that of the published one {MD5[name]}"
        )
    return read(name, path, config)


for _name in TASKS:
    register("dataset", _name)(lambda config, name=_name: _load(name, config))


def read(name: str, path: Path, config: DatasetConfig) -> RawData:
    """The columns of the training file of `name`; `config.fields` names other keys. Raises UserError for a file that is
    not one of them.
    """
    from offrl.data.containers.npz import Npz
    from offrl.data.loading.read import read_raw

    fields = {
        **{column: key for column, key in FIELDS.items() if key != "truncated" or key in Npz(path).shapes},
        **config.fields,
    }
    raw = read_raw(str(path), replace(config, name=str(path), format="columns", fields=fields))
    for column, size in zip(("observations", "actions"), TASKS[name][:2], strict=True):
        if raw.columns[column].shape[1:] != (size,):
            raise UserError(
                f"{path} is not NeoRL-2's {name}: its {column} have shape {raw.columns[column].shape[1:]}, not "
                f"({size},)"
            )
    raw.name, raw.source, raw.task = name, "neorl2", lookup(name)
    if name in TRAJECTORIES:
        _keep(raw, TRAJECTORIES[name])
    return raw


def _keep(raw: RawData, trajectories: int) -> None:
    """Drop what comes after the first `trajectories` episodes."""
    flags = [raw.columns[k] for k in ("terminations", "truncations") if k in raw.columns]
    ends = np.flatnonzero(np.logical_or.reduce(flags)) + 1
    if len(ends) > trajectories:
        raw.columns = {k: column[: ends[trajectories - 1]] for k, column in raw.columns.items()}
        raw.notes.append(f"the first {trajectories} of {len(ends)} trajectories, as the neorl2 package gives them out")
