"""A progress bar for notebooks: HTML that IPython replaces in place. rich's and tqdm's bars need ipywidgets, which many
notebooks lack.
"""

from __future__ import annotations

import html
import sys
import time
from typing import Any

from offrl.errors import one_line

INTERVAL = 0.25  # seconds between two pictures of the bar


def in_notebook() -> bool:
    """Whether the output is that of a notebook's cell."""
    ipython: Any = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return shell is not None and hasattr(shell, "kernel") and not sys.stdout.isatty()


class NotebookBar:
    """`done` of `total` as a bar with text beside it, below the cell that runs. total: None where unknown."""

    def __init__(self, total: int | None, title: str = "", done: int = 0) -> None:
        self.total, self.title, self.done, self.text = total, title, done, ""
        self.shown_at, self.handle = 0.0, None

    def update(self, done: int, text: str = "", now: bool = False) -> None:
        """Show them, unless the last picture is very young; `now`: in any case."""
        self.done, self.text = done, text
        if now or time.monotonic() - self.shown_at >= INTERVAL or done == self.total:
            self._show()

    def stop(self) -> None:
        """Show the last state, which stays."""
        if self.handle is not None:
            self._show()

    def _show(self) -> None:
        from IPython.display import display

        self.shown_at = time.monotonic()
        data = {"text/html": self._html(), "text/plain": self._plain()}
        if self.handle is None:
            self.handle = display(data, raw=True, display_id=True)
        else:
            self.handle.update(data, raw=True)

    def _counts(self) -> str:
        return f"{self.done:,}" if self.total is None else f"{self.done:,}/{self.total:,}"

    def _plain(self) -> str:
        return "  ".join(part for part in (one_line(self.title), self._counts(), one_line(self.text)) if part)

    def _html(self) -> str:
        share = 100.0 * self.done / self.total if self.total else 0.0
        colour = "#009e73" if share >= 100.0 else "#0072b2"
        bar = (
            '<span style="display:inline-block;width:240px;height:10px;border-radius:5px;background:rgba(128,128,128,0.25);'  # noqa: E501
            'overflow:hidden"><span '
            f'style="display:block;height:10px;width:{share:.1f}%;background:{colour}"></span></span>'
        )
        texts = [html.escape(one_line(t)) for t in (self.title, self._counts(), self.text)]
        beside = "".join(f"<span>{text}</span>" for text in texts[1:] if text)
        style = "display:flex;gap:1em;align-items:center;font-family:monospace;font-size:13px;flex-wrap:wrap"
        return f'<div style="{style}">{f"<b>{texts[0]}</b>" if texts[0] else ""}{bar}{beside}</div>'
