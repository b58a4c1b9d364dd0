"""Which source a name, path or id belongs to."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from offrl import registry
from offrl.data.containers.file_type import file_type
from offrl.data.containers.guard import reading
from offrl.data.containers.hdf5 import open_hdf5
from offrl.data.containers.npz import Npz
from offrl.data.containers.plain_files import refuse_special, refuse_tables
from offrl.data.formats import d4rl, minari, ogbench, padded, robomimic, vd4rl
from offrl.data.formats.lerobot import meta as lerobot
from offrl.data.formats.minari_episodes import numbered
from offrl.data.tables import files as tables
from offrl.data.tables.csv_file import is_csv
from offrl.data.text import files as text
from offrl.data.text import minari as minari_text
from offrl.errors import UserError, nearest
from offrl.settings.aliases import datasets
from offrl.settings.dataset import DatasetConfig
from offrl.tasks.task import Task, lookup

BUILTIN = Path(__file__).parents[2] / "assets" / "hopper-mixed-v0.hdf5"
# .json is mostly something else
_SUFFIXES = (".hdf5", ".h5", ".npz", ".parquet", ".npy", ".pq", ".hdf", ".csv", ".tsv", ".jsonl", ".ndjson")


@dataclass(frozen=True)
class Source:
    """The location of a dataset."""

    kind: str  # builtin | registered | one of offrl.settings.dataset.FORMATS
    name: str
    path: Path | None = None
    task: Task | None = None
    loader: Callable[[DatasetConfig], Any] | None = None
    beside: Path | None = None  # a file that is read as well
    files: tuple[Path, ...] = ()  # all of them, where there are several

    @property
    def text(self) -> bool:
        """True where the data are texts: `load_text` reads them, and `read_raw` does not."""
        return self.kind == "text" or (
            self.kind == "minari" and self.path is not None and minari_text.is_text(self.path)
        )

    def identity(self) -> list[Any]:
        """A state that changes with any file: paths, sizes and times of the last change. For the keys of the caches."""
        if self.path is None:
            return [self.kind, self.name]
        folders = {"minari": minari.files, "lerobot": lerobot.files}
        files = folders[self.kind](self.path) if self.kind in folders else list(self.files) or [self.path]
        files += [self.beside] if self.beside is not None and self.beside.is_file() else []
        # ctime: mtime can be set
        stats = [(str(p.resolve()), s.st_size, s.st_mtime_ns, s.st_ctime_ns) for p in files for s in [p.stat()]]
        return [self.kind, self.name, stats]


def resolve(name: str, config: DatasetConfig) -> Source:
    """The source of `name`; downloads what is a name and not here yet. Raises UserError, with the nearest name, for an
    unknown one.
    """
    if not isinstance(name, str):
        raise UserError(f"dataset={name!r} is no name of data, which is a text")
    form = config.format
    prefix, colon, path_or_id = name.partition(":")
    if colon and prefix in ("minari", "d4rl", "ogbench") and not path_or_id.startswith("//"):
        form, name = prefix, path_or_id
    if name == "builtin":
        if not BUILTIN.is_file():
            raise UserError(f"the built-in dataset is missing from this installation ({BUILTIN}); install offrl again")
        return Source("builtin", name, BUILTIN)
    if form == "auto" and name in (loaders := registry.names("dataset")):
        return Source("registered", name, loader=loaders[name])
    if (several := _several(name, config)) is not None:
        return several
    path = Path(name).expanduser()
    with reading(path):
        exists = path.exists()  # not where a name is too long for the file system
    if exists:
        with reading(path):
            source = _by_path(path, name, form)
        if source.kind == "padded" and config.instruction_encodings:
            refuse_special(beside := Path(config.instruction_encodings).expanduser())
            return replace(source, beside=beside)
        return source
    if (
        path.suffix.lower() in _SUFFIXES
        or is_csv(path)
        or text.named_text(path)
        or re.match(r"[./~]|[A-Za-z]:\\", name)
    ):
        raise UserError(_missing(path))
    task = lookup(name) if form in ("auto", "d4rl") else None
    if task is not None and task.url:
        return Source("d4rl", name, d4rl.locate(task, config), task)
    if form == "ogbench" or (form == "auto" and ogbench.NAME.fullmatch(name)):
        return Source("ogbench", name, ogbench.locate(name, config), lookup(name.removesuffix("-val")))
    if form == "minari" or (
        form == "auto" and minari.ID.fullmatch(name) and ("/" in name or name in minari.installed())
    ):
        return _minari(name, minari.locate(name))
    known = _known_names()
    hint = datasets.hint(name) or nearest(name, known) or " `offrl data list` shows those that can be named"
    raise UserError(f"unknown dataset '{name}': no such file, and no D4RL, OGBench, Minari or registered name.{hint}")


def _several(name: str, config: DatasetConfig) -> Source | None:
    """The source of a list "[a.csv,b.csv]" or a glob; None for another name. Raises UserError for files that are whole
    datasets each.
    """
    if not (name.startswith("[") and name.endswith("]")) and not any(c in name for c in "*?"):
        return None
    paths = tables.listed(name)
    if not paths:
        raise UserError(f"dataset={name} names no file")
    if all(map(tables.is_table, paths)):
        refuse_tables(paths, by_name=name.startswith("["))
        return Source("columns", name, paths[0], files=tuple(paths))
    if len(paths) == 1:
        return resolve(str(paths[0]), config)
    shown = " ".join(map(str, paths[:3])) + (" ..." if len(paths) > 3 else "")
    remaining = ",".join(map(str, paths[1:3])) + (",..." if len(paths) > 3 else "")
    raise UserError(
        f"dataset={name} names {len(paths)} files, of which each is a dataset (only CSV and Parquet are read as one): "
        "`offrl data merge "
        f"{shown} merged.hdf5` makes one of these, or append the others: dataset={paths[0]} "
        f'"dataset.concatenate=[{remaining}]"'
    )


def _known_names() -> list[str]:
    """Names worth suggesting: registered ones, D4RL's, the Minari ids that are installed, and files in the working
    directory.
    """
    names = ["builtin", *registry.names("dataset"), *minari.installed()]
    registry.names("task")  # imports the tables
    for listed in registry.names("task_names").values():
        names += list(listed())
    return names + _data_files(Path())


def _data_files(folder: Path) -> list[str]:
    """The names of files in a folder that are datasets by their names."""
    return sorted(
        p.name for p in folder.iterdir() if p.suffix in _SUFFIXES or is_csv(p) or p.name.endswith(".jsonl.gz")
    )


def _missing(path: Path) -> str:
    """The message for a file that is not there, with the nearest file name in its folder."""
    folder = path.parent
    if not folder.is_dir():
        return f"there is no file {path}: the folder {folder} does not exist"
    return f"there is no file {path}.{nearest(path.name, _data_files(folder))}"


def _by_path(path: Path, name: str, form: str) -> Source:
    """The source of a file or folder that exists, by its content."""
    if form == "lerobot" or (path.is_dir() and lerobot.is_lerobot(path)):
        return Source("lerobot", path.resolve().name, path)
    if path.is_dir():
        if minari.data_folder(path) is None:
            if paths := tables.listed(name):
                refuse_tables(paths, by_name=False)
                return Source("columns", name, paths[0], files=tuple(paths))
            if paths := vd4rl.files(path):
                return Source("vd4rl", name, path, files=tuple(paths))
            inside = _data_files(path)
            hint = (
                f"; it has the files {', '.join(inside[:5])}: name one, or make one of them with `offrl data merge`"
                if inside
                else ""
            )
            raise UserError(
                f"{path} is a folder without a Minari dataset (no data/metadata.json), a LeRobot dataset (no "
                f"meta/info.json), and CSV, Parquet or V-D4RL files{hint}"
            )
        return _minari("", path)
    refuse_tables([path], by_name=True)
    if form != "auto":
        return _minari(name, path) if form == "minari" and minari.data_folder(path) else Source(form, name, path)
    if is_csv(path):
        return Source("columns", name, path)
    if text.is_text(path):
        return Source("text", name, path)
    kind = file_type(path)
    if padded.is_padded(path, kind):
        return Source("padded", name, path)
    if kind == "npz" and ogbench.is_own(path, set(Npz(path).shapes)):
        return Source("ogbench", name, path, lookup(path.stem.removesuffix("-val")))
    if kind == "npz" and vd4rl.own(kind, set(Npz(path).shapes)):
        return Source("vd4rl", name, path)
    if kind != "hdf5":
        return Source("columns", name, path)
    with open_hdf5(path) as file:
        if robomimic.demonstrations(file):
            return Source("robomimic", name, path)
        if minari.data_folder(path) and numbered(file, "episode_"):
            return _minari("", path)
        keys = set(file)
    if {"actions_0", "rewards_0"} <= keys or {"observations", "episode_terminals"} <= keys:
        return Source("d3rlpy", name, path)
    if {"observations", "actions", "rewards", "terminals"} <= keys:
        return Source("d4rl", name, path)
    if vd4rl.own(kind, keys):
        return Source("vd4rl", name, path)
    return Source("columns", name, path)


def _minari(name: str, path: Path) -> Source:
    """The source of a Minari dataset. Raises UserError for links that lead out of it."""
    minari.refuse_links(path)
    return Source("minari", name, path)


def guessed_task(source: Source) -> Task | None:
    """The task that the name of the source stands for; the file itself may say more."""
    return source.task or (
        d4rl.guess_task(source.path.stem) if source.kind in ("columns", "d4rl") and source.path else None
    )
