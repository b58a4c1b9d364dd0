"""Python files that a person adds to offrl: algorithms, data sources, networks, environments that register themselves
when imported.

`plugins=my.py` names one, $OFFRL_PLUGINS the same for all commands. Each file is a module of its own, so that its
classes can be pickled; worker processes inherit the variable, and import the module by its name. A run records its
plugins. That record is a file, which may be a stranger's: what only a file names is run where a person has named it
before with the same content (`known`), or with trust=true."""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import importlib.util
import os
import re
import sys
import traceback
from collections.abc import Iterable, Iterator
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from typing import Any

from offrl.errors import Interrupted, UserError, nearest, warn
from offrl.system import trust
from offrl.system.plugins.known import checksum, remember, remembered

VARIABLE = "OFFRL_PLUGINS"  # files, divided as those of $PATH
PREFIX = "offrl_plugin_"  # of the modules' names
_loaded: dict[str, str] = {}  # path -> checksum of what was imported


@contextlib.contextmanager
def scope() -> Iterator[None]:
    """Within it plugins may be named, which child processes inherit; after it they are no longer."""
    before = os.environ.get(VARIABLE)
    try:
        yield
    finally:
        os.environ.pop(VARIABLE, None)
        os.environ.update({} if before is None else {VARIABLE: before})


def typed(files: str | Path | Iterable[str | Path] | None) -> list[str]:
    """Import the plugins that a person named; their absolute paths. Raises UserError, naming file and line of what is
    wrong.
    """
    names = [files] if isinstance(files, (str, Path)) else list(files or [])
    if bad := [n for n in names if not isinstance(n, (str, Path))]:
        raise UserError(f"plugins={bad[0]!r} is no file; write plugins=my.py, or plugins=[a.py,b.py]")
    paths = [_path(Path(name)) for name in names]
    for path in paths:
        if str(path) not in _named():
            os.environ[VARIABLE] = os.pathsep.join([*_named(), str(path)])
        remember(path)
        _load(path)
    return [str(path) for path in paths]


def load_named() -> list[str]:
    """Import all plugins that were named, here, in $OFFRL_PLUGINS or to a parent process; their paths. Raises
    UserError.
    """
    paths = [_path(Path(name)) for name in _named()]
    for path in paths:
        _load(path)
    return [str(path) for path in paths]


def of_file(files: Any, where: str) -> list[str]:
    """Import the plugins that a run or a policy names; their paths. `where`: that file, for messages.

    A plugin of the same file name that a person has named takes the place of one. Raises UserError for what no person
    has named."""
    if not files:
        return []
    if not isinstance(files, list) or not all(isinstance(name, str) for name in files):
        raise UserError(f"{where}: 'plugins' must be a list of files")
    paths = [_of_file(name, where) for name in files]
    for path in paths:
        _load(path)
    return [str(path) for path in paths]


def _of_file(name: str, where: str) -> Path:
    plugins = {Path(path).name: Path(path) for path in _named()}
    path = Path(name)
    if path.name in plugins:
        return plugins[path.name]
    cure = f"say plugins={path.name if path.is_absolute() else name}, with the path of that file, if you know it"
    if not path.is_absolute() or path.suffix != ".py":
        raise UserError(f"{where} needs the plugin {name}: {cure}")
    if not path.is_file():
        raise UserError(f"{where} needs the plugin {path}, which is not there: say plugins=PATH/{path.name}")
    if not trust.granted() and not remembered(path):
        raise UserError(
            f"{where} names the plugin {path}, Python code that is not run unasked, for with this content nobody has "
            f"named it here: say plugins={path} if you know it, or trust=true"
        )
    os.environ[VARIABLE] = os.pathsep.join([*_named(), str(path)])  # for child processes
    return path


def checksums(files: Iterable[str]) -> dict[str, str]:
    """{file name: the first letters of the content's checksum}: what a run is depends on it."""
    return {Path(path).name: (_loaded.get(path) or checksum(Path(path)))[:12] for path in files}


def used_by(*things: Any) -> list[str]:
    """The plugins that define these classes or functions."""
    return [
        path for path in _loaded if _module_name(Path(path)) in [getattr(thing, "__module__", None) for thing in things]
    ]


