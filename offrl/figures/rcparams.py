"""matplotlib's settings for every picture, whatever a `matplotlibrc` says."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

# a matplotlibrc may name one with the letters of a language
FONTS = ("font.family", "font.sans-serif", "font.serif", "font.monospace")


@contextlib.contextmanager
def own_settings() -> Iterator[None]:
    """Within it, also as a decorator, pictures follow matplotlib's own settings and not a `matplotlibrc`, which
    matplotlib reads from the working folder too: one in a stranger's folder could have names typeset by LaTeX, which
    reads files. A $ in a name is a $. Only fonts are the reader's."""
    import matplotlib

    settings: Any = matplotlib.rcParams
    with matplotlib.rc_context():
        fonts = {name: settings[name] for name in FONTS}
        matplotlib.rcdefaults()
        settings.update({**fonts, "text.parse_math": False})
        yield
