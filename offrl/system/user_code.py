"""The user's own functions and objects: imported by name, and called with errors that say where they come from."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import traceback
from collections.abc import Callable
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from offrl.errors import UserError, nearest

_importing: ContextVar[str] = ContextVar("importing", default="")


def refuse_imported() -> None:
    """Raises UserError where a file that is only imported, for a function or class in it, begins a run of its own."""
    if path := _importing.get():
        raise UserError(f'{path} trains when it is imported: put what it runs under `if __name__ == "__main__":`')


def python_object(reference: str, name: str, text: str) -> tuple[Any, Path | None]:
    """The object `name` of the Python file (.py) or module `reference`, and the file it was read from. `text`: both,
    for messages.

    Raises UserError.
    """
    if reference.endswith(".py"):
        path = Path(reference).expanduser()
        if not path.is_file():
            files = [p.name for p in path.parent.glob("*.py")] if path.parent.is_dir() else []
            raise UserError(f"there is no file {path}.{nearest(path.name, files)}")
        spec = importlib.util.spec_from_file_location(f"_offrl_agent_{path.stem}", path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module  # dataclasses and the like look their module up
        sys.path.insert(0, str(path.parent.resolve()))
        token = _importing.set(str(path))
        try:
            guarded(f"importing {path}", spec.loader.exec_module, module)
        finally:
            _importing.reset(token)
            sys.path.pop(0)
    else:
        try:
            missing = importlib.util.find_spec(reference) is None
        except (ImportError, ValueError):  # a parent that is missing, or a name that cannot be one
            missing = True
        if missing:
            raise UserError(f"{text}: there is no Python module '{reference}'; a file is named file.py:{name}")
        module = guarded(f"importing {reference}", importlib.import_module, reference)
    value: Any = module
    for part in name.split("."):
        if not hasattr(value, part):
            raise UserError(
                f"{reference} has no '{part}'.{nearest(part, [n for n in vars(module) if not n.startswith('_')])}"
            )
        value = getattr(value, part)
    source = getattr(module, "__file__", None)
    return value, Path(source) if source else None


def function_of(text: str, setting: str) -> Callable[..., Any]:
    """The user's function that `setting` names as file.py:FUNCTION. Raises UserError."""
    source, _, name = text.rpartition(":")
    if not source or not name.isidentifier():
        raise UserError(f"{setting}={text} names no function: {setting}=file.py:FUNCTION")
    value = python_object(source, name, f"{setting}={text}")[0]
    if not callable(value):
        raise UserError(f"{setting}={text} is a {type(value).__name__}; a function is due")
    return value


def guarded(where: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call user code. Raises UserError, in one line that names the place, for whatever it raises, SystemExit too: what
    calls it saves its work then.
    """
    try:
        return function(*args, **kwargs)
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename != __file__]
        at = f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
        reason = " ".join(str(error).split())
        raise UserError(f"{where} failed{at}: {type(error).__name__}: {reason}") from error
