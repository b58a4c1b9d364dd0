"""What a person sees of long work that is not one run: a tune, a selection."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from offrl.errors import one_line, say


class Show:
    """Lines and progress bars on standard output; nothing when quiet."""

    def __init__(self, quiet: bool, about: str = "") -> None:
        """about: a second line of each title, of the arithmetic, say."""
        self.quiet, self.about = quiet, about
        self.bar: Any = None

    def tell(self, *lines: str) -> None:
        """Print lines."""
        self.stop()
        if not self.quiet:
            say(*lines)

    def stage(self, title: str, total: int) -> Callable[[int, float], None]:
        """A bar for a long piece of work; what it returns is told (step, updates a second)."""
        from offrl.system.progress import TrainingProgress

        self.stop()
        title = f"{one_line(title)}; {total:,} updates" + (f"\n{self.about}" if self.about else "")
        bar = self.bar = TrainingProgress(title, total, quiet=self.quiet)
        return bar.update

    def stop(self) -> None:
        """End the bar."""
        if self.bar is not None:
            self.bar.stop()
            self.bar = None
