"""Web addresses and the logins that they may carry (https://NAME:PASSWORD@HOST), which no file and no message may
hold.
"""

from __future__ import annotations

import base64
import re
import urllib.parse
from collections.abc import Mapping
from typing import Any

HERE = ("localhost", "127.0.0.1", "::1")
# the second form: a password with characters that should be written as %2F and the like, after a colon that begins no
# port
_LOGIN = re.compile(
    r"""(?<![A-Za-z0-9+.-])([A-Za-z][A-Za-z0-9+.-]*://)(?:[^/?#\s"']*@|[^/?#\s"':@]*:(?!\d*(?:[/?#]|$))[^\s"']*@)"""
)


def without_logins(value: Any, shown: str = "") -> Any:
    """`value`, text or nested dictionaries and lists with texts in them, with NAME:PASSWORD@ taken out of every
    address.

    shown: what stands in its place, such as "***@" in a message.
    """
    if isinstance(value, str):
        return _LOGIN.sub(rf"\g<1>{shown}", value)
    if isinstance(value, Mapping):
        return {key: without_logins(entry, shown) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(without_logins(entry, shown) for entry in value)
    return value


def unprotected(url: str) -> bool:
    """Whether what goes to and from `url` can be read and changed on the way: plain http to another host than this
    one.
    """
    parts = urllib.parse.urlsplit(url)
    return parts.scheme in ("http", "ftp") and parts.hostname not in HERE


def split_login(url: str, other: str | None = None) -> tuple[str, str | None]:
    """(`url` without its login, the header `Authorization` for it or None). other: an address whose login holds for
    `url` too, where it is of the same scheme, host and port."""
    bare = without_logins(url)
    for source in filter(None, (url, other)):
        parts, wanted = urllib.parse.urlsplit(source), urllib.parse.urlsplit(bare)
        name, at, host = parts.netloc.rpartition("@")
        if at and (parts.scheme, host) == (wanted.scheme, wanted.netloc):
            return bare, "Basic " + base64.b64encode(urllib.parse.unquote(name).encode()).decode()
    return bare, None
