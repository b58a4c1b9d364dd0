"""Environments of the user's own: `file.py:Name` and `package.module:Name`, a class or a function that makes one."""

from __future__ import annotations

import functools
import importlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from offrl.errors import UserError
from offrl.system import trust
from offrl.system.user_code import guarded, python_object


def in_file(env_id: str | None) -> bool:
    """Whether an environment is named as a class or function in a Python file."""
    return (env_id or "").rpartition(":")[0].endswith(".py")


def custom_environment(env_id: str) -> Callable[..., Any] | None:
    """What makes the environment `env_id`; None where that is an id of Gymnasium's. Runs code: call
    `trust.check_environment` first.

    Raises UserError for a file or name that is not there, and for what makes nothing.
    """
    source, _, name = env_id.rpartition(":")
    if in_file(env_id):
        path = Path(source).expanduser()
        make = _object(source, name, env_id, path.stat().st_mtime_ns if path.is_file() else 0)
    else:
        import gymnasium as gym

        if not source or not name.isidentifier() or trust.open_to_files(source):
            return None
        try:
            module = importlib.import_module(source)
        except ImportError:
            return None  # Gymnasium's own message
        if name in gym.registry or not hasattr(module, name):
            return None
        make = _object(source, name, env_id, 0)
    if not callable(make):
        raise UserError(
            f"env={env_id} is a {type(make).__name__}; a class of environments is due, or a function that makes one"
        )
    return functools.partial(guarded, f"env={env_id}", make)


@functools.cache  # a file is read once for all the environments of a process
def _object(source: str, name: str, env_id: str, changed: int) -> Any:
    return python_object(source, name, env_id)[0]


def place_of(make: Callable[..., Any]) -> str | None:
    """`file.py:Name` or `module:Name` of a class or function at the top of a module; None where another process cannot
    name it: in a notebook or the interpreter, and for a lambda or what stands inside a function."""
    name = getattr(make, "__qualname__", "")
    module = sys.modules.get(getattr(make, "__module__", ""))
    file = getattr(module, "__file__", None)
    if not name or "<" in name or module is None or file is None or not str(file).endswith(".py"):
        return None
    value: Any = module
    for part in name.split("."):
        value = getattr(value, part, None)
    if value is not make:
        return None
    if getattr(module, "__package__", None) and module.__name__ != "__main__":
        return f"{module.__name__}:{name}"
    path = (
        os.path.relpath(file)
        if Path(file).resolve().is_relative_to(Path.cwd().resolve())
        else str(Path(file).resolve())
    )
    return f"{path}:{name}"
