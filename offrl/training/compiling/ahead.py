"""A pattern of updates as a library of machine code, kept under a name made of the code and the settings it was made
of.

`torch.compile` reads the Python code anew in each process, which takes as long as a thousand updates; the library is
loaded in milliseconds, by processes that never import a compiler. It is traced by running the updates once (`make_fx`),
and compiled by AOTInductor."""

from __future__ import annotations

import contextlib
import gc
import hashlib
import json
import logging
import os
import re
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from offrl.errors import UserError
from offrl.system import backend, locks
from offrl.system.files import write_text
from offrl.training.compiling import kernels
from offrl.training.compiling.fingerprint import Fingerprint, Unnamed, sources

PROGRAMS = "programs"  # in the folder of compiled code
OPTIONS = {
    "aot_inductor.precompile_headers": False,  # of use from the third program on
    "aot_inductor.compile_wrapper_opt_level": "O0",  # it calls kernels and products, which take the time
    "size_asserts": False,
}
PACE = "pace.json"  # in the folder of compiled code: the last compilation
# seconds of a core: for any step, and for each of its operations (Zen 5, torch 2.13; docs/benchmarks/speed-journal.md)
COMPILING = (4.0, 0.012)
Work = Callable[..., None]
Traced = tuple[fx.GraphModule, list[Tensor]]


def available() -> bool:
    """Whether this torch compiles ahead of time for a CPU in the way that is used here."""
    return hasattr(getattr(torch._C, "_aoti", None), "AOTIModelContainerRunnerCpu") and hasattr(
        torch.compiler, "skip_all_guards_unsafe"
    )


class Library:
    """`work(*trees)`, which writes over its arguments, as compiled code. Later calls must be of tensors of the same
    shapes and strides.
    """

    def __init__(self, work: Work, trees: tuple[Any, ...], cache_key: Sequence[Any]) -> None:
        """Load it, or make it; of several processes that need the same one makes it. cache_key: all that decides what
        `work` does.

        Raises whatever tracing and compiling do.
        """
        leaves, structure = pytree.tree_flatten(trees)
        folder = backend.compiled_folder() / PROGRAMS
        name = Fingerprint()
        key: Path | None = None
        with contextlib.ExitStack() as stack:
            with _traced_beside_kernels(work, leaves, structure) as traced:
                with contextlib.suppress(Unnamed):
                    inputs = [(x.dtype, x.shape, x.stride()) for x in leaves]
                    for part in (sources("offrl"), kernels.kinds(), str(structure), inputs, *cache_key):
                        name.add(part)
                    key = folder / f"{name.digest()}.key"
                if key is not None:  # before the other processes go on: who traced compiles
                    stack.enter_context(locks.alone(key, "the compiled step", quiet=True))
            entry = None if key is None else _known(key, len(name.tensors))
            if entry is None:
                with _no_collection():
                    program, constants = _made(leaves, traced or _traced(work, leaves, structure), folder)
                constant_indices = [
                    next((i for i, x in enumerate(name.tensors) if x is constant), None) for constant in constants
                ]
                if key is not None and None not in constant_indices:
                    write_text(key, json.dumps({"program": program.stem, "constants": constant_indices}))
            else:
                program, constants = entry[0], [name.tensors[i] for i in entry[1]]
        self.constants = constants
        self._runner = torch._C._aoti.AOTIModelContainerRunnerCpu(str(program), 1)
        self._tree: Any = None
        self._leaves: list[Tensor] = []

    def __call__(self, tree: Any, *other_trees: Any) -> None:
        """tree: the largest one, whose tensors are looked up again only where it is another object."""
        if tree is not self._tree:
            self._tree, self._leaves = tree, pytree.tree_leaves(tree)
        self._runner.run([*self._leaves, *pytree.tree_leaves(other_trees), *self.constants])


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Without Python's search for garbage, a fifth of the time of making a large graph."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _known(key: Path, tensors: int) -> tuple[Path, list[int]] | None:
    """The library that was kept as `key`, and the numbers of its constants among so many tensors of the cache_key."""
    if os.environ.get("TORCHINDUCTOR_FORCE_DISABLE_CACHES") == "1":
        return None
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        entry = json.loads(key.read_text())
        program, constants = key.with_name(f"{entry['program']}.so"), [int(i) for i in entry["constants"]]
        if (
            re.fullmatch("[0-9a-f]{64}", entry["program"])
            and program.is_file()
            and all(0 <= i < tensors for i in constants)
        ):
            return program, constants
    return None


