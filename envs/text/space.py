"""The space of texts."""

from __future__ import annotations

import string
from typing import Any

from gymnasium import spaces

PRINTABLE = "\n" + "".join(sorted(set(string.printable) - set(string.whitespace) | {" "}))  # what `sample` draws from
LONGEST = 100_000  # characters


class AnyText(spaces.Text):
    """Every text of at most `max_length` characters, in whatever script: what people and language models write.

    `spaces.Text` has to be given its characters one by one. Here they (ASCII's printable ones and the line break) are
    only what `sample` draws from; `contains` asks for no more than a text that can be written down (a lone surrogate
    cannot) and is not too long."""

    def __init__(self, max_length: int = LONGEST) -> None:
        super().__init__(max_length, min_length=0, charset=PRINTABLE)

    def contains(self, x: Any) -> bool:
        if not isinstance(x, str) or len(x) > self.max_length:
            return False
        try:
            x.encode()
        except UnicodeEncodeError:
            return False
        return True

    def __repr__(self) -> str:
        return f"AnyText({self.max_length})"
