"""Checkpoints that are either whole or not there: one safetensors file each, written aside, synced, and renamed into
place.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import re
import shutil
import stat
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from offrl.errors import UserError, first_line, warn
from offrl.system import trust

VERSION = 2  # of the layout of files
FOLDER = "checkpoints"
HOME = Path("~/.cache/offrl")  # of downloads, arrays and compiled code
BUILDING = "building-"  # begins the name of a folder that is not finished, or that is being deleted
ELSEWHERE = " Free some space, or choose another place with runs_dir=."


class NewerVersion(UserError):
    """The file is whole, but this version of offrl cannot read it."""


def cache_dir(configured: str | None = None) -> Path:
    """The folder for downloads and memory-mapped columns: the setting, $OFFRL_CACHE, or ~/.cache/offrl."""
    return Path(configured or os.environ.get("OFFRL_CACHE") or HOME).expanduser()


def flatten(tree: Any) -> dict[str, Tensor]:
    """{path: tensor} with paths such as "params/critic/head.weight", in a fixed order."""
    leaves, _ = pytree.tree_flatten_with_path(tree)
    return {"/".join(_name(k) for k in path): leaf for path, leaf in leaves}


def _name(key: Any) -> str:
    return str(getattr(key, "name", getattr(key, "key", getattr(key, "idx", key))))


def unflatten(template: Any, flat: Mapping[str, Tensor], where: str) -> Any:
    """The inverse of `flatten`; `template` gives the structure and the devices; tensors stay where they are for those
    on the meta device.

    Raises UserError naming the first tensor that is missing or differs.
    """
    names = flatten(template)
    if missing := [n for n in names if n not in flat]:
        raise UserError(
            f"{where} has no '{missing[0]}': it was written by another version of the algorithm, or for other settings"
        )
    for name, leaf in names.items():
        if flat[name].shape != leaf.shape or flat[name].dtype != leaf.dtype:
            raise UserError(
                f"{where}: '{name}' is {flat[name].dtype} {tuple(flat[name].shape)} where these settings need "
                f"{leaf.dtype} {tuple(leaf.shape)}"
            )
    _, structure = pytree.tree_flatten(template)
    return pytree.tree_unflatten(
        [flat[n] if leaf.is_meta else flat[n].to(leaf.device) for n, leaf in names.items()], structure
    )


def write(path: Path, tensors: Mapping[str, Tensor], meta: Mapping[str, Any], survivor: str = "") -> None:
    """Write one safetensors file atomically, with `meta` as JSON and a checksum in its header.

    Raises UserError when it cannot be written (a full disk, say); what stood at `path` before is then untouched.
    `survivor` is added to the message.
    """
    # cloned, as safetensors refuses tensors that share memory: what an update left alone is one tensor in the old state
    # and the new
    tensors = {k: v.detach().cpu().clone(memory_format=torch.contiguous_format) for k, v in tensors.items()}
    header = {"offrl": json.dumps({"version": VERSION, "sha256": tensor_digest(tensors), **meta})}
    write_bytes(path, safetensors.torch.save(tensors, header), survivor)


def read(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and meta of a file by `write`. Raises UserError when it is missing, damaged, from a newer version, or no
    such file.

    The checksum shows damage, not who wrote the file: meta is a dictionary of whatever JSON can hold.
    """
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise UserError(f"{path} is not a file that can be read: it is a folder, a pipe or a device")
        with safetensors.safe_open(path, framework="pt") as file:
            header = (file.metadata() or {}).get("offrl")
            tensors = {k: file.get_tensor(k) for k in file.keys()}  # noqa: SIM118 - not a dictionary
        if header is None:
            raise UserError(f"{path} was not written by offrl")
        meta = json.loads(header)
        digest = tensor_digest(tensors)
    except FileNotFoundError:
        raise UserError(f"{path} does not exist") from None
    except (
        OSError,
        safetensors.SafetensorError,
        ValueError,
        RuntimeError,
        TypeError,
        LookupError,
        MemoryError,
    ) as error:
        raise UserError(f"{path} is damaged and cannot be read ({first_line(error)})") from None
    if (
        not isinstance(meta, dict)
        or not isinstance(meta.get("version"), int)
        or not isinstance(meta.get("sha256"), str)
    ):
        raise UserError(
            f"{path} is damaged: its header has no version or no checksum, as every file that offrl writes has"
        )
    if meta["version"] > VERSION:
        raise NewerVersion(
            f"{path} was written by a newer offrl (layout {meta['version']}, this one reads up to {VERSION}); upgrade "
            "offrl"
        )
    if meta["sha256"] != digest:
        raise UserError(f"{path} is damaged: its checksum does not match")
    return tensors, meta


def save(run_dir: Path, step: int, tensors: Mapping[str, Tensor], meta: Mapping[str, Any], keep: int) -> None:
    """Add the checkpoint of `step`, point `latest` at it, and delete all but the newest `keep` (0 keeps all)."""
    folder = run_dir / FOLDER
    previous = steps(run_dir)
    survivor = (
        f" The checkpoint of step {previous[-1]:,} survives; free some space and run the same command to continue."
        if previous
        else ""
    )
    path = folder / f"step_{step:09d}.safetensors"
    write(path, tensors, {**meta, "step": step}, survivor)
    write_text(folder / "latest", path.name + "\n", survivor)
    for old in steps(run_dir)[:-keep] if keep else []:
        (folder / f"step_{old:09d}.safetensors").unlink(missing_ok=True)


