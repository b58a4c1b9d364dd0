"""Parts of an update in code of our own, where general libraries are slow: see `kernels.cpp`."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from offrl import rng  # noqa: F401 - defines `stream`
from offrl.errors import UserError
from offrl.system import backend, devices, locks
from offrl.system.files import write_text

SOURCE = Path(__file__).with_suffix(".cpp")
COMPILERS = ("c++", "g++", "clang++")
TRIES = 10  # of a product of ours and one of the library's, in turns; the fastest counts
EQUAL = 1.1  # how much longer ours may take: thin ones gain more
FLAGS = ("-O3", "-march=native", "-std=c++17", "-shared", "-fPIC")

_library = torch.library.Library("offrl", "FRAGMENT")
_library.define("gated_product(Tensor gate, Tensor outer, Tensor inner, Tensor right, bool turned) -> Tensor")
_library.define("vector_product(Tensor matrix, Tensor vector) -> Tensor")
_library.define("product(Tensor left, Tensor right) -> Tensor")
gated_product, vector_product = torch.ops.offrl.gated_product.default, torch.ops.offrl.vector_product.default
product = torch.ops.offrl.product.default
DECLARATIONS = {  # what code by AOTInductor calls
    product: ["AOTITorchError aoti_torch_cpu_product(AtenTensorHandle, AtenTensorHandle, AtenTensorHandle*)"],
    gated_product: [
        "AOTITorchError aoti_torch_cpu_gated_product(AtenTensorHandle, AtenTensorHandle, AtenTensorHandle, "
        "AtenTensorHandle, int32_t, AtenTensorHandle*)"
    ],
    torch.ops.offrl.stream.default: [
        "AOTITorchError aoti_torch_cpu_stream(AtenTensorHandle, int64_t, AtenTensorHandle*)"
    ],
    vector_product: [
        "AOTITorchError aoti_torch_cpu_vector_product(AtenTensorHandle, AtenTensorHandle, AtenTensorHandle*)"
    ],
}


@torch.library.register_fake("offrl::gated_product", lib=_library)
def _(gate: Tensor, outer: Tensor, inner: Tensor, right: Tensor, turned: bool) -> Tensor:
    shape = (gate.shape[0], gate.shape[1], right.shape[2])
    return right.new_empty((shape[0], shape[2], shape[1]) if turned else shape)


@torch.library.register_fake("offrl::vector_product", lib=_library)
def _(matrix: Tensor, vector: Tensor) -> Tensor:
    return matrix.new_empty(matrix.shape[:2])


@torch.library.register_fake("offrl::product", lib=_library)
def _(left: Tensor, right: Tensor) -> Tensor:
    return left.new_empty(left.shape[0], left.shape[1], right.shape[2])


def _gated_product(gate: Tensor, outer: Tensor, inner: Tensor, right: Tensor, turned: bool) -> Tensor:
    """diag(outer) [gate > 0] diag(inner) right: gate [B, M, K], outer [B, M], inner [B, K], right [B, K, N] -> [B, M,
    N], or [B, N, M].
    """
    (count, rows, depth), columns = gate.shape, right.shape[2]
    out = torch.empty((count, columns, rows) if turned else (count, rows, columns))
    tensors = [part for x in (gate, outer, inner, right) for part in _strided(x)]
    _loaded().offrl_gated_product(
        *tensors, ctypes.c_void_p(out.data_ptr()), *map(ctypes.c_int64, (turned, count, rows, columns, depth))
    )
    return out


def _vector_product(matrix: Tensor, vector: Tensor) -> Tensor:
    """matrix [B, M, K], vector [B, K] -> [B, M]."""
    count, rows, depth = matrix.shape
    out = torch.empty(count, rows)
    tensors = [*_strided(matrix), *_strided(vector), ctypes.c_void_p(out.data_ptr())]
    _loaded().offrl_vector_product(*tensors, *map(ctypes.c_int64, (count, rows, depth)))
    return out


def _product(left: Tensor, right: Tensor) -> Tensor:
    """left [B, M, K] right [B, K, N] -> [B, M, N]."""
    (count, rows, depth), columns = left.shape, right.shape[2]
    out = torch.empty(count, rows, columns)
    tensors = [*_strided(left), *_strided(right), ctypes.c_void_p(out.data_ptr())]
    _loaded().offrl_product(*tensors, *map(ctypes.c_int64, (count, rows, columns, depth)))
    return out


_library.impl("product", _product, "CPU")
_library.impl("gated_product", _gated_product, "CPU")
_library.impl("vector_product", _vector_product, "CPU")


def _strided(x: Tensor) -> Sequence[Any]:
    return ctypes.c_void_p(x.data_ptr()), (ctypes.c_int64 * x.ndim)(*x.stride())


def kinds() -> tuple[str, ...]:
    """Which of these products serve here: each uses one core. "gated" stands for those with vectors too."""
    if torch.get_num_threads() > 1 or native() is None:
        return ()
    return ("gated", "dense") if _dense_are_fast() else ("gated",)


def _loaded() -> ctypes.CDLL:
    library = native()
    if library is None:
        raise RuntimeError(f"{SOURCE.name} could not be compiled here")
    return library


@functools.lru_cache(maxsize=1)
def native() -> ctypes.CDLL | None:
    """The compiled `kernels.cpp`, kept for this kind of machine, whose functions compiled code finds from now on; None
    where there is no compiler for it, or its results are not those of torch."""
    try:
        library = ctypes.CDLL(str(_compiled()), mode=ctypes.RTLD_GLOBAL)
    except (OSError, subprocess.SubprocessError):
        return None
    return library if _right(library) else None


@functools.lru_cache(maxsize=1)
def _dense_are_fast() -> bool:
    """Whether our dense products take no longer than those of the library in use, as measured once (5 ms) and kept:
    processes of a run must all take the same ones, since they round differently."""
    library = getattr(devices.matmul_switch(), "fp32_precision", "none")
    path = _compiled().with_suffix(f".{library}.txt")
    with locks.alone(path, "the kernels' time", quiet=True):
        with contextlib.suppress(OSError):
            if (answer := path.read_text(encoding="utf-8").strip()) in ("True", "False"):
                return answer == "True"
        left, right = torch.ones(1, 256, 256), torch.ones(1, 256, 256)
        seconds: dict[Any, float] = {torch.bmm: float("inf"), product: float("inf")}
        for _ in range(TRIES):
            for function, least in seconds.items():
                start = time.perf_counter()
                function(left, right)
                seconds[function] = min(least, time.perf_counter() - start)
        answer = str(seconds[product] < EQUAL * seconds[torch.bmm])
        with contextlib.suppress(OSError, UserError):
            write_text(path, answer + "\n")
        return answer == "True"


@contextlib.contextmanager
def compiling() -> Iterator[Future[Any] | None]:
    """The library's compilation in a thread; None where there is nothing to compile. Another process that asks
    meanwhile waits until this ends, so that what is done within is done by one."""
    if torch.get_num_threads() > 1 or _compiler() is None:
        yield None
        return
    target = _place()
    with contextlib.ExitStack() as stack:
        stack.enter_context(locks.alone(target.with_name(f"{target.stem}-thread.key"), "the kernels", quiet=True))
        if target.is_file():
            stack.close()
            yield None
        else:
            yield stack.enter_context(ThreadPoolExecutor(1)).submit(native)


def _compiler() -> str | None:
    return next(filter(None, map(shutil.which, COMPILERS)), None)


def _place() -> Path:
    """Where the library is, or is to be."""
    content = (SOURCE.read_text(encoding="utf-8"), FLAGS, torch.__version__)
    return backend.compiled_folder() / "programs" / f"kernels-{hashlib.sha256(repr(content).encode()).hexdigest()}.so"


def _compiled() -> Path:
    """Where the library is; one of several processes makes it. Raises OSError or CalledProcessError."""
    compiler, target = _compiler(), _place()
    if compiler is None:
        raise FileNotFoundError(COMPILERS[0])
    if target.is_file():
        return target
    torch_libraries = Path(torch.__file__).parent / "lib"
    target.parent.mkdir(parents=True, exist_ok=True)
    with locks.alone(target.with_suffix(".key"), "the kernels", quiet=True):
        if not target.is_file():
            with tempfile.TemporaryDirectory(prefix="building-", dir=target.parent.parent) as folder:
                library = Path(folder, target.name)
                command = [compiler, *FLAGS, "-o", str(library), str(SOURCE), f"-L{torch_libraries}", "-ltorch_cpu"]
                subprocess.run(command, check=True, capture_output=True)
                os.replace(library, target)
    return target


def _right(library: ctypes.CDLL) -> bool:
    """Whether the library computes what it should, in shapes that fill no block."""
    rows, depth, columns = 19, 37, 70
    draw = torch.Generator().manual_seed(0)
    gate, right = torch.randn(1, rows, depth, generator=draw).relu(), torch.randn(1, columns, depth, generator=draw).mT
    outer, inner = torch.randn(1, rows, generator=draw), torch.randn(1, depth, generator=draw)
    out, sums, dense = torch.empty(1, columns, rows), torch.empty(1, rows), torch.empty(1, rows, columns)
    sizes = map(ctypes.c_int64, (1, 1, rows, columns, depth))
    tensors = [part for x in (gate, outer, inner, right) for part in _strided(x)]
    library.offrl_gated_product(*tensors, ctypes.c_void_p(out.data_ptr()), *sizes)
    shape = map(ctypes.c_int64, (1, rows, depth))
    library.offrl_vector_product(*_strided(gate), *_strided(inner), ctypes.c_void_p(sums.data_ptr()), *shape)
    shape = map(ctypes.c_int64, (1, rows, columns, depth))
    library.offrl_product(*_strided(gate), *_strided(right), ctypes.c_void_p(dense.data_ptr()), *shape)
    expected = (outer[..., None] * (gate > 0) * inner[:, None, :]).double() @ right.double()
    close = functools.partial(torch.allclose, rtol=1e-4, atol=1e-4)
    results = (
        (out.mT, expected),
        (dense, gate.double() @ right.double()),
        (sums[..., None], gate.double() @ inner.double()[..., None]),
    )
    return all(close(result.double(), exact) for result, exact in results)
