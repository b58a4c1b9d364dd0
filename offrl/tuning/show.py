"""What a person sees of a tune while it works."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from offrl.errors import one_line, say


class Show:
    """Lines and progress bars on standard output; nothing when quiet."""

    def __init__(self, quiet: bool) -> None:
        self.quiet = quiet
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
        bar = self.bar = TrainingProgress(f"{one_line(title)}; {total:,} updates", total, quiet=self.quiet)
        return bar.update

    def stop(self) -> None:
        """End the bar."""
        if self.bar is not None:
            self.bar.stop()
            self.bar = None
