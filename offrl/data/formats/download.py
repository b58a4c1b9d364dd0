"""Downloads that survive broken connections: resumed, checked, and visible under their name only when whole."""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import json
import math
import os
import shutil
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from offrl.errors import UserError, warn
from offrl.system import trust
from offrl.system.files import open_to_append, replacing
from offrl.system.progress import Progress

BLOCK = 1 << 20
MB = 1_000_000
ATTEMPTS = 4


def fetch(
    url: str, folder: Path, check: Callable[[Path], None], mirror: str | None = None, what: str = "dataset", timeout: float = 30.0
) -> Path:
    """The file of `url` in `folder`, downloaded unless it is there.

    check: raises UserError when the file is not what it should be. mirror: a URL prefix or a folder that serves instead of `url`'s server
    (default $OFFRL_MIRROR). Raises UserError when the file cannot be had; what was downloaded so far stays, and the next call continues.
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
            if mirror and "://" not in mirror:
                with _in_folder(Path(mirror).expanduser(), url, what).open("rb") as source, replacing(part) as copy:
                    shutil.copyfileobj(source, copy)
            else:
                _download(_candidates(url, mirror), part, what, target, timeout)
            try:
                check(part)
            except UserError as error:
                _remove(part)
                raise UserError(
                    f"the {what} downloaded from {mirror or url} is damaged and was removed ({error}); try again or use dataset.mirror"
                ) from None
            record = {"url": url, "size": part.stat().st_size, "sha256": _sha256(part)}
            _note(_record(target), record)
            os.replace(part, target)
            _remove(part)
    except OSError as error:
        raise UserError(
            f"cannot store {target}: {error.strerror or error}; set dataset.cache_dir or $OFFRL_CACHE to another folder"
        ) from None
    return target


def _record(target: Path) -> Path:
    return target.with_name(target.name + ".json")


def _note(path: Path, values: dict[str, Any]) -> None:
    with replacing(path) as file:
        file.write(json.dumps(values).encode())


def _intact(target: Path) -> bool:
    """True if the file is there, with the size it had when it was checked. A file put there by hand has no record and is trusted."""
    if not target.is_file():
        return False
    try:
        size = json.loads(_record(target).read_text())["size"]
    except (OSError, ValueError, KeyError):
        return True
    if target.stat().st_size == size:
        return True
    warn(f"{target} has {target.stat().st_size} bytes instead of {size}: downloading it again")
    return False


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(BLOCK):
            digest.update(block)
    return digest.hexdigest()


def _remove(part: Path) -> None:
    for path in (part, part.with_name(part.name + ".json")):
        path.unlink(missing_ok=True)


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    """One download of a file at a time; where the system has no file locks, none."""
    try:
        import fcntl
    except ImportError:
        yield
        return
    with trust.open_to_write(path, "a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # the file stays: removing it would let a third process in beside the second
        yield


def _in_folder(mirror: Path, url: str, what: str) -> Path:
    """The file in a mirror that is a folder: under the last two parts of the URL, or the last one."""
    parts = url.split("/")
    for candidate in (mirror / parts[-2] / parts[-1], mirror / parts[-1]):
        if candidate.is_file():
            return candidate
    raise UserError(f"the mirror folder {mirror} has no {parts[-1]}; put the {what} from {url} there")


def _candidates(url: str, mirror: str | None) -> list[str]:
    if not mirror:
        return [url]
    parts = url.split("/")
    return [f"{mirror.rstrip('/')}/{parts[-2]}/{parts[-1]}", f"{mirror.rstrip('/')}/{parts[-1]}"]


def _download(urls: list[str], part: Path, what: str, target: Path, timeout: float) -> None:
    """Bytes of the first address that has the file into `part`, continuing where an earlier attempt stopped."""
    reason = ""
    for url in urls:
        attempt = 0
        while attempt < ATTEMPTS:
            offset = part.stat().st_size if part.exists() else 0
            try:
                _attempt(url, part, timeout)
                return
            except urllib.error.HTTPError as error:
                reason = f"the server answered {error.code} {error.reason}"
                if error.code in (400, 401, 403, 404, 410):
                    break
            except (urllib.error.URLError, http.client.HTTPException, TimeoutError, ConnectionError) as error:
                reason = str(getattr(error, "reason", "") or error or type(error).__name__)
                if isinstance(error, urllib.error.URLError) and isinstance(error.reason, OSError) and offset == 0 and not part.exists():
                    break  # no route to the server at all: waiting does not help
            progressed = part.exists() and part.stat().st_size > offset
            attempt = 0 if progressed else attempt + 1
            time.sleep(min(0.2 * 2**attempt, 2.0))
    have = f"; {part.stat().st_size} bytes are kept and the next attempt continues" if part.exists() and part.stat().st_size else ""
    raise UserError(
        f"cannot download the {what} {urls[0]} ({reason}){have}. "
        f"Without a network: put the file at {target}, or set dataset.mirror (or $OFFRL_MIRROR) to a folder or URL that has it"
    )


def _attempt(url: str, part: Path, timeout: float) -> None:
    """One request. Returns when the file is whole; raises what the connection raises otherwise."""
    state = part.with_name(part.name + ".json")
    have = part.stat().st_size if part.exists() else 0
    known: dict[str, Any] = {}
    with contextlib.suppress(OSError, ValueError):
        known = json.loads(state.read_text())
    if have and known.get("url") != url:
        _remove(part)  # the start of another file
        have, known = 0, {}
    request = urllib.request.Request(url, headers={"User-Agent": "offrl", "Accept-Encoding": "identity"})
    if have:
        request.add_header("Range", f"bytes={have}-")
        if known.get("version"):
            request.add_header("If-Range", known["version"])
    try:
        response = urllib.request.urlopen(request, timeout=timeout)
    except urllib.error.HTTPError as error:
        if error.code == 416 and have:  # nothing after what we have: whole, or the file on the server became shorter
            remote_size = error.headers.get("Content-Range", "").rpartition("/")[2]
            if remote_size == str(have):
                return
            _remove(part)
            raise ConnectionError("the file on the server has changed") from None
        raise
    with response:
        length = response.headers.get("Content-Length")
        if response.status == 206:
            span = response.headers.get("Content-Range", "")
            if not span.startswith(f"bytes {have}-"):
                _remove(part)
                raise ConnectionError("the server sent another part of the file than was asked for")
            total = int(span.rpartition("/")[2]) if span.rpartition("/")[2].isdigit() else have + int(length or 0)
        else:
            have = 0
            total = int(length) if length else 0
        etag = response.headers.get("ETag", "")
        version = etag if etag and not etag.startswith("W/") else response.headers.get("Last-Modified", "")
        _note(state, {"url": url, "version": version, "total": total})
        if not have:
            part.unlink(missing_ok=True)
        title, megabytes = f"downloading {part.name.removesuffix('.part')}", math.ceil(total / MB) or None
        with open_to_append(part) as file, Progress(title, megabytes, "MB", False, have // MB, stderr=True) as progress:
            while True:
                try:
                    block = response.read(BLOCK)
                except http.client.IncompleteRead as error:
                    file.write(error.partial)
                    raise
                if not block:
                    break
                file.write(block)
                progress.update(file.tell() // MB)
    size = part.stat().st_size
    if total and size < total:
        raise ConnectionError(f"the connection closed after {size} of {total} bytes")
    if total and size > total:
        _remove(part)
        raise ConnectionError("more bytes arrived than were announced")
