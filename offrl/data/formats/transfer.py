"""Bytes from the web into a file: requests that continue where a connection broke, within limits."""

from __future__ import annotations

import contextlib
import http.client
import json
import math
import time
import urllib.error
import urllib.parse
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from offrl.errors import UserError, warn
from offrl.system.addresses import unprotected, without_logins
from offrl.system.files import open_to_append, replacing
from offrl.system.progress import Progress

BLOCK = 1 << 20
MB = 1_000_000
GB = 1_000_000_000
ATTEMPTS = 4


class Different(UserError):
    """A file that is whole, perhaps, but another one."""


def remove(part: Path) -> None:
    """Remove what was downloaded, and the note of where it is from."""
    for path in (part, part.with_name(part.name + ".json")):
        path.unlink(missing_ok=True)


def size_of(part: Path) -> int:
    """The bytes that were downloaded so far."""
    return part.stat().st_size if part.exists() else 0


def note(path: Path, values: dict[str, Any]) -> None:
    """Write what is known of a download beside it. Raises OSError."""
    with replacing(path) as file:
        file.write(json.dumps(values).encode())


def candidates(url: str, mirror: str | None) -> list[str]:
    """The addresses to try: `url`, or what stands for it at the `mirror`, under its last two parts or the last one."""
    if not mirror:
        return [url]
    parts = url.split("/")
    return [f"{mirror.rstrip('/')}/{parts[-2]}/{parts[-1]}", f"{mirror.rstrip('/')}/{parts[-1]}"]


@dataclass(frozen=True)
class Limits:
    """The bounds of a download, and its login."""

    timeout: float  # seconds without a sign of life
    most: int  # bytes
    exact: bool  # whether `most` is the size of the file
    login: str | None  # the header Authorization for the first host

    def check(self, size: int, url: str) -> None:
        """Raises UserError for a file of `size` bytes, or more, that is too large."""
        if size <= self.most:
            return
        if self.exact:
            raise Different(
                f"{url} is not the known file: it has {size:,} bytes or more, the known one {self.most:,}; it was "
                "removed"
            )
        raise UserError(
            f"{url} has {size / GB:.3g} GB or more, and more than {self.most / GB:.3g} GB are not downloaded: nothing "
            "of it is kept; dataset.download_limit_gb= sets another limit"
        )


class _Redirects(urllib.request.HTTPRedirectHandler):
    """To the web alone, and never from an encrypted connection to one that is not."""

    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> Any:
        scheme, host = urllib.parse.urlsplit(newurl)[:2]
        if scheme not in ("http", "https") or (scheme == "http" and req.type == "https"):
            origin = without_logins(f"{scheme}://{host}")
            raise UserError(
                f"{req.full_url} redirects to {origin}, where nothing protects the download; set dataset.mirror to a "
                "place that you trust"
            )
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def download(urls: list[str], part: Path, title: str, target: Path, limits: Limits) -> None:
    """Bytes of the first address that has the file into `part`, continuing where an earlier attempt stopped. Raises
    UserError.
    """
    reason = ""
    if limits.login and unprotected(urls[0]):
        warn(f"the login of the mirror goes unencrypted to {urllib.parse.urlsplit(urls[0]).hostname}: use https://")
    for url in urls:
        attempt = 0
        while attempt < ATTEMPTS:
            offset = size_of(part)
            try:
                _attempt(url, part, limits)
                return
            except UserError:
                remove(part)
                raise
            except urllib.error.HTTPError as error:
                reason = f"the server answered {error.code} {error.reason}"
                if error.code == 401 and not limits.login:
                    reason += ", which wants a login: OFFRL_MIRROR=https://NAME:PASSWORD@HOST in the environment"
                if error.code in (400, 401, 403, 404, 410):
                    break
            except (urllib.error.URLError, http.client.HTTPException, TimeoutError, ConnectionError) as error:
                reason = str(getattr(error, "reason", "") or error or type(error).__name__)
                if (
                    isinstance(error, urllib.error.URLError)
                    and isinstance(error.reason, OSError)
                    and offset == 0
                    and not part.exists()
                ):
                    break  # no route to the server at all: waiting does not help
            attempt = 0 if size_of(part) > offset else attempt + 1
            time.sleep(min(0.2 * 2**attempt, 2.0))
    have = f"; {size_of(part)} bytes are kept and the next attempt continues" if size_of(part) else ""
    raise UserError(
        f"cannot download the {title} {urls[0]} ({reason}){have}. Without a network: put the file at {target}, or set "
        "dataset.mirror (or $OFFRL_MIRROR) to a folder or URL that has it"
    )


def _attempt(url: str, part: Path, limits: Limits) -> None:
    """One request. Returns when the file is whole; raises what the connection raises otherwise, and UserError for too
    large a file.
    """
    state = part.with_name(part.name + ".json")
    have = size_of(part)
    known: dict[str, Any] = {}
    with contextlib.suppress(OSError, ValueError):
        known = json.loads(state.read_text())
    if have and (known.get("url") != url or have > limits.most):
        remove(part)  # the start of another file
        have, known = 0, {}
    request = urllib.request.Request(url, headers={"User-Agent": "offrl", "Accept-Encoding": "identity"})
    if have:
        request.add_header("Range", f"bytes={have}-")
        if known.get("version"):
            request.add_header("If-Range", known["version"])
    if limits.login:
        request.add_unredirected_header("Authorization", limits.login)
    try:
        response = urllib.request.build_opener(_Redirects).open(request, timeout=limits.timeout)
    except urllib.error.HTTPError as error:
        if error.code == 416 and have:  # nothing after what we have: whole, or the file on the server became shorter
            remote_size = error.headers.get("Content-Range", "").rpartition("/")[2]
            if remote_size == str(have):
                return
            remove(part)
            raise ConnectionError("the file on the server has changed") from None
        raise
    with response:
        length, span = (response.headers.get(f"Content-{name}", "") for name in ("Length", "Range"))
        if response.status != 206:
            have = 0
        elif not span.startswith(f"bytes {have}-"):
            remove(part)
            raise ConnectionError("the server sent another part of the file than was asked for")
        stated = span.rpartition("/")[2] if response.status == 206 else ""
        total = int(stated) if stated.isdecimal() else have + (int(length) if length.isdecimal() else 0)
        limits.check(total, url)
        etag = response.headers.get("ETag", "")
        version = etag if etag and not etag.startswith("W/") else response.headers.get("Last-Modified", "")
        note(state, {"url": url, "version": version, "total": total})
        title, megabytes = f"downloading {part.name.removesuffix('.part')}", math.ceil(total / MB) or None
        if not have:
            part.unlink(missing_ok=True)
        with open_to_append(part) as file, Progress(title, megabytes, "MB", False, have // MB, stderr=True) as progress:
            while file.tell() <= limits.most:
                try:
                    block = response.read(BLOCK)
                except http.client.IncompleteRead as error:
                    file.write(error.partial)
                    raise
                if not block:
                    break
                file.write(block)
                progress.update(file.tell() // MB)
    size = size_of(part)
    limits.check(size, url)
    if total and size < total:
        raise ConnectionError(f"the connection closed after {size} of {total} bytes")
    if total and size > total:
        remove(part)
        raise ConnectionError("more bytes arrived than were announced")
