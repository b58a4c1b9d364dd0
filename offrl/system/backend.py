"""Picks the CPU's matrix back end and the number of threads, and says what it picked."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import importlib
import os
import platform
import shutil
import struct
import subprocess
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils import _pytree as pytree

from offrl.errors import UserError, warn
from offrl.system import code_cache, devices
from offrl.system.files import write_text

SEAL = ".sha256"  # beside compiled code
WRITING = 300.0  # seconds for which another process may be writing some
WARM_UP = 3  # calls before a graph is captured, as torch's own
SHORT = 256  # keys; up to here fused attention is slower than plain where its many small products go to oneDNN


def configure(device: torch.device, threads: int, precision: str = "float32") -> str:
    """Set up arithmetic and memory for a run on `device`; returns one line for the log. TF32 and bfloat16 are off
    unless requested.

    bf16 itself is switched on where the step runs. Raises UserError for tf32 where there is none.
    """
    torch.set_num_threads(threads)
    leave_dynamo()
    precision_text = {
        "float32": "float32",
        "tf32": "products in TensorFloat-32",
        "bf16": "networks under bfloat16 autocast",
    }[precision]
    if device.type == "mps":
        if precision != "float32":
            raise UserError(f"precision={precision} is not for device=mps; use float32")
        return "Apple GPU (MPS, which offrl was never tried on), float32"
    if device.type != "cpu":
        if device.index is not None:  # "cuda" alone is the current one already, and `set_device` refuses it
            torch.cuda.set_device(device)  # streams and graphs are made on the current one
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = precision == "tf32"
        return f"{torch.cuda.get_device_name(device)}, {precision_text}"
    devices.keep_memory()
    if precision == "tf32":
        raise UserError("precision=tf32 needs a CUDA GPU; on a CPU use float32 or bf16")
    if precision == "bf16":
        return f"CPU, {threads} thread{'s' if threads > 1 else ''}, {precision_text}"
    word = f"CPU, {threads} thread{'s' if threads > 1 else ''}, float32 products by "
    if devices.products_library() == devices.ONEDNN:
        devices.matmul_switch().fp32_precision = "bf16"
        return word + "oneDNN (accuracy checked)"
    if (matmul := devices.matmul_switch()) is not None:
        matmul.fp32_precision = "none"
    return word + "torch's default library"


class _Dynamo(types.ModuleType):
    """`torch._dynamo` until something of it is used that a gradient does not need."""

    # which nothing but `torch._dynamo` can have enabled
    compiled_autograd = types.SimpleNamespace(_disable=contextlib.nullcontext)

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module("torch._dynamo"), name)


def leave_dynamo() -> None:
    """Keep the first gradient from importing `torch._dynamo`, 1.5 seconds: `torch.func.grad` asks it to disable what is
    not enabled.

    Whatever imports it finds the module itself, which then takes its place.
    """
    if "torch._dynamo" not in sys.modules:
        torch.__dict__["_dynamo"] = _Dynamo("torch._dynamo")


def attention(device: torch.device, keys: int) -> contextlib.AbstractContextManager[None]:
    """Fused or plain attention to `keys` tokens, whichever is the faster: each small product inside the fused kernel is
    a call of oneDNN's. For 76 tokens in four heads of 16 that is four times slower than plain products of whole
    batches.
    """
    if device.type == "cpu" and keys <= SHORT and getattr(devices.matmul_switch(), "fp32_precision", None) == "bf16":
        return sdpa_kernel(SDPBackend.MATH)
    return contextlib.nullcontext()


def cache_compiled() -> None:
    """Keep what Inductor compiles under the user's cache folder, so that the next run starts in seconds, after a
    restart too.

    torch names what it keeps by the program alone: not by the CPU, whose vectors may be half as long on the next
    machine that shares this home, nor by the number of threads. So there is a folder for each of these. To be called
    after `configure`.
    """
    folder = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    if folder is not None and not code_cache.is_own(folder):
        return
    base = code_cache.folder() if folder is None else Path(folder).parent
    # the vectors follow from processor and compiler
    folder = _digest([*_machine(), f"{torch.get_num_threads()} threads"])
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(base / folder)
    damaged = [code for code in (base / folder).glob("*/*.so") if not _sound(code)]
    for code in damaged:
        with contextlib.suppress(OSError):
            code.rename(code.with_suffix(".damaged"))
            code.with_suffix(SEAL).unlink(missing_ok=True)
    if damaged:
        warn(
            f"{len(damaged)} files of compiled code in {base / folder} were damaged; they are renamed to *.damaged, "
            "and compiled anew"
        )


def compiled_folder() -> Path:
    """Where compiled code is kept."""
    if "TORCHINDUCTOR_CACHE_DIR" not in os.environ:
        cache_compiled()
    return Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])


def seal_compiled() -> None:
    """Note the checksums of the code that Inductor has kept, which has just run: damaged code ends a process without a
    word.
    """
    folder = os.environ.get("TORCHINDUCTOR_CACHE_DIR", "")
    for code in Path(folder).glob("*/*.so") if code_cache.is_own(folder) else ():
        with contextlib.suppress(OSError, UserError):
            content, seal = code.read_bytes(), code.with_suffix(SEAL)
            if not seal.exists() and _is_complete(content):  # another process may be writing its own
                write_text(seal, hashlib.sha256(content).hexdigest())


def _sound(code: Path) -> bool:
    """True for a library as `seal_compiled` saw it, or, where it saw none, for one whose writing came to an end."""
    try:
        content = code.read_bytes()
        seal = code.with_suffix(SEAL)
        if seal.exists():
            return hashlib.sha256(content).hexdigest() == seal.read_text()
        return _is_complete(content) or time.time() - code.stat().st_mtime < WRITING
    except OSError:
        return True  # somebody else removed it


def _is_complete(library: bytes) -> bool:
    """True where the end of the file is there: the table of sections (of ELF; elsewhere nobody knows)."""
    if sys.platform != "linux":
        return True
    if not library.startswith(b"\x7fELF") or len(library) < 64:
        return False
    table, size, count = *struct.unpack_from("<Q", library, 40), *struct.unpack_from("<HH", library, 58)
    return table + size * count <= len(library)


def _digest(facts: list[str]) -> str:
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()[:16]


@functools.lru_cache
def _machine() -> list[str]:
    """The dependencies of compiled code besides the program: versions, compiler, processor, GPU."""
    compiler = os.environ.get("CXX") or next((c for c in ("g++", "c++", "clang++") if shutil.which(c)), "none")
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        result = subprocess.run([compiler, "--version"], capture_output=True, text=True, timeout=20)
        compiler = f"{compiler} {result.stdout.partition(chr(10))[0]}"
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    capability = os.environ.get("ATEN_CPU_CAPABILITY", "")
    versions = [
        torch.__version__,
        platform.python_version(),
        platform.system(),
        platform.machine(),
        *platform.libc_ver(),
    ]
    return [*versions, *devices.processor(), torch.backends.cpu.get_cpu_capability(), capability, compiler, gpu]


def set_aside_compiled() -> str:
    """Move what Inductor has kept out of its way; words that say where to, or what to do where the folder is not ours
    to move.
    """
    folder = os.environ.get("TORCHINDUCTOR_CACHE_DIR", "")
    if not code_cache.is_own(folder):
        return f"remove {folder or 'the cache of torch.compile'}"
    for number in range(1000):
        aside = Path(f"{folder}.aside{number}")
        with contextlib.suppress(OSError):
            if not aside.exists():
                Path(folder).rename(aside)
                return f"what was compiled is set aside in {aside}"
    return f"{folder} could not be moved: remove it"


def capture(work: Callable[[], None], pool: Any = None) -> torch.cuda.CUDAGraph:
    """`work`, whose inputs and results lie in fixed memory, as a CUDA graph. It is called first: what a first call
    compiles or sets up cannot be captured. pool: of memory, shared with graphs that never run at the same time.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARM_UP):
            work()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        work()
    return graph


