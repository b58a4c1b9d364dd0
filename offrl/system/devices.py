"""The device that a setting names, and the library that a CPU's matrix products go to."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from offrl.errors import UserError
from offrl.system.files import cache_dir, write_text

PRODUCTS = "OFFRL_PRODUCTS"  # the environment variable that names the library
DEFAULT, ONEDNN = "default", "onednn"
# [b, m, k] times [b, k, n] of an update: hidden layers with either operand transposed, of one network and of two with a
# larger batch, which libraries treat otherwise; a first layer and its gradient
SHAPES = (
    ("NN", 1, 256, 256, 256),
    ("NT", 1, 256, 256, 256),
    ("TN", 1, 256, 256, 256),
    ("NT", 1, 256, 16, 256),
    ("TN", 1, 16, 256, 256),
    ("NN", 2, 512, 256, 256),
    ("NT", 2, 512, 256, 256),
    ("TN", 2, 256, 512, 256),
)
TRIES = 6  # of each product with each library, in turns; the fastest counts
# how much faster oneDNN must be: repeated, the ratio varies by 0.02, and where they are equal nothing is gained
GAIN = 1.05
# of instructions
LIMITS = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "MKL_CBWR", "MKL_ENABLE_INSTRUCTIONS")
ERROR = 4.0  # how many times the default library's largest error oneDNN's may be
MALLOC = ((-3, 2**25), (-1, 2**29))  # M_MMAP_THRESHOLD, as large as it may be, and M_TRIM_THRESHOLD, in bytes


def pick_device(name: str) -> torch.device:
    """The device of a setting: auto, cpu, cuda, cuda:N or mps, which auto never takes. Raises UserError for another, or
    for a GPU that is not there."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    kind, _, index = name.partition(":")
    if kind == "gpu":
        kind, name = "cuda", name.replace("gpu", "cuda")
    if kind not in ("cpu", "cuda", "mps") or (index and not index.isdigit()) or (kind != "cuda" and index):
        raise UserError(f"device={name} is not known; use auto, cpu, cuda, cuda:N or mps")
    if kind == "mps" and not torch.backends.mps.is_available():
        raise UserError(f"device=mps, but torch {torch.__version__} finds no GPU of Apple's; use device=cpu")
    if kind == "cuda" and not torch.cuda.is_available():
        raise UserError(
            f"device={name}, but torch {torch.__version__} finds no CUDA GPU; use device=cpu or install a CUDA build "
            "of torch"
        )
    if index and int(index) >= torch.cuda.device_count():
        raise UserError(f"device={name}, but there are only {torch.cuda.device_count()} GPUs")
    return torch.device(name)


def matmul_switch() -> Any:
    """The switch that routes float32 products to oneDNN; None in torch before 2.9."""
    return getattr(torch.backends.mkldnn, "matmul", None)


def products_library() -> str:
    """DEFAULT (torch's own, mostly MKL) or ONEDNN for float32 products on this CPU with as many threads as torch has
    now.

    It is measured once for each kind of machine (about 50 ms) and kept in the cache folder: a resumed run, and all
    processes of a run, must take the same one, since they round differently. $OFFRL_PRODUCTS takes the place of the
    measurement, though oneDNN is never taken where it is not exact. Raises UserError for another name.
    """
    name = os.environ.get(PRODUCTS, "")
    if name not in ("", DEFAULT, ONEDNN):
        raise UserError(f"{PRODUCTS}={name} is no library of products: take {DEFAULT} or {ONEDNN}, or leave it out")
    if name == ONEDNN:
        return ONEDNN if onednn_is_exact() else DEFAULT
    return name or _kept(torch.get_num_threads())