@contextlib.contextmanager
def _traced_beside_kernels(work: Work, leaves: list[Tensor], structure: Any) -> Iterator[Traced | None]:
    """What `_traced` gives, where meanwhile the kernels have to be compiled; else None. See `kernels.compiling` for
    other processes.
    """
    with kernels.compiling() as compilation:
        if compilation is None:
            yield None
            return
        with _no_collection():
            traced = _traced(work, leaves, structure)
            import torch._inductor.compile_fx  # noqa: F401 - takes most of a second, and is needed next

            compilation.result()
        yield traced


def _made(leaves: list[Tensor], traced: Traced, folder: Path) -> tuple[Path, list[Tensor]]:
    """A library of what was traced, compiled unless another name's graph was the same; and the tensors that it reads
    besides `leaves`.
    """
    graph, constants = traced
    inputs = [*leaves, *constants]
    text = f"{sources('offrl.training.compiling')}\n{kernels.kinds()}\n{graph.code}\n"
    text += f"{[(x.dtype, tuple(x.shape), x.stride()) for x in inputs]}\n"
    text += "\n".join(f"{name} {x.tolist()}" for name, x in sorted(_held(graph).items()))
    program = folder / f"{hashlib.sha256(text.encode()).hexdigest()}.so"
    if not program.is_file() or os.environ.get("TORCHINDUCTOR_FORCE_DISABLE_CACHES") == "1":
        start = time.monotonic()
        _compile(graph, inputs, program)
        _note_seconds(time.monotonic() - start, sum(node.op == "call_function" for node in graph.graph.nodes))
    return program, constants


def _traced(work: Work, leaves: list[Tensor], structure: Any) -> Traced:
    """The operations of `work` on copies of `leaves`, with the tensors that it read from elsewhere as further
    inputs.
    """
    from torch.fx.experimental.proxy_tensor import make_fx

    def flat(*inputs: Tensor) -> list[Tensor]:
        work(*pytree.tree_unflatten(list(inputs), structure))
        return []

    graph = make_fx(torch.func.functionalize(flat, remove="mutations"))(*[x.clone() for x in leaves])
    last = [node for node in graph.graph.nodes if node.op == "placeholder"][-1]
    constants: list[Tensor] = []
    for node in list(graph.graph.nodes):
        node.meta.clear()  # of this trace's own imagined tensors
        if node.target is torch.ops.aten.view.default:
            node.target = torch.ops.aten.reshape.default  # what is contiguous here need not be once it is decomposed
        if (
            node.op != "get_attr"
            or not isinstance(value := getattr(graph, str(node.target)), Tensor)
            or value.numel() <= 1
        ):
            continue
        known = next((i for i, x in enumerate(constants) if x is value), None)
        if known is None:
            constants.append(value)
            with graph.graph.inserting_after(last):
                last = graph.graph.placeholder(f"constant_{len(constants)}")
            known = len(constants) - 1
        placeholders = graph.graph.find_nodes(op="placeholder")
        node.replace_all_uses_with(placeholders[len(leaves) + known])
        graph.graph.erase_node(node)
    graph.graph.lint()
    graph.recompile()
    return graph, constants


def _held(graph: fx.GraphModule) -> dict[str, Tensor]:
    """The constants that stay in a graph."""
    names = {str(node.target) for node in graph.graph.nodes if node.op == "get_attr"}
    return {name: value for name in names if isinstance(value := getattr(graph, name), Tensor)}