class Captured:
    """A function of tensors as a CUDA graph of its own: what it returns lies where the next call writes."""

    def __init__(self, function: Callable[..., Any], *inputs: Any) -> None:
        self.inputs = pytree.tree_map(torch.clone, inputs)

        def work() -> None:
            self.output = function(*self.inputs)

        self.graph = capture(work)

    def __call__(self, *inputs: Any) -> Any:
        overwrite(pytree.tree_leaves(self.inputs), pytree.tree_leaves(inputs))
        self.graph.replay()
        return self.output


def overwrite(olds: list[Tensor], news: list[Tensor]) -> None:
    """Copy each of `news` to its place in `olds`, on a GPU in one launch."""
    pairs = [(old, new) for old, new in zip(olds, news, strict=True) if old is not new]
    if pairs:
        torch._foreach_copy_([old for old, _ in pairs], [new for _, new in pairs])


def move(source: Any, device: torch.device) -> Any:
    """The prepared source of a sampler on another device: dataclasses and containers with the tensors in them moved."""
    if isinstance(source, torch.Tensor):
        return source.to(device)
    if dataclasses.is_dataclass(source) and not isinstance(source, type):
        return dataclasses.replace(
            source, **{f.name: move(getattr(source, f.name), device) for f in dataclasses.fields(source) if f.init}
        )
    if isinstance(source, dict):
        return {k: move(v, device) for k, v in source.items()}
    if isinstance(source, tuple) and hasattr(source, "_fields"):
        return type(source)(*(move(v, device) for v in source))
    if isinstance(source, (list, tuple)):
        return type(source)(move(v, device) for v in source)
    return source