@functools.lru_cache(maxsize=1)
def onednn_is_exact() -> bool:
    """False where oneDNN's float32 products would not have float32 accuracy: the switch that routes them there also
    permits bfloat16, which CPUs with AMX compute in."""
    flags = " ".join(processor())
    if not flags or "amx_bf16" in flags or matmul_switch() is None or not torch.backends.mkldnn.is_available():
        return False
    return all(_error(a, b, ONEDNN) <= ERROR * _error(a, b, DEFAULT) for a, b in _operands())


@functools.lru_cache
def _kept(threads: int) -> str:
    """What was measured on such a machine before, or is now."""
    facts = [*processor(), torch.__version__, f"{threads} threads", *(f"{k}={os.environ.get(k, '')}" for k in LIMITS)]
    path = cache_dir() / f"products-{hashlib.sha256(repr((facts, SHAPES)).encode()).hexdigest()[:16]}.txt"
    with contextlib.suppress(OSError, ValueError):
        if (name := path.read_text(encoding="utf-8").strip()) in (DEFAULT, ONEDNN):
            return name
    name = DEFAULT
    if onednn_is_exact():
        default, onednn = measure_libraries()
        name = ONEDNN if default > GAIN * onednn else DEFAULT
    with contextlib.suppress(OSError, UserError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, name + "\n")
    return name


def measure_libraries() -> tuple[float, float]:
    """Seconds of `SHAPES` once each, with torch's default library and with oneDNN."""
    totals = {DEFAULT: 0.0, ONEDNN: 0.0}
    for a, b in _operands():
        out = torch.empty(*a.shape[:2], b.shape[2])
        best = dict.fromkeys(totals, float("inf"))
        for _ in range(TRIES):
            for library in totals:
                with routed(library):
                    start = time.perf_counter()
                    torch.bmm(a, b, out=out)
                    best[library] = min(best[library], time.perf_counter() - start)
        for library, seconds in best.items():
            totals[library] += seconds
    return totals[DEFAULT], totals[ONEDNN]


@contextlib.contextmanager
def routed(library: str) -> Iterator[None]:
    """Float32 products by one of the two libraries, whatever was chosen for the run."""
    matmul = matmul_switch()
    previous = getattr(matmul, "fp32_precision", None)
    if matmul is not None:
        matmul.fp32_precision = "bf16" if library == ONEDNN else "none"
    try:
        yield
    finally:
        if matmul is not None:
            matmul.fp32_precision = previous


def _operands() -> list[tuple[Tensor, Tensor]]:
    """The factors of `SHAPES`."""
    generator = torch.Generator().manual_seed(0)

    def factor(count: int, rows: int, columns: int, turned: bool) -> Tensor:
        shape = (count, columns, rows) if turned else (count, rows, columns)
        x = torch.randn(shape, generator=generator)
        return x.mT if turned else x

    return [(factor(b, m, k, form[0] == "T"), factor(b, k, n, form[1] == "T")) for form, b, m, k, n in SHAPES]


def _error(a: Tensor, b: Tensor, library: str) -> float:
    with routed(library):
        return float(((a @ b).double() - a.double() @ b.double()).abs().max())


@functools.lru_cache(maxsize=1)
def keep_memory() -> None:
    """Let the C library keep what tensors free for the next ones. It would hand large blocks back to the system at
    once, and an update that makes some has the same pages filled with zeros each time: thousands of faults, a fifth of
    the time of CQL's update. (glibc; others have no such function.)
    """
    with contextlib.suppress(OSError, AttributeError, TypeError):
        mallopt = ctypes.CDLL(None).mallopt
        for parameter, size in MALLOC:
            mallopt(parameter, size)


@functools.lru_cache(maxsize=1)
def processor() -> list[str]:
    """Lines of /proc/cpuinfo that say what kind of CPU this is; none where there is no such file."""
    fields = ("vendor_id", "cpu family", "model", "model name", "stepping", "flags", "Features")  # not the clock
    with contextlib.suppress(OSError):
        cpu = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").split("\n\n")[0]
        return [line for line in cpu.splitlines() if line.split(":")[0].strip() in fields]
    return []
