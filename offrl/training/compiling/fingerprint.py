"""A name for what a piece of Python computes: of its code, of all that this code calls, and of the values that it
reads.

Two programs with the same name may take each other's place. What cannot be named (open files, threads, code without
source) is refused."""

from __future__ import annotations

import builtins
import enum
import functools
import hashlib
import os
import sys
import types
from collections.abc import Iterable
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

SMALL = 4096  # entries of a tensor up to which its values belong to the name, as code may have read them as numbers
_PLAIN = (
    type(None),
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    enum.Enum,
    np.generic,
    np.dtype,
    torch.dtype,
    torch.device,
    torch.Size,
    PurePath,
)
_OF_CLASSES = (
    "__dict__",
    "__weakref__",
    "__doc__",
    "__module__",
    "__abstractmethods__",
    "_abc_impl",
    "__annotations__",
    "__dataclass_fields__",
)
_OF_DATACLASSES = ("__annotations__", "__dataclass_fields__")
# more than values
_OUTSIDE = ("_io", "io", "_thread", "threading", "socket", "subprocess", "multiprocessing", "weakref", "random")
_LIBRARIES = (*sys.stdlib_module_names, "torch", "numpy")  # the machine's name holds their versions


class Unnamed(Exception):
    """Something whose meaning cannot be told from its parts."""


