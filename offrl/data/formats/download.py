"""Downloads that survive broken connections: resumed, checked, bounded, and visible under their name only when whole.

The bytes of a file are checked before anything reads them: against its known size and SHA-256 where there are any
(`Task.file`), else against those of the first download, which are noted beside it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from offrl.data.formats.transfer import BLOCK, GB, Different, Limits, candidates, download, note, remove
from offrl.errors import UserError, warn
from offrl.system import trust
from offrl.system.addresses import split_login, unprotected
from offrl.system.files import replacing
from offrl.system.locks import lock

Known = tuple[int, str]  # bytes of a file, and its SHA-256 in hexadecimal digits


def fetch(
    url: str,
    folder: Path,
    check: Callable[[Path], None],
    mirror: str | None = None,
    title: str = "dataset",
    timeout: float = 30.0,
    known: Known | None = None,
    limit_gb: float = 100.0,
) -> Path:
    """The file of `url` in `folder`, downloaded unless it is there.

    check: raises UserError when the file is not what it should be. mirror: a URL prefix or a folder that serves instead
    of `url`'s server (default $OFFRL_MIRROR), with NAME:PASSWORD@ before its host where it wants a login. limit_gb: the
    most that is downloaded of a file whose size is not `known`. Raises UserError when the file cannot be had, or is
    another one than it should be; what was downloaded of it when a connection broke stays, and the next call continues.
    """
    name = url.rsplit("/", 1)[1]
    target = folder / name
    if _intact(target):
        return target
    mirror = mirror or os.environ.get("OFFRL_MIRROR")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _lock(folder / f"{name}.lock"):
            if _intact(target):  # another process downloaded it while this one waited
                return target
            part = folder / f"{name}.part"
            from_folder = mirror is not None and "://" not in mirror  # a folder of the user's
            origin, login = (
                (mirror, None) if from_folder or mirror is None else split_login(mirror, os.environ.get("OFFRL_MIRROR"))
            )
            if from_folder:
                with (
                    _in_folder(Path(str(mirror)).expanduser(), url, title).open("rb") as source,
                    replacing(part) as copy,
                ):
                    shutil.copyfileobj(source, copy)
            else:
                most = known[0] if known else int(limit_gb * GB)
                download(candidates(url, origin), part, title, target, Limits(timeout, most, known is not None, login))
            size, digest = part.stat().st_size, checksum(part)
            try:
                _compare(digest, known, target, f"{title} from {origin or url}", from_folder)
                check(part)
            except Different:
                remove(part)
                raise
            except UserError as error:
                remove(part)
                raise UserError(
                    f"the {title} downloaded from {origin or url} is damaged and was removed ({error}); try again or "
                    "use dataset.mirror"
                ) from None
            if not known and unprotected(origin or url) and not _record(target).exists():
                warn(
                    f"{origin or url} is not encrypted, and on the way anybody could change the {title}; its SHA-256 "
                    f"is {digest}"
                )
            note(_record(target), {"url": url, "size": size, "sha256": digest})
            os.replace(part, target)
            remove(part)
    except OSError as error:
        raise UserError(
            f"cannot store {target}: {error.strerror or error}; set dataset.cache_dir or $OFFRL_CACHE to another folder"
        ) from None
    return target


def local_file(name: str, variable: str, folder: str) -> Path | None:
    """The file in the folder that an environment variable names, or else in the folder of its publisher's package."""
    paths = [Path(f).expanduser() / name for f in (os.environ.get(variable), folder) if f]
    return next((path for path in paths if path.is_file()), None)


def _record(target: Path) -> Path:
    return target.with_name(target.name + ".json")


def _intact(target: Path) -> bool:
    """True if the file is there, with the size it had when it was checked. A file put there by hand has no record and
    is trusted.
    """
    if not target.is_file():
        return False
    try:
        size = json.loads(_record(target).read_text())["size"]
    except (OSError, ValueError, KeyError, TypeError):
        return True
    if target.stat().st_size == size:
        return True
    warn(f"{target} has {target.stat().st_size} bytes instead of {size}: downloading it again")
    return False


def _compare(digest: str, known: Known | None, target: Path, title: str, from_folder: bool) -> None:
    """Raises Different for a file with another SHA-256 than the `known` one, or, where none is, the last download of
    the same file. With `from_folder`, a folder of the user's, there is a warning only."""
    before: dict[str, Any] = {}
    if known is None:
        with contextlib.suppress(OSError, ValueError, TypeError):
            before = dict(json.loads(_record(target).read_text()))
    expected = known[1] if known else before.get("sha256")
    if not expected or expected == digest:
        return
    if known:
        text = f"the {title} is not the known one: its SHA-256 is {digest}, that of the known one {expected}"
        cure = "if you trust that file, name the file itself: dataset=FILE"
    else:
        text = f"the {title} is another one than was downloaded before: its SHA-256 is {digest}, then it was {expected}"
        cure = f"if it was replaced for good reason, remove {_record(target)} and try again"
    if not from_folder:
        raise Different(f"{text}; it was removed; {cure}")
    warn(text)


def checksum(path: Path, kind: str = "sha256") -> str:
    """The checksum of a file in hexadecimal digits. Raises OSError."""
    digest = hashlib.new(kind, usedforsecurity=kind != "md5")
    with path.open("rb") as file:
        while block := file.read(BLOCK):
            digest.update(block)
    return digest.hexdigest()


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    """One download of a file at a time; where the system has no file locks, none."""
    with trust.open_to_write(path, "a") as file:
        with contextlib.suppress(OSError):
            lock(file)  # the file stays: removing it would let a third process in beside the second
        yield


def _in_folder(mirror: Path, url: str, title: str) -> Path:
    """The file in a mirror that is a folder: under the last two parts of the URL, or the last one."""
    for candidate in map(Path, candidates(url, str(mirror))):
        if candidate.is_file():
            return candidate
    raise UserError(f"the mirror folder {mirror} has no {candidate.name}; put the {title} from {url} there")
