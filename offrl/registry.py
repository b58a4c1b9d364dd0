"""Names for everything that can be chosen by name: algorithms, dataset sources, tasks, known terminations and rewards.

The core never imports the four folders that stand on it; it finds them, and third-party plugins, here and by name.
"""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, TypeVar

from offrl.errors import UserError, nearest, warn

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

T = TypeVar("T")
# importing the packages registers their members
_BUILTIN = {
    "algo": "offrl.algorithms",
    "dataset": "offrl.envs",
    "task": "offrl.envs",
    "task_guess": "offrl.envs",
    "task_names": "offrl.envs",
    "published": "offrl.envs",
    "transform": "offrl.relabel",
    "reward_labels": "offrl.data.transforms.reward_labels offrl.relabel",
    "world_model": "offrl.algorithms",
    "artifact": "offrl.training.run.artifacts offrl.report.models.ensembles offrl.training.run.open_loop",
    "stop": "offrl.ope.stopping",
    "termination": "offrl.world_models.known.terminations offrl.envs",
    "reward": "offrl.world_models.known.rewards offrl.envs",
}
_table: dict[str, dict[str, Any]] = {}
_lock = threading.RLock()
_plugins_loaded = False


def register(kind: str, name: str) -> Callable[[T], T]:
    """Decorator: make an object known as `name`. `kind` is "algo", "network", "dataset" (a loader), "task" (an
    environment lookup), "published" (a lookup of published scores), "termination" or "reward" (a known function of a
    transition), "transform" (of a dataset, by a model that it trains), "reward_labels" (a class whose `load` reads a
    file of that kind), "stop" (an `offrl.training.run.stopping.StoppingRule`) or "artifact" (an
    `offrl.training.run.artifacts.Artifact`)."""

    def add(item: T) -> T:
        known = _table.setdefault(kind, {})
        if name in known and getattr(known[name], "__qualname__", None) != getattr(item, "__qualname__", None):
            raise UserError(
                f"{kind} '{name}' is registered twice, by {_place(known[name])} and by {_place(item)}: give one "
                "another name"
            )
        known[name] = item
        return item

    return add


def _place(item: Any) -> str:
    """Where a member is defined: its file and its name."""
    module = sys.modules.get(getattr(item, "__module__", ""))
    return f"{getattr(module, '__file__', None) or getattr(item, '__module__', '?')}:{getattr(item, '__qualname__', repr(item))}"  # noqa: E501


def entry_points(group: str) -> Iterable[EntryPoint]:
    """Those that installed packages declare."""
    import importlib.metadata  # a tenth of a second, which --help need not wait for

    return importlib.metadata.entry_points(group=group)


def load_plugins() -> None:
    """Import every entry point of the group `offrl.plugins`, once. A plugin that fails to import is named in a
    warning.
    """
    global _plugins_loaded
    with _lock:
        if _plugins_loaded:
            return
        _plugins_loaded = True
        for point in entry_points(group="offrl.plugins"):
            try:
                point.load()
            except Exception as error:  # a third-party package must not take the library down
                warn(f"plugin '{point.name}' ({point.value}) could not be loaded: {type(error).__name__}: {error}")


def has_plugins(kind: str) -> bool:
    """Whether there may be members besides offrl's own, so that only importing all of them tells. Imports nothing."""
    modules = (getattr(item, "__module__", "") for item in _table.get(kind, {}).values())
    return any(module.partition(".")[0] != "offrl" for module in modules) or bool(entry_points(group="offrl.plugins"))


def names(kind: str) -> dict[str, Any]:
    """All registered members of a kind, by name."""
    for module in _BUILTIN.get(kind, "").split():
        importlib.import_module(module)
    load_plugins()
    return dict(sorted(_table.get(kind, {}).items()))


def get(kind: str, name: str) -> Any:
    """The member called `name`. Raises UserError, with the nearest name, when there is none."""
    known = names(kind)
    if name not in known:
        word = {
            "algo": "algorithm",
            "stop": "stopping rule",
            "termination": "termination function",
            "reward": "reward function",
        }.get(kind, kind)
        raise UserError(f"unknown {word} '{name}'.{nearest(name, known)} Known: {', '.join(known)}")
    return known[name]
