"""Replies of an OpenAI-compatible endpoint, which may hold anything."""

from __future__ import annotations

import contextlib
import email.utils
import json
import time
from collections.abc import Mapping
from typing import Any

LARGEST = 16 << 20  # bytes of a reply
BLOCK = 1 << 16
SHORT = (
    8  # characters of a key that is none: servers without keys are given "EMPTY" or "x", which answers may well hold
)


def read(reply: Any, end: float) -> bytes:
    """The body, at most LARGEST bytes of it, and what came by the time `end`."""
    data = bytearray()
    while len(data) < LARGEST and time.monotonic() < end and (block := reply.read1(min(BLOCK, LARGEST - len(data)))):
        data += block
    return bytes(data)


def without_key(text: str, key: str) -> str:
    """`text` with *** for the key, which some servers repeat."""
    return text.replace(key, "***") if len(key) >= SHORT else text


def answer(data: bytes) -> str:
    """The text of a chat completion. Raises ValueError for what is none."""
    try:
        content = json.loads(data)["choices"][0]["message"].get("content")
    except (KeyError, IndexError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(str(error)) from None
    if isinstance(content, list):  # parts
        content = "".join(str(part.get("text") or "") for part in content if isinstance(part, Mapping))
    return str(content) if content is not None else ""


def message(data: bytes) -> tuple[str, str]:
    """(what an error's body says, its code)."""
    text = data.decode("utf-8", "replace")
    with contextlib.suppress(ValueError, AttributeError, RecursionError):
        body = json.loads(text)
        error = body.get("error", body)
        if isinstance(error, Mapping):
            return str(error.get("message") or error.get("detail") or text), str(
                error.get("code") or error.get("type") or ""
            )
        return str(error), ""
    return text, ""


def wait(value: str | None) -> float | None:
    """Seconds of a Retry-After header: a number or a date."""
    if not value:
        return None
    try:
        return max(0.0, float(value))
    except ValueError:
        pass
    try:
        return max(0.0, email.utils.parsedate_to_datetime(value).timestamp() - time.time())
    except (ValueError, TypeError):
        return None
