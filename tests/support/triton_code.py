"""The Triton code that Inductor writes for a GPU that is not there, and, where Triton is installed, its compilation for
that GPU.

Private names of torch are used, which other versions may lack: `needed` skips the tests then.
"""

from __future__ import annotations

import contextlib
import importlib.util
import pkgutil
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

CAPABILITY = 90  # of an H100
CARD = SimpleNamespace(
    name="H100", major=9, minor=0, multi_processor_count=132, regs_per_multiprocessor=65536, warp_size=32,
    max_threads_per_multi_processor=2048, max_threads_per_block=1024, total_memory=80 << 30,
)  # fmt: skip


PARTS = {
    "CudaInterface": "torch._dynamo.device_interface:CudaInterface",
    "compile_fx": "torch._inductor.compile_fx",
    "config": "torch._inductor.config",
    "graph": "torch._inductor.graph",
    "scheduler": "torch._inductor.scheduler",
    "reinplace": "torch._inductor.fx_passes.reinplace",
    "select_decomp_table": "torch._inductor.decomposition:select_decomp_table",
    "FakeTensorMode": "torch._subclasses.fake_tensor:FakeTensorMode",
    "make_fx": "torch.fx.experimental.proxy_tensor:make_fx",
    "triton": "torch.utils._triton",
}


def needed() -> SimpleNamespace:
    """The parts of torch that this stands on; the test is skipped where this version has others."""
    try:
        return SimpleNamespace(**{name: pkgutil.resolve_name(where) for name, where in PARTS.items()})
    except (ImportError, AttributeError) as error:
        pytest.skip(f"torch {torch.__version__} is made otherwise inside: {error}")


def code_for(f: Callable[..., Any], *inputs: Tensor, **options: Any) -> str:
    """Inductor's Python file for `f` of tensors like `inputs` (which lie on "meta"), as if there were an H100. options:
    of Inductor.
    """
    t, cuda, result = needed(), torch.device("cuda", 0), []
    pure = torch.func.functionalize(lambda *x: tuple(pytree.tree_leaves(f(*x))))
    traced = t.make_fx(pure, decomposition_table=t.select_decomp_table())(*inputs)
    given = list(inputs)
    for node in list(traced.graph.nodes):
        if "device" in node.kwargs:
            node.kwargs = {**node.kwargs, "device": cuda}
        if node.op == "get_attr":  # tensors that `f` holds, such as the data, become inputs
            with traced.graph.inserting_before(next(iter(traced.graph.nodes))):
                input_ = traced.graph.placeholder(f"held_{node.name}")
            given.insert(0, getattr(traced, node.target))
            node.replace_all_uses_with(input_)
            traced.graph.erase_node(node)
    traced.recompile()

    def stop(self: Any) -> None:
        result.append(self.codegen()[0].value)
        raise KeyboardInterrupt  # nothing of torch catches it

    properties = {
        "is_available": staticmethod(lambda: True),
        "get_device_properties": staticmethod(lambda *a: CARD),
        "current_device": staticmethod(lambda: 0),
        "raise_if_triton_unavailable": staticmethod(lambda *a: None),
    }
    with (
        mock.patch.multiple(
            torch.cuda,
            get_device_properties=lambda *a: CARD,
            get_device_capability=lambda *a: (9, 0),
            current_device=lambda: 0,
            device_count=lambda: 1,
        ),
        mock.patch.multiple(t.CudaInterface, **properties),
        mock.patch.object(torch.version, "cuda", "12.9"),
        mock.patch.object(t.scheduler, "has_triton", lambda *a: True),
        mock.patch.object(t.triton, "triton_hash_with_backend", lambda: ""),
        mock.patch.object(t.graph.GraphLowering, "compile_to_module", stop),
        mock.patch.object(
            t.reinplace, "canonicalize_view_scatter_ops", lambda graph: None
        ),  # tries a copy, which needs a build for CUDA
        t.config.patch(fx_graph_cache=False, **options),
        t.FakeTensorMode(allow_non_fake_inputs=True),
        contextlib.suppress(KeyboardInterrupt),
    ):
        t.compile_fx.compile_fx_inner(
            traced, [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=cuda) for x in given]
        )
    return str(result[0])


def index_constants(code: str) -> list[str]:
    """64-bit constants in index expressions, which Triton computes in 32 bits: it refuses them, or cuts them off."""
    return re.findall(r"\(-?\d{10,}\)\s*[*+]|-?\d{10,}\s*\*\s*[xr]\d", code)


def kernels(code: str) -> dict[str, str]:
    """The source of each Triton kernel in a file of Inductor's, by name."""
    return dict(re.findall(r"async_compile\.triton\('(\w+)', '''(.*?)''', device_str", code, re.DOTALL))


def loaded(name: str, source: str, folder: Path) -> tuple[Any, dict[str, Any]]:
    """(the kernel as Triton's own function, what Inductor says of its arguments), without Inductor's decorator, which
    looks for a GPU.
    """
    from torch._inductor.runtime.hints import DeviceProperties

    head, at, body = source.partition("@triton.jit")
    meta = re.search(r"triton_meta=(\{.*\}),\n", head)
    assert meta is not None
    imports = "".join(line + "\n" for line in head.splitlines() if "import" in line and "triton_heuristics" not in line)
    path = folder / f"{name}.py"  # Triton reads the source of its functions from files
    path.write_text(f"{imports}from torch._inductor.runtime import triton_helpers\n{at}{body}")
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, name), eval(meta[1], {"DeviceProperties": DeviceProperties, "AttrsDescriptor": dict})


def compiled(code: str, folder: Path) -> dict[str, str]:
    """The PTX of each kernel in a file of Inductor's, compiled for `CAPABILITY` by Triton, which needs no GPU for
    that.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    result = {}
    for name, source in kernels(code).items():
        kernel, meta = loaded(name, source, folder)
        blocks = {arg: 64 for arg in kernel.arg_names if meta["signature"].get(arg, "constexpr") == "constexpr"}
        signature = {**meta["signature"], **dict.fromkeys(blocks, "constexpr")}
        made = triton.compile(
            ASTSource(kernel, signature, {**blocks, **meta["constants"]}), target=GPUTarget("cuda", CAPABILITY, 32)
        )
        result[name] = made.asm["ptx"]
    return result
