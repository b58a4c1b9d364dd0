"""Places that data are written to: what a target's name stands for, and replacing what stands there in one step."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path

from offrl.data.formats import minari
from offrl.errors import UserError
from offrl.system.locks import TemporaryFolder

FORMS = ("d4rl", "minari", "jsonl")
D4RL_SUFFIX = (".hdf5", ".h5")
TEXT_SUFFIX = (".jsonl", ".jsonl.gz")


@contextlib.contextmanager
def placing(place: Path) -> Iterator[Path]:
    """Gives a path beside `place` to write a file or folder to, which is moved to `place` in one step when the body has
    not raised.

    Raises UserError for what the file system raises: what stood at `place` is untouched then, and nothing half-written
    is left."""
    part: TemporaryFolder | None = None
    folders = [p for p in (place.parent, *place.parent.parents) if not p.exists()]
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        part = TemporaryFolder(f".{place.name}.part-", place.parent)
        written = part.path / place.name
        yield written
        _sync(written)
        _replace(written, place)
    except (OSError, RuntimeError) as error:  # h5py has both
        raise write_error(error, place) from None
    finally:
        if part is not None:
            part.close()
        if not place.exists():
            for folder in folders:
                with contextlib.suppress(OSError):
                    folder.rmdir()


def destination(target: str | Path, form: str, given: str = "", force: bool = False) -> tuple[Path, str]:
    """The path to write to, and the id of a Minari dataset (`given`: the id of one in a folder of its own).

    Raises UserError where `target` does not fit `form`, or where something stands there that is not to be replaced.
    """
    place, data_id = _place(str(target), form, given)
    if place.exists():
        if not force:
            raise UserError(f"{place} exists; give another name, or force=true to replace it")
        if place.is_dir() and (form != "minari" or minari.data_folder(place) != place / "data"):
            raise UserError(f"{place} is a folder that holds no Minari dataset, and is not replaced; give another name")
    return place, data_id


def _place(target: str, form: str, given: str) -> tuple[Path, str]:
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
            f"{target}: data are written as D4RL HDF5 (a name that ends in .hdf5), texts as JSON lines (.jsonl), "
            "and both as Minari datasets (an id, or a folder)"
        )
    if path.suffix.lower() in D4RL_SUFFIX:
        raise UserError(f"{target}: a Minari dataset is an id such as mine/{path.stem}-v0, or a folder, not a file")
    is_path = target.startswith((".", "~", "/", "\\")) or path.is_absolute() or not minari.ID.fullmatch(target)
    if not is_path:
        return minari.root() / target, target
    base, inside = minari.root().resolve(), path.resolve()
    if inside.is_relative_to(base) and minari.ID.fullmatch(data_id := inside.relative_to(base).as_posix()):
        return path, data_id
    if minari.ID.fullmatch(given):
        return path, given
    name = re.sub(r"[^\w-]+", "-", inside.name).strip("-") or "data"
    return path, name if minari.ID.fullmatch(name) else f"{name}-v0"


def _sync(written: Path) -> None:
    """Bring files to the disk, so that a rename never leaves a name without its data."""
    for path in [written, *written.rglob("*")] if written.is_dir() else [written]:
        if path.is_file():
            with open(path, "rb") as handle:
                os.fsync(handle.fileno())


def _replace(written: Path, place: Path) -> None:
    """Move into place in one step; a folder that stands there is moved aside first, and back if that fails."""
    if not (place.is_dir() and not place.is_symlink()):
        os.replace(written, place)
        return
    aside = written.with_name("old")
    os.replace(place, aside)  # goes with the temporary folder
    try:
        os.replace(written, place)
    except OSError:
        os.replace(aside, place)
        raise


def write_error(error: OSError | RuntimeError, place: Path) -> UserError:
    """The one-line message for a write that failed; h5py's have the cause in their text only."""
    text = " ".join(str(error).split())
    code = getattr(error, "errno", None) or next((int(n) for n in re.findall(r"errno = (\d+)", text)), None)
    outcome = "what stood there before is untouched" if place.exists() else "nothing was left there"
    if code in (28, 122):
        return UserError(
            f"disk full while writing {place}; {outcome}: free some space, or give a place on another disk"
        )
    reason = os.strerror(code) if code else text
    return UserError(f"cannot write {place}: {reason}; {outcome}")