def _compile(graph: fx.GraphModule, inputs: list[Tensor], program: Path) -> None:
    """Make the library `program` of a graph."""
    import torch._inductor

    from offrl.training.compiling import passes

    program.parent.mkdir(parents=True, exist_ok=True)
    build_folder = Path(tempfile.mkdtemp(prefix="building-", dir=program.parent.parent))
    try:
        with _quick(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's of its own use of itself
            options: dict[str, Any] = {**OPTIONS, "aot_inductor.output_path": str(build_folder)}
            options["joint_custom_pre_pass"] = passes.Simpler(kernel_kinds := kernels.kinds())
            if kernel_kinds:
                options["aot_inductor.custom_ops_to_c_shims"] = kernels.DECLARATIONS
            library = Path(str(torch._inductor.aot_compile(graph, tuple(inputs), options=options)))
        operators = library.with_suffix(".json")  # those that are called through Python
        if operators.is_file():
            os.replace(operators, program.with_suffix(".json"))
        os.replace(library, program)
    finally:
        shutil.rmtree(build_folder, ignore_errors=True)


@contextlib.contextmanager
def _quick() -> Iterator[None]:
    """AOTInductor in half of its time, and without its notes.

    Checks of each input, which it writes and never runs, are left out; the processor's flags say which vectors it has,
    and no program is built and loaded to try each; where an operation was called from is not kept; a table that torch
    makes anew for each operation is made once; the two files of a program are compiled side by side. Where torch has
    other names for these, it takes longer, or the caller falls back.
    """
    from torch._inductor import cpp_builder, cpu_vec_isa
    from torch._inductor.codegen.cpp_wrapper_cpu import CppWrapperCpu
    from torch._inductor.dtype_propagation import DtypePropagationOpsHandler

    # the latter looks for CUDA
    loggers = [logging.getLogger(name) for name in ("torch._inductor", "torch.utils.cpp_extension")]
    levels, beside = [logger.level for logger in loggers], _Beside(cpp_builder.CppBuilder.build)
    no_checks = (
        "\nstatic constexpr bool _check_aoti_runtime_check_inputs_env() { return false; }\nstatic void "
        "__check_inputs_outputs(AtenTensorHandle*, AtenTensorHandle*) {}\n"
    )
    changes: list[tuple[Any, str, Any]] = [
        (torch.fx.config, "do_not_emit_stack_traces", True),
        (DtypePropagationOpsHandler, "__init__", _once(DtypePropagationOpsHandler.__init__)),
        (CppWrapperCpu, "generate_input_output_runtime_checks", lambda self: self.prefix.splice_aot(no_checks)),
        (cpu_vec_isa.VecISA, "check_build", lambda self, code: True),
        (cpp_builder.CppBuilder, "build", lambda self: beside.build(self)),
    ]
    changes = [change for change in changes if hasattr(*change[:2])]
    originals = [(owner, name, getattr(owner, name)) for owner, name, _ in changes]
    try:
        for change in changes:
            setattr(*change)
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
        for original in originals:
            setattr(*original)


def _once(init: Callable[[Any], None]) -> Callable[[Any], None]:
    """`init` of a class with one object, which does nothing the second time."""
    done: list[Any] = []

    def first(self: Any) -> None:
        if not done:
            init(self)
            done.append(self)

    return first


class _Beside:
    """Compiles a program's entry (`*.wrapper.o`) in a thread of its own, while what comes before linking goes on."""

    def __init__(self, build: Callable[[Any], None]) -> None:
        self._build = build
        self._pool = ThreadPoolExecutor(1)
        self._entry: Future[None] | None = None

    def build(self, builder: Any) -> None:
        target = str(builder.get_target_file_path())
        if target.endswith(".wrapper.o"):
            self._entry = self._pool.submit(self._build, builder)
            return
        if target.endswith(".so") and self._entry is not None:
            self._entry.result()
            self._pool.shutdown()
        self._build(builder)


def compiling_seconds(operations: int) -> float:
    """How long compiling that many operations takes here, as the last compilation says; without one, as where this was
    written.
    """
    seconds = COMPILING[0] + COMPILING[1] * operations
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        last = json.loads((backend.compiled_folder() / PACE).read_text())
        usual = COMPILING[0] + COMPILING[1] * int(last["operations"])
        seconds *= min(10.0, max(0.3, float(last["seconds"]) / usual))
    return seconds


def _note_seconds(seconds: float, operations: int) -> None:
    """Keep how long a compilation took, for `compiling_seconds`."""
    with contextlib.suppress(OSError, UserError):
        write_text(
            backend.compiled_folder() / PACE,
            json.dumps({"seconds": round(seconds, 2), "operations": operations}) + "\n",
        )
