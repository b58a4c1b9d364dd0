"""Places that data are written to: what a target's name stands for, and replacing what stands there in one step."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path

from offrl.data.formats import minari
from offrl.data.formats.lerobot import meta as lerobot
from offrl.errors import UserError
from offrl.system.locks import TemporaryFolder

FORMS = ("d4rl", "minari", "jsonl", "lerobot")
D4RL_SUFFIX = (".hdf5", ".h5")
TEXT_SUFFIX = (".jsonl", ".jsonl.gz")
LEROBOT_SUFFIX = (".lerobot",)


@contextlib.contextmanager
def atomic_output(target: Path) -> Iterator[Path]:
    """Gives a path beside `target` to write a file or folder to, which is moved to `target` in one step when the body
    has not raised.

    Raises UserError for what the file system raises: what stood at `target` is untouched then, and nothing half-written
    is left."""
    part: TemporaryFolder | None = None
    folders = [p for p in (target.parent, *target.parent.parents) if not p.exists()]
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        part = TemporaryFolder(f".{target.name}.part-", target.parent)
        written = part.path / target.name
        yield written
        _sync(written)
        _replace(written, target)
    except (OSError, RuntimeError) as error:  # h5py has both
        raise write_error(error, target) from None
    finally:
        if part is not None:
            part.close()
        if not target.exists():
            for folder in folders:
                with contextlib.suppress(OSError):
                    folder.rmdir()


def output_path(target: str | Path, form: str, dataset_id: str = "", force: bool = False) -> tuple[Path, str]:
    """The path to write to, and the id of a Minari dataset (`dataset_id`: the id of one in a folder of its own).

    Raises UserError where `target` does not fit `form`, or where something stands there that is not to be replaced.
    """
    path, data_id = _place(str(target), form, dataset_id)
    if path.exists():
        if not force:
            raise UserError(f"{path} exists; give another name, or force=true to replace it")
        sound = {"minari": minari.data_folder(path) == path / "data", "lerobot": lerobot.is_lerobot(path)}
        if path.is_dir() and not sound.get(form):
            raise UserError(
                f"{path} is a folder that holds no dataset of format {form}, and is not replaced; give another name"
            )
    return path, data_id


def _place(target: str, form: str, dataset_id: str) -> tuple[Path, str]:
    path = Path(target).expanduser()
    if form not in FORMS:
        raise UserError(f"data are written as {' or '.join(FORMS)}, not '{form}'")
    if form == "d4rl":
        if path.suffix.lower() not in D4RL_SUFFIX:
            raise UserError(
                f"{target}: a D4RL file ends in .hdf5; write {target}.hdf5, or format=minari for a Minari dataset"
            )
        return path, ""
    if form == "jsonl":
        if not path.name.lower().endswith(TEXT_SUFFIX):
            raise UserError(f"{target}: JSON lines end in .jsonl or .jsonl.gz; write {target}.jsonl")
        return path, ""
    if form == "lerobot":
        return path, ""
    target = target.removeprefix("minari:")
    path = Path(target).expanduser()
    if path.suffix.lower() in (
        ".npz",
        ".npy",
        ".parquet",
        ".pq",
        ".hdf",
        ".csv",
        ".json",
        ".zip",
        ".pkl",
        *TEXT_SUFFIX,
    ):
        raise UserError(
            f"{target}: data are written as D4RL HDF5 (a name that ends in .hdf5), texts as JSON lines (.jsonl), and "
            "both as Minari datasets (an id, or a folder)"
        )
    if path.suffix.lower() in D4RL_SUFFIX:
        raise UserError(f"{target}: a Minari dataset is an id such as mine/{path.stem}-v0, or a folder, not a file")
    is_path = target.startswith((".", "~", "/", "\\")) or path.is_absolute() or not minari.ID.fullmatch(target)
    if not is_path:
        return minari.root() / target, target
    base, inside = minari.root().resolve(), path.resolve()
    if inside.is_relative_to(base) and minari.ID.fullmatch(data_id := inside.relative_to(base).as_posix()):
        return path, data_id
    if minari.ID.fullmatch(dataset_id):
        return path, dataset_id
    name = re.sub(r"[^\w-]+", "-", inside.name).strip("-") or "data"
    return path, name if minari.ID.fullmatch(name) else f"{name}-v0"


def _sync(written: Path) -> None:
    """Bring files to the disk, so that a rename never leaves a name without its data."""
    for path in [written, *written.rglob("*")] if written.is_dir() else [written]:
        if path.is_file():
            with open(path, "rb") as handle:
                os.fsync(handle.fileno())


def _replace(written: Path, target: Path) -> None:
    """Move into place in one step; a folder that stands there is moved aside first, and back if that fails."""
    if not (target.is_dir() and not target.is_symlink()):
        os.replace(written, target)
        return
    aside = written.with_name("old")
    os.replace(target, aside)  # goes with the temporary folder
    try:
        os.replace(written, target)
    except OSError:
        os.replace(aside, target)
        raise


def write_error(error: OSError | RuntimeError, path: Path) -> UserError:
    """The one-line message for a write that failed; h5py's have the cause in their text only."""
    text = " ".join(str(error).split())
    code = getattr(error, "errno", None) or next((int(n) for n in re.findall(r"errno = (\d+)", text)), None)
    outcome = "what stood there before is untouched" if path.exists() else "nothing was left there"
    if code in (28, 122):
        return UserError(f"disk full while writing {path}; {outcome}: free some space, or give a place on another disk")
    reason = os.strerror(code) if code else text
    return UserError(f"cannot write {path}: {reason}; {outcome}")