def object_of(text: str, setting: str) -> Any:
    """What `FILE.py:NAME` stands for, FILE being one of the plugins that are loaded. Raises UserError. setting: for
    messages.
    """
    file, _, name = text.rpartition(":")
    paths = {Path(path).name: Path(path) for path in _loaded}
    if Path(file).name not in paths:
        raise UserError(
            f"{setting}={text} is in the file {file}, which is not loaded: say plugins=PATH/{Path(file).name}"
        )
    module = sys.modules[_module_name(paths[Path(file).name])]
    if not hasattr(module, name):
        public_names = [n for n in vars(module) if not n.startswith("_")]
        raise UserError(f"{setting}={text}: {paths[Path(file).name]} has no '{name}'.{nearest(name, public_names)}")
    return getattr(module, name)


def blamed(error: BaseException) -> str | None:
    """One line that names file and line, for an error that a plugin raised, or what a plugin called; None for
    others.
    """
    files = set(_named())
    frames = [(f.filename, f.lineno) for f in traceback.extract_tb(error.__traceback__)]
    if isinstance(error, SyntaxError):
        frames.append((str(error.filename), error.lineno))
    frame = next((p for p in reversed(frames) if p[0] in files), None)
    reason = " ".join(str(error.msg if isinstance(error, SyntaxError) else error).split())
    return None if frame is None else f"plugin {frame[0]}, line {frame[1]}: {type(error).__name__}: {reason}"


@contextlib.contextmanager
def blaming() -> Iterator[None]:
    """Within it an error of a plugin's code is a UserError: file, line, and what went wrong there. Other errors, and
    those of the machine, pass."""
    try:
        yield
    except (UserError, OSError, MemoryError, Interrupted):
        raise
    except Exception as error:
        if "out of memory" in str(error) or (line := blamed(error)) is None:
            raise
        raise UserError(line) from error


def _named() -> list[str]:
    return [name for name in os.environ.get(VARIABLE, "").split(os.pathsep) if name]


def _path(path: Path) -> Path:
    path = Path(os.path.abspath(path.expanduser()))
    if path.suffix != ".py":
        raise UserError(f"plugins={path} is no Python file; write plugins=my.py")
    if not path.is_file():
        files = [p.name for p in path.parent.glob("*.py")] if path.parent.is_dir() else []
        raise UserError(f"plugins={path}: there is no such file.{nearest(path.name, files)}")
    return path


def _module_name(path: Path) -> str:
    folder_hash = hashlib.sha256(str(path).encode()).hexdigest()[:6]  # two folders may have a file of the same name
    return f"{PREFIX}{re.sub(r'[^0-9A-Za-z]', '_', path.stem)}_{folder_hash}"


def _load(path: Path) -> None:
    """Import a plugin, anew where its content has changed. Raises UserError."""
    content, name = checksum(path), _module_name(path)
    if _loaded.get(str(path)) == content and name in sys.modules:
        return
    sys.modules.pop(name, None)
    try:
        importlib.import_module(name)
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        reason = " ".join(str(error).split())
        raise UserError(blamed(error) or f"plugin {path}: {type(error).__name__}: {reason}") from error
    if _loaded.get(str(path)) not in (None, content) and sys.stdout.isatty():
        warn(f"plugin {path} has changed and was imported anew")
    _loaded[str(path)] = content


class _Loader(SourceFileLoader):
    """Reads the source each time: bytecode goes by time and size, and a change of one digit may keep both."""

    def path_stats(self, path: str) -> Any:
        raise OSError

    def set_data(self, path: str, data: Any, *, _mode: int = 0o666) -> None:
        """No bytecode beside a user's file."""


class _Finder:
    """Finds the modules of the plugins that $OFFRL_PLUGINS names, also for pickles in worker processes."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if not name.startswith(PREFIX):
            return None
        files = [Path(plugin) for plugin in _named()]
        plugin = next((p for p in files if _module_name(p) == name), None)
        return (
            None
            if plugin is None
            else importlib.util.spec_from_file_location(name, plugin, loader=_Loader(name, str(plugin)))
        )


sys.meta_path.append(_Finder)