def steps(run_dir: Path) -> list[int]:
    """The steps of all checkpoints, ascending."""
    return sorted(
        int(m[1]) for p in (run_dir / FOLDER).glob("step_*") if (m := re.fullmatch(r"step_(\d+)\.safetensors", p.name))
    )


def load_latest(run_dir: Path) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
    """The newest readable checkpoint, or None where there is none. A damaged one is named in a warning and passed over.

    Raises UserError when none can be read, or when a newer offrl wrote the newest: to pass over that one would lose
    what it holds."""
    damaged: list[str] = []
    for path in _newest_first(run_dir):
        try:
            content = read(path)
        except NewerVersion:
            raise
        except UserError as error:
            damaged.append(str(error))
            continue
        for message in damaged:
            warn(f"{message}; going on from step {content[1]['step']:,}")
        return content
    if damaged:
        earlier = f", nor any of the {len(damaged) - 1} before" if len(damaged) > 1 else ""
        raise UserError(f"{damaged[0]}{earlier}: restore a checkpoint, or start anew with another name=")
    return None


def _newest_first(run_dir: Path) -> Iterator[Path]:
    """The checkpoint that `latest` points at, then the others."""
    paths = [run_dir / FOLDER / f"step_{s:09d}.safetensors" for s in reversed(steps(run_dir))]
    try:
        pointed = run_dir / FOLDER / (run_dir / FOLDER / "latest").read_text(encoding="utf-8").strip()
    except OSError:
        pointed = None
    # a file newer than the pointer is whole as well (it was renamed into place), but its run had not noted it yet
    if pointed in paths:
        paths.remove(pointed)
        paths.insert(0, pointed)
    yield from paths


def finite(value: Any) -> Any:
    """A tree of plain values with None for every number that is not finite: JSON has no NaN."""
    if isinstance(value, Mapping):
        return {k: finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write_text(path: Path, text: str, survivor: str = "") -> None:
    """Replace a small text file atomically. Raises UserError when it cannot be written."""
    write_bytes(path, text.encode(), survivor)


def write_private(path: Path, text: str) -> None:
    """Replace a small text file by one that no other user can read. Raises UserError when it cannot be written."""
    write_bytes(path, text.encode(), mode=0o600)


def write_bytes(path: Path, data: bytes, survivor: str = "", mode: int = 0o666) -> None:
    """Write aside, sync, rename: after a crash at any moment the file is the old one or the new one, whole. mode: its
    permissions, less the umask. Raises UserError when it cannot be written."""
    try:
        with replacing(path, mode) as file:
            file.write(data)
    except OSError as error:
        raise UserError(f"could not write {path}: {error.strerror}.{survivor or ELSEWHERE}") from None


@contextlib.contextmanager
def replacing(path: Path, mode: int = 0o666) -> Iterator[IO[bytes]]:
    """A new file beside `path`, open for writing, that takes its place in one step; where the body raises it is removed
    instead.

    The folder is made. No link is followed: one in the place of `path`, or of the new file, is replaced, and what it
    leads to stays as it is. The new file's path is its `name`, for programs that take no open file. Raises OSError.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    file, part = trust.open_part(path, mode)
    try:
        with file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
        _sync_folder(path.parent)
    except BaseException:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
        raise


def open_to_append(path: Path, mode: str = "ab", **options: Any) -> IO[Any]:
    """`open` for files that grow. A file that has other names too (hard links: of a backup by `cp -l`) is copied first,
    so that those keep what they hold. Raises OSError, and UserError for a link."""
    file = trust.open_to_write(path, mode, **options)
    if os.fstat(file.fileno()).st_nlink == 1:
        return file
    file.close()
    with open(path, "rb") as old, replacing(path) as new:
        shutil.copyfileobj(old, new)
    return trust.open_to_write(path, mode, **options)


def discard(folder: Path, names: str) -> None:
    """Delete the files of `folder` whose names match the pattern `names`, in the order of their names, and the folder
    once it is empty: whatever else it holds stays. A folder that is a link is left alone. Raises OSError."""
    if not folder.is_dir() or folder.is_symlink():
        return
    for path in sorted(p for p in folder.iterdir() if re.fullmatch(names, p.name)):
        if path.is_symlink() or not path.is_dir():
            path.unlink(missing_ok=True)
    if not any(folder.iterdir()):
        folder.rmdir()


def discard_entry(folder: Path, names: str) -> None:
    """`discard` for what several processes write: no file is deleted of a folder that another one puts there meanwhile.
    Leaves what cannot be deleted."""
    aside = folder.with_name(f"{BUILDING}{uuid.uuid4().hex}")
    with contextlib.suppress(OSError):  # there is none, or another process is faster
        if not folder.is_symlink():
            folder.rename(aside)  # in one step
            discard(aside, names)
            aside.rename(folder)  # where there is still something in it


def _sync_folder(folder: Path) -> None:
    """Make a rename in `folder` durable; Windows opens no folders, and does so by itself."""
    if os.name == "nt":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def tensor_digest(tensors: Mapping[str, Tensor]) -> str:
    """A hash of names and numbers."""
    sha = hashlib.sha256()
    for name in sorted(tensors):
        sha.update(name.encode())
        sha.update(tensors[name].contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()


def file_name(text: str) -> str:
    """A text as part of a file's name: letters, digits, dashes, dots and underscores."""
    return "".join(c if c.isalnum() or c in "-_." else "-" for c in text)