class Fingerprint:
    """Takes in objects one after the other; `tensors` are those met on the way, in the same order each time."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self._hash = hashlib.sha256()
        self._seen: dict[int, int] = {}
        self._alive: list[Any] = []  # an id is an object's own only while it lives

    def digest(self) -> str:
        """64 letters that stand for all that was taken in."""
        return self._hash.hexdigest()

    def add(self, thing: Any) -> None:
        """Take in an object, with all that it refers to. Raises Unnamed."""
        if isinstance(thing, _PLAIN):
            return self._note(f"{type(thing).__name__} {thing!r}")
        if id(thing) in self._seen:
            return self._note(f"again {self._seen[id(thing)]}")
        self._seen[id(thing)] = len(self._seen)
        self._alive.append(thing)
        if isinstance(thing, Tensor):
            self._tensor(thing)
        elif isinstance(thing, np.ndarray):
            self._note(f"array {thing.dtype} {thing.shape}")
            self._hash.update(
                np.ascontiguousarray(thing).tobytes() if thing.dtype != object else repr(thing.tolist()).encode()
            )
        elif isinstance(thing, (list, tuple)):
            self._all(type(thing), thing)
        elif isinstance(thing, (set, frozenset)):
            self._all(type(thing), sorted(thing, key=repr))
        elif isinstance(thing, (dict, types.MappingProxyType)):
            self._all(type(thing), (part for item in thing.items() for part in item))
        elif isinstance(thing, types.ModuleType):
            self._note(f"module {thing.__name__}")
        elif isinstance(thing, types.CodeType):
            self._code(thing)
        elif isinstance(thing, type):
            self._class(thing)
        else:
            self._function(thing)

    def _note(self, text: str) -> None:
        self._hash.update(text.encode("utf-8", "backslashreplace") + b"\0")

    def _all(self, kind: type, parts: Iterable[Any]) -> None:
        self._note(f"( {kind.__qualname__}")
        for part in parts:
            self.add(part)
        self._note(")")

    def _tensor(self, x: Tensor) -> None:
        # a network's first weights are drawn anew by each process, and never used
        is_parameter = isinstance(x, nn.Parameter)
        self._note(f"tensor {x.dtype} {tuple(x.shape)} {x.stride()} {x.device} {is_parameter}")
        self.tensors.append(x)
        if not is_parameter and x.numel() <= SMALL:
            self._hash.update(x.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())

    def _function(self, thing: Any) -> None:
        """Functions and what wraps them, else an object with attributes."""
        if isinstance(
            thing,
            (
                types.BuiltinFunctionType,
                types.MethodWrapperType,
                types.WrapperDescriptorType,
                types.MethodDescriptorType,
            ),
        ):
            self._note(f"builtin {thing.__qualname__}")
        elif isinstance(thing, types.FunctionType):
            self._note(f"function {thing.__module__}.{thing.__qualname__}")
            if not _of_library(thing.__module__):
                self._code(thing.__code__, thing.__globals__)
                self._all(
                    tuple,
                    (thing.__defaults__, thing.__kwdefaults__, *(_content(cell) for cell in thing.__closure__ or ())),
                )
        elif isinstance(thing, types.MethodType):
            self._all(tuple, (thing.__func__, thing.__self__))
        elif isinstance(thing, functools.partial):
            self._all(tuple, (thing.func, thing.args, thing.keywords))
        elif isinstance(thing, (staticmethod, classmethod, functools.cached_property, property)) or hasattr(
            thing, "__wrapped__"
        ):
            self._all(type(thing), [getattr(thing, name, None) for name in ("__wrapped__", "func", "fget")])
        else:
            self._object(thing)

    def _object(self, thing: Any) -> None:
        kind = type(thing)
        if kind.__module__.partition(".")[0] in _OUTSIDE:
            raise Unnamed(f"a {kind.__qualname__}")
        if _of_library(kind.__module__) and not (isinstance(thing, nn.Module) or hasattr(thing, "__dict__")):
            text = repr(thing)
            if " at 0x" in text:
                raise Unnamed(f"a {kind.__qualname__}")
            return self._note(f"{kind.__qualname__} {text}")
        self.add(kind)
        slots = [name for base in kind.__mro__ for name in getattr(base, "__slots__", ()) if hasattr(thing, name)]
        values = {**{name: getattr(thing, name) for name in slots}, **getattr(thing, "__dict__", {})}
        self._all(kind, (part for name in sorted(values) if name != "pretrained" for part in (name, values[name])))

    def _class(self, kind: type) -> None:
        self._note(f"class {kind.__module__}.{kind.__qualname__}")
        if _of_library(kind.__module__):
            return
        for base in kind.__mro__[1:]:
            self.add(base)
        members = {
            name: value
            for name, value in vars(kind).items()
            if name not in (*_OF_CLASSES, *_OF_DATACLASSES) and not _is_slot(value)
        }
        self._all(type, (part for name in sorted(members) for part in (name, members[name])))

    def _code(self, code: types.CodeType, names: dict[str, Any] | None = None) -> None:
        """The instructions, and what they find by name among `names`, a module's globals, and in modules there."""
        self._hash.update(code.co_code)
        self._note(f"{code.co_names} {code.co_varnames} {code.co_freevars}")
        for constant in code.co_consts:
            if isinstance(constant, types.CodeType):
                self._code(constant, names)
            else:
                self.add(constant)
        for name in code.co_names if names is not None else ():
            value = names.get(name, getattr(builtins, name, None))  # type: ignore[union-attr]
            if isinstance(value, types.ModuleType) and not _of_library(value.__name__):
                for part in code.co_names:
                    self._global(vars(value).get(part))
            elif name in (names or {}):
                self._global(value)

    def _global(self, value: Any) -> None:
        """What a function reads is its arguments and constants: of other objects in a module only the kind is noted."""
        if isinstance(
            value, (*_PLAIN, Tensor, np.ndarray, type, types.FunctionType, types.BuiltinFunctionType, functools.partial)
        ):
            self.add(value)
        elif hasattr(value, "__wrapped__"):
            self.add(value.__wrapped__)
        else:
            self._note(f"global {type(value).__qualname__}")


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return None


def _is_slot(value: Any) -> bool:
    return isinstance(value, (types.MemberDescriptorType, types.GetSetDescriptorType))


@functools.cache
def _of_library(module: str | None) -> bool:
    return (module or "").partition(".")[0] in _LIBRARIES


@functools.cache
def sources(package: str) -> str:
    """The checksum of all source files of an imported package: code that is found by name while it runs belongs to
    them.
    """
    digest = hashlib.sha256()
    for folder in sys.modules[package].__path__:
        for at, folders, names in os.walk(folder, followlinks=True):
            folders.sort()
            for name in sorted(names):
                if name.endswith((".py", ".cpp")):
                    path = Path(at, name)
                    digest.update(str(path.relative_to(folder)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()
