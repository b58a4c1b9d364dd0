"""What people hand to Python functions as a dataset: names, paths, lists of paths, DataFrames."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from offrl.data.dataset import Dataset
from offrl.data.loading.assemble import assemble
from offrl.data.tables.frame import NAME, is_frame, raw_from_frame
from offrl.errors import UserError
from offrl.settings.dataset import DatasetConfig
from offrl.settings.untrusted import literal
from offrl.tasks.task import lookup


def as_dataset(dataset: Any, config: DatasetConfig) -> Dataset:
    """A `Dataset` as it is; a DataFrame as `config` maps its columns. Raises UserError."""
    return dataset if isinstance(dataset, Dataset) else assemble(raw_from_frame(dataset, config), config)


def is_user_data(name: str, dataset: Dataset) -> bool:
    """Whether data are a person's own, for which nobody published how long to train: none of the known names, no
    reference scores.
    """
    spec = dataset.spec
    if spec.text or spec.source in ("builtin", "ogbench") or (spec.source == "minari" and not Path(name).exists()):
        return False
    known = any(lookup(word) is not None for word in (spec.name, name))
    return not known and (spec.task is None or spec.task.ref_min is None)


def name_of(dataset: Any) -> str:
    """The setting `dataset` for what a caller gave. Raises UserError for what is no dataset, with the function that
    makes one of it.
    """
    if isinstance(dataset, Dataset):
        return literal(dataset.spec.name)
    if isinstance(dataset, str | Path):
        return str(dataset)
    if is_frame(dataset):
        return NAME
    if isinstance(dataset, list | tuple) and dataset and all(isinstance(p, str | Path) for p in dataset):
        if odd := [str(p) for p in dataset if set(str(p)) & set(",[]")]:
            raise UserError(f"dataset={odd[0]}: in a list of files no name has a comma or a bracket; rename it")
        return f"[{','.join(map(str, dataset))}]"
    hint = ""
    if isinstance(dataset, Mapping):
        hint = ": offrl.from_arrays(**{name: array}) makes one of arrays by name"
    elif hasattr(dataset, "shape"):
        hint = ": offrl.from_arrays(observations, actions, rewards, ...) makes one of arrays"
    raise UserError(
        f"dataset is a {type(dataset).__name__}; it may be a name or path, a list of paths, a DataFrame or an "
        f"offrl.Dataset{hint}"
    )
