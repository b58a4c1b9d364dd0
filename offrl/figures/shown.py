"""A figure that shows itself: in a notebook as the value of a cell, in a script by `show()`."""

from __future__ import annotations

import io
from typing import Any

from matplotlib.figure import Figure

from offrl.errors import say
from offrl.figures.rcparams import own_settings


class ShownFigure(Figure):
    """A figure outside pyplot, which neither keeps it alive nor shows it a second time."""

    def _repr_png_(self) -> bytes:
        """The picture for notebooks, whatever their `%matplotlib` says."""
        buffer = io.BytesIO()
        with own_settings():
            self.savefig(buffer, format="png")
        return buffer.getvalue()

    def show(self, warn: bool = True) -> None:
        """Open a window with the picture, and wait until it is closed; in a notebook show it there.

        Where there is no screen it says how to save the picture instead.
        """
        from matplotlib import get_backend, pyplot
        from matplotlib.backends import BackendFilter, backend_registry

        if "inline" in get_backend() or "ipympl" in get_backend():
            from IPython.display import display

            display(self)
            return
        windows = backend_registry.list_builtin(BackendFilter.INTERACTIVE)
        if get_backend().lower() not in [name.lower() for name in windows]:
            say('no screen to show a picture on; figure.savefig("curve.png") saves it')
            return
        first = pyplot.figure()  # of the class that the screen needs
        canvas: Any = type(first.canvas)
        pyplot.close(first)
        canvas.new_manager(self, 1).show()
        pyplot.show(block=True)
