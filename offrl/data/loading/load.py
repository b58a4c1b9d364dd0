"""`load_dataset`: resolve, read, check, assemble, transform, and put the columns where they fit; and what people hand
to Python functions as a dataset: names, paths, lists of paths, DataFrames.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from offrl.data.dataset import Dataset
from offrl.data.loading.assemble import assemble
from offrl.data.loading.cache import code_id, entry
from offrl.data.loading.read import load_one
from offrl.data.loading.resolve import resolve
from offrl.data.memory import Memory, mapped_bytes, memory_budget, open_mapped
from offrl.data.tables.frame import NAME, from_dataframe, is_frame, raw_from_frame
from offrl.data.text.dataset import refuse_settings
from offrl.data.transforms.apply import apply_transforms
from offrl.data.transforms.reward_labels import labeller
from offrl.errors import UserError
from offrl.settings.dataset import DatasetConfig
from offrl.settings.untrusted import literal
from offrl.tasks.task import lookup


def load_dataset(config: DatasetConfig | str | Dataset | Any, device: str = "cpu", quiet: bool = False) -> Dataset:
    """The dataset that `config` (or a name, path, list of paths or DataFrame alone) describes; a `Dataset` is returned
    as it is.

    The columns are on the CPU, in memory, or memory-mapped when `config.memory` says so or when they need more than the
    memory limit of the host or of `device`, the one they are meant for; `Dataset.to` moves them. `quiet`: no progress
    of models that label data. Raises UserError, in one line, for whatever is wrong.
    """
    if isinstance(config, Dataset):
        return config
    if not isinstance(config, DatasetConfig):
        if is_frame(config):
            return from_dataframe(config)
        config = DatasetConfig(name=name_of(config))
    config.validate()
    names = [config.name, *config.concatenate]
    sources = [resolve(name, config) for name in names]
    sources += [resolve(name, config.of_any_layout("actions")) for name in config.action_free]
    if config.expert is not None:
        sources.append(resolve(config.expert, config))
    sources += [resolve(name, config.of_any_layout()) for name in config.imagined]
    for source in sources:
        if source.text:
            refuse_settings(config, str(source.path))
    budget = float("inf")
    if config.memory == "mmap":
        budget = -1.0
    elif config.memory == "auto":
        budget = config.memory_limit_gb * 1e9 if config.memory_limit_gb else memory_budget(device)
    functions = {f"dataset.{k}": getattr(config, k) for k in ("reward_labels", "cost_labels")}
    labels = "".join(labeller(text, setting)[1] for setting, text in functions.items() if text is not None)
    target = entry("mapped", config, sources, labels)
    files = all(s.kind != "registered" for s in sources)
    cached = mapped_bytes(target, code_id()) if files else None
    if cached is not None and cached > budget:
        return open_mapped(target)
    memory = Memory(budget, target.parent)
    try:
        configs = [config, *[replace(config, episodes="")] * len(config.concatenate)]
        parts = [load_one(s, c, memory) for s, c in zip(sources, configs, strict=False)]
        dataset = apply_transforms(parts, config, memory, files, device, quiet)
        if config.memory == "mmap" or memory.folder is not None or dataset.nbytes > budget:
            memory.write(dataset, target, code_id())
            return open_mapped(target)
        return dataset
    except OSError as error:
        raise UserError(
            f"cannot write memory-mapped columns under {target.parent} ({error.strerror}); set dataset.cache_dir"
        ) from None
    finally:
        memory.discard()


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
